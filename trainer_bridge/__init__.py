"""The trainer's half of `rollout`: post prompts, push weights, use what comes back.

The names below are what a loop needs first. The rest is in four packages: `push` (weights to a server), `score` (a
trainer's own logprobs of what was sampled, and losses), `loop` (an asynchronous loop's sampler, records, metrics,
checkpoint) and `integrations`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainer_bridge.client import AsyncRolloutClient, RolloutClient, RolloutError
from trainer_bridge.push.control import DisplacedError, WeightPushError
from trainer_bridge.rollouts import Prompt, RolloutGroup

if TYPE_CHECKING:
    from trainer_bridge.loop.sampler import RolloutSampler
    from trainer_bridge.push.sender import WeightSender

__all__ = [
    "AsyncRolloutClient",
    "DisplacedError",
    "Prompt",
    "RolloutClient",
    "RolloutError",
    "RolloutGroup",
    "RolloutSampler",
    "WeightPushError",
    "WeightSender",
]

_WITH_TORCH = {
    "RolloutSampler": "trainer_bridge.loop.sampler",
    "WeightSender": "trainer_bridge.push.sender",
}


def __getattr__(name: str) -> Any:
    """What imports torch, on first use: a client that only generates does without."""
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
