"""The task of the demo: answer a question in one sentence of exactly ten words.

Small enough that a model of 135 million parameters learns it within minutes, and anyone can check an answer by
counting. It can't be had by saying nothing, or by never stopping.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer_bridge.rollouts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS = 10
SYSTEM = "Answer in one sentence of exactly ten words."

QUESTIONS = (
    *("What is the sea?", "What is a volcano?", "What is music?", "What is a good friend?", "What is a library?"),
    *("What is gravity?", "What is a desert?", "What is money?", "What is a robot?", "What is a mountain?"),
    *("What is bread?", "What is a dream?", "What is the moon?", "What is a river?", "What is chess?"),
    *("What is a forest?", "What is snow?", "What is a teacher?", "What is the internet?", "What is a bridge?"),
    *("Why do birds sing?", "Why is the sky blue?", "Why do we sleep?", "Why do cats purr?", "Why do leaves fall?"),
    *("Why do people travel?", "Why is exercise important?", "Why do dogs bark?", "Why do we read books?"),
    *("Why is water important?", "Why do stars shine?", "Why do we laugh?", "Why do we need trees?"),
    *("How do bees make honey?", "How does rain form?", "How do plants grow?", "How do planes fly?"),
    *("How do fish breathe?", "How do clocks work?", "How do magnets work?", "How do whales talk?"),
    *("How do children learn?", "How does a candle burn?", "How do boats float?", "How do we see colors?"),
    *("What happens in winter?", "What do farmers do?", "What do doctors do?", "What makes a good story?"),
)

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_ONE_SENTENCE = re.compile(r"[^.!?\n]+[.!?]")


def prompt_token_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The question as the model's chat template puts it."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text).input_ids)


def prompts(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Iterator[Prompt]:
    """Every question once, then again in another order, without end; a prompt's task is its question."""
    while True:
        for question in rng.sample(QUESTIONS, len(QUESTIONS)):
            yield Prompt(prompt_token_ids(tokenizer, question), question)


def reward(text: str, finished: bool) -> float:
    """From 0 to 1: one tenth less for each word too many or too few, half of that unless it is one whole sentence.

    An answer that was cut off (`finished` is False) is worth nothing.
    """
    if not finished:
        return 0.0
    text = text.strip()
    closeness = max(0.0, 1 - abs(len(_WORD.findall(text)) - WORDS) / WORDS)
    return closeness if _ONE_SENTENCE.fullmatch(text) else closeness / 2
