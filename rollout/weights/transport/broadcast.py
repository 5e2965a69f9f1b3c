"""Weights broadcast by the trainer, over gloo or NCCL, one broadcast a parameter or packed into buffers.

The groups are made by hand, beside any default group: a `PrefixStore("rollout", TCPStore(...))` that the trainer's rank
0 hosts, and a bare ProcessGroupGloo or ProcessGroupNCCL over it. With a `group_name` the keys lie where SGLang's
trainers look for them. `VllmNcclGroup` speaks to trainers that use vLLM's own
communicator: no process group, but a raw NCCL communicator whose unique id lies, pickled, in a TCPStore.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ctypes
import pickletools
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rollout.rendezvous import device_uuid, gloo_group, nccl_group, packed_groups
from rollout.weights.bodies import Announcement, InitInfo
from rollout.weights.errors import AbandonedError, WeightUpdateError
from rollout.weights.staging import Incoming, Staging
from rollout.weights.transport import Transport

_UNIQUE_ID_BYTES = 128
_POLL_S = 0.0005
_TICK = timedelta(seconds=0.05)


class Group(Protocol):
    """The receiving end of a group whose rank 0 is the trainer."""

    def broadcast(self, tensor: torch.Tensor, check: Callable[[], None]) -> None:
        """Receive a contiguous tensor from rank 0; on return, in the order of the current stream, it is filled.

        `check` is called now and then, and raises to end the wait. Only a gloo group may still write to the tensor
        then.
        """

    def close(self) -> None:
        """Leave."""


class GlooGroup:
    """ProcessGroupGloo: CPU tensors, as bytes. Nothing but its own timeout ends a broadcast, which holds its tensor."""

    def __init__(self, info: InitInfo, timeout_s: float, device: torch.device) -> None:
        self._group: Any = gloo_group(
            _store(info, timeout_s), info.rank_offset, info.world_size, timeout_s, info.group_name
        )

    def broadcast(self, tensor: torch.Tensor, check: Callable[[], None]) -> None:
        """Receive; the tensor is in host memory."""
        work = self._group.broadcast(tensor.view(-1).view(torch.uint8), 0)
        while not work.is_completed():
            check()
            with contextlib.suppress(RuntimeError):  # not yet; what has failed is raised below
                work.wait(_TICK)
        work.wait()

    def close(self) -> None:
        """Drop the group and its sockets; waits for a broadcast that was given up, without holding up other threads."""
        del self._group


class NcclGroup:
    """ProcessGroupNCCL without its watchdog: the deadline is kept here, and an abort ends the kernel that waits."""

    def __init__(self, info: InitInfo, timeout_s: float, device: torch.device) -> None:
        self._timeout_s = timeout_s
        store = _store(info, timeout_s)
        self._group = nccl_group(store, info.rank_offset, info.world_size, device, timeout_s, info.group_name)

    def broadcast(self, tensor: torch.Tensor, check: Callable[[], None]) -> None:
        """Receive, or abort the communicator when nothing came in time."""
        work = self._group.broadcast(tensor, 0)
        try:
            _poll(work.is_completed, self._timeout_s, check)
        except BaseException:
            self._group.abort()
            raise
        work.wait()

    def close(self) -> None:
        """Abort the communicator: nothing is in flight that anybody waits for."""
        self._group.abort()


class VllmNcclGroup:
    """A raw NCCL communicator, as vLLM's StatelessProcessGroup + PyNcclCommunicator build it on the trainer's side."""

    def __init__(self, info: InitInfo, timeout_s: float, device: torch.device) -> None:
        class UniqueId(ctypes.Structure):
            """NCCL's ncclUniqueId, which its functions take by value."""

            _fields_ = [("internal", ctypes.c_byte * _UNIQUE_ID_BYTES)]

        self._timeout_s = timeout_s
        self._nccl = ctypes.CDLL("libnccl.so.2")
        unique_id = UniqueId.from_buffer_copy(_unique_id(info, timeout_s))
        self._comm = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._call(
                "ncclCommInitRank", ctypes.byref(self._comm), ctypes.c_int(info.world_size), unique_id,
                ctypes.c_int(info.rank_offset),
            )  # fmt: skip
            one = torch.zeros(1, device=device)
            # 1 element; 7 is ncclFloat32, 0 is ncclSum.
            self._on_stream("ncclAllReduce", one, (1, 7, 0), lambda: None)

    def broadcast(self, tensor: torch.Tensor, check: Callable[[], None]) -> None:
        """Receive as bytes: 0 is ncclInt8, and the root."""
        self._on_stream("ncclBroadcast", tensor, (tensor.nbytes, 0, 0), check)

    def _on_stream(
        self, function: str, tensor: torch.Tensor, rest: tuple[int, int, int], check: Callable[[], None]
    ) -> None:
        stream = torch.cuda.current_stream(tensor.device)
        count, dtype, root_or_sum = rest
        self._call(
            function, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(count),
            ctypes.c_int(dtype), ctypes.c_int(root_or_sum), self._comm, ctypes.c_void_p(stream.cuda_stream),
        )  # fmt: skip
        try:
            _poll(stream.query, self._timeout_s, check)
        except BaseException:
            self.close()
            raise

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._nccl, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"{function} failed with ncclResult {status}")

    def close(self) -> None:
        if self._comm:
            self._nccl.ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()


