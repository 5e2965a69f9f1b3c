"""The trainer's half of `rollout`: post prompts, push weights, use what comes back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainer_bridge.client import AsyncRolloutClient, RolloutClient, RolloutError
from trainer_bridge.push.control import DisplacedError, WeightPushError

if TYPE_CHECKING:
    from trainer_bridge.push.sender import WeightSender

__all__ = ["AsyncRolloutClient", "DisplacedError", "RolloutClient", "RolloutError", "WeightPushError", "WeightSender"]


def __getattr__(name: str) -> Any:
    """The sender on first use: it imports torch, which a client that only generates does without."""
    if name == "WeightSender":
        return importlib.import_module("trainer_bridge.push.sender").WeightSender
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
