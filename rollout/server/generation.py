"""One running request: its outputs from the engine, token by token, as what is new of each choice."""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections.abc import Iterable
from itertools import groupby
from types import TracebackType
from typing import Self

import numpy as np

from rollout.fleet.stream import RequestStream
from rollout.messages import AddRequest
from rollout.outputs import FinishReason, KVState, RoutingShape, TokenOutput, WeightVersionSpan, mask_ids
from rollout.sampling.params import SamplingParams
from rollout.server.context import ServerContext
from rollout.server.latency import RequestClock, RequestTiming
from rollout.server.live import ShownAnswer
from rollout.server.text.detokenizer import TextReader, Vocabulary
from rollout.server.wire.answer import Answer, Delta

logger = logging.getLogger(__name__)

Stamp = tuple[str, int, KVState]


def weight_versions(stamps: Iterable[Stamp]) -> list[WeightVersionSpan]:
    """Group the (version, epoch, kv) stamps of a choice's output tokens, in order, into spans that tile [0, len).

    A span ends where any of the three changes: a commit that keeps its label still starts a new one. No tokens: [].
    """
    spans: list[WeightVersionSpan] = []
    start = 0
    for (version, epoch, kv), run in groupby(stamps):
        end = start + len(list(run))
        spans.append(WeightVersionSpan(version=version, start=start, end=end, epoch=epoch, kv=kv))
        start = end
    return spans


def routed_experts(rows: bytes, shape: RoutingShape) -> np.ndarray:
    """The rows of TokenOutputs, joined in order, as an array: (tokens, layers, experts per token), uint8 or uint16."""
    return np.frombuffer(rows, shape.dtype).reshape(-1, shape.num_layers, shape.num_experts_per_tok)


def _row_bytes(shape: RoutingShape | None) -> int:
    return 0 if shape is None else shape.num_layers * shape.num_experts_per_tok * np.dtype(shape.dtype).itemsize


