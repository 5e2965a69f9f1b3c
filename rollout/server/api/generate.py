"""Token-in/token-out: `/inference/v1/generate` and its abort."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Body, Depends, Request, Response
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollout.messages import AddRequest, EngineReady
from rollout.outputs import TokenLogprob, TokenOutput
from rollout.sampling_params import SamplingParams
from rollout.server.choices import ChoiceBuilder, sendable
from rollout.server.engine_client import RequestStream
from rollout.server.errors import ApiError, as_api_error, error_body
from rollout.server.protocol import (
    UNSET,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    PromptLogprob,
    PromptLogprobs,
    Usage,
)
from rollout.server.state import Server, ServerDep, require_json
from rollout.server.tokenizer import bad_words_token_ids, decode_each

CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is left to read it

router = APIRouter(dependencies=[Depends(require_json)])
disabled_router = APIRouter()

_encode = msgspec.json.Encoder(enc_hook=array.tolist).encode  # sampling masks, one at a time


@router.post("/inference/v1/generate")
async def generate(body: GenerateRequest, request: Request, server: ServerDep) -> Response:
    """Continue a prompt of token ids; server-sent events with `stream`."""
    add = await prepare(server, body, request.headers)
    if body.stream:
        return EventStream(stream_events(server, body, add), media_type="text/event-stream")
    with server.engine.submit(add) as stream:
        answering = asyncio.ensure_future(whole_answer(server, body, add, stream))
        leaving = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return Response(_encode(answering.result()), media_type="application/json")
        finally:
            answering.cancel()
            leaving.cancel()


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


async def prepare(server: Server, body: GenerateRequest, headers: Headers) -> AddRequest:
    """The engine's request for this body, every value checked. Raises ApiError or ParameterError, naming the field."""
    server.check_accepting()
    server.check_model(body.model)
    check_supported(server, body, headers)
    check_prompt(server, body.token_ids)
    params = resolve_params(server, body.sampling_params, len(body.token_ids))
    bad_words = []
    if params.bad_words:
        bad_words = await asyncio.to_thread(bad_words_token_ids, await server.tokenizer.get(), params.bad_words)
    check_satisfiable(params, bad_words, server.engine.info)
    return AddRequest(
        request_id=f"generate-tokens-{headers.get('x-request-id') or body.request_id or uuid.uuid4().hex[:16]}",
        prompt_token_ids=body.token_ids,
        sampling_params=params,
        bad_words_token_ids=bad_words,
        priority=body.priority,
        cache_salt=body.cache_salt,
        return_sampling_mask=server.config.return_sampling_mask,
    )


