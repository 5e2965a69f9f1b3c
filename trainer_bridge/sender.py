"""Push a trainer's weights into a running server.

Control calls go over HTTP, the tensors by broadcast in a group (this process is rank 0, the server's workers follow)
that is made by hand and leaves any default process group alone. The server commits a push as a whole or keeps what it
had.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx
import torch
import torch.distributed as dist
from torch import nn

from trainer_bridge.group import Backend, TrainerGroup, buffers, packed_groups
from trainer_bridge.sources import ModuleSource, StateDictSource, TensorInfo, WeightSource

T = TypeVar("T")

# Large enough that the cost of a broadcast vanishes, small enough that neither side misses the memory.
PACKED_BUFFER_BYTES = 64 << 20


class WeightPushError(RuntimeError):
    """A push that did not happen: the server keeps the weights it had. The next push joins a fresh group by itself."""


class _RefusedError(WeightPushError):
    """The server answered with an error, so it has dropped the update itself."""


class Endpoint(Protocol):
    """Anything that knows a server's address and key, such as RolloutClient."""

    @property
    def base_url(self) -> str:
        """http://host:port."""

    @property
    def api_key(self) -> str | None:
        """The bearer key, if the server wants one."""


@dataclass(frozen=True)
class PushResult:
    """A committed push: the server's label and weight epoch, bytes broadcast, seconds from start to commit.

    On ranks other than 0 of a sharded trainer, `version` is what `push` was given.
    """

    version: str
    epoch: int
    bytes: int
    seconds: float


