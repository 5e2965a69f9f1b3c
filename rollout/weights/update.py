"""One update: what it has received so far, the work that its receiver's thread does for it, and what became of it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Literal

from rollout.config import KVPolicy
from rollout.weights.bodies import Announcement, StartBody
from rollout.weights.errors import AbandonedError, WeightUpdateError
from rollout.weights.receiver import Answer, Receiver
from rollout.weights.staging import Staging
from rollout.weights.store import WeightStore

logger = logging.getLogger(__name__)

State = Literal["idle", "open", "receiving", "ready", "committed", "aborted"]
REMEMBERED = 8
"""Committed updates of which an UpdateLog has the epochs."""


@dataclass(frozen=True)
class Commit:
    """A flip that has just happened. `kv_policy` is the update's own wish, None for the server's default."""

    epoch: int
    label: str
    kv_policy: KVPolicy | None


class Update:
    """One update, from start to commit or abort.

    `answer` is the call that a trainer waits for; `busy` while the receiver's thread may use the buffers; `over` once
    it was committed or dropped. `staging` is given for an update in place, and else made when something comes.
    `single_call`: it came as a whole, with a receiver of its own.
    """

    def __init__(
        self,
        store: WeightStore,
        receiver: Receiver,
        body: StartBody,
        staging: Staging | None,
        *,
        single_call: bool = False,
    ) -> None:
        self.store, self.receiver, self.body, self.staging = store, receiver, body, staging
        assert body.update_id is not None
        self.id = body.update_id
        self.single_call = single_call
        self.label: str | None = None
        self.answer: Answer | None = None
        self.busy = self.over = False
        self.nbytes = 0
        self.started = self.touched = time.monotonic()

    def touch(self, nbytes: int = 0) -> None:
        """A sign of life; raises AbandonedError, to end the job at hand, if the update is over."""
        if self.over:
            raise AbandonedError
        self.nbytes += nbytes
        self.touched = time.monotonic()

    def alive_s(self, progress_s: float) -> float:
        """For how long it counts as alive without a sign of life, of which each is good for `progress_s` seconds.

        Not at all where its trainer is known to be gone.
        """
        if self.receiver.transport.gone():
            return 0.0
        return max(0.0, progress_s - (time.monotonic() - self.touched))

    def check_id(self, method: str, update_id: str | None) -> None:
        """Raise WeightUpdateError 409 for a call that belongs to another update."""
        if update_id != self.id and (update_id is not None or not self.body.handed_out):
            told = "without an update_id" if update_id is None else f"of update {update_id}"
            raise WeightUpdateError(409, f"{method} {told}: the update that is open is {self.id}", param="update_id")

    def reply(self, result: dict[str, Any]) -> None:
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.set_result(result)

    def receive(self, info: Announcement) -> None:
        """Receive what is announced into staging, and check it where that is all of the update.

        After a failure the trainer's group can't be used again.
        """
        transport = self.receiver.transport
        try:
            if info.counts is not None and self.body.base_epoch is None:
                raise WeightUpdateError(400, 'counts need an update that was started with {"base_epoch": <epoch>}')
            if self.staging is None:
                self.staging = self.store.stage(verify=self.body.verify)
            info = transport.describe(info)
            plan = self.staging.resolve(info.names, info.dtype_names, info.shapes, info.counts)
            transport.receive(info, plan, self.staging, self.touch)
        except Exception as error:
            self.receiver.spend(str(error) or type(error).__name__)
            raise
        if self.single_call:
            self.check(None)

    def check(self, checksums: dict[str, str] | None) -> None:
        """Raise WeightUpdateError 400 unless what was received is whole, finite, and what the checksums say."""
        assert self.staging is not None
        self.staging.check(partial=self.body.partial, progress=self.touch, checksums=checksums)

    def figures(self) -> dict[str, Any]:
        """What /weight_info says of it: bytes received, seconds since its start, and the transport."""
        return {
            "bytes": self.nbytes,
            "seconds": round(time.monotonic() - self.started, 3),
            "transport": self.receiver.transport.name,
        }


class UpdateLog:
    """`last` is the end of the last update; `totals` counts updates, bytes and seconds by result.

    `committed`: the epochs of the last few committed updates, by their ids, the newest last.
    """

    def __init__(self) -> None:
        self.last: dict[str, Any] = {"last_error": None, "bytes": 0, "seconds": 0.0, "transport": None}
        self.totals = {result: {"updates": 0, "bytes": 0, "seconds": 0.0} for result in ("committed", "aborted")}
        self.committed: dict[str, int] = {}

    def record(self, update: Update, error: WeightUpdateError | None, state: str, store: WeightStore) -> None:
        """An update has ended, in `state`: committed, or dropped for this error."""
        self.last = {"last_error": None if error is None else error.message, **update.figures()}
        if error is None:
            self.committed[update.id] = store.epoch
            for oldest in list(self.committed)[:-REMEMBERED]:
                del self.committed[oldest]
        totals = self.totals["committed" if error is None else "aborted"]
        totals["updates"] += 1
        for name in ("bytes", "seconds"):
            totals[name] += self.last[name]
        logger.log(
            logging.INFO if error is None else logging.WARNING,
            "weight_update state=%s epoch=%d weight_version=%r transport=%s bytes=%d seconds=%.3f "
            "weights=%s partial=%s sparse=%s error=%r",
            state,
            store.epoch,
            store.label,
            self.last["transport"],
            self.last["bytes"],
            self.last["seconds"],
            store.validity,
            update.body.partial,
            update.body.base_epoch is not None,
            self.last["last_error"],
        )
