"""Push a trainer's weights into running servers.

Control calls go over HTTP, the tensors by broadcast in a group (this process is rank 0, the servers' workers follow)
that is made by hand and leaves any default process group alone, or as files on a disk that both sides see. A server
commits a push as a whole or keeps what it had; of several servers all are ready before the first one commits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trainer_bridge.push.control import (
    Endpoint,
    RefusedError,
    ServerControl,
    WeightPushError,
    in_thread,
    on_all,
    result,
)
from trainer_bridge.push.folder import PushFolder
from trainer_bridge.push.group import Backend, TrainerGroup, buffers, packed_groups
from trainer_bridge.push.sources import ModuleSource, StateDictSource, TensorInfo, WeightSource
from trainer_bridge.push.sparse import Baseline, digested

T = TypeVar("T")
LEAVE_S = 3.0
logger = logging.getLogger(__name__)

# Large enough that the cost of a broadcast vanishes, small enough that neither side misses the memory.
PACKED_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True)
class PushResult:
    """A committed push.

    `version` is the server's label (on ranks other than 0 of a sharded trainer: what `push` was given); `epochs` the
    weight epoch that it has on each server, in their order, and `epoch` the first of them; `bytes` what was sent, and
    `bytes_saved` how much less that is than the whole; `seconds` from start to commit.
    """

    version: str
    epochs: tuple[int, ...]
    bytes: int
    seconds: float
    bytes_saved: int = 0

    @property
    def epoch(self) -> int:
        """On the (first) server."""
        return self.epochs[0]


@dataclass
class _Load:
    """What one push sends: tensors as announced (`infos`), or those in a folder."""

    infos: list[TensorInfo]
    tensors: Iterator[torch.Tensor]
    sparse: bool = False
    saved: int = 0
    checksums: dict[str, str] | None = None
    path: Path | None = None


class WeightSender:
    """A trainer's connection for weight pushes. Make one with `connect`; close it, or use it as a context manager.

    With a sharded source (FSDP2), every rank makes one and every rank calls `push`: all gather, rank 0 sends, and all
    raise if it failed.
    """

    def __init__(
        self,
        servers: Sequence[ServerControl],
        source: WeightSource | None,
        *,
        backend: Backend | Literal["disk"],
        folder: PushFolder | None,
        packed: bool,
        timeout_s: float,
    ) -> None:
        self._servers = list(servers)
        self._source = source
        self._backend, self._folder = backend, folder
        self._packed = packed
        self._timeout_s = timeout_s
        self._distributed = source is not None and source.distributed
        self._leads = not self._distributed or dist.get_rank() == 0
        self._joined = False
        self._group: TrainerGroup | None = None
        self._baseline: Baseline | None = None
        # Epochs, bytes, seconds and bytes saved, as rank 0 told the others.
        self._shared: tuple[tuple[int, ...], int, float, int] = ((0,), 0, 0.0, 0)

    @classmethod
    def connect(
        cls,
        client: str | Endpoint | Sequence[str | Endpoint],
        model: nn.Module | dict[str, torch.Tensor] | WeightSource | None,
        *,
        backend: Backend | Literal["disk"] | None = None,
        disk_path: str | Path | None = None,
        packed: bool = True,
        timeout_s: float = 300.0,
        api_key: str | None = None,
        force: bool = False,
    ) -> WeightSender:
        """Join a group with the server at `client` (a URL, or a RolloutClient), or with several of them.

        `backend` is nccl for CUDA parameters and gloo for others unless given; `disk` writes each push as a new folder
        in `disk_path`, which belongs to this sender alone and which the servers see under the same path (without a
        `model` it serves for `push_folder`). `timeout_s` bounds every single wait; `force` takes over from a trainer
        whose update is still making progress. Safe to repeat: a new sender takes over from one that is gone.
        Raises WeightPushError where a server can't be reached or refuses.
        """
        if isinstance(model, nn.Module):
            source: WeightSource | None = ModuleSource(model)
        else:
            source = StateDictSource(model) if isinstance(model, dict) else model
        if (source is None or disk_path is not None) and backend != "disk":
            raise ValueError(f"without a model, or with a disk_path, backend must be 'disk', got {backend!r}")
        if backend is None:
            backend = "nccl" if source is not None and source.device.type == "cuda" else "gloo"
        clients = [client] if isinstance(client, str) or not isinstance(client, Sequence) else client
        servers = [
            ServerControl(c, api_key, timeout_s)
            if isinstance(c, str)
            else ServerControl(c.base_url, api_key or c.api_key, timeout_s)
            for c in clients
        ]
        if not servers:
            raise ValueError("connect needs at least one server, got none")
        folder = None if disk_path is None else PushFolder(disk_path)
        sender = cls(servers, source, backend=backend, folder=folder, packed=packed, timeout_s=timeout_s)
        try:
            sender._lead(lambda: sender._join(force))
        except BaseException:
            sender.close()
            raise
        return sender

    def push(
        self,
        version: str | None = None,
        *,
        partial: bool = False,
        kv_policy: Literal["keep", "recompute"] | None = None,
        weight_staging: Literal["full", "in_place"] | None = None,
        verify: bool = False,
        sparse: bool = False,
    ) -> PushResult:
        """Send the weights as they are now; returns once every server samples from them.

        `version` labels them (None keeps the server's label), `partial` allows a source that holds a subset of the
        parameters, `kv_policy` says what becomes of the cache of running requests and `weight_staging` where the server
        receives (in_place: into the live weights; pause it first). None: as the server was started.
        `verify` sends a checksum of every tensor along, and nothing commits unless what arrived has it.
        `sparse` sends only the elements that changed since the last push, where every server still serves that one and
        it takes less than half the bytes; for that it keeps a copy of the weights in this process's CPU memory, until
        a push without it.
        Raises WeightPushError; a server then keeps what it had (unless it received in place).
        """
        if self._source is None or (self._backend == "disk" and self._folder is None):
            raise ValueError("connected without a model or a disk_path: only push_folder can push")
        if sparse and self._backend == "disk":
            raise ValueError("sparse pushes need a broadcast backend, this sender's is 'disk'")
        start: dict[str, Any] = {"is_checkpoint_format": True, "partial": partial, "verify": verify}
        start |= {"kv_policy": kv_policy, "weight_staging": weight_staging}
        self._baseline = (self._baseline or Baseline()) if sparse else None
        source, tensors = self._source, self._source.tensors()
        pushed = self._lead(
            lambda: self._push(version, start, lambda epochs: self._load(source.infos(), tensors, verify, epochs)),
            tensors,
        )
        return pushed or PushResult(version or "", *self._shared)

    def push_folder(
        self,
        path: str | Path,
        version: str | None = None,
        *,
        kv_policy: Literal["keep", "recompute"] | None = None,
        weight_staging: Literal["full", "in_place"] | None = None,
    ) -> PushResult:
        """Have the servers read a folder of safetensors, such as a transformers checkpoint (backend `disk`)."""
        if self._backend != "disk":
            raise ValueError(f"push_folder needs backend='disk', this sender's is {self._backend!r}")
        start = {"kv_policy": kv_policy, "weight_staging": weight_staging}
        folder = Path(path).absolute()
        pushed = self._lead(lambda: self._push(version, start, lambda _: _Load([], iter(()), path=folder)))
        return pushed or PushResult(version or "", *self._shared)

    def close(self) -> None:
        """Leave the group. The servers may be pushed to by another sender afterwards."""
        self._drop_group()
        for server in self._servers:
            server.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Ranks of a sharded trainer.

    def _lead(self, work: Callable[[], T], tensors: Iterable[torch.Tensor] = ()) -> T | None:
        """Do `work` on the rank that sends, while the others gather; then all ranks raise if it failed."""
        error: BaseException | None = None
        done: T | None = None
        try:
            if self._leads:
                done = work()
        except BaseException as caught:
            error = caught
        if self._distributed:
            for _ in tensors:  # a gather is a collective: rank 0 finishes its part also after a failure
                pass
            self._share(done, error is None)
        if error is not None:
            raise error
        return done

    def _share(self, done: object, succeeded: bool) -> None:
        """Tell the other ranks what came of it; raises on them if it failed."""
        assert self._source is not None
        outcome: tuple[float, ...] = (0.0,) * (3 + len(self._servers))
        if isinstance(done, PushResult):
            outcome = (done.bytes, done.seconds, done.bytes_saved, *done.epochs)
        verdict = torch.tensor([succeeded, *outcome], dtype=torch.float64, device=self._source.device)
        dist.broadcast(verdict, 0)
        ok, nbytes, seconds, saved, *epochs = verdict.tolist()
        self._shared = (tuple(map(int, epochs)), int(nbytes), seconds, int(saved))
        if not ok and not self._leads:
            raise WeightPushError("rank 0 could not push the weights; its own error says why")

    # Rank 0.

    def _join(self, force: bool = False) -> None:
        info: dict[str, Any] = {"backend": self._backend, "timeout_s": self._timeout_s, "force": force}
        if self._backend == "disk":
            on_all(self._servers, lambda _, s: s.call("POST", "/init_weight_transfer_engine", {"init_info": info}))
            self._joined = True
            return
        sizes = on_all(self._servers, lambda _, s: int(s.call("GET", "/get_world_size")["world_size"]))
        world_size, timeout = sum(sizes) + 1, timedelta(seconds=self._timeout_s)
        store = dist.TCPStore("localhost", 0, world_size, True, timeout, wait_for_workers=False)
        info |= {"master_port": store.port, "world_size": world_size}
        info |= {"packed": self._packed, "packed_buffer_size_bytes": PACKED_BUFFER_BYTES}

        def init(index: int, server: ServerControl) -> dict[str, Any]:
            own = {"master_address": server.address_here(), "rank_offset": 1 + sum(sizes[:index])}
            return server.call("POST", "/init_weight_transfer_engine", {"init_info": info | own})

        backend = self._backend
        made = in_thread(lambda: TrainerGroup(backend, store, world_size, self._timeout_s))
        all_of_them: list[Future[Any]] = [
            *(in_thread(lambda i=i, s=s: init(i, s)) for i, s in enumerate(self._servers)),  # type: ignore[misc]
            made,
        ]
        _, late = wait(all_of_them, timeout=2 * self._timeout_s, return_when=FIRST_EXCEPTION)
        for future in all_of_them:
            if future not in late:
                result(future, "the group with the server could not be made")
        if late:
            raise WeightPushError(f"the group did not come to be within {2 * self._timeout_s:g} s")
        self._group, self._joined = made.result(), True

    def _push(self, version: str | None, start: dict[str, Any], load_for: Callable[[list[int]], _Load]) -> PushResult:
        began = time.monotonic()
        try:
            if not self._joined:
                self._join()
            epochs = self._meet()
            load = load_for(epochs)
            base = [{"base_epoch": epoch} if load.sparse else {} for epoch in epochs]
            try:
                on_all(self._servers, lambda i, s: s.start(start | base[i]))
            except RefusedError:
                on_all(self._servers, lambda _, s: s.abort_quietly())
                if not self._is_stale():
                    raise
                self._meet()  # an engine has come back just now
                on_all(self._servers, lambda i, s: s.start(start | base[i]))
            self._transfer(load)
            infos = self._finish(version, epochs, load.checksums)
        except BaseException as error:
            self._drop_group()
            on_all(self._servers, lambda _, s: s.abort_quietly())
            if isinstance(error, WeightPushError) or not isinstance(error, Exception):
                raise
            raise WeightPushError(f"the weights could not be pushed: {error}") from error
        epochs = [int(info["epoch"]) for info in infos]
        if self._baseline is not None:
            self._baseline.epochs = epochs
        nbytes = sum(i.nbytes for i in load.infos) if load.infos else int(infos[0]["bytes"])
        return PushResult(infos[0]["weight_version"], tuple(epochs), nbytes, time.monotonic() - began, load.saved)

    def _meet(self) -> list[int]:
        """Join the servers again where their engines are other ones than those met; each one's epoch."""
        if self._is_stale():
            self._drop_group()
            self._join()
        return [int(info["epoch"]) for info in self._infos()]

    def _infos(self) -> list[dict[str, Any]]:
        return on_all(self._servers, lambda _, s: s.call("GET", "/weight_info"))

    def _is_stale(self) -> bool:
        return any(info.get("transfer") == "stale" for info in self._infos())

    def _load(self, infos: list[TensorInfo], tensors: Iterator[torch.Tensor], verify: bool, epochs: list[int]) -> _Load:
        """What to send to servers of these epochs: the changes if that is asked for, possible and worth it, or all."""
        sums: dict[str, str] | None = {} if verify else None
        if sums is not None:
            tensors = digested(infos, tensors, sums)
        if self._folder is not None:  # before the update starts, which must not wait for a disk
            return _Load(infos, iter(()), checksums=sums, path=self._folder.write(infos, tensors))
        if self._baseline is None:
            return _Load(infos, tensors, checksums=sums)
        known = self._baseline.epochs == epochs
        changes = self._baseline.take(infos, tensors)
        if not known or changes is None:
            return _Load(infos, self._baseline.tensors(infos), checksums=sums)
        announced, payloads = changes
        saved = sum(i.nbytes for i in infos) - sum(i.nbytes for i in announced)
        logger.info("sparse push: %d bytes saved of %d", saved, sum(i.nbytes for i in infos))
        return _Load(announced, iter(payloads), sparse=True, saved=saved, checksums=sums)

    def _transfer(self, load: _Load) -> None:
        """Bring the tensors into every server's staging."""
        if load.path is None:
            self._broadcast(load)
            return
        info = {"update_info": {"path": str(load.path)}}
        # Large checkpoints take their time to read; a server that makes no progress gives up by itself.
        longest = self._timeout_s * (1 + len(list(load.path.glob("*.safetensors"))))
        on_all(self._servers, lambda _, s: s.call("POST", "/update_weights", info, timeout_s=longest))

    def _broadcast(self, load: _Load) -> None:
        """Announce over HTTP and broadcast, at the same time; a failure of either ends both."""
        assert self._group is not None
        packed = self._packed or load.sparse
        groups = packed_groups(load.infos, PACKED_BUFFER_BYTES) if packed else [[i] for i in load.infos]
        update_info: dict[str, Any] = {
            "names": [i.name for i in load.infos],
            "dtype_names": [str(i.dtype).removeprefix("torch.") for i in load.infos],
            "shapes": [list(i.shape) for i in load.infos],
        }
        if load.sparse:
            update_info["counts"] = [i.count for i in load.infos]
        # The answer comes after the last broadcast, and each of these has its own timeout.
        longest = self._timeout_s * (len(groups) + 1)

        def announce(server: ServerControl) -> dict[str, Any]:
            return server.call("POST", "/update_weights", {"update_info": update_info}, timeout_s=longest)

        calls = [in_thread(lambda s=server: announce(s)) for server in self._servers]  # type: ignore[misc]
        device = torch.device("cpu") if self._backend == "gloo" or self._source is None else self._source.device
        try:
            for buffer in buffers(groups, load.tensors, packed, device):
                self._group.broadcast(buffer, calls)
        except Exception:
            # A server's own words, where it has any, tell more than a lost connection does.
            done, _ = wait(calls, timeout=min(5.0, self._timeout_s), return_when=FIRST_EXCEPTION)
            for call in done:
                result(call, "the server refused the weights")
            raise
        _, late = wait(calls, timeout=self._timeout_s)
        for call, server in zip(calls, self._servers, strict=True):
            if call in late:
                late_by = f"within {self._timeout_s:g} s of the last broadcast"
                raise WeightPushError(f"{server.base_url}: no answer to /update_weights {late_by}")
            result(call, "the server refused the weights")

    def _finish(self, version: str | None, epochs: list[int], checksums: dict[str, str] | None) -> list[dict[str, Any]]:
        """Commit everywhere, several servers only once all are ready to; each one's /weight_info after it."""
        checks = {} if checksums is None else {"checksums": checksums}
        label = {} if version is None else {"weight_version": version}
        if len(self._servers) == 1:
            return [self._servers[0].commit(label | checks, epochs[0])]
        on_all(self._servers, lambda _, s: s.call("POST", "/finish_weight_update", {"prepare": True} | checks))
        try:
            infos = on_all(self._servers, lambda i, s: s.commit(label, epochs[i]))
        except WeightPushError as error:
            committed = [s.base_url for s in self._servers if s.committed]
            raise WeightPushError(f"{error} (committed already: {', '.join(committed) or 'none'})") from error
        return infos

    def _drop_group(self) -> None:
        self._joined = False
        if self._baseline is not None:
            self._baseline.epochs = None
        group, self._group = self._group, None
        if group is not None:
            # A group's destructor waits for what is in flight, which may take the timeout. Give it the moment that it
            # takes otherwise: a process that exits within the destructor aborts.
            leaving = threading.Thread(target=group.leave, name="leave-weight-group", daemon=True)
            leaving.start()
            leaving.join(LEAVE_S)
