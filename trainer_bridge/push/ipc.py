"""The sending end of CUDA IPC: memory of this process that an engine on the same device may open."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from rollout.rendezvous import IPC_HANDLE_BYTES, device_uuid
from trainer_bridge.push.control import ServerControl, on_all

logger = logging.getLogger(__name__)


@contextmanager
def shared(buffer: torch.Tensor) -> Iterator[dict[str, Any]]:
    """What tells an engine where a buffer of bytes lies; nobody may have it open any more at the end of the block.

    Raises RuntimeError where this memory can't be shared so.
    """
    if buffer.device.type == "cuda":
        torch.cuda.current_stream(buffer.device).synchronize()  # what was written to it is there when others read
    storage: Any = buffer.untyped_storage()
    _, handle, size, offset, counter, counter_offset, _, _ = storage._share_cuda_()
    try:
        # torch's own version of the format, and how it was allocated, come before the handle.
        if handle[:-IPC_HANDLE_BYTES][1:] not in (b"", b"c"):
            raise RuntimeError("memory of expandable segments (PYTORCH_CUDA_ALLOC_CONF) can't be shared by a handle")
        name = base64.b64encode(handle[-IPC_HANDLE_BYTES:]).decode()
        yield {"storage_handle": name, "storage_size_bytes": size, "storage_offset_bytes": offset}
    finally:
        storage._release_ipc_counter_cuda(counter, counter_offset)  # else torch would keep the memory for ever


@contextmanager
def offered(device: torch.device) -> Iterator[dict[str, Any]]:
    """The fields of `init_info` by which an engine can tell whether it can open this device's memory."""
    with shared(torch.zeros(1, dtype=torch.uint8, device=device)) as handle:
        yield {"device_uuid": device_uuid(device), "ipc_handle": handle}


def backend_beside(servers: Sequence[ServerControl], device: torch.device) -> Literal["nccl", "ipc", "gloo"]:
    """How CUDA tensors reach these servers: NCCL refuses two ranks on one device, where IPC needs no rank at all."""
    infos = on_all(servers, lambda _, server: server.call("GET", "/weight_info"))
    theirs = {rank.get("device_uuid") for info in infos for rank in info.get("ranks", [info])}
    own = device_uuid(device)
    if own is None or own not in theirs:
        return "nccl"
    if theirs == {own}:
        return "ipc"
    logger.warning("some engines are on the trainer's own device, which NCCL refuses: weights go over gloo")
    return "gloo"
