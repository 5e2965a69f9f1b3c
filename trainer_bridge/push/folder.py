"""Weights as files: each push a new numbered folder of safetensors, which appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from rollout.rendezvous import TensorInfo

SHARD_BYTES = 1 << 30
_TEMPORARY = "writing-"


class PushFolder:
    """A folder that belongs to one sender: it numbers its sub-folders on, and keeps the last `keep` of them.

    What a sender that died in the middle left behind is removed by the next one's first write.
    """

    def __init__(self, root: str | Path, keep: int = 2) -> None:
        self.root = Path(root).absolute()
        self._keep = keep

    def write(self, infos: list[TensorInfo], tensors: Iterable[torch.Tensor]) -> Path:
        """A new sub-folder with these tensors; on the disk, not only in its cache, when this returns.

        At most SHARD_BYTES (or one tensor) are held in memory at once.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for left in self.root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(left)
        number = max((int(p.name) for p in self._written()), default=-1) + 1
        temporary, final = self.root / f"{_TEMPORARY}{number:08d}", self.root / f"{number:08d}"
        temporary.mkdir()
        shard: dict[str, torch.Tensor] = {}
        shards = size = 0
        for info, tensor in zip(infos, tensors, strict=True):
            shard[info.name] = tensor.detach().cpu().clone()
            size += info.nbytes
            if size >= SHARD_BYTES:
                _save(shard, temporary / f"model-{shards:05d}.safetensors")
                shard, size, shards = {}, 0, shards + 1
        if shard:
            _save(shard, temporary / f"model-{shards:05d}.safetensors")
        sync(temporary)
        temporary.rename(final)
        sync(self.root)
        for old in self._written()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def _written(self) -> list[Path]:
        return sorted(p for p in self.root.iterdir() if p.is_dir() and len(p.name) == 8 and p.name.isdecimal())


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file(tensors, file)
    sync(file)


def sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk itself, not only in its cache. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
