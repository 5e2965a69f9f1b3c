"""A weight update of several ranks that load, check and flip together, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from rollout.tensor_parallel.commands import CommitWeights, GatherWeights, WeightCall
from rollout.tensor_parallel.team import Team
from rollout.two_phase import TwoPhaseCommit
from rollout.weights.bodies import InitBody, parse
from rollout.weights.errors import WeightUpdateError
from rollout.weights.ownership import with_ids
from rollout.weights.receiver import Answer
from rollout.weights.store import WeightStore
from rollout.weights.update import Commit
from rollout.weights.updater import WeightUpdater

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
        self._gathers: list[Answer] = []

    def call(self, method: str, params: dict[str, Any]) -> Answer:
        """As `WeightUpdater.call`; on the engine's thread."""
        if method in _LEADERS_OWN or method not in self.methods:
            return super().call(method, params)
        try:
            if method == "init_weight_transfer_engine":
                self._check_ranks(params)
            if method == "weight_checker":
                with self.gathering():
                    return _begun(super().call(method, params))
            return self._call_all(method, with_ids(method, params))
        except WeightUpdateError as error:
            refused: Answer = Future()
            refused.set_exception(error)
            return refused

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """As `WeightUpdater.gathering`: the followers gather what serves at the end of the block. One at a time."""
        if not all(answer.done() for answer in self._gathers):
            raise WeightUpdateError(
                409, "the weights are being gathered for an earlier call: ask again after its answer"
            )
        yield
        self._gathers = self._team.call(lambda rank, call_id: GatherWeights(call_id))

    def commit_if_ready(self, *, timeout_s: float = 0.0) -> Commit | None:
        """As `WeightUpdater.commit_if_ready`, for all ranks. Raises FollowerLostError."""
        self._team.check()
        commit = super().commit_if_ready(timeout_s=timeout_s)
        if commit is not None:
            self._team.send(CommitWeights())
        return commit

    def give_up(self, method: str, ids: dict[str, Any]) -> None:
        """Have every rank drop what a call that failed on one of them has begun."""
        if method not in (_ABORT, _SHUTDOWN):
            undo = _SHUTDOWN if method == "init_weight_transfer_engine" else _ABORT
            super().call(undo, ids)
            self._tell(undo)

    def commit_prepared(self, ids: dict[str, Any]) -> Answer:
        """Let the prepared update be committed before the next step."""
        return super().call("finish_weight_update", ids)

    def _call_all(self, method: str, params: dict[str, Any]) -> Answer:
        commits = method == "finish_weight_update" or params.get("weight_dir") is not None
        asked = {**params, "prepare": True} if commits else params
        try:
            own = _begun(super().call(method, asked))
        except WeightUpdateError as error:
            if self._update is None and error.param is None:
                self._tell(_ABORT)
            raise
        if method == "start_weight_update":
            self._tell(_ABORT)  # an update that only they have left open is over
        others = self._team.call(lambda rank, call_id: WeightCall(call_id, method, _params_of(method, asked, rank)))
        ids = {key: params[key] for key in ("owner", "update_id") if params.get(key) is not None}
        return _Joint(self, method, ids, [own, *others], commit=commits and not params.get("prepare")).answer

    def _tell(self, method: str) -> None:
        self._team.call(lambda rank, call_id: WeightCall(call_id, method, {}))

    def _check_ranks(self, params: dict[str, Any]) -> None:
        info = parse(params, InitBody).init_info
        left = info.world_size - info.rank_offset
        if info.backend not in ("disk", "ipc") and left < self._team.size:
            raise WeightUpdateError(
                400,
                f"init_info leaves {left} ranks (rank_offset {info.rank_offset} of world_size {info.world_size}), "
                f"this engine takes {self._team.size}: /get_world_size says how many",
            )


class _Joint:
    """One answer for all ranks: the leader's own once all have theirs, or the first error.

    Where the others may wait for a trainer in vain, an error is the answer at once. Where they only check what they
    have, they come to an end first: an update that is dropped in the middle of its work spends the trainer's group.
    """

    def __init__(
        self, updater: TeamUpdater, method: str, ids: dict[str, Any], answers: list[Answer], *, commit: bool
    ) -> None:
        self.answer: Answer = Future()
        self._updater, self._method, self._ids, self._commit = updater, method, ids, commit
        self._own = answers[0]
        self._change = TwoPhaseCommit(range(len(answers)), patient=method == "finish_weight_update")
        self._lock = threading.Lock()
        for rank, answer in enumerate(answers):
            answer.add_done_callback(partial(self._report, rank))

    def _report(self, rank: int, done: Answer) -> None:
        with self._lock:
            before, phase = self._change.phase, self._change.report(rank, done.exception())
        if before != "preparing":
            return
        if phase == "aborted" and self._change.error is not None:
            self._fail(self._change.error)
        elif phase == "committing" and self._commit:
            self._updater.commit_prepared(self._ids).add_done_callback(self._pass_on)
        elif phase == "committing":
            self.answer.set_result(self._own.result())

    def _fail(self, error: BaseException) -> None:
        self._updater.give_up(self._method, self._ids)
        self.answer.set_exception(error)

    def _pass_on(self, done: Answer) -> None:
        if (error := done.exception()) is not None:
            self._fail(error)
        else:
            self.answer.set_result(done.result())


def _begun(answer: Answer) -> Answer:
    """The answer to a call; raises what has already refused it."""
    if answer.done() and (error := answer.exception()) is not None:
        raise error
    return answer


def _params_of(method: str, params: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a follower gets where the leader has been called with `params`, and hasn't refused: the leader alone knows
    whose calls count."""
    known = {key: value for key, value in params.items() if key not in ("owner", "update_id", "rejoin", "handed_out")}
    if method != "init_weight_transfer_engine":
        return known
    info = params["init_info"]
    return {**known, "init_info": {**info, "rank_offset": info.get("rank_offset", 1) + rank, "force": True}}