class WeightSender:
    """A trainer's connection for weight pushes. Make one with `connect`; close it, or use it as a context manager.

    With a sharded source (FSDP2), every rank makes one and every rank calls `push`: all gather, rank 0 sends, and all
    raise if it failed.
    """

    def __init__(
        self,
        base_url: str,
        source: WeightSource,
        *,
        backend: Backend,
        packed: bool,
        timeout_s: float,
        api_key: str | None,
    ) -> None:
        self._source = source
        self._backend: Backend = backend
        self._packed = packed
        self._timeout_s = timeout_s
        self._base_url = base_url
        self._leads = not source.distributed or dist.get_rank() == 0
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=base_url, headers=headers, trust_env=False)
        self._group: TrainerGroup | None = None
        self._shared = (0, 0, 0.0)  # epoch, bytes and seconds, as rank 0 told the others

    @classmethod
    def connect(
        cls,
        client: str | Endpoint,
        model: nn.Module | dict[str, torch.Tensor] | WeightSource,
        *,
        backend: Backend | None = None,
        packed: bool = True,
        timeout_s: float = 300.0,
        api_key: str | None = None,
        force: bool = False,
    ) -> WeightSender:
        """Join a group with the server at `client` (a URL, or a RolloutClient).

        `backend` is nccl for CUDA parameters and gloo for others unless given; `timeout_s` bounds every single wait;
        `force` takes over from a trainer whose update is still making progress. Safe to repeat: a new sender takes
        over from one that is gone. Raises WeightPushError where the server can't be reached or refuses.
        """
        if isinstance(model, nn.Module):
            source: WeightSource = ModuleSource(model)
        else:
            source = StateDictSource(model) if isinstance(model, dict) else model
        backend = backend or ("nccl" if source.device.type == "cuda" else "gloo")
        url, key = (client, api_key) if isinstance(client, str) else (client.base_url, api_key or client.api_key)
        sender = cls(url, source, backend=backend, packed=packed, timeout_s=timeout_s, api_key=key)
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
    ) -> PushResult:
        """Send the weights as they are now; returns once the server samples from them.

        `version` labels them (None keeps the server's label), `partial` allows a source that holds a subset of the
        parameters, `kv_policy` says what becomes of the cache of running requests (None: as the server was started).
        Raises WeightPushError; the server then keeps what it had.
        """
        start: dict[str, Any] = {"is_checkpoint_format": True, "partial": partial}
        if kv_policy is not None:
            start["kv_policy"] = kv_policy
        tensors = self._source.tensors()
        result = self._lead(lambda: self._push(version, start, tensors), tensors)
        return result or PushResult(version or "", *self._shared)

    def close(self) -> None:
        """Leave the group. The server may be pushed to by another sender afterwards."""
        self._drop_group()
        self._http.close()

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
        result: T | None = None
        try:
            if self._leads:
                result = work()
        except BaseException as caught:
            error = caught
        if self._source.distributed:
            for _ in tensors:  # a gather is a collective: rank 0 finishes its part also after a failure
                pass
            outcome = (result.epoch, result.bytes, result.seconds) if isinstance(result, PushResult) else (0, 0, 0.0)
            verdict = torch.tensor([error is None, *outcome], dtype=torch.float64, device=self._source.device)
            dist.broadcast(verdict, 0)
            succeeded, epoch, nbytes, seconds = verdict.tolist()
            self._shared = (int(epoch), int(nbytes), seconds)
            if not succeeded and not self._leads:
                raise WeightPushError("rank 0 could not push the weights; its own error says why")
        if error is not None:
            raise error
        return result

    # Rank 0.

    def _join(self, force: bool = False) -> TrainerGroup:
        world_size = int(self._call("GET", "/get_world_size")["world_size"]) + 1
        store = dist.TCPStore(
            "localhost", 0, world_size, True, timedelta(seconds=self._timeout_s), wait_for_workers=False
        )
        init_info = {
            "backend": self._backend,
            "master_address": _address_towards(self._base_url),
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": self._packed,
            "packed_buffer_size_bytes": PACKED_BUFFER_BYTES,
            "timeout_s": self._timeout_s,
            "force": force,
        }
        call = _in_thread(lambda: self._call("POST", "/init_weight_transfer_engine", {"init_info": init_info}))
        made = _in_thread(lambda: TrainerGroup(self._backend, store, world_size, self._timeout_s))
        both: list[Future[Any]] = [call, made]
        _, late = wait(both, timeout=2 * self._timeout_s, return_when=FIRST_EXCEPTION)
        for future in both:
            if future not in late:
                _result(future, "the group with the server could not be made")
        if late:
            raise WeightPushError(f"the server did not join the group within {2 * self._timeout_s:g} s")
        self._group = made.result()
        return self._group

    def _push(self, version: str | None, start: dict[str, Any], tensors: Iterator[torch.Tensor]) -> PushResult:
        began = time.monotonic()
        opened = False
        try:
            group = self._group or self._join()
            epoch_before = self._call("GET", "/weight_info")["epoch"]
            self._call("POST", "/start_weight_update", start)
            opened = True
            infos = self._source.infos()
            self._send(group, infos, tensors)
            info = self._finish(version, epoch_before)
        except BaseException as error:
            self._drop_group()
            if opened and not isinstance(error, _RefusedError):
                self._abort_quietly()
            if isinstance(error, WeightPushError) or not isinstance(error, Exception):
                raise
            raise WeightPushError(f"the weights could not be pushed: {error}") from error
        nbytes = sum(i.nbytes for i in infos)
        return PushResult(info["weight_version"], info["epoch"], nbytes, time.monotonic() - began)

    def _send(self, group: TrainerGroup, infos: list[TensorInfo], tensors: Iterator[torch.Tensor]) -> None:
        """Announce over HTTP and broadcast, at the same time; a failure of either ends both."""
        groups = packed_groups(infos, PACKED_BUFFER_BYTES) if self._packed else [[i] for i in infos]
        body = {
            "update_info": {
                "names": [i.name for i in infos],
                "dtype_names": [str(i.dtype).removeprefix("torch.") for i in infos],
                "shapes": [list(i.shape) for i in infos],
            }
        }
        # The answer comes after the last broadcast, and each of these has its own timeout.
        longest = self._timeout_s * (len(groups) + 1)
        call = _in_thread(lambda: self._call("POST", "/update_weights", body, timeout_s=longest))
        device = torch.device("cpu") if self._backend == "gloo" else self._source.device
        try:
            for buffer in buffers(groups, tensors, self._packed, device):
                group.broadcast(buffer, call)
        except Exception:
            # The server's own words, where it has any, tell more than a lost connection does.
            wait([call], timeout=min(5.0, self._timeout_s))
            if call.done():
                _result(call, "the server refused the weights")
            raise
        wait([call], timeout=self._timeout_s)
        if not call.done():
            raise WeightPushError(f"no answer to /update_weights within {self._timeout_s:g} s of the last broadcast")
        _result(call, "the server refused the weights")

    def _finish(self, version: str | None, epoch_before: int) -> dict[str, Any]:
        """Commit; the server's /weight_info after it, which also decides where the answer itself was lost."""
        lost: Exception | None = None
        try:
            self._call("POST", "/finish_weight_update", {} if version is None else {"weight_version": version})
        except _RefusedError:
            raise
        except WeightPushError as error:
            lost = error
        deadline = time.monotonic() + self._timeout_s
        while True:
            info = self._call("GET", "/weight_info")
            if lost is None or info["epoch"] > epoch_before:
                return info
            if info["state"] not in ("receiving", "ready") or time.monotonic() > deadline:
                raise lost
            time.sleep(0.05)

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        try:
            timeout = httpx.Timeout(timeout_s or self._timeout_s, connect=min(10.0, self._timeout_s))
            response = self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise WeightPushError(f"{method} {path} got no answer: {type(error).__name__}: {error}") from error
        if response.status_code >= 400:
            raise _RefusedError(f"{method} {path} was refused with {response.status_code}: {_message(response)}")
        answer: dict[str, Any] = response.json()
        return answer

    def _abort_quietly(self) -> None:
        """Free the server for the next push at once; it would come to that by its own timeout."""
        with contextlib.suppress(WeightPushError):
            self._call("POST", "/abort_weight_update", {}, timeout_s=min(5.0, self._timeout_s))

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            # A group's destructor waits for what is in flight.
            threading.Thread(target=group.leave, name="leave-weight-group", daemon=True).start()


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Run on a daemon thread: one that is stuck must not keep the trainer from exiting."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-sender", daemon=True).start()
    return future


def _result(future: Future[T], what: str) -> T:
    try:
        return future.result()
    except WeightPushError:
        raise
    except Exception as error:
        raise WeightPushError(f"{what}: {error}") from error


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:500]


def _address_towards(url: str) -> str:
    """This machine's address as the server at `url` can reach it: that of the route there."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
