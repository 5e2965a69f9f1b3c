"""The trainer's half of `rollout`: post prompts, push weights, use what comes back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainer_bridge.client import AsyncRolloutClient, RolloutClient, RolloutError

if TYPE_CHECKING:
    from trainer_bridge.push.sender import WeightPushError, WeightSender

__all__ = ["AsyncRolloutClient", "RolloutClient", "RolloutError", "WeightPushError", "WeightSender"]


def __getattr__(name: str) -> Any:
    """The sender on first use: it imports torch, which a client that only generates does without."""
    if name in ("WeightPushError", "WeightSender"):
        return getattr(importlib.import_module("trainer_bridge.push.sender"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
