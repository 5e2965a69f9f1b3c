"""A copy of the last committed weights on disk, and what an engine that takes over from a dead one makes of it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from rollout.weights.bodies import Announcement
from rollout.weights.errors import WeightUpdateError
from rollout.weights.receiver import beside_decoding
from rollout.weights.store import WeightStore
from rollout.weights.transport.disk import DiskTransport

logger = logging.getLogger(__name__)

_FILE_BYTES = 64 << 20  # a file is put together in one go, for which other threads of this process have to wait
_ABOUT = "snapshot.json"
_RETRY_S = 30.0  # after a snapshot that failed, as on a full disk


class SnapshotKeeper:
    """Writes the store's weights as `<folder>/epoch-<n>`: safetensors under module names, and `snapshot.json`.

    A thread of its own writes them; a folder gets its name once it is whole, and the older ones go then. Commits that
    follow each other faster than that are left out, but for the newest. One that fails is logged, and tried again every
    `retry_s` seconds. While it reads, as a checksum does, an update in place is refused with a 409. Nothing is forced
    to the disk: a machine that goes down takes the server along.
    """

    def __init__(self, store: WeightStore, folder: str, *, retry_s: float = _RETRY_S) -> None:
        self._store, self._folder, self._retry_s = store, Path(folder), retry_s
        self._wanted = threading.Event()
        threading.Thread(target=self._run, name="weights-snapshot", daemon=True).start()

    def request(self) -> None:
        self._wanted.set()

    def _run(self) -> None:
        while self._wanted.wait():
            self._wanted.clear()
            try:
                self._write()
            except (OSError, SafetensorError, WeightUpdateError):
                logger.exception("the snapshot of the weights could not be written; next try in %g s", self._retry_s)
                shutil.rmtree(self._folder / "partial", ignore_errors=True)
                self._wanted.wait(self._retry_s)  # or until the next commit
                self._wanted.set()

    def _write(self) -> None:
        epoch, label = self._store.epoch, self._store.label
        partial = self._folder / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)  # of this engine, within the server's
        partial.mkdir()
        with self._store.snapshot() as tensors, beside_decoding(tensors):
            if self._store.epoch != epoch:
                return  # a commit came between: it has asked for another one
            for index, piece in enumerate(_pieces(tensors)):
                # `save_file` would hold up all threads while it writes.
                (partial / f"{index:05}.safetensors").write_bytes(save(piece))
        (partial / _ABOUT).write_text(json.dumps({"epoch": epoch, "weight_version": label}))
        older = _whole(self._folder)
        os.replace(partial, self._folder / f"epoch-{epoch:09}")
        for path in older:
            shutil.rmtree(path, ignore_errors=True)


def _pieces(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    piece: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        piece[name] = tensor.detach().cpu()
        if sum(held.nbytes for held in piece.values()) >= _FILE_BYTES:
            yield piece
            piece = {}
    if piece:
        yield piece


def _whole(folder: Path) -> list[Path]:
    """The snapshots in a folder, oldest first."""
    return sorted(path for path in folder.glob("epoch-*") if (path / _ABOUT).exists())


def resume(store: WeightStore, folder: str | None, epoch: int, label: str) -> str:
    """Have `store`, of a model just loaded, go on from `epoch` and `label`, the last that are known to have served.

    At epoch 0 what was loaded is what served. Else the weights are those of the last whole snapshot in `folder`, or
    invalid until an update commits. An epoch never names two sets of weights: a snapshot that is older than `epoch`
    serves as the one after it, under the label it had. Returns what happened, as a clause.
    """
    store.epoch, store.label = epoch, label
    if epoch == 0:
        return "it serves the model it was started with, as before"
    store.valid = False
    why = "no snapshot of them was kept"
    if folder is not None and (found := _whole(Path(folder))):
        try:
            return _load(store, found[-1])
        except (WeightUpdateError, SafetensorError, OSError, ValueError, KeyError) as error:
            logger.exception("the snapshot %s can't be used", found[-1])
            why = f"their snapshot can't be used: {error}"
    return f"the weights of epoch {epoch} ({label!r}) are lost ({why}): push the weights, whole, to generate again"


def _load(store: WeightStore, path: Path) -> str:
    disk = DiskTransport()
    about = json.loads(disk.read_small(path / _ABOUT))
    kept, known = int(about["epoch"]), store.epoch
    label = store.label if kept == known else str(about["weight_version"])
    staging = store.stage(in_place=True)
    info = disk.describe(Announcement(path=str(path)))
    plan = staging.resolve(info.names, info.dtype_names, info.shapes)
    disk.receive(info, plan, staging, lambda nbytes: None)
    staging.check(partial=False, progress=lambda: None)
    store.commit(staging, label)
    store.epoch = kept if kept >= known else known + 1
    if store.epoch == kept:
        return f"it serves the snapshot of epoch {kept} ({label!r})"
    return (
        f"it serves the snapshot of epoch {kept} ({label!r}) as epoch {store.epoch}: that of {known} was not whole yet"
    )