class BroadcastTransport(Transport):
    """Receives what `update_info` announces from the trainer's broadcasts."""

    spent_by_failure = True

    def __init__(self, info: InitInfo, timeout_s: float, device: torch.device) -> None:
        raw_nccl = info.backend is None and device.type == "cuda"
        self.name = info.backend or ("nccl" if raw_nccl else "gloo")
        if self.name == "nccl" and device.type != "cuda":
            raise WeightUpdateError(400, f"backend 'nccl' needs a CUDA engine, this one is on {device}; use 'gloo'")
        if not (raw_nccl and info.nccl_unique_id_b64) and (info.master_address is None or info.master_port is None):
            raise WeightUpdateError(400, "init_info needs master_address and master_port: the trainer's store")
        if info.master_port is not None and not 0 < info.master_port < 1 << 16:
            raise WeightUpdateError(400, f"init_info.master_port must be in [1, 65535], got {info.master_port}")
        if self.name == "nccl" and info.device_uuid == device_uuid(device):
            raise WeightUpdateError(
                400, f"trainer and engine share the device {info.device_uuid}, which NCCL refuses: use 'ipc' or 'gloo'"
            )
        if info.rank_offset >= info.world_size:
            raise WeightUpdateError(
                400, f"init_info.rank_offset {info.rank_offset} must be below world_size {info.world_size}"
            )
        self.peer = f"{info.master_address}:{info.master_port}"
        self._info, self.timeout_s, self._device = info, timeout_s, device
        self._lands_on = torch.device("cpu") if self.name == "gloo" else device
        kinds: dict[str, type[GlooGroup] | type[NcclGroup]] = {"gloo": GlooGroup, "nccl": NcclGroup}
        self._kind: Callable[[InitInfo, float, torch.device], Group] = VllmNcclGroup if raw_nccl else kinds[self.name]
        self._group: Group | None = None
        self._last: Announcement | None = None
        self._watched: socket.socket | None = None
        self._interrupted = threading.Event()

    def connect(self) -> None:
        """Join the trainer's group. Raises WeightUpdateError 503 where it does not come to be in time."""
        try:
            self._group = self._kind(self._info, self.timeout_s, self._device)
        except (RuntimeError, OSError) as error:
            raise WeightUpdateError(503, f"no group with the trainer at {self.peer}: {_first_line(error)}") from error
        if self._info.master_address is not None:  # its store lives as long as the trainer: it closes this connection
            address = self._info.master_address, self._info.master_port or 0
            with contextlib.suppress(OSError):
                self._watched = socket.create_connection(address, timeout=self.timeout_s)
                self._watched.setblocking(False)

    def gone(self) -> bool:
        """Whether the trainer's store has closed its connection."""
        if self._watched is None:
            return False
        try:
            return not self._watched.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def interrupt(self) -> None:
        """End a receive; over gloo, its last broadcast holds on to one tensor until its timeout. From any thread."""
        self._interrupted.set()

    def _check(self) -> None:
        if self._interrupted.is_set():
            raise AbandonedError

    def describe(self, info: Announcement) -> Announcement:
        """Three empty lists stand for the last call's."""
        if info.names or info.dtype_names or info.shapes:
            self._last = info
        elif self._last is None:
            raise WeightUpdateError(400, "update_info names no tensors, and there was no earlier call to reuse")
        assert self._last is not None
        last = self._last
        return Announcement(
            last.names, last.dtype_names, last.shapes, info.packed, info.packed_buffer_size_bytes, counts=info.counts
        )

    def receive(
        self, info: Announcement, plan: list[Incoming], staging: Staging, progress: Callable[[int], Any]
    ) -> None:
        """Receive in order. Raises WeightUpdateError 503 when the trainer is lost or stalls for the timeout."""
        packed = self._info.packed if info.packed is None else info.packed
        try:
            if packed or info.counts is not None:
                limit = info.packed_buffer_size_bytes or self._info.packed_buffer_size_bytes
                self._receive_packed(plan, limit, staging, progress)
            else:
                for item in plan:
                    self._receive_one(item, staging, as_bytes=False)
                    progress(item.nbytes)
        except (RuntimeError, TimeoutError) as error:
            raise WeightUpdateError(
                503, f"the trainer's broadcast was lost or took over {self.timeout_s:g} s: {_first_line(error)}"
            ) from error

    def _receive_one(self, item: Incoming, staging: Staging, *, as_bytes: bool) -> None:
        landing = staging.direct(item, self._lands_on)
        if landing is None:
            landing = torch.empty(item.target.size, dtype=item.dtype, device=self._lands_on)
        try:
            self._broadcast(landing.view(-1).view(torch.uint8) if as_bytes else landing)
        except AbandonedError:
            staging.give_up(item)
            raise
        staging.place(item, landing)

    def _receive_packed(
        self, plan: list[Incoming], limit: int, staging: Staging, progress: Callable[[int], Any]
    ) -> None:
        buffer = torch.empty(0, dtype=torch.uint8, device=self._lands_on)
        for group in packed_groups(plan, limit):
            size = sum(item.nbytes for item in group)
            if len(group) == 1 and group[0].count is None:
                self._receive_one(group[0], staging, as_bytes=True)
            else:
                if buffer.numel() < size:
                    buffer = torch.empty(0, dtype=torch.uint8, device=self._lands_on)  # free before growing
                    buffer = torch.empty(size, dtype=torch.uint8, device=self._lands_on)
                if size:  # else nothing changed in any of them
                    self._broadcast(buffer[:size])
                unpack(buffer, group, staging)
            progress(size)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        assert self._group is not None
        self._group.broadcast(tensor, self._check)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._watched is not None:
            self._watched.close()
            self._watched = None


