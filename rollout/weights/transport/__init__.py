"""How weights travel: an announcement of tensors, then their values, into a Staging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rollout.weights.bodies import Announcement
from rollout.weights.staging import Incoming, Staging


class Transport(Protocol):
    """One trainer's connection. Its methods may block; every wait in them ends by the timeout that it was made with."""

    @property
    def name(self) -> str:
        """gloo, nccl or disk."""

    @property
    def peer(self) -> str:
        """Where the trainer is met, for messages."""

    @property
    def spent_by_failure(self) -> bool:
        """Whether the group can't be used again after an update that failed."""

    def connect(self) -> None:
        """Meet the trainer. Raises WeightUpdateError."""

    def describe(self, info: Announcement) -> Announcement:
        """The announcement with names, dtypes and shapes filled in. Raises WeightUpdateError 400."""

    def receive(
        self, info: Announcement, plan: list[Incoming], staging: Staging, progress: Callable[[int], Any]
    ) -> None:
        """Fill `staging` as planned; `progress(bytes)` after each piece may raise to stop it."""

    def gone(self) -> bool:
        """Whether the trainer is known to have left, or to have died. At once, from any thread."""

    def interrupt(self) -> None:
        """End a `describe` or `receive` with AbandonedError, now or later; from any thread."""

    def close(self) -> None:
        """Leave the group."""
