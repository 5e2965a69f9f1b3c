"""`/v1/completions`: continue one prompt or several, each a text or token ids."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET
from starlette.datastructures import Headers

from rollout.outputs import FinishReason
from rollout.sampling.params import ParameterError
from rollout.server.answers.choices import encode_json, prompt_logprobs
from rollout.server.answers.text_answers import (
    admit,
    check,
    completion_logprobs,
    extras,
    last_usage,
    names_by_id,
    routing,
    total_usage,
)
from rollout.server.context import Server, ServerDep, require_json
from rollout.server.generation import Delta, EventStream, Generation, answer, sse
from rollout.server.prompts import encode
from rollout.server.wire.openai_answers import (
    FINGERPRINT,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionResponse,
)
from rollout.server.wire.openai_requests import CompletionRequest
from rollout.server.wire.tokens import Usage

router = APIRouter(dependencies=[Depends(require_json)])

# A body of the largest size could hold millions, and each of them is a request of its own.
MAX_PROMPTS = 2048


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, server: ServerDep) -> Response:
    """Continue prompts; server-sent events with `stream`. Choice i·n + j is the j-th of prompt i."""
    check(server, body)
    continuations = await _admit_all(server, body, request.headers)
    if body.stream:
        return EventStream(stream_events(server, body, continuations))
    return await answer(request, whole_answer(server, body, continuations))


@dataclass
class Continuation:
    """One prompt in hand. `echo` is its text where the answer begins with it."""

    generation: Generation
    echo: str


async def prompt_token_ids(server: Server, body: CompletionRequest) -> list[list[int]]:
    """The ids of every prompt. Raises ParameterError for none, and for too many."""
    prompt: Any = body.prompt
    prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ParameterError(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}.", "prompt")
    return [
        await encode(server, one, add_special_tokens=body.add_special_tokens) if isinstance(one, str) else one
        for one in prompts
    ]


async def _admit_all(server: Server, body: CompletionRequest, headers: Headers) -> list[Continuation]:
    every = await prompt_token_ids(server, body)
    server.engine.check_room(len(every) * (body.n or 1))
    found: list[Continuation] = []
    for ids in every:
        generation = await admit(server, body, ids, body.sampling_params(), headers, "cmpl-")
        echo = await _echoed(body, len(found), generation) if body.echo else ""
        found.append(Continuation(generation, echo))
    return found


async def _echoed(body: CompletionRequest, number: int, generation: Generation) -> str:
    """The prompt as it was given, or the text of its ids."""
    given = body.prompt if isinstance(body.prompt, str) else body.prompt[number]
    if isinstance(given, str):
        return given
    assert generation.vocabulary is not None
    return await asyncio.to_thread(generation.vocabulary.decode, generation.prompt_token_ids)


async def whole_answer(server: Server, body: CompletionRequest, continuations: Sequence[Continuation]) -> bytes:
    """Every choice of every prompt, once all have ended."""
    generations = [c.generation for c in continuations]
    with contextlib.ExitStack() as running:
        for generation in generations:
            running.enter_context(generation)
        collecting = [asyncio.ensure_future(generation.collect()) for generation in generations]
        try:
            collected = await asyncio.gather(*collecting)
        finally:
            for task in collecting:
                task.cancel()
    choices: list[CompletionChoice] = []
    for continuation, deltas in zip(continuations, collected, strict=True):
        generation = continuation.generation
        asked = await prompt_logprobs(server, generation) if body.prompt_logprobs is not None else None
        for delta in deltas:
            shown = _shown(body, delta)
            choice = CompletionChoice(
                index=len(choices),
                text=continuation.echo + (shown.text or ""),
                logprobs=_logprobs(server, body, generation, shown, first=True),
                finish_reason=shown.finish_reason,
                stop_reason=shown.stop_reason,
                token_ids=shown.token_ids if body.return_token_ids else None,
                prompt_logprobs=asked,
                prompt_token_ids=generation.prompt_token_ids if body.return_token_ids else None,
                routed_experts=routing(server, shown),
                **extras(server, body, shown),
            )
            choices.append(choice)
    response = CompletionResponse(
        id=generations[0].request_id,
        created=int(time.time()),
        model=server.model_name,
        choices=choices,
        usage=_counted(body, total_usage(generations)),
    )
    return encode_json(response)


async def stream_events(
    server: Server, body: CompletionRequest, continuations: Sequence[Continuation]
) -> AsyncGenerator[bytes, None]:
    """The events of a completion, of whichever choice has news; usage where asked for."""
    generations = [c.generation for c in continuations]
    created, offsets = int(time.time()), dict[int, int]()

    def event(choices: list[CompletionChunkChoice]) -> CompletionChunk:
        chunk = CompletionChunk(id=generations[0].request_id, created=created, model=server.model_name, choices=choices)
        if body.running_usage:
            chunk.usage = _counted(body, total_usage(generations))
        return chunk

    with contextlib.ExitStack() as running:
        for generation in generations:
            running.enter_context(generation)
        async with contextlib.aclosing(_news(generations)) as news:
            async for number, deltas in news:
                for delta in deltas:
                    chunk = event([_chunk_choice(server, body, continuations[number], number, delta, offsets)])
                    if delta.finish_reason is not None:
                        chunk.system_fingerprint = FINGERPRINT
                    yield sse(encode_json(chunk))
    if body.last_usage:
        totals = event([])
        totals.usage = _counted(body, last_usage(generations))
        yield sse(encode_json(totals))


def _chunk_choice(
    server: Server,
    body: CompletionRequest,
    continuation: Continuation,
    number: int,
    delta: Delta,
    offsets: dict[int, int],
) -> CompletionChunkChoice:
    """What is new of a choice; `offsets` has where the next token of each starts in its text."""
    generation = continuation.generation
    index = number * generation.params.n + delta.index
    first = index not in offsets
    offset = offsets.setdefault(index, 0)
    shown = _shown(body, delta)
    logprobs = _logprobs(server, body, generation, shown, first=first, offset=offset)
    if logprobs is not None and logprobs.tokens:
        offsets[index] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
    return CompletionChunkChoice(
        index=index,
        text=(continuation.echo if first else "") + (shown.text or ""),
        logprobs=logprobs,
        finish_reason=shown.finish_reason,
        stop_reason=shown.stop_reason,
        prompt_token_ids=generation.prompt_token_ids if first and body.return_token_ids else None,
        token_ids=shown.token_ids if body.return_token_ids else None,
        routed_experts=routing(server, shown) or UNSET,
        **extras(server, body, shown),
    )


def _logprobs(
    server: Server, body: CompletionRequest, generation: Generation, delta: Delta, *, first: bool, offset: int = 0
) -> CompletionLogprobs | None:
    """Those of the new tokens, with `echo` after those of the prompt."""
    ids, entries = delta.token_ids, delta.logprobs
    if body.echo and first and entries is not None and generation.prompt_logprobs is not None:
        both = [*generation.prompt_logprobs, *entries]
        ids = [*generation.prompt_token_ids, *ids]
        return completion_logprobs(ids, both, generation.vocabulary, offset=0, as_ids=names_by_id(server, body))
    return completion_logprobs(ids, entries, generation.vocabulary, offset=offset, as_ids=names_by_id(server, body))


def _shown(body: CompletionRequest, delta: Delta) -> Delta:
    """The delta without its one token where only the prompt was asked back."""
    if not body.only_echo:
        return delta
    return dataclasses.replace(
        delta,
        token_ids=[],
        text="",
        logprobs=None if delta.logprobs is None else [],
        sampling_mask=None,
        routed_experts=None,
        spans=None if delta.spans is None else [],
        finish_reason=None if delta.finish_reason is None else FinishReason.LENGTH,
        stop_reason=None,
    )


def _counted(body: CompletionRequest, usage: Usage) -> Usage:
    if body.only_echo:
        usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
    return usage


async def _news(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    """What the generations bring, each with its number, as it comes."""
    if len(generations) == 1:  # spares a task a token
        async for deltas in generations[0]:
            yield 0, deltas
        return
    waiting = {asyncio.ensure_future(_next(generation)): number for number, generation in enumerate(generations)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = waiting.pop(task)
                if deltas := task.result():
                    waiting[asyncio.ensure_future(_next(generations[number]))] = number
                    yield number, deltas
    finally:
        for task in waiting:
            task.cancel()


async def _next(generation: Generation) -> list[Delta]:
    """The next deltas; none once it has ended."""
    async for deltas in generation:
        return deltas
    return []