def unpack(buffer: torch.Tensor, group: list[Incoming], staging: Staging) -> None:
    """Place tensors that lie in a buffer of bytes, one behind the other."""
    offset = 0
    for item in group:
        piece = buffer[offset : offset + item.nbytes]
        if item.count is None:
            staging.place(item, _typed(piece, item.dtype).view(item.target.size))
        else:
            split = item.count * item.index_dtype.itemsize
            staging.place_changes(item, _typed(piece[:split], item.index_dtype), _typed(piece[split:], item.dtype))
        offset += item.nbytes


def _typed(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements; copied where they don't start on a multiple of their size."""
    return (piece.clone() if piece.storage_offset() % dtype.itemsize else piece).view(dtype)


def unpickled_bytes(data: bytes) -> bytes:
    """The one 128-byte string in a pickle, read from its opcodes; nothing is ever unpickled. Raises ValueError."""
    arguments = [argument for _, argument, _ in pickletools.genops(data)]
    found = [bytes(a) for a in arguments if isinstance(a, bytes | bytearray) and len(a) == _UNIQUE_ID_BYTES]
    if len(found) != 1:
        raise ValueError(f"expected one {_UNIQUE_ID_BYTES}-byte string in the pickled ncclUniqueId, found {len(found)}")
    return found[0]


def _unique_id(info: InitInfo, timeout_s: float) -> bytes:
    if info.nccl_unique_id_b64 is not None:
        try:
            unique_id = base64.b64decode(info.nccl_unique_id_b64, validate=True)
        except binascii.Error as error:
            raise WeightUpdateError(400, f"init_info.nccl_unique_id_b64 is not base64: {error}") from error
        if len(unique_id) != _UNIQUE_ID_BYTES:
            raise WeightUpdateError(400, f"init_info.nccl_unique_id_b64 holds {len(unique_id)} bytes, not 128")
        return unique_id
    try:
        return unpickled_bytes(_store(info, timeout_s).get("broadcast_from/0/0"))
    except ValueError as error:
        raise WeightUpdateError(400, str(error)) from error


def _store(info: InitInfo, timeout_s: float) -> dist.TCPStore:
    """The trainer's store. To wait for workers is to register as one: vLLM's classes wait until all ranks have."""
    assert info.master_address is not None
    assert info.master_port is not None
    return dist.TCPStore(
        info.master_address,
        info.master_port,
        info.world_size,
        False,
        timedelta(seconds=timeout_s),
        wait_for_workers=True,
    )


def _poll(condition: Callable[[], bool], timeout_s: float, check: Callable[[], None]) -> None:
    """Wait until the condition holds. Raises TimeoutError, and what `check` raises."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came within {timeout_s:g} s")
        time.sleep(_POLL_S)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]
