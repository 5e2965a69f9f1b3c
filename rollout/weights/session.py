"""One weight update at a time: idle → open → receiving → ready → committed | aborted.

`WeightUpdater.call` takes the control calls of the trainer's HTTP protocol and answers with futures. Joining,
receiving, casting and checking happen on a thread of the trainer's connection; the engine's thread only flips, in
`commit_if_ready`, between two steps. Until that flip nothing that serves is touched, so every failure is an abort that
leaves the old weights under their old label.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rollout.config import KVPolicy
from rollout.weights.bodies import (
    Announcement,
    CheckerBody,
    FinishBody,
    InitBody,
    StartBody,
    UpdateBody,
    VersionBody,
    parse,
)
from rollout.weights.errors import WeightUpdateError
from rollout.weights.link import Link
from rollout.weights.store import Staging, WeightStore
from rollout.weights.transport import Transport
from rollout.weights.transport.broadcast import BroadcastTransport
from rollout.weights.transport.disk import DiskTransport

logger = logging.getLogger(__name__)

State = Literal["idle", "open", "receiving", "ready", "committed", "aborted"]
Answer = Future[dict[str, Any]]


@dataclass(frozen=True)
class Commit:
    """A flip that has just happened. `kv_policy` is the update's own wish, None for the server's default."""

    epoch: int
    label: str
    kv_policy: KVPolicy | None


@dataclass(eq=False)
class _Session:
    """One update. `answer` is the call that a trainer waits for; `busy` while the link's thread may use the buffers."""

    link: Link
    partial: bool
    kv_policy: KVPolicy | None
    single_call: bool = False
    label: str | None = None
    staging: Staging | None = None
    answer: Answer | None = None
    busy: bool = False
    nbytes: int = 0
    started: float = field(default_factory=time.monotonic)
    touched: float = field(default_factory=time.monotonic)


class _AbandonedError(Exception):
    """Ends a job whose session is over."""


