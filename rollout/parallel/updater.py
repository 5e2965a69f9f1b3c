"""A weight update of several ranks that load, check and flip together, or not at all."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

from rollout.parallel.commands import CommitWeights
from rollout.parallel.team import Team
from rollout.weights.bodies import InitBody, parse
from rollout.weights.errors import WeightUpdateError
from rollout.weights.session import Commit, WeightUpdater
from rollout.weights.store import WeightStore
from rollout.weights.update import Answer

_LEADERS_OWN = ("weight_info", "update_weight_version")
_ABORT, _SHUTDOWN = "abort_weight_update", "shutdown_weight_transfer_engine"


class TeamUpdater(WeightUpdater):
    """The leader's updater, which has the followers do as it does.

    Every rank is a receiver of its own in the trainer's group, from `rank_offset` on. What the leader refuses at once
    the followers never hear of; where any rank fails later, the others drop the update, and the first error is the
    answer. Whatever would commit is prepared by all first; the followers flip at the leader's place in the stream of
    steps.
    """

    def __init__(self, team: Team, store: WeightStore, **options: Any) -> None:
        super().__init__(store, **options)
        self._team = team
        self._checking: Answer | None = None

    def call(self, method: str, params: dict[str, Any]) -> Answer:
        """As `WeightUpdater.call`; on one thread."""
        if method in _LEADERS_OWN or method not in self.methods:
            return super().call(method, params)
        try:
            self._refuse(method, params)
        except WeightUpdateError as error:
            refused: Answer = Future()
            refused.set_exception(error)
            return refused
        holds = method == "finish_weight_update" or params.get("weight_dir") is not None
        own = super().call(method, {**params, "prepare": True} if holds else params)
        if own.done() and own.exception() is not None:
            if self._session is None:
                self._team.ask(_ABORT, lambda rank: {})
            return own
        if method == "start_weight_update":
            self._team.ask(_ABORT, lambda rank: {})  # one that only they have left is over
        answers = self._team.ask(method, partial(_params_of, method, {**params, "prepare": True} if holds else params))
        commit = holds and not params.get("prepare")
        answer = _Joint(self, method, [own, *answers], commit=commit).answer
        if method == "weight_checker":
            self._checking = answer
        return answer

    def commit_if_ready(self) -> Commit | None:
        """As `WeightUpdater.commit_if_ready`, for all ranks. Raises FollowerLostError."""
        self._team.check()
        commit = super().commit_if_ready()
        if commit is not None:
            self._team.tell(CommitWeights())
        return commit

    def give_up(self, method: str) -> None:
        """Have every rank drop what a call that failed on one of them has begun."""
        undo = {"init_weight_transfer_engine": _SHUTDOWN}.get(method, _ABORT)
        if method not in (_ABORT, _SHUTDOWN, "weight_checker"):
            super().call(undo, {})
            self._team.ask(undo, lambda rank: {})

    def flip(self) -> Answer:
        """Let the prepared update be committed before the next step."""
        return super().call("finish_weight_update", {})

    def _refuse(self, method: str, params: dict[str, Any]) -> None:
        if method == "init_weight_transfer_engine":
            info = parse(params, InitBody).init_info
            left = info.world_size - info.rank_offset
            if info.backend != "disk" and left < self._team.size:
                raise WeightUpdateError(
                    400,
                    f"init_info leaves {left} ranks (rank_offset {info.rank_offset} of world_size {info.world_size}), "
                    f"this engine takes {self._team.size}: /get_world_size says how many",
                )
        if method == "weight_checker" and self._checking is not None and not self._checking.done():
            raise WeightUpdateError(409, "weight_checker is at work for an earlier call: ask again after its answer")


class _Joint:
    """One answer for all ranks: the leader's own once all have theirs, or the first error.

    Where the others may wait for a trainer in vain, an error is the answer at once. Where they only check what they
    have, they come to an end first: an update that is dropped in the middle of its work spends the trainer's group.
    """

    def __init__(self, updater: TeamUpdater, method: str, answers: list[Answer], *, commit: bool) -> None:
        self.answer: Answer = Future()
        self._updater, self._method, self._commit = updater, method, commit
        self._own, self._left = answers[0], len(answers)
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        for answer in answers:
            answer.add_done_callback(self._take)

    def _take(self, done: Answer) -> None:
        error = done.exception()
        with self._lock:
            self._left -= 1
            last, first_error = not self._left, error is not None and self._error is None
            self._error = self._error or error
        if self._error is not None:
            if last if self._method == "finish_weight_update" else first_error:
                self._fail(self._error)
        elif last and self._commit:
            self._updater.flip().add_done_callback(self._pass_on)
        elif last:
            self.answer.set_result(self._own.result())

    def _fail(self, error: BaseException) -> None:
        self._updater.give_up(self._method)
        self.answer.set_exception(error)

    def _pass_on(self, done: Answer) -> None:
        if (error := done.exception()) is not None:
            self._fail(error)
        else:
            self.answer.set_result(done.result())


def _params_of(method: str, params: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a follower gets where the leader has been called with `params`, and hasn't refused."""
    if method != "init_weight_transfer_engine":
        return params
    info = params["init_info"]
    return {**params, "init_info": {**info, "rank_offset": info.get("rank_offset", 1) + rank, "force": True}}
