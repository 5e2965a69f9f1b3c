"""Two tasks for grpo.py and ppo.py: one for a real model, one for a tiny random one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from rollout.demo import task as ten_words
from trainer_bridge.client import Choice
from trainer_bridge.rollouts import Prompt


class TenWords:
    """Answer a question in one sentence of exactly ten words (the task of `rollout demo`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def prompts(self, rng: random.Random) -> Iterator[Prompt]:
        """Every question once, then again in another order."""
        return ten_words.prompts(self._tokenizer, rng)

    def reward(self, prompt: Prompt, choice: Choice) -> float:
        """One tenth less for each word too many or too few."""
        return ten_words.reward(self.decode(choice.token_ids), choice.finish_reason == "stop")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class EvenTokens:
    """Say even token ids: for a tiny random model without a tokenizer, which learns it in a few steps."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def prompts(self, rng: random.Random) -> Iterator[Prompt]:
        """Eight random ids each."""
        while True:
            yield Prompt([rng.randrange(2, self._vocab_size) for _ in range(8)])

    def reward(self, prompt: Prompt, choice: Choice) -> float:
        """The share of even ids."""
        return sum(token % 2 == 0 for token in choice.token_ids) / len(choice.token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The ids."""
        return " ".join(map(str, token_ids))


Task = TenWords | EvenTokens


def task_of(model: Path) -> Task:
    """TenWords for a model with a tokenizer, EvenTokens for one without."""
    if (model / "tokenizer_config.json").exists():
        return TenWords(AutoTokenizer.from_pretrained(model))
    return EvenTokens(AutoConfig.from_pretrained(model).vocab_size)
