"""Logprobs as answers tell them: by token id, as text, and those of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from rollout.outputs import TokenLogprob
from rollout.server.text.detokenizer import Vocabulary

# What stands for a logprob of -inf or NaN, which JSON can't say.
LOWEST_LOGPROB = -9999.0


class TopLogprob(msgspec.Struct):
    """One candidate at one position."""

    token_id: int
    logprob: float
    rank: int


class SampledLogprob(msgspec.Struct):
    """The sampled token at one position; `top_logprobs` names it first, then the others by rank."""

    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct):
    """One entry a token."""

    content: list[SampledLogprob]


class TextTopLogprob(msgspec.Struct):
    """One candidate at one position, as text.

    `bytes` are the token's own, also where it is only part of a character, and null where `token` is `token_id:N`.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class TextLogprob(msgspec.Struct):
    """The sampled token at one position, as text; `top_logprobs` names it first, then the others by rank."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TextTopLogprob]


class TextLogprobs(msgspec.Struct):
    """One entry a token, in the shape of chat completions."""

    content: list[TextLogprob]


class PromptLogprob(msgspec.Struct):
    """One candidate at one prompt position, under its token id."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
Entries = Sequence[list[TokenLogprob]]


def sendable(logprob: float) -> float:
    """The logprob, or -9999.0 where it is NaN or below."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def _candidates(entry: list[TokenLogprob]) -> Iterator[TokenLogprob]:
    """The sampled token, then the others: it may be among the top k too."""
    yield entry[0]
    yield from (c for c in entry[1:] if c.token_id != entry[0].token_id)


def token_logprobs(entries: Entries | None) -> Logprobs | None:
    """Logprobs that name tokens by their ids."""
    if entries is None:
        return None
    every = [[TopLogprob(c.token_id, sendable(c.logprob), c.rank) for c in _candidates(entry)] for entry in entries]
    return Logprobs([SampledLogprob(top[0].token_id, top[0].logprob, top[0].rank, top) for top in every])


def text_logprobs(
    entries: Entries | None, vocabulary: Vocabulary | None, *, as_ids: bool, top: int = -1
) -> TextLogprobs | None:
    """Logprobs in the shape of chat completions: text and bytes of each candidate, or `token_id:N` with `as_ids`.

    `top_logprobs` has `top` candidates (-1: all), the sampled token first, then by rank.
    """
    if entries is None:
        return None

    def candidate(c: TokenLogprob) -> TextTopLogprob:
        token, data = token_text(c.token_id, vocabulary, as_ids=as_ids)
        return TextTopLogprob(token, sendable(c.logprob), None if data is None else list(data))

    every = [[candidate(c) for c in _candidates(entry)] for entry in entries]
    shown = None if top == -1 else top
    return TextLogprobs([TextLogprob(all[0].token, all[0].logprob, all[0].bytes, all[:shown]) for all in every])


def token_text(token_id: int, vocabulary: Vocabulary | None, *, as_ids: bool) -> tuple[str, bytes | None]:
    """How logprobs name a token: its text and its bytes, or `token_id:N` and none."""
    if as_ids:
        return f"token_id:{token_id}", None
    assert vocabulary is not None, "text was asked for, so there is a tokenizer"
    return vocabulary.piece(token_id)


def prompt_logprobs(positions: Sequence[list[TokenLogprob] | None], vocabulary: Vocabulary | None) -> PromptLogprobs:
    """What a prompt's logprobs were: each candidate under its id, with its text if that is known."""

    def read(candidate: TokenLogprob) -> PromptLogprob:
        text = None if vocabulary is None else vocabulary.piece(candidate.token_id)[0]
        return PromptLogprob(sendable(candidate.logprob), candidate.rank, text)

    return [None if found is None else {str(c.token_id): read(c) for c in found} for found in positions]
