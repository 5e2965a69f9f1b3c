"""What a loop hands from the sampler to the trainer: prompts, and the groups of answers to them."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_bridge.client import Choice
from trainer_bridge.wire import as_token_ids


@dataclass(frozen=True)
class Prompt:
    """What is sampled for, and what the reward needs to know of it (`task`: anything)."""

    token_ids: list[int]
    task: Any = None


@dataclass(frozen=True)
class RolloutGroup:
    """One prompt, the parameters it was sampled with (the request's own `seed` among them), answers and rewards.

    `logprobs_mode` is what the server says its logprobs are (`/weight_info`), None where it doesn't. Raises ValueError
    for a choice that ended with an error: the server had no token to sample, so nothing of it is to be trained on.
    """

    prompt: Prompt
    sampling_params: dict[str, Any]
    choices: list[Choice]
    rewards: list[float]
    logprobs_mode: str | None = None

    def __post_init__(self) -> None:
        for choice in self.choices:
            if choice.finish_reason == "error":
                raise ValueError(f"choice {choice.index} ended with an error: {choice.stop_reason}. Drop its group.")

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


def text_reward(
    function: Callable[[Any, str], float | Awaitable[float]], tokenizer: Any
) -> Callable[[Prompt, Choice], float | Awaitable[float]]:
    """A reward for `RolloutSampler` from `function(task, text)`: the prompt's task, which is a data set's row, and what
    the answer says, without special tokens. It may be an `async def`."""

    @functools.wraps(function)
    def reward(prompt: Prompt, choice: Choice) -> float | Awaitable[float]:
        return function(prompt.task, str(tokenizer.decode(choice.token_ids, skip_special_tokens=True)))

    return reward


def prompts_of(items: Iterable[Prompt | Sequence[int]]) -> Iterator[Prompt]:
    """The prompts of a list, iterable or data set of prompts or token ids (lists, arrays, tensors). Raises TypeError
    for an item of another kind."""
    for item in items:
        if isinstance(item, str | Mapping):
            raise TypeError(f"a prompt is a Prompt or token ids, got {item!r}: prompts_of_rows makes them of rows")
        yield item if isinstance(item, Prompt) else Prompt(as_token_ids(item))


def prompts_of_rows(
    rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, column: str = "prompt", **chat_template: Any
) -> Iterator[Prompt]:
    """The prompts of a data set's rows: `column` holds text or messages, the whole row becomes the prompt's task.

    Messages go through the tokenizer's chat template, with `chat_template` as its further arguments.
    """
    for row in rows:
        prompt = row[column]
        if isinstance(prompt, str):
            ids = tokenizer(prompt).input_ids
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **chat_template)
        yield Prompt(list(ids), row)
