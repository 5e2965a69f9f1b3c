"""The sending end of a weight broadcast: the group, and what goes into each broadcast."""

from __future__ import annotations

import ipaddress
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import torch
import torch.distributed as dist

from rollout.rendezvous import TensorInfo, gloo_group, nccl_group

Backend = Literal["gloo", "nccl", "ipc", "disk"]

_POLL_S = 0.0005


class TrainerGroup:
    """Rank 0 of the group; `store` is the rendezvous that it hosts. Blocks until the servers have come."""

    def __init__(
        self, backend: Backend, store: dist.TCPStore, world_size: int, timeout_s: float, device: torch.device
    ) -> None:
        self._timeout_s = timeout_s
        self._group: Any
        if backend == "gloo":
            self._group = gloo_group(store, 0, world_size, timeout_s)
        else:
            self._group = nccl_group(store, 0, world_size, device, timeout_s)
        self._abort = backend == "nccl"

    def broadcast(self, tensor: torch.Tensor, calls: list[Future[Any]]) -> None:
        """Send a contiguous tensor.

        Raises RuntimeError when one of `calls` fails meanwhile, TimeoutError after the timeout.
        """
        work = self._group.broadcast(tensor, 0)
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if any(call.done() and call.exception() is not None for call in calls):
                raise RuntimeError("a server has given up on this update")
            if time.monotonic() > deadline:
                raise TimeoutError(f"a server did not take a broadcast within {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        work.wait()

    def leave(self) -> None:
        """Drop the group and its sockets; may block until a broadcast in flight has timed out."""
        if self._abort:
            self._group.abort()
        self._group = None


def store_address(addresses: Sequence[str]) -> str:
    """Where the store listens: `addresses` are this machine's, as each server reaches it.

    One address serves servers of this machine and of one network; only for several networks it is all of them.
    """
    outside = {address for address in addresses if not ipaddress.ip_address(address).is_loopback}
    if len(outside) > 1:
        return "::" if any(":" in address for address in outside) else "0.0.0.0"
    return next(iter(outside or addresses))


def fill(buffer: torch.Tensor, group: list[TensorInfo], tensors: Iterator[torch.Tensor]) -> list[int]:
    """Put the next tensors into a buffer of bytes, one behind the other; returns where each begins."""
    offsets = [0, *itertools.accumulate(info.nbytes for info in group)]
    for start, end in itertools.pairwise(offsets):
        buffer[start:end].copy_(next(tensors).reshape(-1).view(torch.uint8))
    return offsets[:-1]


def buffers(
    groups: list[list[TensorInfo]], tensors: Iterator[torch.Tensor], packed: bool, device: torch.device
) -> Iterator[torch.Tensor]:
    """What to broadcast, in order. A buffer is reused: it must be on its way before the next is asked for."""
    sizes = [sum(info.nbytes for info in group) for group in groups]
    shared = max(
        (size for size, group in zip(sizes, groups, strict=True) if len(group) > 1 or group[0].count is not None),
        default=0,
    )
    buffer = torch.empty(shared, dtype=torch.uint8, device=device)
    for size, group in zip(sizes, groups, strict=True):
        if len(group) == 1 and group[0].count is None:
            tensor = next(tensors).to(device)
            yield tensor.view(-1).view(torch.uint8) if packed else tensor
            continue
        fill(buffer, group, tensors)
        if size:  # else nothing changed in any of them
            yield buffer[:size]