class WeightUpdater:
    """The state machine, for one engine. Thread-safe.

    `timeout_s` bounds every single wait (a join, a broadcast, a pause between two calls of an open session), unless the
    trainer's `init_info.timeout_s` says otherwise. An update makes progress while its last sign of life is younger than
    `progress_s`. `wake` is called, on any thread, when a commit waits for the engine; `info` adds weight_info fields.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        timeout_s: float = 300.0,
        device: torch.device | str = "cpu",
        progress_s: float = 10.0,
        wake: Callable[[], None] = lambda: None,
        info: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._progress_s = progress_s
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._wake, self._info = wake, info
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._session: _Session | None = None
        self._ready: _Session | None = None
        self._state: State = "idle"
        self._last: dict[str, Any] = {"last_error": None, "bytes": 0, "seconds": 0.0, "transport": None}
        self._methods: dict[str, Callable[[dict[str, Any], Answer], None]] = {
            "init_weight_transfer_engine": self._init,
            "start_weight_update": self._start,
            "update_weights": self._update,
            "finish_weight_update": self._finish,
            "abort_weight_update": self._abort_call,
            "update_weight_version": self._relabel,
            "weight_info": self._weight_info,
            "shutdown_weight_transfer_engine": self._shutdown,
            "weight_checker": self._checker,
        }

    @property
    def methods(self) -> frozenset[str]:
        """The control calls understood by `call`."""
        return frozenset(self._methods)

    def call(self, method: str, params: dict[str, Any]) -> Answer:
        """Start a control call; `params`: its JSON body. The future holds the answer's body, or a WeightUpdateError."""
        answer: Answer = Future()
        try:
            with self._lock:
                self._methods[method](params, answer)
        except Exception as error:
            answer.set_exception(_as_update_error(error))
        return answer

    def commit_if_ready(self) -> Commit | None:
        """Flip to the received weights if a checked set waits. For the engine's thread, between two steps."""
        if self._ready is None:
            return None
        with self._lock:
            session = self._ready
            if session is None or session.staging is None:
                return None
            self._ready = self._session = None
            self._store.commit(session.staging, session.label)
            self._state = "committed"
            self._record(session, None)
            self._retire(session)
            commit = Commit(self._store.epoch, self._store.label, session.kv_policy)
            answer, session.answer = session.answer, None
        if answer is not None:
            answer.set_result(
                {"status": "ok"}
                if session.single_call
                else {"message": "Weight update committed", "weight_version": commit.label, "epoch": commit.epoch}
            )
        return commit

    def close(self) -> None:
        """Abort what is under way and leave the trainer's group; the engine is going down."""
        self.call("shutdown_weight_transfer_engine", {})

    # Calls. Each runs under the lock and either resolves `answer`, hands it to a job, or raises WeightUpdateError.

    def _init(self, params: dict[str, Any], answer: Answer) -> None:
        info = parse(params, InitBody).init_info
        timeout_s = self._timeout_s if info.timeout_s is None else info.timeout_s
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise WeightUpdateError(400, f"init_info.timeout_s must be a positive number of seconds, got {timeout_s}")
        transport: Transport = (
            DiskTransport() if info.backend == "disk" else BroadcastTransport(info, timeout_s, self._device)
        )
        session = self._session
        if session is not None:
            quiet = time.monotonic() - session.touched
            if quiet < self._progress_s and not info.force:
                raise WeightUpdateError(
                    409,
                    f"another trainer's update is {self._state} and showed progress {quiet:.1f} s ago; wait for it to "
                    f"end, or for {self._progress_s:g} s without progress, or take over with "
                    'init_info {"force": true}',
                )
            self._abort(session, WeightUpdateError(503, "another trainer took over the weight transfer"))
        self._drop_link()
        link = self._link = Link(transport, timeout_s, self._expire)
        link.submit(lambda: self._join(link, answer))

    def _join(self, link: Link, answer: Answer) -> None:
        try:
            with self._on_device():
                link.transport.connect()
        except Exception as error:
            failure = _as_update_error(error)
            with self._lock:
                if self._link is link:
                    self._drop_link()
            answer.set_exception(failure)
            return
        with self._lock:
            current = self._link is link
            link.joined = True
        if current:
            answer.set_result({"message": f"Weight transfer initialized ({link.transport.name})"})
        else:
            answer.set_exception(WeightUpdateError(409, "the transfer was shut down or taken over while joining"))

    def _start(self, params: dict[str, Any], answer: Answer) -> None:
        body = parse(params, StartBody)
        self._refuse_second()
        link = self._usable_link()
        self._open(_Session(link, body.partial, body.kv_policy))
        answer.set_result({"message": "Weight update started", "epoch": self._store.epoch})

    def _update(self, params: dict[str, Any], answer: Answer) -> None:
        try:
            body = parse(params, UpdateBody)
            if body.update_info is None and body.weight_dir is None:
                raise WeightUpdateError(400, "update_weights needs update_info (or weight_dir)")
        except WeightUpdateError as error:
            # The trainer's broadcasts may be on their way.
            if self._session is not None and self._session.answer is None:
                self._session.link.spend(error.message)
                self._abort(self._session, error)
            raise
        if body.weight_dir is not None:
            self._refuse_second()
            session = _Session(Link(DiskTransport(), self._timeout_s, self._expire), False, None, single_call=True)
            self._open(session)
            info = Announcement(path=body.weight_dir)
        else:
            if self._session is None:
                self._usable_link()
            session = self._active("update_weights")
            assert body.update_info is not None
            info = body.update_info
        self._state = "receiving"
        self._submit(session, answer, lambda: self._receive(session, info))

    def _finish(self, params: dict[str, Any], answer: Answer) -> None:
        body = parse(params, FinishBody)
        if self._session is None:
            self._usable_link()
        session = self._active("finish_weight_update")
        if self._state == "open":
            raise WeightUpdateError(409, "the update is open and has received nothing: call update_weights first")
        session.label = body.weight_version
        self._submit(session, answer, lambda: self._check(session))

    def _abort_call(self, params: dict[str, Any], answer: Answer) -> None:
        if self._session is None:
            raise WeightUpdateError(409, f"no update is open (state {self._state}): there is nothing to abort")
        self._abort(self._session, WeightUpdateError(503, "the update was aborted by abort_weight_update"))
        answer.set_result({"message": "Weight update aborted"})

    def _relabel(self, params: dict[str, Any], answer: Answer) -> None:
        version = parse(params, VersionBody).new_version
        self._store.label = version
        answer.set_result({"success": True, "new_version": version})

    def _weight_info(self, params: dict[str, Any], answer: Answer) -> None:
        now: dict[str, Any] = {
            "weight_version": self._store.label,
            "epoch": self._store.epoch,
            "state": self._state,
            **self._last,
        }
        if self._session is not None:
            now |= self._figures(self._session)
        answer.set_result(now | self._info())

    def _shutdown(self, params: dict[str, Any], answer: Answer) -> None:
        if self._session is not None:
            self._abort(self._session, WeightUpdateError(503, "the weight transfer engine was shut down"))
        self._drop_link()
        self._state = "idle"
        answer.set_result({"message": "Weight transfer engine shut down"})

    def _checker(self, params: dict[str, Any], answer: Answer) -> None:
        body = parse(params, CheckerBody)
        if body.action == "compare" and body.baseline is None:
            raise WeightUpdateError(400, "weight_checker's action 'compare' needs a baseline: {name: sha256}")

        def check() -> None:
            try:
                with self._on_device():
                    sums = self._store.checksums()
            except Exception as error:
                answer.set_exception(_as_update_error(error))
                return
            baseline = body.baseline or {}
            differing = sorted(n for n in sums.keys() | baseline.keys() if sums.get(n) != baseline.get(n))
            compared = {"match": not differing, "mismatches": differing}
            answer.set_result(compared if body.action == "compare" else {"checksums": sums})

        threading.Thread(target=check, name="weights-checker", daemon=True).start()

    # Order.

    def _refuse_second(self) -> None:
        if self._session is not None:
            raise WeightUpdateError(
                409, f"an update is already {self._state}: finish_weight_update or abort_weight_update it first"
            )

    def _usable_link(self) -> Link:
        if self._link is None:
            raise WeightUpdateError(400, "no weight transfer is configured: call init_weight_transfer_engine first")
        if not self._link.joined:
            raise WeightUpdateError(
                409, "init_weight_transfer_engine is still joining the trainer: wait for its answer"
            )
        if self._link.spent is not None:
            raise WeightUpdateError(
                409, f"the last update left its group unusable ({self._link.spent}): "
                "call init_weight_transfer_engine again with a fresh group",
            )  # fmt: skip
        return self._link

    def _active(self, method: str) -> _Session:
        if self._session is None:
            raise WeightUpdateError(409, f"{method} in state {self._state}: call start_weight_update first")
        if self._session.answer is not None:
            doing = "committing" if self._state == "ready" else "still answering an earlier call"
            raise WeightUpdateError(409, f"{method} in state {self._state}: the update is {doing}; wait for its answer")
        return self._session

    def _open(self, session: _Session) -> None:
        self._session, self._state = session, "open"

    # Jobs, on the link's thread.

    def _submit(self, session: _Session, answer: Answer, work: Callable[[], None]) -> None:
        session.answer, session.busy = answer, True
        session.touched = time.monotonic()
        session.link.submit(lambda: self._run(session, work))

    def _run(self, session: _Session, work: Callable[[], None]) -> None:
        try:
            with self._on_device():
                self._touch(session, 0)
                work()
        except _AbandonedError:
            session.busy = False
        except Exception as error:
            failure = _as_update_error(error)
            with self._lock:
                session.busy = False
                if self._session is session:
                    self._abort(session, failure)

    def _touch(self, session: _Session, nbytes: int) -> None:
        """A sign of life of the session, or the end of its job if the session is over."""
        if self._session is not session:
            raise _AbandonedError
        session.nbytes += nbytes
        session.touched = time.monotonic()

    def _receive(self, session: _Session, info: Announcement) -> None:
        transport = session.link.transport
        if session.staging is None:
            session.staging = self._store.stage()
        try:
            info = transport.describe(info)
            plan = session.staging.resolve(info.names, info.dtype_names, info.shapes)
            transport.receive(info, plan, session.staging, lambda nbytes: self._touch(session, nbytes))
        except Exception as error:
            session.link.spend(str(error) or type(error).__name__)
            raise
        if session.single_call:
            self._check(session)
            return
        with self._lock:
            self._touch(session, 0)
            session.busy = False
            answer, session.answer = session.answer, None
        if answer is not None:
            answer.set_result({"message": "Weights received"})

    def _check(self, session: _Session) -> None:
        assert session.staging is not None
        session.staging.check(partial=session.partial, progress=lambda: self._touch(session, 0))
        if self._stream is not None:
            self._stream.synchronize()
        with self._lock:
            self._touch(session, 0)
            session.busy = False
            self._state, self._ready = "ready", session
        self._wake()

    @contextlib.contextmanager
    def _on_device(self) -> Any:
        """On CUDA: a stream of our own, behind the kernels that still read what is now staging."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    # Ends.

    def _expire(self, link: Link) -> None:
        with self._lock:
            session = self._session
            if session is not None and session.link is link and time.monotonic() - session.touched > link.timeout_s:
                self._abort(
                    session, WeightUpdateError(503, f"no call of the trainer for {link.timeout_s:g} s ({self._state})")
                )

    def _abort(self, session: _Session, error: WeightUpdateError) -> None:
        """Drop the session. Its buffers return to the store only if its thread can't write into them any more."""
        self._session = self._ready = None
        self._state = "aborted"
        if session.busy:
            session.link.spend(error.message)
        if session.staging is not None and not session.busy:
            self._store.release(session.staging)
        self._record(session, error)
        self._retire(session)
        answer, session.answer = session.answer, None
        if answer is not None:
            answer.set_exception(error)

    def _retire(self, session: _Session) -> None:
        session.staging = session.staging if session.busy else None
        if session.single_call:
            session.link.stop()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.stop()
            self._link = None

    def _figures(self, session: _Session) -> dict[str, Any]:
        return {
            "bytes": session.nbytes,
            "seconds": round(time.monotonic() - session.started, 3),
            "transport": session.link.transport.name,
        }

    def _record(self, session: _Session, error: WeightUpdateError | None) -> None:
        self._last = {"last_error": None if error is None else error.message, **self._figures(session)}
        logger.log(
            logging.INFO if error is None else logging.WARNING,
            "weight_update state=%s epoch=%d weight_version=%r transport=%s bytes=%d seconds=%.3f partial=%s error=%r",
            self._state,
            self._store.epoch,
            self._store.label,
            self._last["transport"],
            self._last["bytes"],
            self._last["seconds"],
            session.partial,
            self._last["last_error"],
        )


def _as_update_error(error: Exception) -> WeightUpdateError:
    if isinstance(error, WeightUpdateError):
        return error
    logger.error("weight update failed", exc_info=error)
    return WeightUpdateError(500, f"{type(error).__name__}: {error}")
