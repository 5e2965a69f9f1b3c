"""What both ends of a weight broadcast must make alike: the store where they meet, the NCCL group between them, and
which bytes go into each broadcast.

Engines import it, and so does `trainer_bridge`: two copies would drift apart.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

DEFAULT_BUFFER_BYTES = 1 << 30
"""Where a packed buffer is cut unless the trainer says otherwise; vLLM's default."""

IPC_HANDLE_BYTES = 64
"""Of a cudaIpcMemHandle_t, which names an allocation of one process to another on the same device."""

_PREFIX = "rollout"
"""Of all keys of a group in its store."""

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_MOST_CTAS = 4
_environment = threading.Lock()


def device_uuid(device: torch.device) -> str | None:
    """Which device it is, whatever number this process gives it; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def host_store(host: str, world_size: int, timeout_s: float) -> dist.TCPStore:
    """A store for `world_size` ranks, on a free port of the interface that has the address `host`.

    Anyone who reaches a store can write to it, and torch's own socket listens on all interfaces. Raises OSError where
    `host` isn't an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        world_size,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _keys(store: dist.Store, name: str | None, device_type: str) -> dist.Store:
    """Where a group has its keys in the store.

    One with a name has them where torch's `_new_process_group_helper` puts them under a `PrefixStore(name, store)`:
    SGLang's `init_custom_process_group` and its trainers' copies of it make their groups so.
    """
    if name is None:
        return dist.PrefixStore(_PREFIX, store)
    return dist.PrefixStore(f"{device_type}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))


def gloo_group(store: dist.Store, rank: int, world_size: int, timeout_s: float, name: str | None = None) -> Any:
    """A ProcessGroupGloo, with a name one of SGLang's. Blocks until all ranks have come."""
    return dist.ProcessGroupGloo(_keys(store, name, "cpu"), rank, world_size, timedelta(seconds=timeout_s))


def nccl_group(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float, name: str | None = None
) -> Any:
    """A ProcessGroupNCCL whose lost peer is an error of the call that waits for it, and of nothing else.

    With blocking waits, torch starts neither the watchdog nor the heartbeat monitor, which end the process when a peer
    is lost. (The switch is an environment variable that the constructor reads.) The communicator is made at once, so
    that what keeps it from working shows here; but for SGLang's groups, which have a name: their other ranks make it
    with the first broadcast. It takes few of the device's processors: a broadcast that waits for the
    trainer must not keep the decoder off them. Blocks until all ranks have come; nothing can wake it.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.max_ctas = _MOST_CTAS
    with _environment:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            group = dist.ProcessGroupNCCL(_keys(store, name, "cuda"), rank, world_size, options)
        finally:
            if before is None:
                del os.environ[_BLOCKING_WAIT]
            else:
                os.environ[_BLOCKING_WAIT] = before
    index = torch.cuda.current_device() if device.index is None else device.index
    if name is None:
        group.eager_connect_single_device(torch.device("cuda", index))
    return group


@dataclass(frozen=True)
class TensorInfo:
    """What a server is told of a tensor before it comes: its checkpoint or module name, dtype on the wire, full shape.

    `count`: only so many elements of it are sent, each with its flat index; None for the whole tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    count: int | None = None

    @property
    def index_dtype(self) -> torch.dtype:
        """Of the flat indices."""
        return torch.int32 if math.prod(self.shape) < 1 << 31 else torch.int64

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        if self.count is None:
            return math.prod(self.shape) * self.dtype.itemsize
        return self.count * (self.index_dtype.itemsize + self.dtype.itemsize)


T = TypeVar("T", bound=TensorInfo)


def packed_groups(infos: Iterable[T], limit: int) -> list[list[T]]:
    """The tensors of each packed buffer: one is sent once its size exceeds `limit` bytes, the last as it is."""
    groups: list[list[T]] = []
    size = limit + 1
    for info in infos:
        if size > limit:
            groups.append([])
            size = 0
        groups[-1].append(info)
        size += info.nbytes
    return groups
