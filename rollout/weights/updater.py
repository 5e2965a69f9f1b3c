"""One weight update at a time: idle → open → receiving → ready → committed | aborted.

`WeightUpdater.call` takes the control calls of the trainer's HTTP protocol and answers with futures. Joining,
receiving, casting and checking happen on a thread of the trainer's connection; the engine's thread only flips, in
`commit_if_ready`, between two steps. Until that flip nothing that serves is touched, so every failure is an abort that
leaves the old weights under their old label. (An update in place is the exception: it needs a paused engine, and from
its start to a commit the weights are invalid and nothing is generated.)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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
from rollout.weights.connection import Connection
from rollout.weights.errors import AbandonedError, WeightUpdateError, as_update_error
from rollout.weights.link import Link, on_device
from rollout.weights.receiver import Answer, Update
from rollout.weights.staging import Staging
from rollout.weights.store import WeightStore
from rollout.weights.transport.disk import DiskTransport

logger = logging.getLogger(__name__)

State = Literal["idle", "open", "receiving", "ready", "committed", "aborted"]


@dataclass(frozen=True)
class Commit:
    """A flip that has just happened. `kv_policy` is the update's own wish, None for the server's default."""

    epoch: int
    label: str
    kv_policy: KVPolicy | None


class WeightUpdater:
    """The state machine, for one engine. Thread-safe.

    `timeout_s` bounds every single wait (a join, a broadcast, a pause between two calls of an open session), unless the
    trainer's `init_info.timeout_s` says otherwise. An update makes progress while its last sign of life is younger than
    `progress_s`. `wake` is called, on any thread, when a commit waits for the engine; `info` adds weight_info fields;
    `paused` tells, on the engine's thread, whether it is paused (calls that may start an in-place update come on it).
    `totals` counts the updates that were committed and aborted, with their bytes and seconds.
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
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._progress_s = progress_s
        self._device = torch.device(device)
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._on_device = partial(on_device, self._device, stream)
        self._wake, self._info, self._paused = wake, info, paused
        store.on_unread = wake
        self._lock = threading.RLock()
        self._connection = Connection(timeout_s, self._device, self._on_device, self._expire, self._lock)
        self._session: Update | None = None
        self._ready: Update | None = None
        self._state: State = "idle"
        self._last: dict[str, Any] = {"last_error": None, "bytes": 0, "seconds": 0.0, "transport": None}
        self.totals: dict[str, dict[str, float]] = {
            result: {"updates": 0, "bytes": 0, "seconds": 0.0} for result in ("committed", "aborted")
        }
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
            answer.set_exception(as_update_error(error))
        return answer

    def commit_if_ready(self, *, timeout_s: float = 0.0) -> Commit | None:
        """Commit the received weights if a checked set waits. For the engine's thread, between two steps.

        Where that overwrites weights that are being read, it waits for the readers: until a later call, or so long.
        """
        if self._ready is None:
            return None
        with self._lock:
            session = self._ready
            if session is None or session.staging is None:
                return None
            if not timeout_s and not self._store.can_commit(session.staging):
                return None
            self._store.commit(session.staging, session.label, timeout_s=timeout_s)
            self._ready = self._session = None
            self._state = "committed"
            self._record(session, None)
            self._retire(session)
            commit = Commit(self._store.epoch, self._store.label, session.body.kv_policy)
            answer, session.answer = session.answer, None
        if answer is not None:
            answer.set_result(
                {"status": "ok"}
                if session.single_call
                else {"message": "Weight update committed", "weight_version": commit.label, "epoch": commit.epoch}
            )
        return commit

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Begin, within the block, to read the store's `gather`. Raises WeightUpdateError 409 where it isn't free."""
        yield

    def close(self) -> None:
        """Abort what is under way and leave the trainer's group; the engine is going down."""
        self.call("shutdown_weight_transfer_engine", {})

    # Calls. Each runs under the lock and either resolves `answer`, hands it to a job, or raises WeightUpdateError.

    def _init(self, params: dict[str, Any], answer: Answer) -> None:
        info = parse(params, InitBody).init_info
        transport, timeout_s = self._connection.transport_for(info)
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
        self._connection.join(transport, timeout_s, answer)

    def _start(self, params: dict[str, Any], answer: Answer) -> None:
        body = parse(params, StartBody)
        self._refuse_second()
        link = self._connection.usable()
        self._open(Update(self._store, link, body, self._admit(body)))
        answer.set_result({"message": "Weight update started", "epoch": self._store.epoch})

    def _update(self, params: dict[str, Any], answer: Answer) -> None:
        try:
            body = parse(params, UpdateBody)
            if body.update_info is None and body.weight_dir is None:
                raise WeightUpdateError(400, "update_weights needs update_info (or weight_dir)")
            if body.weight_dir is None and self._state == "ready":
                raise WeightUpdateError(409, "update_weights in state ready: the update was already checked")
        except WeightUpdateError as error:
            # The trainer's broadcasts may be on their way.
            if self._session is not None and self._session.answer is None:
                self._session.link.spend(error.message)
                self._abort(self._session, error)
            raise
        if body.weight_dir is not None:
            self._refuse_second()
            staging = self._admit(StartBody())
            link = Link(DiskTransport(), self._timeout_s, self._expire)
            session = Update(self._store, link, StartBody(), staging, single_call=True)
            self._open(session)
            info = Announcement(path=body.weight_dir)
        else:
            if self._session is None:
                # What the trainer broadcasts now would be taken for the next update's values.
                self._connection.usable().spend(f"update_weights came in state {self._state}")
            session = self._active("update_weights")
            assert body.update_info is not None
            info = body.update_info
        self._state = "receiving"
        done = self._received
        if session.single_call:
            done = self._prepared if body.prepare else self._make_ready
        self._submit(session, answer, lambda: session.receive(info), done)

    def _received(self, session: Update) -> None:
        session.reply({"message": "Weights received"})

    def _finish(self, params: dict[str, Any], answer: Answer) -> None:
        body = parse(params, FinishBody)
        if self._session is None:
            self._connection.usable()
        session = self._active("finish_weight_update")
        if self._state == "open":
            raise WeightUpdateError(409, "the update is open and has received nothing: call update_weights first")
        if body.weight_version is not None:
            session.label = body.weight_version
        if self._state == "ready":
            session.answer = answer
            (self._prepared if body.prepare else self._make_ready)(session)
            return
        if session.body.verify != (body.checksums is not None):
            raise WeightUpdateError(
                400,
                "the update was started with verify: finish it with its checksums"
                if session.body.verify
                else 'checksums need an update that was started with {"verify": true}',
            )
        done = self._prepared if body.prepare else self._make_ready
        self._submit(session, answer, lambda: session.check(body.checksums), done)

    def _prepared(self, session: Update) -> None:
        session.touch()
        self._state = "ready"
        session.reply({"message": "Weight update prepared: finish_weight_update commits it"})

    def _make_ready(self, session: Update) -> None:
        session.touch()
        self._state, self._ready = "ready", session
        self._wake()

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
            "weights": self._validity,
            **self._last,
        }
        if self._session is not None:
            now |= self._session.figures()
        answer.set_result(now | self._info())

    def _shutdown(self, params: dict[str, Any], answer: Answer) -> None:
        if self._session is not None:
            self._abort(self._session, WeightUpdateError(503, "the weight transfer engine was shut down"))
        self._connection.drop()
        self._state = "idle"
        answer.set_result({"message": "Weight transfer engine shut down"})

    def _checker(self, params: dict[str, Any], answer: Answer) -> None:
        body = parse(params, CheckerBody)
        if body.action == "compare" and body.baseline is None:
            raise WeightUpdateError(400, "weight_checker's action 'compare' needs a baseline: {name: sha256}")

        pinned = ExitStack()
        tensors = pinned.enter_context(self._store.snapshot())  # now: no commit may come between two ranks' calls

        def check() -> None:
            try:
                with pinned, self._on_device():
                    sums = self._store.digest(tensors)
            except Exception as error:
                answer.set_exception(as_update_error(error))
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

    def _active(self, method: str) -> Update:
        if self._session is None:
            raise WeightUpdateError(409, f"{method} in state {self._state}: call start_weight_update first")
        if self._session.answer is not None:
            doing = "committing" if self._state == "ready" else "still answering an earlier call"
            raise WeightUpdateError(409, f"{method} in state {self._state}: the update is {doing}; wait for its answer")
        return self._session

    def _admit(self, body: StartBody) -> Staging | None:
        """Refuse an update that can't begin on what serves now; the live set, where it is received in place."""
        if body.base_epoch is not None and body.base_epoch != self._store.epoch:
            raise WeightUpdateError(
                409, f"the changes are against epoch {body.base_epoch}, epoch {self._store.epoch} serves: push it whole"
            )
        if not self._store.valid and (body.partial or body.base_epoch is not None):
            raise WeightUpdateError(409, "the weights are invalid (weight_info says since when): push them whole")
        if self._store.names.shares and (body.base_epoch is not None or body.weight_staging == "in_place"):
            asked = "sparse changes (base_epoch)" if body.base_epoch is not None else "an update in place"
            raise WeightUpdateError(
                400, f"{asked} can't be had with tensor_parallel_size > 1: push it whole and staged"
            )
        if (body.weight_staging or self._store.weight_staging) == "full":
            return None
        if not self._paused():
            raise WeightUpdateError(
                409,
                "an update in place overwrites the weights that serve: POST /pause?mode=keep first and /resume after "
                'it, or start it with {"weight_staging": "full"}',
            )
        return self._store.stage(in_place=True, verify=body.verify)

    def _open(self, session: Update) -> None:
        self._session, self._state = session, "open"

    # Jobs, on the link's thread.

    def _submit(
        self, session: Update, answer: Answer, work: Callable[[], object], done: Callable[[Update], None]
    ) -> None:
        """Have `work` done, and then `done` under the lock; a failure of either aborts the session."""
        session.answer, session.busy = answer, True
        session.touch()
        session.link.submit(lambda: self._run(session, work, done))

    def _run(self, session: Update, work: Callable[[], object], done: Callable[[Update], None]) -> None:
        try:
            with self._on_device():
                session.touch()
                work()
            with self._lock:
                session.touch()
                session.busy = False
                done(session)
        except AbandonedError:
            session.busy = False
        except Exception as error:
            failure = as_update_error(error)
            with self._lock:
                session.busy = False
                if self._session is session:
                    self._abort(session, failure)

    # Ends.

    def _expire(self, link: Link) -> None:
        with self._lock:
            session = self._session
            if session is not None and session.link is link and time.monotonic() - session.touched > link.timeout_s:
                self._abort(
                    session, WeightUpdateError(503, f"no call of the trainer for {link.timeout_s:g} s ({self._state})")
                )

    def _abort(self, session: Update, error: WeightUpdateError) -> None:
        """Drop the session. Its buffers return to the store only if its thread can't write into them any more."""
        self._session = self._ready = None
        self._state = "aborted"
        session.over = True
        if session.busy:
            session.link.spend(error.message)
        if session.staging is not None:
            session.staging.close()
            if session.staging.in_place or not session.busy:
                self._store.release(session.staging)
        self._record(session, error)
        self._retire(session)
        answer, session.answer = session.answer, None
        if answer is not None:
            answer.set_exception(error)

    def _retire(self, session: Update) -> None:
        session.over = True
        session.staging = session.staging if session.busy else None
        if session.single_call:
            session.link.stop()

    def _record(self, session: Update, error: WeightUpdateError | None) -> None:
        self._last = {"last_error": None if error is None else error.message, **session.figures()}
        totals = self.totals["committed" if error is None else "aborted"]
        totals["updates"] += 1
        for name in ("bytes", "seconds"):
            totals[name] += self._last[name]
        logger.log(
            logging.INFO if error is None else logging.WARNING,
            "weight_update state=%s epoch=%d weight_version=%r transport=%s bytes=%d seconds=%.3f "
            "weights=%s partial=%s sparse=%s error=%r",
            self._state,
            self._store.epoch,
            self._store.label,
            self._last["transport"],
            self._last["bytes"],
            self._last["seconds"],
            self._validity,
            session.body.partial,
            session.body.base_epoch is not None,
            self._last["last_error"],
        )

    @property
    def _validity(self) -> str:
        return "valid" if self._store.valid else "invalid"
