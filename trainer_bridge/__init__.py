"""The trainer's half of `rollout`: post prompts, push weights, use what comes back."""

from trainer_bridge.client import AsyncRolloutClient, RolloutClient, RolloutError
from trainer_bridge.sender import WeightPushError, WeightSender

__all__ = ["AsyncRolloutClient", "RolloutClient", "RolloutError", "WeightPushError", "WeightSender"]
