"""Admission: from a request's body, headers and prompt to a generation that can be entered, or to a refusal."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers

from rollout.config import EngineConfig
from rollout.messages import AddRequest, EngineReady
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.context import ServerContext
from rollout.server.errors import ApiError
from rollout.server.generation import Generation
from rollout.server.prompts import require_vocabulary
from rollout.server.text.call_formats import REASONING_FORMATS
from rollout.server.text.thinking import free_thinking
from rollout.server.text.tokenizer import bad_words_token_ids
from rollout.server.wire.body import GenerationBody


async def admit(
    server: ServerContext, body: GenerationBody, headers: Headers, token_ids: list[int], first_index: int = 0
) -> Generation:
    """Check every value of a request, and make it ready to be entered; its choices count from `first_index`.

    Raises ApiError or ParameterError, naming the field.
    """
    check_cache_salt(body.cache_salt)
    rank = data_parallel_rank(server, headers, body.wanted_rank)
    check_prompt(server.model, token_ids)
    params = body.to_sampling_params()
    named = body.wanted_adapter(first_index // max(1, params.n))
    adapter = server.check_model(named, param=body.adapter_param) if named else None
    body.adapt(params, server.config)
    resolve_params(server.model, server.engine_config, params, len(token_ids))
    vocabulary, wants_text = None, body.wants_text
    if wants_text and body.text_optional:
        vocabulary = await server.tokenizer.vocabulary()
        wants_text = vocabulary is not None
    if wants_text:
        vocabulary = await require_vocabulary(server, body.text_needs, param=body.text_param)
    elif params.stop:
        vocabulary = await require_vocabulary(server, "Stop strings need", param="stop")
    elif params.prompt_logprobs is not None:
        vocabulary = await server.tokenizer.vocabulary()
    grammar, thinking = None, None
    if params.structured_outputs is not None:
        field = body.structure_param
        known = await require_vocabulary(server, "Structured outputs need", param=field)
        grammar = await server.grammars.grammar(params.structured_outputs, known.tokenizer, server.model, field)
        if (format := REASONING_FORMATS.get(server.config.reasoning_parser or "")) is not None:
            thinking = free_thinking(known, token_ids, format, ended=body.ended_reasoning, param=field)
    bad_words = []
    if params.bad_words:
        bad_words = await asyncio.to_thread(bad_words_token_ids, await server.tokenizer.get(), params.bad_words)
    check_satisfiable(params, bad_words, server.model)
    request = AddRequest(
        request_id=make_request_id(headers, body, first_index),
        prompt_token_ids=token_ids,
        sampling_params=params,
        bad_words_token_ids=bad_words,
        priority=body.priority,
        cache_salt=body.cache_salt,
        return_sampling_mask=server.config.return_sampling_mask or body.wants_sampling_mask,
        session_id=body.session_id or (body.vllm_xargs and body.session) or headers.get("x-session-id") or None,
        grammar=grammar,
        tokenizer=server.config.tokenizer,
        thinking=thinking,
        adapter=adapter,
    )
    return Generation(server, request, vocabulary, wants_text=wants_text, rank=rank, first_index=first_index)


def make_request_id(headers: Headers, body: GenerationBody, first_index: int = 0) -> str:
    """The id that a client reads, and may abort by: its own, behind what kind of request it is, or a random one."""
    return f"{body.id_prefix}{headers.get('x-request-id') or body.own_id(first_index) or uuid.uuid4().hex[:16]}"


def check_cache_salt(cache_salt: str | None) -> None:
    """Raise a 400 for a salt that is no salt."""
    if cache_salt == "":
        message = "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"
        raise ApiError(400, message, param="cache_salt")


def data_parallel_rank(server: ServerContext, headers: Headers, wanted: int | None = None) -> int | None:
    """The rank that a client pins its request to, by its header, else as `wanted`; a header that is no integer counts
    as absent.

    Raises a 400 for a rank that isn't there.
    """
    try:
        rank = int(headers["x-data-parallel-rank"])
    except (KeyError, ValueError):
        if wanted is None:
            return None
        rank = wanted
    size = len(server.engine.ranks)
    if not 0 <= rank < size:
        raise ApiError(400, f"data_parallel_rank {rank} is out of range [0, {size}).")
    return rank


def check_prompt(model: EngineReady, token_ids: list[int]) -> None:
    """Raise a 400 for no id, for one outside the vocabulary, and for a prompt that leaves no room for one token."""
    if not token_ids:
        raise ApiError(400, "The decoder prompt cannot be empty.", param="prompt")
    check_vocabulary(model, token_ids)
    limit = model.max_model_len
    advice = "Make sure that `max_model_len` is no smaller than the number of text tokens"
    if len(token_ids) > limit:
        raise ApiError(
            400,
            f"The decoder prompt (length {len(token_ids)}) is longer than the maximum model length of {limit}. "
            f"{advice}.",
        )
    if len(token_ids) == limit:
        raise ApiError(
            400,
            f"The decoder prompt (length {limit}) plus the number of requested output tokens (at least 1) is longer "
            f"than the maximum model length of {limit}. {advice} (prompt + requested output tokens).",
        )


def check_vocabulary(model: EngineReady, token_ids: Sequence[int]) -> None:
    """Raise a 400 for an id that the model doesn't have."""
    if (largest := max(token_ids, default=0)) >= model.vocab_size:
        raise ApiError(400, f"Token id {largest} is out of vocabulary")


def resolve_params(model: EngineReady, config: EngineConfig, params: SamplingParams, prompt_len: int) -> None:
    """Check the values, then fill in and cut to what this model and prompt allow. Raises ParameterError."""
    params.validate(vocab_size=model.vocab_size, max_logprobs=config.max_logprobs, max_num_seqs=model.max_num_seqs)
    room = model.max_model_len - prompt_len
    if params.min_tokens > room:
        raise ParameterError(
            f"min_tokens must be at most {room}, what the model's length of {model.max_model_len} leaves after a "
            f"prompt of {prompt_len} tokens, got {params.min_tokens}.",
            "min_tokens",
        )
    if params.routed_experts_prompt_start > prompt_len:
        raise ParameterError(
            f"routed_experts_prompt_start must be at most the prompt's {prompt_len} tokens, got "
            f"{params.routed_experts_prompt_start}.",
            "routed_experts_prompt_start",
        )
    params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    params.top_k = min(params.top_k, model.vocab_size)


def check_satisfiable(params: SamplingParams, bad_words: list[list[int]], model: EngineReady) -> None:
    """Raise a 400 where the filters leave no token at all to begin with. (Longer bad words may still do so later.)"""
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        banned.update(model.eos_token_ids, params.stop_token_ids)
    if not banned:
        return
    allowed = range(model.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if all(token in banned for token in allowed):
        message = (
            f"No token is left to sample: all {len(allowed)} allowed ones are banned, by bad_words or, until "
            f"min_tokens={params.min_tokens} tokens exist, as EOS or stop_token_ids. Allow others, or ban fewer."
        )
        raise ApiError(400, message, param="bad_words" if params.allowed_token_ids is None else "allowed_token_ids")
