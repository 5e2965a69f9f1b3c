"""Token-in/token-out: `/inference/v1/generate` and its abort."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Request, Response
from msgspec import UNSET

from rollout.server.answers.choices import encode_json, prompt_logprobs, text_choice, token_choice
from rollout.server.context import Server, ServerDep, require_json
from rollout.server.generation import Delta, EventStream, Generation, answer, prepare, require_vocabulary, sse
from rollout.server.wire.errors import ApiError
from rollout.server.wire.tokens import (
    Choice,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    TextChoice,
    Usage,
)

router = APIRouter(dependencies=[Depends(require_json)])
disabled_router = APIRouter()


@router.post("/inference/v1/generate")
async def generate(body: GenerateRequest, request: Request, server: ServerDep) -> Response:
    """Continue a prompt of token ids; server-sent events with `stream`."""
    await check_supported(server, body)
    generation = await prepare(
        server,
        token_ids=body.token_ids,
        params=body.sampling_params,
        headers=request.headers,
        detokenize=body.output_mode == "text",
        request_id=body.request_id,
        model=body.model,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    if body.stream:
        return EventStream(stream_events(server, body, generation))
    return await answer(request, whole_answer(server, body, generation))


@router.post("/inference/v1/abort_requests")
async def abort_requests(
    server: ServerDep, request_ids: Annotated[list[str] | None, Body(embed=True)] = None
) -> Response:
    """End these requests with finish_reason "abort", in the background. Ids are those that the server returned."""
    if request_ids is None:
        raise ApiError(400, "Missing 'request_ids' in request body", type="Bad Request")
    server.engine.abort(request_ids)
    return Response()


@disabled_router.post("/inference/v1/generate")
@disabled_router.post("/inference/v1/abort_requests")
async def scale_out_disabled() -> Response:
    """Both paths on a server started without the flag."""
    message = "Scale-out endpoints are disabled. Restart rollout serve with --enable-scale-out to enable them."
    raise ApiError(403, message)


async def check_supported(server: Server, body: GenerateRequest) -> None:
    """Refuse by name what this server doesn't do, rather than ignore it."""
    if body.features is not None or body.content_parts:
        name = "content_parts" if body.features is None else "features"
        message = f"{name} can't be served: {server.model_name} is a text-only model. Send token_ids alone."
        raise ApiError(400, message, param=name)
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if getattr(body, name) is not None:
            message = f"{name} can't be served: this server runs a model whole, and transfers no cache. Leave it out."
            raise ApiError(400, message, param=name)
    if body.output_mode == "text":
        await require_vocabulary(server, "output_mode='text' needs", param="output_mode")


async def whole_answer(server: Server, body: GenerateRequest, generation: Generation) -> bytes:
    """Everything that comes of a request, as one answer."""
    with generation:
        deltas = await generation.collect()
    response = GenerateResponse(
        request_id=generation.request_id,
        model=server.model_name,
        created=int(time.time()),
        usage=_usage(generation),
        prompt_logprobs=await prompt_logprobs(server, generation),
        prompt_token_ids=body.token_ids if body.return_token_ids else None,
        output_mode=body.output_mode,
        choices=[_choice(server, body, generation, delta) for delta in deltas],
    )
    return encode_json(response)


async def stream_events(server: Server, body: GenerateRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a request: a chunk per choice that has news, then usage where asked for."""
    options = body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    running_usage = options is not None and with_usage and bool(options.continuous_usage_stats)
    first = True
    with generation:
        async for deltas in generation:
            for delta in deltas:
                chunk = GenerateChunk(
                    request_id=generation.request_id,
                    usage=_usage(generation) if running_usage else None,
                    output_mode=body.output_mode,
                    choices=[_choice(server, body, generation, delta)],
                )
                if first:
                    first = False
                    if body.return_token_ids:
                        chunk.prompt_token_ids = body.token_ids
                    chunk.prompt_logprobs = await prompt_logprobs(server, generation) or UNSET
                yield sse(encode_json(chunk))
    if with_usage:
        usage = _usage(generation)
        usage.prompt_tokens_details = usage.completion_tokens_details = UNSET
        totals: GenerateChunk[object] = GenerateChunk(
            request_id=generation.request_id, usage=usage, output_mode=body.output_mode, choices=[]
        )
        yield sse(encode_json(totals))


def _choice(server: Server, body: GenerateRequest, generation: Generation, delta: Delta) -> Choice | TextChoice:
    routing = server.engine.info.routing
    if body.output_mode == "tokens":
        return token_choice(delta, routing)
    assert generation.vocabulary is not None
    return text_choice(delta, routing, generation.vocabulary, as_ids=server.config.return_tokens_as_token_ids)


def _usage(generation: Generation) -> Usage:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return Usage(prompt_tokens=prompt, total_tokens=prompt + completion, completion_tokens=completion)