def check_supported(server: Server, body: GenerateRequest, headers: Headers) -> None:
    """Refuse by name what this server doesn't do, rather than ignore it."""
    for name in ("features", "content_parts", "kv_transfer_params", "ec_transfer_params"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is not supported: this server runs text-only models, whole.", param=name)
    if body.output_mode == "text":
        message = "output_mode='text' is not served yet; use 'tokens' and decode the ids."
        raise ApiError(400, message, param="output_mode")
    if body.cache_salt == "":
        message = "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"
        raise ApiError(400, message, param="cache_salt")
    try:
        rank = int(headers.get("x-data-parallel-rank", "0"))
    except ValueError:
        return  # as if it weren't there
    if rank != 0:
        raise ApiError(400, f"data_parallel_rank {rank} is out of range [0, 1).")


def check_prompt(server: Server, token_ids: list[int]) -> None:
    """Raise a 400 for an id outside the vocabulary and for a prompt that leaves no room for one token."""
    largest, limit = max(token_ids), server.engine.info.max_model_len
    if largest >= server.engine.info.vocab_size:
        raise ApiError(400, f"Token id {largest} is out of vocabulary")
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


def resolve_params(server: Server, params: SamplingParams, prompt_len: int) -> SamplingParams:
    """Check the values, then fill in and cut to what this model and prompt allow. Raises ParameterError."""
    info = server.engine.info
    if server.config.tokens_only:
        params.detokenize = False
    params.validate(
        vocab_size=info.vocab_size,
        max_logprobs=server.engine_config.max_logprobs,
        max_num_seqs=info.max_num_seqs,
    )
    if params.stop:
        raise ApiError(400, "Stop strings are not served yet; use stop_token_ids.", param="stop")
    room = info.max_model_len - prompt_len
    params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    params.min_tokens = min(params.min_tokens, params.max_tokens)
    params.top_k = min(params.top_k, info.vocab_size)
    return params


def check_satisfiable(params: SamplingParams, bad_words: list[list[int]], info: EngineReady) -> None:
    """Raise a 400 where the filters leave no token at all to begin with. (Longer bad words may still do so later.)"""
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        banned.update(info.eos_token_ids, params.stop_token_ids)
    allowed = range(info.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if all(token in banned for token in allowed):
        message = (
            f"No token is left to sample: all {len(allowed)} allowed ones are banned, by bad_words or, until "
            f"min_tokens={params.min_tokens} tokens exist, as EOS or stop_token_ids. Allow others, or ban fewer."
        )
        raise ApiError(400, message, param="bad_words" if params.allowed_token_ids is None else "allowed_token_ids")


async def whole_answer(
    server: Server, body: GenerateRequest, add: AddRequest, stream: RequestStream
) -> GenerateResponse:
    """Everything the engine says of a request, as one answer."""
    builders = _builders(add.sampling_params)
    prompt_logprobs = None
    async for outputs in stream:
        for output in outputs:
            builders[output.index].add(output)
        prompt_logprobs = prompt_logprobs or _prompt_logprobs(outputs)
    return GenerateResponse(
        request_id=add.request_id,
        model=server.model_name,
        created=int(time.time()),
        usage=_usage(body, builders),
        prompt_logprobs=await _readable(server, prompt_logprobs) if prompt_logprobs else None,
        prompt_token_ids=body.token_ids if body.return_token_ids else None,
        choices=[builder.take() for builder in builders],
    )


async def stream_events(server: Server, body: GenerateRequest, add: AddRequest) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a request: a chunk per choice and batch, usage where asked, then `[DONE]`.

    A reader who falls behind gets several tokens a chunk. An engine that fails is told in an `error` event.
    """
    options = body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    running_usage = options is not None and with_usage and bool(options.continuous_usage_stats)
    builders = _builders(add.sampling_params)
    first = True
    try:
        with server.engine.submit(add) as stream:
            async for outputs in stream:
                for output in outputs:
                    builders[output.index].add(output)
                prompt_logprobs = _prompt_logprobs(outputs)
                for index in dict.fromkeys(output.index for output in outputs):
                    chunk = GenerateChunk(request_id=add.request_id, choices=[builders[index].take()])
                    if running_usage:
                        chunk.usage = _usage(body, builders)
                    if first:
                        first = False
                        chunk.prompt_token_ids = body.token_ids if body.return_token_ids else UNSET
                    if prompt_logprobs:
                        chunk.prompt_logprobs, prompt_logprobs = await _readable(server, prompt_logprobs), None
                    yield _event(_encode(chunk))
        if with_usage:
            usage = _usage(body, builders)
            usage.prompt_tokens_details = usage.completion_tokens_details = UNSET
            yield _event(_encode(GenerateChunk(request_id=add.request_id, usage=usage, choices=[])))
    except Exception as error:
        yield _event(error_body(as_api_error(error)))
    yield _event(b"[DONE]")


class EventStream(StreamingResponse):
    """A streamed answer whose generator is closed when the client leaves, so that the request is aborted at once."""

    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()


def _builders(params: SamplingParams) -> list[ChoiceBuilder]:
    return [ChoiceBuilder(index, with_logprobs=params.logprobs is not None) for index in range(params.n)]


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _usage(body: GenerateRequest, builders: list[ChoiceBuilder]) -> Usage:
    prompt, completion = len(body.token_ids), sum(builder.num_tokens for builder in builders)
    return Usage(prompt_tokens=prompt, total_tokens=prompt + completion, completion_tokens=completion)


def _prompt_logprobs(outputs: list[TokenOutput]) -> list[list[TokenLogprob] | None] | None:
    return next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None)


async def _readable(server: Server, positions: list[list[TokenLogprob] | None]) -> PromptLogprobs:
    texts = await decode_each(
        await server.tokenizer.get(), (c.token_id for candidates in positions for c in candidates or ())
    )
    return [
        {str(c.token_id): PromptLogprob(sendable(c.logprob), c.rank, texts[c.token_id]) for c in candidates}
        if candidates is not None
        else None
        for candidates in positions
    ]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
