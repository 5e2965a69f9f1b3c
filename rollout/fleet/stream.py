"""The outputs of one request, from the engine that serves it to whoever answers it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from rollout.fleet.errors import EngineError
from rollout.messages import AddRequest
from rollout.outputs import TokenOutput

# A prompt token is this many times less work than an output token: it is computed in company.
PROMPT_DISCOUNT = 4


class StreamSource(Protocol):
    """What a stream asks of the engine that serves it (see EngineClient)."""

    rank: int

    def close_stream(self, stream: RequestStream) -> None:
        """Forget a request, and abort it in the engine if it still runs there."""

    def abort_choice(self, stream: RequestStream, index: int, work: int) -> None:
        """End one choice of a request in the engine, with so much work left."""


class RequestStream:
    """The outputs of one request: iterate for batches of TokenOutput; leaving the `with` block aborts the rest.

    A batch holds everything that came since the last one, so a slow reader costs one wake-up, not one a token.
    Raises EngineError where the engine dies first (found by the process's exit or the watchdog: no wait is endless),
    unless another engine can begin it again: `restarts` counts how often that happened, and what was read before
    is void then. A reader who has passed something on sets `passed_on`, and `pinned` binds it to its engine: neither
    is begun again.
    """

    def __init__(self, request: AddRequest, *, pinned: bool = False) -> None:
        self.request = request
        self.request_id = request.request_id
        self.pinned = pinned
        self.passed_on = False
        self.restarts = -1
        self.error: EngineError | None = None
        self._wake = asyncio.Event()

    def begin(self, client: StreamSource, engine_id: str) -> None:
        """All of it comes from this engine, which knows it by this id."""
        params, prompt = self.request.sampling_params, self.request.prompt_token_ids
        self.client, self.engine_id = client, engine_id
        self.restarts += 1
        self._pending: list[TokenOutput] = []
        self._left = dict.fromkeys(range(params.n), params.max_tokens or 1)
        self._prompt_work = len(prompt) // PROMPT_DISCOUNT

    @property
    def work(self) -> int:
        """What is left to compute, in output tokens, if every choice takes all that it may."""
        return self._prompt_work + sum(self._left.values())

    def put(self, output: TokenOutput) -> int:
        """Take one output from the engine; returns the work that it stands for. Of a choice that has ended, nothing
        is taken any more."""
        left = self._left.get(output.index)
        if left is None:
            return 0
        self._pending.append(output)
        self._wake.set()
        done = self._prompt_work
        self._prompt_work = 0
        if output.finish_reason is not None:
            del self._left[output.index]
            return done + left
        self._left[output.index] = left - 1
        return done + 1

    def end_choice(self, index: int) -> None:
        """End this choice here and in the engine, where that hasn't: its text has completed a stop string."""
        if index in self._left:
            self.client.abort_choice(self, index, self._left.pop(index))

    def fail(self, error: EngineError) -> None:
        """End the stream with this error, after what came before it."""
        self.error = error
        self._wake.set()

    @property
    def num_open(self) -> int:
        """How many choices have not ended."""
        return len(self._left)

    @property
    def finished(self) -> bool:
        return not self._left

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenOutput]:
        while not self._pending:
            if self.finished:
                raise StopAsyncIteration
            if self.error is not None:
                raise self.error
            self._wake.clear()
            await self._wake.wait()
        batch, self._pending = self._pending, []
        return batch

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close_stream(self)
