"""examples/minimal.py: a loop of a few lines that learns."""

from __future__ import annotations

from pathlib import Path

import minimal
import pytest
import torch

from tests.support import tiny_trl


def test_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    means = minimal.train(str(tiny_trl.build(tmp_path / "model")), steps=14, learning_rate=1e-2)
    assert len(means) == 14
    assert sum(means[-4:]) > sum(means[:4]) + 4 * 0.1
