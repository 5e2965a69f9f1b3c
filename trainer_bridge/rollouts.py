"""What a loop hands from the sampler to the trainer: prompts, and the groups of answers to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer_bridge.client import Choice


@dataclass(frozen=True)
class Prompt:
    """What is sampled for, and what the reward needs to know of it (`task`: anything)."""

    token_ids: list[int]
    task: Any = None


@dataclass(frozen=True)
class RolloutGroup:
    """One prompt, the parameters it was sampled with (the request's own `seed` among them), answers and rewards.

    `logprobs_mode` is what the server says its logprobs are (`/weight_info`), None where it doesn't.
    """

    prompt: Prompt
    sampling_params: dict[str, Any]
    choices: list[Choice]
    rewards: list[float]
    logprobs_mode: str | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer."""
        return [len(choice.token_ids) for choice in self.choices]

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(self.lengths)

    @property
    def logprobs(self) -> list[float]:
        """The server's, of all tokens, one answer after the other: π_old."""
        return [logprob for choice in self.choices for logprob in choice.logprobs or ()]
