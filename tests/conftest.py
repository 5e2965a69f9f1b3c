from __future__ import annotations

import os
import shutil
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
    """Deselect the tests marked `gpu` or `chromium` where there is none."""
    found = {"gpu": torch.cuda.is_available(), "chromium": shutil.which("chromium") is not None}
    lacking = [name for name, there in found.items() if not there]
    without = [item for item in items if any(map(item.get_closest_marker, lacking))]
    items[:] = [item for item in items if item not in without]
    config.hook.pytest_deselected(items=without)
