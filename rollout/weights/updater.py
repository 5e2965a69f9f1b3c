"""One weight update at a time: idle → open → receiving → ready → committed | aborted.

`WeightUpdater.call` takes the control calls of the trainer's HTTP protocol and answers with futures. Joining,
receiving, casting and checking happen on a thread of the trainer's connection; the engine's thread only flips, in
`commit_if_ready`, between two steps. Until that flip nothing that serves is touched, so every failure is an abort that
leaves the old weights under their old label. (An update in place is the exception: it needs a paused engine, and from
its start to a commit the weights are invalid and nothing is generated.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from rollout.weights.bodies import (
    WEIGHT_CALLS,
    Announcement,
    CheckerBody,
    FinishBody,
    InitBody,
    OwnedBody,
    StartBody,
    UpdateBody,
    VersionBody,
    parse,
)
from rollout.weights.checker import start_check
from rollout.weights.errors import AbandonedError, WeightUpdateError, as_update_error
from rollout.weights.ownership import Ownership, with_ids
from rollout.weights.receiver import Answer, Receiver, TrainerConnection, on_device
from rollout.weights.store import WeightStore
from rollout.weights.transport import Transport
from rollout.weights.transport.disk import DiskTransport
from rollout.weights.update import Commit, State, Update, UpdateLog


class WeightUpdater:
    """The state machine, for one engine. Thread-safe.

    `timeout_s` bounds every single wait (a join, a broadcast, a pause between two calls of an open update), unless the
    trainer's `init_info.timeout_s` says otherwise. An update makes progress while its last sign of life is younger than
    `progress_s`; `ready` is one whose checked set waits for its commit. `wake` is called, on any thread, when a commit
    waits for the engine; `info` adds weight_info fields; `paused` tells, on the engine's thread, whether it is paused
    (calls that may start an in-place update come on it).
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
        self._on_device = partial(on_device, torch.device(device))
        self._wake, self._info, self._paused = wake, info, paused
        store.on_unread = wake
        self._lock = threading.RLock()
        self._ownership = Ownership()
        self._trainer = TrainerConnection(timeout_s, torch.device(device), self._expire, self._lock)
        self._update: Update | None = None
        self.ready: Update | None = None
        self._state: State = "idle"
        self._log = UpdateLog()
        self._methods: dict[str, Callable[[dict[str, Any], Answer], None]] = {
            name: getattr(self, f"_call_{name}") for name in WEIGHT_CALLS
        }

    @property
    def totals(self) -> dict[str, dict[str, float]]:
        """How many updates were committed and aborted, with their bytes and seconds."""
        return self._log.totals

    @property
    def methods(self) -> frozenset[str]:
        return frozenset(self._methods)

    def call(self, method: str, params: dict[str, Any]) -> Answer:
        """Start a control call; `params`: its JSON body. The future holds the answer's body, or a WeightUpdateError."""
        answer: Answer = Future()
        try:
            with self._lock:
                self._methods[method](with_ids(method, params), answer)
        except Exception as error:
            answer.set_exception(as_update_error(error))
        return answer

    def receive(self, transport: Transport, start: StartBody, label: str | None) -> Answer:
        """Start a whole update from this process: all that the transport describes. The future holds its epoch and
        bytes once it was committed under `label`, or a WeightUpdateError."""
        answer: Answer = Future()
        with self._lock:
            update = self._open_single_call(start, transport)
            update.label, self._state = label, "receiving"
            self._submit(update, answer, lambda: update.receive(Announcement()), self._make_ready)
        return answer

    def commit_if_ready(self, *, timeout_s: float = 0.0) -> Commit | None:
        """Commit the received weights if a checked set waits. For the engine's thread, between two steps.

        Where that overwrites weights that are being read, the commit is left to a later call, or waits for the readers
        for up to `timeout_s`.
        """
        if self.ready is None:
            return None
        with self._lock:
            update = self.ready
            if update is None or update.staging is None:
                return None
            if not timeout_s and not self._store.can_commit(update.staging):
                return None
            self._store.commit(update.staging, update.label, timeout_s=timeout_s)
            adapter = update.staging.adapter
            self.ready = self._update = None
            self._state = "committed"
            self._log.record(update, None, self._state, self._store)
            self._retire(update)
            commit = Commit(self._store.epoch, adapter or self._store.label, update.body.kv_policy)
            answer, update.answer = update.answer, None
        if answer is not None:
            done = {"epoch": commit.epoch, "update_id": update.id, "bytes": update.nbytes}
            if update.single_call:
                answer.set_result({"status": "ok"} | done)
            else:
                answer.set_result({"message": "Weight update committed", "weight_version": commit.label} | done)
        return commit if adapter is None else None

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Begin, within the block, to read the store's `gather`. Raises WeightUpdateError 409 where it isn't free."""
        yield

    def close(self) -> None:
        """Abort what is under way and leave the trainer's group; the engine is going down."""
        with self._lock:
            self._shut_down()

    # Calls. Each runs under the lock and either resolves `answer`, hands it to a job, or raises WeightUpdateError.

    def _call_init_weight_transfer_engine(self, params: dict[str, Any], answer: Answer) -> None:
        body = parse(params, InitBody)
        info, update = body.init_info, self._update
        transport = self._trainer.transport_for(info)
        self._trainer.check_room()
        self._ownership.check_rejoin(body)
        own = self._ownership.owns(body.owner)
        if (left := 0.0 if update is None else update.alive_s(self._progress_s)) > 0 and not (info.force or own):
            raise WeightUpdateError(
                409,
                f"another trainer's update is {self._state} and showed progress {self._progress_s - left:.1f} s ago; "
                f"wait for it to end, or for {self._progress_s:g} s without progress, or take over with "
                'init_info {"force": true}',
                param="force",
            )
        self._ownership.hand_to(body)
        if update is not None:
            again = WeightUpdateError(503, "its trainer has joined again")
            self._abort(update, again if own else self._ownership.displaced("the update"))
        result = {"message": f"Weight transfer initialized ({transport.name})", "owner": body.owner}
        self._trainer.join(transport, answer, result)

    def _call_start_weight_update(self, params: dict[str, Any], answer: Answer) -> None:
        body = parse(params, StartBody)
        self._ownership.check("start_weight_update", body.owner)
        self._refuse_second()
        receiver = self._trainer.receiver()
        self._update = Update(self._store, receiver, body, self._store.admit(body, self._paused()))
        self._state = "open"
        answer.set_result({"message": "Weight update started", "epoch": self._store.epoch, "update_id": body.update_id})

    def _call_update_weights(self, params: dict[str, Any], answer: Answer) -> None:
        try:
            body = parse(params, UpdateBody)
            if body.update_info is None and body.weight_dir is None:
                raise WeightUpdateError(400, "update_weights needs update_info (or weight_dir)")
        except WeightUpdateError as error:
            self._spoil(error, params.get("owner"))
            raise
        if body.weight_dir is not None:
            start = StartBody(update_id=body.update_id, handed_out=body.handed_out, kv_policy=body.kv_policy)
            update = self._open_single_call(start, DiskTransport(self._timeout_s))
            update.label = body.weight_version
            info = Announcement(path=body.weight_dir)
        else:
            assert body.update_info is not None
            update = self._announced(body)
            info = body.update_info
        self._state = "receiving"
        done = self._received
        if update.single_call:
            done = self._prepared if body.prepare else self._make_ready
        self._submit(update, answer, lambda: update.receive(info), done)

    def _announced(self, body: UpdateBody) -> Update:
        """The update that an announcement belongs to. The trainer's broadcasts may be on their way already."""
        self._ownership.check("update_weights", body.owner)
        if self._update is None:
            # What the trainer broadcasts now would be taken for the next update's values.
            self._trainer.receiver().spend(f"update_weights came in state {self._state}")
        update = self._active("update_weights", body)
        if self._state == "ready":
            error = WeightUpdateError(409, "update_weights in state ready: the update was already checked")
            self._spoil(error, body.owner)
            raise error
        return update

    def _spoil(self, error: WeightUpdateError, owner: object) -> None:
        """Give up the update that a call out of order, of its own trainer, belongs to."""
        self._ownership.check("update_weights", owner if isinstance(owner, str) else None)
        if self._update is not None and self._update.answer is None:
            self._update.receiver.spend(error.message)
            self._abort(self._update, error)

    def _open_single_call(self, start: StartBody, transport: Transport) -> Update:
        self._refuse_second()
        staging = self._store.admit(start, self._paused())
        receiver = self._trainer.new_receiver(transport)
        self._update = Update(self._store, receiver, start, staging, single_call=True)
        return self._update

    def _received(self, update: Update) -> None:
        update.reply({"message": "Weights received"})

    def _call_finish_weight_update(self, params: dict[str, Any], answer: Answer) -> None:
        body = parse(params, FinishBody)
        if self._update is None or not self._update.single_call:
            self._ownership.check("finish_weight_update", body.owner)
        if self._update is None:
            self._trainer.receiver()
        update = self._active("finish_weight_update", body)
        if self._state == "open":
            raise WeightUpdateError(409, "the update is open and has received nothing: call update_weights first")
        if body.weight_version is not None:
            update.label = body.weight_version
        done = self._prepared if body.prepare else self._make_ready
        if self._state == "ready":
            update.answer = answer
            done(update)
            return
        if update.body.verify != (body.checksums is not None):
            raise WeightUpdateError(
                400,
                "the update was started with verify: finish it with its checksums"
                if update.body.verify
                else 'checksums need an update that was started with {"verify": true}',
            )
        self._submit(update, answer, lambda: update.check(body.checksums), done)

    def _prepared(self, update: Update) -> None:
        update.touch()
        self._state = "ready"
        update.reply({"message": "Weight update prepared: finish_weight_update commits it", "update_id": update.id})

    def _make_ready(self, update: Update) -> None:
        update.touch()
        self._state, self.ready = "ready", update
        self._wake()

    def _call_abort_weight_update(self, params: dict[str, Any], answer: Answer) -> None:
        body = parse(params, OwnedBody)
        if self._update is None:
            raise WeightUpdateError(409, f"no update is open (state {self._state}): there is nothing to abort")
        if not self._update.single_call:
            self._ownership.check("abort_weight_update", body.owner)
        self._update.check_id("abort_weight_update", body.update_id)
        self._abort(self._update, WeightUpdateError(503, "the update was aborted by abort_weight_update"))
        answer.set_result({"message": "Weight update aborted"})

    def _call_update_weight_version(self, params: dict[str, Any], answer: Answer) -> None:
        version = parse(params, VersionBody).new_version
        self._store.label = version
        answer.set_result({"success": True, "new_version": version})

    def _call_weight_info(self, params: dict[str, Any], answer: Answer) -> None:
        now: dict[str, Any] = {
            "weight_version": self._store.label,
            "epoch": self._store.epoch,
            "state": self._state,
            "weights": self._store.validity,
            "update_id": None,
            "takeover_s": 0.0,
            "committed_updates": dict(self._log.committed),
            **self._log.last,
        }
        if self._update is not None:
            now |= {"update_id": self._update.id, "takeover_s": self._update.alive_s(self._progress_s)}
            now |= self._update.figures()
        answer.set_result(now | self._info())

    def _call_shutdown_weight_transfer_engine(self, params: dict[str, Any], answer: Answer) -> None:
        self._ownership.check("shutdown_weight_transfer_engine", parse(params, OwnedBody).owner)
        self._shut_down()
        answer.set_result({"message": "Weight transfer engine shut down"})

    def _shut_down(self) -> None:
        if self._update is not None:
            self._abort(self._update, WeightUpdateError(503, "the weight transfer engine was shut down"))
        self._trainer.leave()
        self._ownership.release()
        self._state = "idle"

    def _call_weight_checker(self, params: dict[str, Any], answer: Answer) -> None:
        start_check(self._store, parse(params, CheckerBody), answer, self._on_device)

    # Order.

    def _refuse_second(self) -> None:
        if self._update is not None:
            raise WeightUpdateError(
                409, f"an update is already {self._state}: finish_weight_update or abort_weight_update it first"
            )

    def _active(self, method: str, body: OwnedBody) -> Update:
        if self._update is None:
            raise WeightUpdateError(409, f"{method} in state {self._state}: call start_weight_update first")
        self._update.check_id(method, body.update_id)
        if self._update.answer is not None:
            doing = "committing" if self._state == "ready" else "still answering an earlier call"
            raise WeightUpdateError(409, f"{method} in state {self._state}: the update is {doing}; wait for its answer")
        return self._update

    # Jobs, on the receiver's thread.

    def _submit(
        self, update: Update, answer: Answer, work: Callable[[], object], done: Callable[[Update], None]
    ) -> None:
        """Have `work` done, and then `done` under the lock; a failure of either aborts the update."""
        update.answer, update.busy = answer, True
        update.touch()
        update.receiver.submit(lambda: self._run(update, work, done))

    def _run(self, update: Update, work: Callable[[], object], done: Callable[[Update], None]) -> None:
        failure: WeightUpdateError | None = None
        try:
            with self._on_device():
                update.touch()
                work()
        except AbandonedError:
            pass
        except Exception as error:
            failure = as_update_error(error)
        with self._lock:
            update.busy = False
            if update.over:  # it was dropped meanwhile
                if update.staging is not None and not update.staging.in_place:
                    self._store.release(update.staging)
                update.staging = None
                return
            try:
                if failure is not None:
                    raise failure
                done(update)
            except Exception as error:
                self._abort(update, as_update_error(error))

    # Ends.

    def _expire(self, receiver: Receiver) -> None:
        with self._lock:
            update, limit = self._update, receiver.timeout_s
            if update is not None and update.receiver is receiver and time.monotonic() - update.touched > limit:
                self._abort(update, WeightUpdateError(503, f"no call of the trainer for {limit:g} s ({self._state})"))

    def _abort(self, update: Update, error: WeightUpdateError) -> None:
        """Drop the update. Its buffers return to the store once its thread can't write into them any more."""
        self._update = self.ready = None
        self._state = "aborted"
        update.over = True
        if update.busy:
            update.receiver.spend(error.message)
        if update.staging is not None:
            update.staging.close()
            if update.staging.in_place or not update.busy:
                self._store.release(update.staging)
        self._log.record(update, error, self._state, self._store)
        self._retire(update)
        answer, update.answer = update.answer, None
        if answer is not None:
            answer.set_exception(error)

    def _retire(self, update: Update) -> None:
        update.over = True
        if not update.busy:
            update.staging = None
        if update.single_call:
            update.receiver.stop()
