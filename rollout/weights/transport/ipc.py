"""Weights in the memory of a trainer on the same device, opened by CUDA IPC: nothing is sent but where they lie.

The trainer's memory must hold the values when the call is made, and until its answer: then it is closed here.
"""

from __future__ import annotations

import base64
import binascii
import traceback
from collections.abc import Callable
from typing import Any

import torch

from rollout.rendezvous import IPC_HANDLE_BYTES, device_uuid
from rollout.weights.bodies import Announcement, InitInfo, IpcHandle
from rollout.weights.errors import WeightUpdateError
from rollout.weights.staging import Incoming, Staging
from rollout.weights.transport import Transport
from rollout.weights.transport.broadcast import unpack


class IpcTransport(Transport):
    """Copies from the trainer's memory into staging, on the device. Nothing here waits for the trainer."""

    name = "ipc"

    def __init__(self, info: InitInfo, timeout_s: float, device: torch.device) -> None:
        own = device_uuid(device)
        if own is None:
            raise WeightUpdateError(400, f"backend 'ipc' needs a CUDA engine, this one is on {device}; use 'gloo'")
        if info.device_uuid != own:
            raise WeightUpdateError(
                400, f"backend 'ipc' needs one device: the trainer's is {info.device_uuid}, this engine's is {own}"
            )
        self.peer, self.timeout_s = own, timeout_s
        self._device, self._probe = device, info.ipc_handle

    def connect(self) -> None:
        """Open the memory that the trainer offers for a trial, if it does. Raises WeightUpdateError 400."""
        if self._probe is not None:
            self._open(self._probe)

    def describe(self, info: Announcement) -> Announcement:
        """It says all. Raises WeightUpdateError 400 without a handle for each tensor."""
        found = len(info.ipc_handles or ())
        if found != len(info.names):
            raise WeightUpdateError(
                400, f"backend 'ipc' needs as many ipc_handles as names ({len(info.names)}), got {found}"
            )
        return info

    def receive(
        self, info: Announcement, plan: list[Incoming], staging: Staging, progress: Callable[[int], Any]
    ) -> None:
        """Copy each tensor. Raises WeightUpdateError 400 on memory that isn't there, before anything was copied."""
        places = [self._place(item, handles) for item, handles in zip(plan, info.ipc_handles or (), strict=True)]
        opened: dict[tuple[str, int, int], torch.Tensor] = {}
        try:
            for place in places:
                if (key := _storage_of(place)) not in opened:
                    opened[key] = self._open(place)
            for item, place in zip(plan, places, strict=True):
                start = place.tensor_offset_bytes
                unpack(opened[_storage_of(place)][start : start + item.nbytes], [item], staging)
                progress(item.nbytes)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold views, and the error outlives this call
            raise
        finally:
            if self._device.type == "cuda":  # the trainer may write to it again once this has returned
                torch.cuda.current_stream(self._device).synchronize()
            opened.clear()

    def _place(self, item: Incoming, handles: dict[str, IpcHandle]) -> IpcHandle:
        place = handles.get(self.peer)
        if place is None:
            raise WeightUpdateError(
                400, f"{item.name}: its memory is on {', '.join(handles) or 'no device'}, this engine is on {self.peer}"
            )
        end = place.tensor_offset_bytes + item.nbytes
        if end > place.storage_size_bytes:
            raise WeightUpdateError(
                400, f"{item.name}: its bytes end at {end} of a storage of {place.storage_size_bytes} bytes"
            )
        return place

    def _open(self, place: IpcHandle) -> torch.Tensor:
        """The storage's bytes, (storage_size_bytes,) uint8; they are closed when nothing refers to them any more."""
        try:
            handle = base64.b64decode(place.storage_handle, validate=True)
        except binascii.Error as error:
            raise WeightUpdateError(400, f"a storage_handle is no base64: {error}") from error
        if len(handle) != IPC_HANDLE_BYTES:
            raise WeightUpdateError(400, f"a storage_handle has {len(handle)} bytes, not {IPC_HANDLE_BYTES}")
        try:
            # The trainer counts who has it open by our answer, and waits for its own device before it asks: so there is
            # neither a counter, which is a file of shared memory, nor an event to be opened at its word.
            storage: Any = torch.UntypedStorage._new_shared_cuda(
                self._device.index or 0,
                _prefix(self._device) + handle,
                place.storage_size_bytes,
                place.storage_offset_bytes,
                b"",
                0,
                b"",
                False,
            )
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise WeightUpdateError(400, f"the trainer's memory can't be opened by CUDA IPC: {reason}") from error
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_of(place: IpcHandle) -> tuple[str, int, int]:
    return place.storage_handle, place.storage_offset_bytes, place.storage_size_bytes


def _prefix(device: torch.device) -> bytes:
    """What this torch has in front of the handle of what cudaMalloc gave: its version of the format, and a "c".

    Read off a handle of our own, since the version differs between releases whose handles are the same.
    """
    storage = torch.empty(1, dtype=torch.uint8, device=device).untyped_storage()
    _, own, _, _, counter, counter_offset, _, _ = storage._share_cuda_()
    storage._release_ipc_counter_cuda(counter, counter_offset)
    return b"" if len(own) == IPC_HANDLE_BYTES else own[:1] + b"c"
