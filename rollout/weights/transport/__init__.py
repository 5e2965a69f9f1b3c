"""How weights travel: an announcement of tensors, then their values, into a Staging."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rollout.weights.bodies import Announcement
from rollout.weights.staging import Incoming, Staging


class Transport(ABC):
    """One trainer's connection. Its methods may block; every wait in them ends by the timeout that it was made with.

    `name` is gloo, nccl, ipc or disk, `peer` where the trainer is met, for messages. `spent_by_failure`: its group
    can't be used again after an update that failed.
    """

    name: str
    peer: str
    timeout_s: float
    spent_by_failure = False

    def connect(self) -> None:  # noqa: B027
        """Meet the trainer. Raises WeightUpdateError."""

    @abstractmethod
    def describe(self, info: Announcement) -> Announcement:
        """The announcement with names, dtypes and shapes filled in. Raises WeightUpdateError 400."""

    @abstractmethod
    def receive(
        self, info: Announcement, plan: list[Incoming], staging: Staging, progress: Callable[[int], Any]
    ) -> None:
        """Fill `staging` as planned; `progress(bytes)` after each piece may raise to stop it."""

    def gone(self) -> bool:
        """Whether the trainer is known to have left, or to have died. At once, from any thread."""
        return False

    def interrupt(self) -> None:  # noqa: B027
        """End a `describe` or `receive` with AbandonedError, now or later; from any thread."""

    def close(self) -> None:  # noqa: B027
        """Leave the group."""
