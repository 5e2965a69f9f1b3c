"""Text processing without generation: a request to token ids (`render`), generated ids to an answer (`derender`).

Together with /inference/v1/generate they do what /v1/completions and /v1/chat/completions do in one call.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers

from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.admit import check_prompt, check_vocabulary, make_request_id, resolve_params
from rollout.server.answers.derender import Derenderer
from rollout.server.context import ServerContext, ServerDep
from rollout.server.limits import BoundedRoute
from rollout.server.prompts import encode, require_vocabulary
from rollout.server.wire.answer import encode_json
from rollout.server.wire.chat import ChatCompletionRequest
from rollout.server.wire.completions import CompletionRequest
from rollout.server.wire.openai import OpenAIRequest
from rollout.server.wire.render import (
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    DerenderedChunk,
    DerenderStreamState,
    GenerateTokensResponse,
    RenderedRequest,
)

router = APIRouter(route_class=BoundedRoute)

# Rendered whatever their value, as a vLLM server does.
_ALWAYS_RENDERED = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "stop",
    "stop_token_ids",
    "max_tokens",
)


@router.post("/v1/chat/completions/render")
async def render_chat_completion(body: ChatCompletionRequest, request: Request, server: ServerDep) -> Response:
    """The body for /inference/v1/generate that stands for this chat."""
    (rendered,) = await _rendered(server, body, request.headers)
    return _json(encode_json(rendered), _ignored(server, body))


@router.post("/v1/completions/render")
async def render_completion(body: CompletionRequest, request: Request, server: ServerDep) -> Response:
    """The bodies for /inference/v1/generate that stand for this completion, one a prompt."""
    if body.echo:
        raise ParameterError("echo can't be rendered: /inference/v1/generate answers with what is new.", "echo")
    rendered = await _rendered(server, body, request.headers)
    return _json(encode_json(rendered), _ignored(server, body))


def _ignored(server: ServerContext, body: OpenAIRequest) -> dict[str, str]:
    return server.ignored_header([name for name in body.ignored if name != "return_token_offsets"])


async def _rendered(server: ServerContext, body: OpenAIRequest, headers: Headers) -> list[RenderedRequest]:
    server.check_model(body.model)
    body.check()
    rendered: list[RenderedRequest] = []
    name, prompts = make_request_id(headers, body), body.prompts()
    for number, prompt in enumerate(prompts):
        encoded = await encode(server, prompt, offsets=bool(body.return_token_offsets))
        ids, params = encoded.token_ids, body.to_sampling_params()
        check_prompt(server.model, ids)
        resolve_params(server.model, server.engine_config, params, len(ids))
        one = RenderedRequest(
            request_id=name if len(prompts) == 1 else f"{name}-{number}",
            token_ids=ids,
            token_offsets=encoded.offsets,
            sampling_params=_rendered_params(params),
            model=body.model or server.model_name,
            return_token_ids=body.return_token_ids,
            stream=bool(body.stream),
            stream_options=None if body.stream_options is None else body.stream_options.model_dump(),
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
        rendered.append(one)
    return rendered


@router.post("/v1/chat/completions/derender")
async def derender_chat(body: DerenderChatRequest | DerenderChatStreamRequest, server: ServerDep) -> Response:
    """The answer to a chat that generated ids make; with `stream`, one chunk of it."""
    check_vocabulary(server.model, body.prompt_token_ids or [])
    if isinstance(body, DerenderChatStreamRequest):
        _check_state(server, body.stream_state)
        derenderer = await _derenderer(server, [body.generate_chunk], body.model)
        chunk, state = await asyncio.to_thread(derenderer.chat_chunk, body)
        return _json(encode_json(DerenderedChunk(chunk, state.model_dump())))
    derenderer = await _derenderer(server, [body.generate_response], body.model)
    return _json(encode_json(await asyncio.to_thread(derenderer.chat, body)))


@router.post("/v1/completions/derender")
async def derender_completion(
    body: DerenderCompletionRequest | DerenderCompletionStreamRequest, server: ServerDep
) -> Response:
    """The answer to a completion that generated ids make; with `stream`, one chunk of it."""
    prompts = [body.prompt_token_ids] if isinstance(body, DerenderCompletionStreamRequest) else body.prompt_token_ids
    for prompt in prompts or ():
        check_vocabulary(server.model, prompt or [])
    if isinstance(body, DerenderCompletionStreamRequest):
        _check_state(server, body.stream_state)
        derenderer = await _derenderer(server, [body.generate_chunk], body.model)
        chunk, state = await asyncio.to_thread(derenderer.completion_chunk, body)
        return _json(encode_json(DerenderedChunk(chunk, state.model_dump())))
    derenderer = await _derenderer(server, body.generate_responses, body.model)
    return _json(encode_json(await asyncio.to_thread(derenderer.completion, body)))


def _check_state(server: ServerContext, state: DerenderStreamState | None) -> None:
    if state is not None:
        check_vocabulary(server.model, [*state.context, *state.token_ids])


def _rendered_params(params: SamplingParams) -> dict[str, Any]:
    """What was asked for, and the fields that clients expect in any case; three of them say something to vLLM only."""
    default = SamplingParams()
    values = dataclasses.asdict(params)
    asked = {name: value for name, value in values.items() if value != getattr(default, name)}
    return {
        **{name: values[name] for name in _ALWAYS_RENDERED},
        **asked,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": params.bad_words,
        "skip_reading_prefix_cache": False,
    }


async def _derenderer(
    server: ServerContext, responses: Sequence[GenerateTokensResponse], model: str | None
) -> Derenderer:
    """Raises a 404 for another model, and a 400 for ids that this one doesn't have."""
    server.check_model(model)
    for response in responses:
        check_vocabulary(server.model, response.prompt_token_ids or [])
        for choice in response.choices:
            entries = [] if choice.logprobs is None else choice.logprobs.content
            named = [c.token_id for entry in entries for c in (entry, *entry.top_logprobs)]
            check_vocabulary(server.model, [*choice.token_ids, *named])
    vocabulary = await require_vocabulary(server, "Text needs")
    return Derenderer(server.config, model or server.model_name, vocabulary, server.model.eos_token_ids)


def _json(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, headers=headers, media_type="application/json")
