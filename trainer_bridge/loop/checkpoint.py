"""A trainer's state in one file that is always whole: a process that is killed leaves the last one that it finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainer_bridge.push.folder import sync


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Write tensors, numbers, strings, and lists and dicts of them. The file appears by one rename, on the disk.

    Raises OSError, where the disk is full for instance; the file is then what it was.
    """
    path = Path(path)
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with open(unfinished, "wb") as file:
            torch.save(state, file)
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def load(path: str | Path) -> dict[str, Any] | None:
    """What `save` wrote last, on the CPU; None where there is no file."""
    path = Path(path)
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
