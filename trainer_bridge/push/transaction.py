"""One update of several servers: joined as one group, sent once, committed by all of them or by none."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollout.rendezvous import TensorInfo, device_uuid, host_store, packed_groups
from rollout.two_phase import TwoPhaseCommit
from trainer_bridge.push import ipc
from trainer_bridge.push.control import (
    Committed,
    RefusedError,
    ServerControl,
    WeightPushError,
    ended,
    in_thread,
    on_all,
    result,
)
from trainer_bridge.push.group import Backend, TrainerGroup, buffers, fill, store_address

logger = logging.getLogger(__name__)

LEAVE_S = 3.0
# Large enough that the cost of a broadcast vanishes, small enough that neither side misses the memory.
PACKED_BUFFER_BYTES = 64 << 20


@dataclass
class Load:
    """What one push sends: tensors as announced (`infos`), or those in a folder."""

    infos: list[TensorInfo]
    tensors: Iterator[torch.Tensor]
    sparse: bool = False
    saved: int = 0
    checksums: dict[str, str] | None = None
    path: Path | None = None


class ServerGroup:
    """The servers of one sender, and the group that it joins them in; rank 0 of the trainer has it.

    `device` is where the tensors are. `joined`: an update can begin; `joins` counts the groups so far.
    """

    def __init__(
        self,
        servers: Sequence[ServerControl],
        *,
        backend: Backend,
        packed: bool,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        self.servers = list(servers)
        self.joined, self.joins = False, 0
        self.backend, self._packed = backend, packed
        self._timeout_s, self._home = timeout_s, device
        self._group: TrainerGroup | None = None

    @property
    def _device(self) -> torch.device:
        """Where the weights are sent from."""
        return torch.device("cpu") if self.backend == "gloo" else self._home

    def join_as_devices_allow(self, *, force: bool) -> None:
        """`join`, of servers that CUDA tensors go to, by what serves these devices: nccl, ipc or gloo."""
        self.backend = ipc.backend_beside(self.servers, self._home)
        try:
            self.join(force=force)
        except RuntimeError as error:  # of the device here, or a server's that can't open what is offered to it
            other = isinstance(error, WeightPushError) and not (isinstance(error, RefusedError) and error.status == 400)
            if self.backend != "ipc" or other:
                raise
            logger.warning("weights go over gloo: %s", error)
            self.backend = "gloo"
            self.join(force=force)

    def join(self, *, force: bool = False, rejoin: bool = False) -> None:
        """Make a group with all servers. `force` takes over from a trainer whose update makes progress; without it,
        this waits for that update as long as one that makes none counts as alive. `rejoin`: only where no other
        trainer has joined since."""
        self.joins += 1
        info: dict[str, Any] = {"backend": self.backend, "timeout_s": self._timeout_s, "force": force}
        if not (force or rejoin):
            on_all(self.servers, lambda _, s: s.wait_for_turn())
        if self.backend in ("disk", "ipc"):
            with ExitStack() as lent:
                offer = lent.enter_context(ipc.offered(self._device)) if self.backend == "ipc" else {}
                on_all(self.servers, lambda _, s: s.join(info | offer, rejoin=rejoin))
            self.joined = True
            return
        sizes = on_all(self.servers, lambda _, s: int(s.call("GET", "/get_world_size")["world_size"]))
        world_size = sum(sizes) + 1
        addresses = [server.address_here() for server in self.servers]
        host = store_address(addresses)
        store = host_store(host, world_size, self._timeout_s)
        info |= {"master_port": store.port, "world_size": world_size, "device_uuid": device_uuid(self._device)}
        info |= {"packed": self._packed, "packed_buffer_size_bytes": PACKED_BUFFER_BYTES}

        def init(index: int, server: ServerControl) -> None:
            address = addresses[index] if ipaddress.ip_address(host).is_unspecified else host
            own = {"master_address": address, "rank_offset": 1 + sum(sizes[:index])}
            server.join(info | own, rejoin=rejoin)

        backend = self.backend
        made = in_thread(lambda: TrainerGroup(backend, store, world_size, self._timeout_s, self._device))
        all_of_them: list[Future[Any]] = [*(in_thread(partial(init, i, s)) for i, s in enumerate(self.servers)), made]
        _, late = wait(all_of_them, timeout=2 * self._timeout_s, return_when=FIRST_EXCEPTION)
        for future in all_of_them:
            if future not in late:
                result(future, "the group with the server could not be made")
        if late:
            raise WeightPushError(f"the group did not come to be within {2 * self._timeout_s:g} s")
        self._group, self.joined = made.result(), True

    def meet(self) -> list[int]:
        """Join where we have left, or where the servers' engines are other ones than those met; each one's epoch."""
        if not self.joined or self._is_stale():
            self.leave()
            self.join(rejoin=True)
        return [int(info["epoch"]) for info in self._infos()]

    def _infos(self) -> list[dict[str, Any]]:
        return on_all(self.servers, lambda _, s: s.call("GET", "/weight_info"))

    def _is_stale(self) -> bool:
        return any(info.get("transfer") == "stale" for info in self._infos())

    def start(self, body: dict[str, Any], base_epochs: list[int] | None) -> None:
        """Open an update, of changes against these epochs where they are given."""
        update_id = secrets.token_hex(8)
        base = [{}] * len(self.servers) if base_epochs is None else [{"base_epoch": epoch} for epoch in base_epochs]
        try:
            on_all(self.servers, lambda i, s: s.start(body | base[i], update_id))
        except RefusedError:
            self.abort_quietly()
            if not self._is_stale():
                raise
            self.meet()  # an engine has come back just now
            on_all(self.servers, lambda i, s: s.start(body | base[i], update_id))

    def send(self, load: Load) -> None:
        if load.path is None:
            (self._share if self.backend == "ipc" else self._broadcast)(load)
            return
        info = {"path": str(load.path)}
        # Large checkpoints take their time to read; a server that makes no progress gives up by itself.
        longest = self._timeout_s * (1 + len(list(load.path.glob("*.safetensors"))))
        on_all(self.servers, lambda _, s: s.announce(info, longest))

    def _share(self, load: Load) -> None:
        """Have the servers copy from a buffer of our device what fits in, until all was in it."""
        uuid = device_uuid(self._device)
        for group in packed_groups(load.infos, PACKED_BUFFER_BYTES):
            nbytes = sum(info.nbytes for info in group)
            buffer = torch.empty(max(1, nbytes), dtype=torch.uint8, device=self._device)
            offsets = fill(buffer, group, load.tensors)
            with ipc.shared(buffer) as handle:
                places = [{uuid: handle | {"tensor_offset_bytes": offset}} for offset in offsets]
                info = _announcement(group, load.sparse) | {"ipc_handles": places}
                on_all(self.servers, lambda _, s, info=info: s.announce(info, self._timeout_s))  # type: ignore[misc]
            del buffer

    def _broadcast(self, load: Load) -> None:
        """Announce over HTTP and broadcast, at the same time; a failure of either ends both."""
        assert self._group is not None
        packed = self._packed or load.sparse
        groups = packed_groups(load.infos, PACKED_BUFFER_BYTES) if packed else [[i] for i in load.infos]
        update_info = _announcement(load.infos, load.sparse)
        # The answer comes after the last broadcast, and each of these has its own timeout.
        longest = self._timeout_s * (len(groups) + 1)
        calls = [in_thread(partial(server.announce, update_info, longest)) for server in self.servers]
        try:
            for buffer in buffers(groups, load.tensors, packed, self._device):
                self._group.broadcast(buffer, calls)
        except Exception:
            # A server's own words, where it has any, tell more than a lost connection does.
            done, _ = wait(calls, timeout=min(5.0, self._timeout_s), return_when=FIRST_EXCEPTION)
            for call in done:
                result(call, "the server refused the weights")
            raise
        _, late = wait(calls, timeout=self._timeout_s)
        for call, server in zip(calls, self.servers, strict=True):
            if call in late:
                late_by = f"within {self._timeout_s:g} s of the last broadcast"
                raise WeightPushError(f"{server.base_url}: no answer to /update_weights {late_by}")
            result(call, "the server refused the weights")

    def finish(self, version: str | None, checksums: dict[str, str] | None) -> list[Committed]:
        """Commit everywhere, several servers only once all are ready to."""
        checks = {} if checksums is None else {"checksums": checksums}
        body: dict[str, Any] = {} if version is None else {"weight_version": version}
        commits: list[Committed] = []
        change = TwoPhaseCommit(self.servers, patient=True)
        if len(self.servers) == 1:
            change.report(self.servers[0])  # finish prepares and commits
            body |= checks
        else:
            self._each(change, lambda s: s.update_call("finish", {"prepare": True} | checks))
        if change.phase == "committing":
            commits = self._each(change, lambda s: s.commit(body))
        if change.phase == "torn":
            committed = ", ".join(server.base_url for server in change.done)
            raise WeightPushError(f"{change.error} (committed already: {committed})") from change.error
        if change.error is not None:
            raise change.error
        return commits

    def _each(self, change: TwoPhaseCommit[ServerControl], work: Callable[[ServerControl], Any]) -> list[Any]:
        futures = ended(self.servers, lambda _, server: work(server))
        for server, future in zip(self.servers, futures, strict=True):
            change.report(server, future.exception())
        return [future.result() for future in futures if future.exception() is None]

    def drop(self) -> None:
        """Leave the group, and have the servers drop the update, so that they are free for the next push at once."""
        self.leave()
        self.abort_quietly()

    def abort_quietly(self) -> None:
        """Have the servers drop the update; they would come to that by their own timeout."""
        on_all(self.servers, lambda _, s: s.abort_quietly())

    def leave(self) -> None:
        """Leave the group; the next update joins a fresh one."""
        self.joined = False
        group, self._group = self._group, None
        if group is not None:
            # A group's destructor waits for what is in flight, which may take the timeout. Give it the moment that it
            # takes otherwise: a process that exits within the destructor aborts.
            leaving = threading.Thread(target=group.leave, name="leave-weight-group", daemon=True)
            leaving.start()
            leaving.join(LEAVE_S)


def _announcement(infos: Sequence[TensorInfo], sparse: bool) -> dict[str, Any]:
    """`update_info` of these tensors."""
    return {
        "names": [i.name for i in infos],
        "dtype_names": [str(i.dtype).removeprefix("torch.") for i in infos],
        "shapes": [list(i.shape) for i in infos],
    } | ({"counts": [i.count for i in infos]} if sparse else {})
