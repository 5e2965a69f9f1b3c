"""Push a trainer's weights into running servers.

Control calls go over HTTP, the tensors by broadcast in a group (this process is rank 0, the servers' workers follow)
that is made by hand and leaves any default process group alone, or as files on a disk that both sides see. A server
commits a push as a whole or keeps what it had; of several servers all are ready before the first one commits.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rollout.rendezvous import TensorInfo
from trainer_bridge.client import RolloutClient
from trainer_bridge.push.adapter import AdapterSource
from trainer_bridge.push.control import DisplacedError, ServerControl, WeightPushError
from trainer_bridge.push.folder import PushFolder
from trainer_bridge.push.group import Backend
from trainer_bridge.push.sources import ModuleSource, StateDictSource, WeightSource
from trainer_bridge.push.sparse import Baseline, digested
from trainer_bridge.push.transaction import Load, ServerGroup

T = TypeVar("T")
logger = logging.getLogger(__name__)


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


class WeightSender:
    """A trainer's connection for weight pushes. Make one with `connect`; close it, or use it as a context manager.

    With a sharded source (FSDP2), every rank makes one and every rank calls `push`: all gather, rank 0 sends, and all
    raise if it failed.
    """

    def __init__(self, servers: ServerGroup, source: WeightSource | None, folder: PushFolder | None) -> None:
        self._servers = servers
        self._source = source
        self._folder = folder
        self._distributed = source is not None and source.distributed
        self._leads = not self._distributed or dist.get_rank() == 0
        self._adapter: str | None = None
        self._displaced: DisplacedError | None = None
        self._baseline: Baseline | None = None
        # Epochs, bytes, seconds and bytes saved, as rank 0 told the others.
        self._shared: tuple[tuple[int, ...], int, float, int] = ((0,), 0, 0.0, 0)

    @classmethod
    def connect(
        cls,
        client: str | RolloutClient | Sequence[str | RolloutClient],
        model: nn.Module | dict[str, torch.Tensor] | WeightSource | None,
        *,
        backend: Backend | None = None,
        disk_path: str | Path | None = None,
        adapter: str | None = None,
        packed: bool = True,
        timeout_s: float = 300.0,
        api_key: str | None = None,
        force: bool = False,
    ) -> WeightSender:
        """Join a group with the server at `client` (a URL, or a RolloutClient), or with several of them.

        `backend` is gloo for parameters on a CPU unless given. For CUDA parameters it is nccl, but where trainer and
        engine have the same device, which NCCL refuses, ipc: the engine copies from this process's memory, or with a
        warning gloo where that can't be. `disk` writes each push as a new folder
        in `disk_path`, which belongs to this sender alone and which the servers see under the same path (without a
        `model` it serves for `push_folder`). `adapter`: `model` is PEFT's, and of it only the active adapter is pushed,
        a new version of this name in servers that run with --enable-lora.
        `timeout_s` bounds every single wait; `force` takes over from a trainer
        whose update is still making progress. Safe to repeat: a new sender takes over from one that is gone, which may
        take the 10 s in which its update counts as alive. The one taken over from raises DisplacedError from then on.
        Raises WeightPushError where a server can't be reached or refuses.
        """
        source: WeightSource | None
        if adapter is not None:
            if not isinstance(model, nn.Module):
                raise ValueError(f"to push the adapter {adapter!r} the model itself is needed, PEFT's")
            source = AdapterSource(model)
        elif isinstance(model, nn.Module):
            source = ModuleSource(model)
        else:
            source = StateDictSource(model) if isinstance(model, dict) else model
        if (source is None or disk_path is not None) and backend != "disk":
            raise ValueError(f"without a model, or with a disk_path, backend must be 'disk', got {backend!r}")
        negotiable = backend is None and source is not None and source.device.type == "cuda"
        clients = [client] if isinstance(client, str) or not isinstance(client, Sequence) else client
        owner = secrets.token_hex(8)
        servers = [
            ServerControl(c, api_key, timeout_s, owner)
            if isinstance(c, str)
            else ServerControl(c.base_url, api_key or c.api_key, timeout_s, owner)
            for c in clients
        ]
        if not servers:
            raise ValueError("connect needs at least one server, got none")
        device = torch.device("cpu") if source is None else source.device
        group = ServerGroup(servers, backend=backend or "gloo", packed=packed, timeout_s=timeout_s, device=device)
        sender = cls(group, source, None if disk_path is None else PushFolder(disk_path))
        sender._adapter = adapter
        try:
            sender._lead(lambda: (group.join_as_devices_allow if negotiable else group.join)(force=force))
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
        Of an adapter `version`, `partial`, `weight_staging` and `sparse` can't be had: its label is its name and
        number, as the result's `version` says.
        Success means that this very push was committed. Raises WeightPushError; a server then keeps what it had (unless
        it received in place). Raises DisplacedError where another trainer has taken over, and in every push after that.
        """
        if self._source is None or (self._servers.backend == "disk" and self._folder is None):
            raise ValueError("connected without a model or a disk_path: only push_folder can push")
        if sparse and self._servers.backend == "disk":
            raise ValueError("sparse pushes need a broadcast backend, this sender's is 'disk'")
        start: dict[str, Any] = {"is_checkpoint_format": True, "partial": partial, "verify": verify}
        start |= {"kv_policy": kv_policy, "weight_staging": weight_staging}
        if self._adapter is not None:
            if version is not None or partial or sparse or weight_staging is not None:
                raise ValueError("an adapter is pushed whole, and its version is its name and number: leave these out")
            assert isinstance(self._source, AdapterSource)
            start |= {"adapter": self._adapter, "lora_config": self._source.lora_config}
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
        if self._servers.backend != "disk":
            raise ValueError(f"push_folder needs backend='disk', this sender's is {self._servers.backend!r}")
        start = {"kv_policy": kv_policy, "weight_staging": weight_staging}
        folder = Path(path).absolute()
        pushed = self._lead(lambda: self._push(version, start, lambda _: Load([], iter(()), path=folder)))
        return pushed or PushResult(version or "", *self._shared)

    def close(self) -> None:
        """Leave the group. The servers may be pushed to by another sender afterwards."""
        self._servers.leave()
        for server in self._servers.servers:
            server.close()

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *_: object) -> None:
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
        outcome: tuple[float, ...] = (0.0,) * (3 + len(self._servers.servers))
        if isinstance(done, PushResult):
            outcome = (done.bytes, done.seconds, done.bytes_saved, *done.epochs)
        verdict = torch.tensor([succeeded, *outcome], dtype=torch.float64, device=self._source.device)
        dist.broadcast(verdict, 0)
        ok, nbytes, seconds, saved, *epochs = verdict.tolist()
        self._shared = (tuple(map(int, epochs)), int(nbytes), seconds, int(saved))
        if not ok and not self._leads:
            raise WeightPushError("rank 0 could not push the weights; its own error says why")

    # Rank 0.

    def _push(self, version: str | None, start: dict[str, Any], load_for: Callable[[list[int]], Load]) -> PushResult:
        began, servers = time.monotonic(), self._servers
        if self._displaced is not None:
            raise DisplacedError(str(self._displaced), self._displaced.status)
        try:
            known = servers.joins
            epochs = servers.meet()
            if self._baseline is not None and servers.joins != known:
                self._baseline.epochs = None
            load = load_for(epochs)
            servers.start(start, epochs if load.sparse else None)
            servers.send(load)
            commits = servers.finish(version, load.checksums)
        except BaseException as error:
            if isinstance(error, DisplacedError):
                self._displaced = error
            if self._baseline is not None:
                self._baseline.epochs = None
            servers.drop()
            if isinstance(error, WeightPushError) or not isinstance(error, Exception):
                raise
            raise WeightPushError(f"the weights could not be pushed: {error}") from error
        if self._baseline is not None:
            self._baseline.epochs = [commit.epoch for commit in commits]
        nbytes = sum(i.nbytes for i in load.infos) if load.infos else commits[0].bytes
        epochs_now = tuple(commit.epoch for commit in commits)
        return PushResult(commits[0].version, epochs_now, nbytes, time.monotonic() - began, load.saved)

    def _load(self, infos: list[TensorInfo], tensors: Iterator[torch.Tensor], verify: bool, epochs: list[int]) -> Load:
        """What to send to servers of these epochs: the changes if that is asked for, possible and worth it, or all."""
        sums: dict[str, str] | None = {} if verify else None
        if sums is not None:
            tensors = digested(infos, tensors, sums)
        if self._folder is not None:  # before the update starts, which must not wait for a disk
            return Load(infos, iter(()), checksums=sums, path=self._folder.write(infos, tensors))
        if self._baseline is None:
            return Load(infos, tensors, checksums=sums)
        known = self._baseline.epochs == epochs
        changes = self._baseline.changes(infos, tensors)
        if not known or changes is None:
            return Load(infos, self._baseline.tensors(infos), checksums=sums)
        announced, payloads = changes
        saved = sum(i.nbytes for i in infos) - sum(i.nbytes for i in announced)
        logger.info("sparse push: %d bytes saved of %d", saved, sum(i.nbytes for i in infos))
        return Load(announced, iter(payloads), sparse=True, saved=saved, checksums=sums)
