"""CUDA IPC without CUDA: the calls of torch and of the driver that it consists of, over files that processes share.

Stood in: `UntypedStorage._share_cuda_`, `_new_shared_cuda` and `_release_ipc_counter_cuda`, with their own arguments
and results, and `device_uuid`. An allocation is a file: its handle, as torch prefixes it, is made of the file's name,
and the storage begins behind other bytes.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from rollout.weights.transport import broadcast as broadcast_transport
from rollout.weights.transport import ipc as ipc_transport
from trainer_bridge.push import ipc as ipc_sender
from trainer_bridge.push import transaction

BEFORE = 512
"""Bytes of an allocation before the storage in it."""
COUNTER = b"/torch_1_2_3"
UUID = "GPU-11111111-2222-3333-4444-555555555555"


class FakeIpc:
    """What was shared and opened so far. `counts`: how many are told of each allocation and have not let it go.

    `engine` and `trainer` are the versions of the handles' format of torch on both sides.
    """

    def __init__(self, folder: Path, *, engine: int = 3, trainer: int = 2, kind: bytes = b"c") -> None:
        self.folder, self.versions, self.kind = folder, {"engine": engine, "trainer": trainer}, kind
        self.counts: list[int] = []
        self.opened: list[StorageWeakRef] = []
        self.engine_uuid: str | None = UUID
        self.trainer_uuid: str | None = UUID

    @property
    def num_open(self) -> int:
        """Storages of the trainer that the engine has open."""
        return sum(not storage.expired() for storage in self.opened)

    def install(self, patch: Callable[[Any, str, Any], None]) -> None:
        """Put the stand-ins in place, for this process."""
        patch(UntypedStorage, "_share_cuda_", self._share)
        patch(UntypedStorage, "_new_shared_cuda", staticmethod(self._open))
        patch(UntypedStorage, "_release_ipc_counter_cuda", staticmethod(self._release))
        for module in (ipc_transport, broadcast_transport):
            patch(module, "device_uuid", lambda device: self.engine_uuid)
        for module in (ipc_sender, transaction):
            patch(module, "device_uuid", lambda device: self.trainer_uuid)

    @property
    def _share(self) -> Callable[[UntypedStorage], tuple[Any, ...]]:
        fake = self

        def share(storage: UntypedStorage) -> tuple[Any, ...]:
            name = secrets.token_bytes(16)
            content = torch.tensor([], dtype=torch.uint8).set_(storage)
            file = fake.folder / name.hex()
            file.with_suffix(".part").write_bytes(os.urandom(BEFORE) + content.numpy().tobytes())
            file.with_suffix(".part").replace(file)
            fake.counts.append(1)
            receives = threading.current_thread().name == "weights-ipc"  # the engine looks at a handle of its own
            version = fake.versions["engine" if receives else "trainer"]
            handle = bytes([version]) + fake.kind + name + bytes(48)
            return 0, handle, storage.nbytes(), BEFORE, COUNTER, len(fake.counts) - 1, bytes(64), True

        return share

    def _open(
        self, device: int, handle: bytes, size: int, offset: int, counter: bytes, place: int, event: bytes, wait: bool
    ) -> UntypedStorage:
        assert (device, counter, place, event, wait) == (0, b"", 0, b"", False)
        if handle[:2] != bytes([self.versions["engine"]]) + b"c":
            raise RuntimeError(f"received a handle of version {handle[0]}\nCUDA kernel errors might be…")
        file = self.folder / handle[2:18].hex()
        if not file.exists() or handle[18:] != bytes(48):
            raise RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be…")
        data = bytearray(file.read_bytes()[offset : offset + size])
        assert len(data) == size
        storage = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
        self.opened.append(StorageWeakRef(storage))
        return storage

    def _release(self, counter: bytes, place: int) -> None:
        assert counter == COUNTER
        self.counts[place] -= 1
