"""What the endpoints that answer in text share: admission, and what an answer says of its tokens where asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from starlette.datastructures import Headers

from rollout.outputs import TokenLogprob
from rollout.sampling.params import SamplingParams
from rollout.server.answers.choices import routed_experts, sendable, text_logprobs, token_text
from rollout.server.context import Server
from rollout.server.generation import Delta, Generation, prepare
from rollout.server.text.detokenizer import Vocabulary
from rollout.server.wire.openai_answers import CompletionLogprobs
from rollout.server.wire.openai_requests import OpenAIRequest
from rollout.server.wire.tokens import TextLogprobs, Usage


def check(server: Server, body: OpenAIRequest) -> None:
    """What can be refused before the prompt is tokenized. Raises ApiError, ParameterError or EngineError."""
    server.check_accepting()
    server.check_model(body.model)
    body.check()


async def admit(
    server: Server, body: OpenAIRequest, token_ids: list[int], params: SamplingParams, headers: Headers, prefix: str
) -> Generation:
    """A generation with text, ready to be entered. Raises as `prepare` does."""
    return await prepare(
        server,
        token_ids=token_ids,
        params=params,
        headers=headers,
        detokenize=True,
        request_id_prefix=prefix,
        request_id=body.request_id,
        model=body.model,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def total_usage(generations: Sequence[Generation]) -> Usage:
    """Token counts of all of them so far."""
    prompt = sum(generation.prompt_tokens for generation in generations)
    completion = sum(generation.completion_tokens for generation in generations)
    return Usage(prompt_tokens=prompt, total_tokens=prompt + completion, completion_tokens=completion)


def last_usage(generations: Sequence[Generation]) -> Usage:
    """The totals as the last chunk of a stream states them: without details."""
    usage = total_usage(generations)
    usage.prompt_tokens_details = usage.completion_tokens_details = UNSET
    return usage


def extras(server: Server, body: OpenAIRequest, delta: Delta) -> dict[str, Any]:
    """This project's own fields of a choice: its weights, and with its ids the support that each was drawn from."""
    found: dict[str, Any] = {}
    if body.return_weight_versions and delta.spans is not None:
        found["weight_versions"] = delta.spans
    if body.return_token_ids and server.config.return_sampling_mask:
        found["sampling_mask"] = delta.sampling_mask
    return found


def routing(server: Server, delta: Delta) -> str | None:
    """The routed experts of a choice's new tokens, where the server was started to tell them."""
    return routed_experts(delta, server.engine.info.routing)


def names_by_id(server: Server, body: OpenAIRequest) -> bool:
    """Whether logprobs name tokens by id: as the body says, else as the server was started."""
    if body.return_tokens_as_token_ids is None:
        return server.config.return_tokens_as_token_ids
    return body.return_tokens_as_token_ids


def chat_logprobs(
    entries: list[list[TokenLogprob]] | None, vocabulary: Vocabulary | None, *, top: int, as_ids: bool
) -> TextLogprobs | None:
    """Logprobs of a chat. `top_logprobs` has `top` candidates (-1: all), the sampled token first, then by rank."""
    if entries is None:
        return None
    assert vocabulary is not None
    found = text_logprobs(entries, vocabulary, as_ids=as_ids)
    if top != -1:
        for token in found.content:
            del token.top_logprobs[top:]
    return found


def completion_logprobs(
    token_ids: list[int],
    entries: Sequence[list[TokenLogprob] | None] | None,
    vocabulary: Vocabulary | None,
    *,
    offset: int,
    as_ids: bool,
) -> CompletionLogprobs | None:
    """Logprobs of a completion; the first token starts at `offset`. A prompt's first token has none."""
    if entries is None:
        return None
    assert vocabulary is not None
    found = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(token_ids, entries, strict=True):
        token = token_text(token_id, vocabulary, as_ids=as_ids)[0]
        found.text_offset.append(offset)
        found.tokens.append(token)
        offset += len(token)
        top: dict[str, float] = {}
        for candidate in entry or []:  # the sampled one first: it wins where two read alike
            name = token_text(candidate.token_id, vocabulary, as_ids=as_ids)[0]
            top.setdefault(name, sendable(candidate.logprob))
        found.token_logprobs.append(None if entry is None else sendable(entry[0].logprob))
        found.top_logprobs.append(None if entry is None else top)
    return found
