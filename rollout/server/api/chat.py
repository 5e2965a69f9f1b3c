"""`/v1/chat/completions`: the model's chat template in front, text behind, and in between tokens as they are."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET

from rollout.server.answers.choices import encode_json, prompt_logprobs
from rollout.server.answers.text_answers import (
    admit,
    chat_logprobs,
    check,
    extras,
    last_usage,
    names_by_id,
    routing,
    total_usage,
)
from rollout.server.context import Server, ServerDep, require_json
from rollout.server.generation import Delta, EventStream, Generation, answer, sse
from rollout.server.prompts import render_chat
from rollout.server.text.detokenizer import Vocabulary
from rollout.server.wire.openai_answers import (
    FINGERPRINT,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatResponse,
    MessageDelta,
)
from rollout.server.wire.openai_requests import ChatCompletionRequest
from rollout.server.wire.tokens import TextLogprobs

router = APIRouter(dependencies=[Depends(require_json)])


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatCompletionRequest, request: Request, server: ServerDep) -> Response:
    """Answer a chat; server-sent events with `stream`."""
    check(server, body)
    token_ids = await render_chat(server, body)
    generation = await admit(server, body, token_ids, body.sampling_params(), request.headers, "chatcmpl-")
    if body.stream:
        return EventStream(stream_events(server, body, generation))
    return await answer(request, whole_answer(server, body, generation))


async def whole_answer(server: Server, body: ChatCompletionRequest, generation: Generation) -> bytes:
    """Every choice, once all have ended."""
    with generation:
        deltas = await generation.collect()
    choices = [
        ChatChoice(
            index=delta.index,
            message=AssistantMessage(content=delta.text or ""),
            logprobs=_logprobs(server, body, generation.vocabulary, delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if body.return_token_ids else None,
            routed_experts=routing(server, delta),
            **extras(server, body, delta),
        )
        for delta in deltas
    ]
    response = ChatResponse(
        id=generation.request_id,
        created=int(time.time()),
        model=server.model_name,
        choices=choices,
        usage=total_usage([generation]),
        prompt_logprobs=await prompt_logprobs(server, generation),
        prompt_token_ids=generation.prompt_token_ids if body.return_token_ids else None,
    )
    return encode_json(response)


async def stream_events(
    server: Server, body: ChatCompletionRequest, generation: Generation
) -> AsyncGenerator[bytes, None]:
    """The events of a chat: for each choice its role, then its text as it comes; usage where asked for."""
    created, begun = int(time.time()), set[int]()

    def event(choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(id=generation.request_id, created=created, model=server.model_name, choices=choices)
        if body.running_usage:
            chunk.usage = total_usage([generation])
        return chunk

    with generation:
        async for deltas in generation:
            for delta in deltas:
                if delta.index not in begun:
                    first = event(
                        [ChatChunkChoice(index=delta.index, delta=MessageDelta(role="assistant", content=""))]
                    )
                    with_ids = body.return_token_ids and not begun
                    first.prompt_token_ids = generation.prompt_token_ids if with_ids else None
                    first.prompt_text = None
                    begun.add(delta.index)
                    yield sse(encode_json(first))
                chunk = event([_chunk_choice(server, body, generation.vocabulary, delta)])
                if delta.finish_reason is not None:
                    chunk.system_fingerprint = FINGERPRINT
                yield sse(encode_json(chunk))
    if body.last_usage:
        totals = event([])
        totals.usage = last_usage([generation])
        yield sse(encode_json(totals))


def _chunk_choice(
    server: Server, body: ChatCompletionRequest, vocabulary: Vocabulary | None, delta: Delta
) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=delta.index,
        delta=MessageDelta(content=delta.text or ""),
        logprobs=_logprobs(server, body, vocabulary, delta),
        finish_reason=delta.finish_reason,
        stop_reason=UNSET if delta.finish_reason is None else delta.stop_reason,
        token_ids=delta.token_ids if body.return_token_ids else None,
        routed_experts=routing(server, delta) or UNSET,
        **extras(server, body, delta),
    )


def _logprobs(
    server: Server, body: ChatCompletionRequest, vocabulary: Vocabulary | None, delta: Delta
) -> TextLogprobs | None:
    return chat_logprobs(delta.logprobs, vocabulary, top=body.shown_logprobs, as_ids=names_by_id(server, body))
