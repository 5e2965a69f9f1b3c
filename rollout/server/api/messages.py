"""`/v1/messages`: a chat in Anthropic's form."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET

from rollout.server.answers.choices import encode_json
from rollout.server.answers.text_answers import admit, chat_logprobs, check, extras, names_by_id, routing
from rollout.server.context import Server, ServerDep, require_json
from rollout.server.generation import Delta, EventStream, Generation, answer
from rollout.server.prompts import render_chat
from rollout.server.wire.anthropic import (
    AnthropicMessage,
    AnthropicMessageDelta,
    BlockDelta,
    BlockStart,
    BlockStop,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessagesUsage,
    StopDelta,
    TextBlock,
    TextDelta,
    stop_reason,
)
from rollout.server.wire.errors import ApiError

router = APIRouter(dependencies=[Depends(require_json)])


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request, server: ServerDep) -> Response:
    """Answer a chat; Anthropic's events with `stream`."""
    check(server, body)
    token_ids = await render_chat(server, body.chat())
    generation = await admit(server, body, token_ids, body.sampling_params(), request.headers, "chatcmpl-")
    if body.stream:
        return EventStream(stream_events(server, body, generation), last=_event(MessageStop()), error_event=_error)
    return await answer(request, whole_answer(server, body, generation))


async def whole_answer(server: Server, body: MessagesRequest, generation: Generation) -> bytes:
    """The message, once it has ended."""
    with generation:
        (delta,) = await generation.collect()
    message = _message(server, body, generation)
    message.content = [TextBlock(delta.text or "")]
    assert delta.finish_reason is not None
    message.stop_reason, sequence = stop_reason(delta.finish_reason, delta.stop_reason)
    message.stop_sequence = UNSET if sequence is None else sequence
    for name, value in _said_of_tokens(server, body, generation, delta).items():
        setattr(message, name, value)
    return encode_json(message)


async def stream_events(server: Server, body: MessagesRequest, generation: Generation) -> AsyncGenerator[bytes, None]:
    """The events of a message with its one block of text, all but the last."""
    with generation:
        start = _message(server, body, generation)
        start.stop_sequence = None
        yield _event(MessageStart(start))
        yield _event(BlockStart(TextBlock("")))
        async for (delta,) in generation:
            said = _said_of_tokens(server, body, generation, delta)
            versions = said.pop("weight_versions", UNSET)
            if delta.text or said:
                yield _event(BlockDelta(delta=TextDelta(delta.text or ""), **said))
            if delta.finish_reason is not None:
                yield _event(BlockStop())
                end = StopDelta(*stop_reason(delta.finish_reason, delta.stop_reason))
                yield _event(AnthropicMessageDelta(delta=end, usage=_usage(generation), weight_versions=versions))


def _message(server: Server, body: MessagesRequest, generation: Generation) -> AnthropicMessage:
    return AnthropicMessage(
        id=generation.request_id,
        content=[],
        model=server.model_name,
        stop_reason=None,
        usage=_usage(generation),
        prompt_token_ids=generation.prompt_token_ids if body.return_token_ids else UNSET,
    )


def _said_of_tokens(server: Server, body: MessagesRequest, generation: Generation, delta: Delta) -> dict[str, Any]:
    """What the answer says of these tokens beside their text, where asked for."""
    said = extras(server, body, delta)
    if body.return_token_ids:
        said["token_ids"] = delta.token_ids
    if delta.logprobs is not None:
        top, as_ids = body.shown_logprobs, names_by_id(server, body)
        said["logprobs"] = chat_logprobs(delta.logprobs, generation.vocabulary, top=top, as_ids=as_ids)
    if (routed := routing(server, delta)) is not None:
        said["routed_experts"] = routed
    return said


def _usage(generation: Generation) -> MessagesUsage:
    return MessagesUsage(generation.prompt_tokens, generation.completion_tokens)


def _event(event: msgspec.Struct) -> bytes:
    name = type(event).__struct_config__.tag
    return f"event: {name}\ndata: ".encode() + encode_json(event) + b"\n\n"


def _error(error: ApiError) -> bytes:
    """An error in the midst of a stream, as Anthropic's clients look for it."""
    body = {"type": "error", "error": {"type": error.type, "message": error.message}}
    return b"event: error\ndata: " + encode_json(body) + b"\n\n"
