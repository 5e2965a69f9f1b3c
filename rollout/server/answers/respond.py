"""From running generations to an HTTP answer in some dialect, which ends the work of a client that has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollout.server.context import ServerContext
from rollout.server.errors import as_api_error
from rollout.server.generation import Generation
from rollout.server.wire.answer import Delta, Writer, encode_json

CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is left to read it


async def respond(
    request: Request, server: ServerContext, writer: Writer[Any], generations: Sequence[Generation]
) -> Response:
    """The answer that `writer` makes of these generations, which all begin here, or of none of them.

    Raises EngineError or ApiError where the server can't take them now, or fails before the first byte is sent.
    """
    server.check_accepting(len(generations) * generations[0].n)
    with contextlib.ExitStack() as running:
        for generation in generations:
            running.enter_context(generation)
        if writer.body.stream:
            return EventStream(writer, generations, running.pop_all())
        return await _whole_answer(request, writer, generations)


async def _whole_answer(request: Request, writer: Writer[Any], generations: Sequence[Generation]) -> Response:
    """One JSON body. A client that leaves first ends the work."""
    collecting = [asyncio.ensure_future(generation.collect()) for generation in generations]
    every = asyncio.gather(*collecting)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((every, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not every.done():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        pairs = zip(generations, every.result(), strict=True)
        choices = [(generation, delta) for generation, deltas in pairs for delta in deltas]
        made = await asyncio.to_thread(writer.whole, choices) if writer.reads_prompt else writer.whole(choices)
        return Response(encode_json(made), media_type="application/json")
    finally:
        leaving.cancel()
        for task in collecting:
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """The events of generations that run, as they come. An exception on the way is told by an event of its own.

    Whether the client reads to the end, leaves, or never begins to read: `running` is closed, and with it what runs.
    """

    def __init__(self, writer: Writer[Any], generations: Sequence[Generation], running: contextlib.ExitStack) -> None:
        self._running = running
        self._events = _events(writer, generations)
        super().__init__(self._events, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._running:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._events.aclose()


async def _events(writer: Writer[Any], generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
    def sent(events: Iterator[msgspec.Struct]) -> list[bytes]:
        return [writer.event(event) for event in events]

    try:
        for event in sent(writer.begin()):
            yield event
        async with contextlib.aclosing(_news(generations)) as news:
            async for generation, deltas in news:
                for delta in deltas:
                    events = writer.chunk(generation, delta)
                    for event in await asyncio.to_thread(sent, events) if writer.reads_prompt else sent(events):
                        yield event
        for event in sent(writer.end()):
            yield event
    except Exception as error:
        yield writer.error(as_api_error(error))
    yield writer.after


async def _news(generations: Sequence[Generation]) -> AsyncGenerator[tuple[Generation, list[Delta]], None]:
    """What the generations bring, as it comes."""
    if len(generations) == 1:  # spares a task a token
        async for deltas in generations[0]:
            yield generations[0], deltas
        return
    waiting = {asyncio.ensure_future(_next(generation)): generation for generation in generations}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                generation = waiting.pop(task)
                if deltas := task.result():
                    waiting[asyncio.ensure_future(_next(generation))] = generation
                    yield generation, deltas
    finally:
        for task in waiting:
            task.cancel()


async def _next(generation: Generation) -> list[Delta]:
    """The next deltas; none once it has ended."""
    async for deltas in generation:
        return deltas
    return []
