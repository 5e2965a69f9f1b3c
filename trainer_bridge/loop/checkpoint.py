"""A trainer's state in one file that is always whole: a process that is killed leaves the last one that it finished."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Write tensors, numbers, strings, and lists and dicts of them. The file appears by one rename, on the disk."""
    path = Path(path)
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load(path: str | Path) -> dict[str, Any] | None:
    """What `save` wrote last, on the CPU; None where there is no file."""
    path = Path(path)
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