class ChoiceReader:
    """Collects the outputs of one choice in its next Delta, up to the token that completes a stop string. `times` are
    those at which its tokens came."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        routing: RoutingShape | None,
        reader: TextReader | None,
        *,
        wants_text: bool,
        keeps_ids: bool = False,
    ) -> None:
        self.ended = False
        self.times = array("d")
        self._kept: array[int] | None = array("i") if keeps_ids else None
        self._index = index
        self._with_logprobs = params.logprobs is not None
        self._routing = routing
        self._reader = reader
        self._wants_text = wants_text
        self._stamps: list[Stamp] = []
        # Of what the engine tells of the prompt, the rows that were told with an earlier turn, in bytes.
        self._told = params.routed_experts_prompt_start * _row_bytes(routing)
        self._begin()

    def _begin(self) -> None:
        self._next = Delta(self._index, [], logprobs=[] if self._with_logprobs else None)
        self._text: list[str] = []
        self._masks: list[array[int] | None] = []
        self._routed: list[bytes] = []

    def add(self, output: TokenOutput) -> bool:
        """Take the next output of a choice that has not ended. True where it completes a stop string."""
        delta, completed = self._next, False
        if output.token_id is not None:
            delta.token_ids.append(output.token_id)
            if self._kept is not None:
                self._kept.append(output.token_id)
            self._masks.append(None if output.sampling_mask is None else mask_ids(output.sampling_mask))
            if delta.logprobs is not None and output.logprobs:
                delta.logprobs.append(output.logprobs)
            if output.routed_experts is not None:
                told = min(self._told, len(output.routed_experts))
                self._told -= told
                self._routed.append(output.routed_experts[told:])
            self._stamps.append((output.version, output.epoch, output.kv))
        delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
        if self._reader is not None:
            if self._wants_text and output.token_id is not None:
                delta.text_offsets.append(self._reader.length)
            text = self._reader.read(output.token_id, output.finish_reason)
            if self._wants_text:
                self._text.append(text)
            if completed := self._reader.stop is not None:
                delta.finish_reason, delta.stop_reason = FinishReason.STOP, self._reader.stop
        self.ended = delta.finish_reason is not None
        return completed

    @property
    def has_news(self) -> bool:
        """Whether a Delta would say anything."""
        return bool(self._next.token_ids or self._next.finish_reason is not None or any(self._text))

    def shown(self) -> ShownAnswer:
        """The whole of a choice that has ended, with its ids where they were kept."""
        return ShownAnswer(weight_versions(self._stamps), self._kept)

    def pop(self) -> Delta:
        """What came since the last call."""
        delta = self._next
        if self._wants_text:
            delta.text = "".join(self._text)
        if any(self._masks):  # a mask is never empty
            delta.sampling_mask = self._masks
        if self._routed and self._routing is not None:
            delta.routed_experts = routed_experts(b"".join(self._routed), self._routing)
        if self.ended:
            delta.weight_versions = weight_versions(self._stamps)
        self._begin()
        return delta


class Generation(Answer):
    """One request. Enter it (`with`) to send it to the engine, then iterate for lists of Delta, or `collect`.

    A list holds at most one Delta a choice: a reader who falls behind gets several tokens at once. A choice whose text
    completes a stop string ends there, also in the engine. Leaving the `with` block aborts what still runs, without
    which its blocks would stay taken. Raises EngineError where the engine fails; where another one begins the request
    again, what `collect` has read so far is dropped. `rank` pins it to one engine; choices count from `first_index`.
    """

    def __init__(
        self,
        server: ServerContext,
        request: AddRequest,
        vocabulary: Vocabulary | None,
        *,
        wants_text: bool,
        rank: int | None = None,
        first_index: int = 0,
    ) -> None:
        prompt = request.prompt_token_ids
        name = request.adapter or server.model_name
        super().__init__(request.request_id, name, prompt, vocabulary, prompt_tokens=len(prompt))
        self.weight_version = server.engine.weight_version
        self.n = request.sampling_params.n
        self._server, self._request, self._rank = server, request, rank
        self._wants_text, self.first_index = wants_text, first_index
        self._stream: RequestStream | None = None

    def _begin(self, restarts: int) -> None:
        self._restarts = restarts
        self.prompt_logprobs = None
        self.completion_tokens = self.cached_tokens = 0
        params, vocabulary = self._request.sampling_params, self.vocabulary
        reads = self._wants_text or bool(params.stop)
        self._choices = [
            ChoiceReader(
                self.first_index + index,
                params,
                self._server.model.routing,
                TextReader(vocabulary, self.prompt_token_ids, params) if reads and vocabulary is not None else None,
                wants_text=self._wants_text,
                keeps_ids=self._server.live.shows_answers,
            )
            for index in range(self.n)
        ]

    def __enter__(self) -> Self:
        self._clock = RequestClock(self._server.metrics.histograms)
        self._stream = self._server.engine.submit(self._request, self._rank)
        if self._request.adapter is not None:
            self.weight_version = self._request.adapter  # now its label
        self._begin(self._stream.restarts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._stream is not None
        self._stream.__exit__(kind, error, traceback)
        if self.completion_tokens:
            self._clock.end(self._stream.client.rank, self.prompt_tokens, [choice.times for choice in self._choices])
        if self._server.config.enable_log_requests:
            self._log()

    def _log(self) -> None:
        assert self._stream is not None
        told = {
            "request_id": self.request_id,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "choices": self.n,
            "choices_ended": sum(choice.ended for choice in self._choices),
            "seconds": round(self._clock.seconds, 3),
            "engine": self._stream.client.rank,
            "weight_version": self.weight_version,
        }
        logger.info(
            "request %(request_id)r: %(prompt_tokens)d prompt tokens, %(completion_tokens)d sampled, %(choices_ended)d "
            "of %(choices)d choices ended, %(seconds).3f s, engine %(engine)d, weights %(weight_version)r",
            told,
            extra={"fields": told},
        )

    def timing(self) -> RequestTiming | None:
        """How long the one choice took."""
        return self._clock.timing(self._choices[0].times) if self.n == 1 else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        while True:
            deltas = [choice.pop() for choice in await self._advance() if choice.has_news]
            if deltas:
                assert self._stream is not None
                self._stream.passed_on = True
                return deltas

    async def collect(self) -> list[Delta]:
        """The whole of every choice, in order."""
        with contextlib.suppress(StopAsyncIteration):
            while True:
                await self._advance()
        return [choice.pop() for choice in self._choices]

    async def _advance(self) -> list[ChoiceReader]:
        """Read what has come from the engine; the choices that it is about. Raises StopAsyncIteration at the end."""
        assert self._stream is not None, "enter the generation first"
        touched: dict[int, ChoiceReader] = {}
        outputs = await anext(self._stream)
        if self._clock.first is None:
            self._clock.read_first(self._stream.client.rank, outputs[0])
        if self._stream.restarts != self._restarts:
            self._begin(self._stream.restarts)
        now = time.monotonic()
        for output in outputs:
            self.cached_tokens = max(self.cached_tokens, min(output.cached_tokens, self.prompt_tokens))
            if output.prompt_logprobs is not None:
                self.prompt_logprobs = output.prompt_logprobs
            choice = touched[output.index] = self._choices[output.index]
            if not choice.ended:
                if output.token_id is not None:
                    self.completion_tokens += 1
                    choice.times.append(now)
                    self.weight_version = output.version
                if choice.add(output):
                    self._stream.end_choice(output.index)
                if choice.ended and self._server.live.viewers:
                    self._server.live.answer = choice.shown()
        return list(touched.values())
