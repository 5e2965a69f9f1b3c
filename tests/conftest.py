from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from rollout.demo.model import fetch_smollm2

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the tests' imports bring Triton in

settings.register_profile("rollout", deadline=None)  # machines under load are no bugs
settings.load_profile("rollout")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The transformers folder of SmolLM2-135M-Instruct; `make test` has downloaded it before the first test."""
    return fetch_smollm2()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `gpu` where there is none."""
    if torch.cuda.is_available():
        return
    without = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=without)
