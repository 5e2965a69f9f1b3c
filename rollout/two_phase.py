"""A change that several participants make together or not at all: its states, without any I/O.

Whoever drives it (a trainer with several servers, a fleet's server, the leader of a tensor-parallel engine) asks the
participants in its own way, reports what each of them answers, and does as `phase` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Literal, TypeVar

P = TypeVar("P")
Phase = Literal["preparing", "aborted", "committing", "committed", "torn"]


class TwoPhaseCommit(Generic[P]):
    """preparing → committing → committed, or preparing → aborted.

    All participants are asked to prepare. One error aborts: at once, or with `patient` when all have answered. When all
    have prepared, all are asked to commit, which none should refuse. Where some do though others have committed, the
    change is torn, and `failed` must not go on as they are; where none has committed it is aborted after all.
    `error` is the first one.
    """

    def __init__(self, participants: Iterable[P], *, patient: bool = False) -> None:
        self.phase: Phase = "preparing"
        self.error: BaseException | None = None
        self.done: list[P] = []
        self.failed: list[P] = []
        self._all = list(participants)
        self._patient = patient

    @property
    def undo(self) -> list[P]:
        """Who is to drop what it has prepared. Nobody where all have refused: then it was out of order, and what is
        under way has nothing to do with it."""
        return self._all if self.phase == "aborted" and len(self.failed) < len(self._all) else []

    def report(self, who: P, error: BaseException | None = None) -> Phase:
        """What a participant has answered in this phase; returns the next one. Late answers don't change it."""
        if self.phase not in ("preparing", "committing"):
            self.failed += [who] if error is not None else []
            return self.phase
        (self.done if error is None else self.failed).append(who)
        self.error = self.error or error
        answered = len(self.done) + len(self.failed) == len(self._all)
        if self.phase == "preparing" and self.failed and (answered or not self._patient):
            self.phase = "aborted"
        elif answered and self.phase == "preparing":
            self.phase, self.done = "committing", []
        elif answered:
            self.phase = "committed" if not self.failed else "torn" if self.done else "aborted"
        return self.phase
