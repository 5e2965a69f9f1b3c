"""Where the reasoning of an answer is: whether a prompt has begun or ended it, and what a grammar must let pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rollout.sampling.params import ParameterError, Thinking
from rollout.server.text.call_formats import ReasoningFormat
from rollout.server.text.detokenizer import Vocabulary

_MARK_TOKENS = 16  # more than any mark has, and white space after it


ReasoningState = Literal["begun", "ended", "open"]


def reasoning_state(vocabulary: Vocabulary | None, prompt: Sequence[int], format: ReasoningFormat) -> ReasoningState:
    """Whether the answer to this prompt begins within its reasoning, or has it behind itself; open: it may begin it.

    The prompt's text says so that ends with a mark, but for white space.
    """
    text = "" if vocabulary is None else vocabulary.decode(list(prompt[-_MARK_TOKENS:])).rstrip()
    if text.endswith(format.end):
        return "ended"
    return "begun" if format.always or text.endswith(format.begin) else "open"


def free_thinking(
    vocabulary: Vocabulary, prompt: Sequence[int], format: ReasoningFormat, *, ended: bool | None, param: str
) -> Thinking | None:
    """What the answer may say before its grammar, which the field `param` asks for, holds; None: nothing.

    `ended` says whether the reasoning has ended already, where the request knows. Raises ParameterError where a mark
    isn't one token: then the grammar wouldn't know for certain where it begins.
    """
    state = {None: None, True: "ended", False: "begun"}[ended] or reasoning_state(vocabulary, prompt, format)
    if state == "ended":
        return None
    begin, end = (_token(vocabulary, mark, param) for mark in (format.begin, format.end))
    return Thinking(end, None if state == "begun" else begin)


def _token(vocabulary: Vocabulary, mark: str, param: str) -> int:
    ids = vocabulary.tokenizer.encode(mark, add_special_tokens=False)
    if len(ids) != 1:
        raise ParameterError(
            f"{param} can't be served beside the reasoning that --reasoning-parser names: its mark {mark!r} is "
            f"{len(ids)} tokens of this model's tokenizer, and a grammar begins after one.",
            param,
        )
    return int(ids[0])
