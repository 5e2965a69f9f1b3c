"""Two trainers, and random faults of everything around them: each token is of the weights that its span names."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.random_faults import RandomFaults


def test_a_short_random_run(tmp_path: Path) -> None:
    run = RandomFaults(tmp_path, seed=1, engines=1, seconds=15, commits=3, kills_engines=False)
    figures = run.run()
    print(figures.text())
    assert figures.tokens > 100
    assert figures.pushes["committed"] >= 3
    assert figures.sampled_successes > 0
    assert figures.faults.total() > 0


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("engines", [1, 2])
def test_a_long_random_run(tmp_path: Path, engines: int) -> None:
    """ROLLOUT_FAULT_SECONDS for each number of engines, else 450; ROLLOUT_FAULT_SEED, else the time."""
    seconds = float(os.environ.get("ROLLOUT_FAULT_SECONDS", 450))
    seed = int(os.environ.get("ROLLOUT_FAULT_SEED", time.time()))
    print(f"seed {seed}, {engines} engine(s), {seconds:g} s")
    figures = RandomFaults(tmp_path, seed=seed, engines=engines, seconds=seconds).run()
    print(figures.text())
    assert figures.sampled_successes > seconds / 60
