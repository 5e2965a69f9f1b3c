"""From what the engine said of a choice to what an answer says of it."""

from __future__ import annotations

import asyncio
from array import array

import msgspec

from rollout.outputs import RoutingShape, TokenLogprob
from rollout.server.answers.routing import routed_experts_npy
from rollout.server.context import Server
from rollout.server.generation import Delta, Generation
from rollout.server.text.detokenizer import Vocabulary
from rollout.server.wire.tokens import (
    Choice,
    Logprobs,
    PromptLogprob,
    PromptLogprobs,
    SampledLogprob,
    TextChoice,
    TextLogprob,
    TextLogprobs,
    TextTopLogprob,
    TopLogprob,
)

# What stands for a logprob of -inf or NaN, which JSON can't say.
LOWEST_LOGPROB = -9999.0

# Sampling masks become lists one at a time: as Python ints a wide one takes nine times the memory.
encode_json = msgspec.json.Encoder(enc_hook=array.tolist).encode


def sendable(logprob: float) -> float:
    """The logprob, or -9999.0 where it is NaN or below."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def _candidates(entry: list[TokenLogprob]) -> list[TokenLogprob]:
    """The sampled token, then the others: it may be among the top k too."""
    return [entry[0], *(c for c in entry[1:] if c.token_id != entry[0].token_id)]


def _sampled_logprob(entry: list[TokenLogprob]) -> SampledLogprob:
    top = [TopLogprob(c.token_id, sendable(c.logprob), c.rank) for c in _candidates(entry)]
    return SampledLogprob(top[0].token_id, top[0].logprob, top[0].rank, top)


def token_choice(delta: Delta, routing: RoutingShape | None) -> Choice:
    """A choice of an answer in token ids."""
    logprobs = None if delta.logprobs is None else Logprobs([_sampled_logprob(entry) for entry in delta.logprobs])
    return Choice(
        index=delta.index,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        token_ids=delta.token_ids,
        routed_experts=routed_experts(delta, routing),
        sampling_mask=delta.sampling_mask,
        weight_versions=delta.spans,
        logprobs=logprobs,
    )


def text_choice(delta: Delta, routing: RoutingShape | None, vocabulary: Vocabulary, *, as_ids: bool) -> TextChoice:
    """A choice of an answer in text. `as_ids`: logprobs name tokens by id."""
    return TextChoice(
        index=delta.index,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        token_ids=delta.token_ids,
        routed_experts=routed_experts(delta, routing),
        sampling_mask=delta.sampling_mask,
        weight_versions=delta.spans,
        text=delta.text or "",
        logprobs=None if delta.logprobs is None else text_logprobs(delta.logprobs, vocabulary, as_ids=as_ids),
    )


def routed_experts(delta: Delta, routing: RoutingShape | None) -> str | None:
    """The routing of a choice's tokens as base64 of an .npy file, None where there is none."""
    if delta.routed_experts is None or routing is None:
        return None
    return routed_experts_npy(delta.routed_experts, routing)


def text_logprobs(entries: list[list[TokenLogprob]], vocabulary: Vocabulary, *, as_ids: bool) -> TextLogprobs:
    """Logprobs in the shape of chat completions: text and bytes of each candidate, or `token_id:N` with `as_ids`."""

    def candidate(c: TokenLogprob) -> TextTopLogprob:
        token, data = token_text(c.token_id, vocabulary, as_ids=as_ids)
        return TextTopLogprob(token, sendable(c.logprob), None if data is None else list(data))

    content = []
    for entry in entries:
        top = [candidate(c) for c in _candidates(entry)]
        content.append(TextLogprob(top[0].token, top[0].logprob, top[0].bytes, top))
    return TextLogprobs(content)


def token_text(token_id: int, vocabulary: Vocabulary, *, as_ids: bool) -> tuple[str, bytes | None]:
    """How logprobs name a token: its text and its bytes, or `token_id:N` and none."""
    return (f"token_id:{token_id}", None) if as_ids else vocabulary.piece(token_id)


async def prompt_logprobs(server: Server, generation: Generation) -> PromptLogprobs | None:
    """What a prompt's logprobs were, where asked for: each candidate under its id, with its text if that is known."""
    positions = generation.prompt_logprobs
    if positions is None:
        return None
    vocabulary = await server.tokenizer.vocabulary()

    def read(candidate: TokenLogprob) -> PromptLogprob:
        text = None if vocabulary is None else vocabulary.piece(candidate.token_id)[0]
        return PromptLogprob(sendable(candidate.logprob), candidate.rank, text)

    def read_all() -> PromptLogprobs:
        return [None if found is None else {str(c.token_id): read(c) for c in found} for found in positions]

    return await asyncio.to_thread(read_all)
