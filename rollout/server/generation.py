"""What every endpoint that generates has in common: checking a request, reading its outputs, answering.

`prepare` turns a prompt and sampling parameters into a `Generation`, which yields `Delta`s once it has been entered;
`answer` and `EventStream` send what an endpoint makes of them, and end the work of a client that has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from fastapi import Request, Response
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollout.fleet.stream import RequestStream
from rollout.messages import AddRequest, EngineReady
from rollout.outputs import FinishReason, TokenLogprob, TokenOutput, WeightVersionSpan, mask_ids
from rollout.sampling.params import SamplingParams
from rollout.server.context import Server
from rollout.server.text.detokenizer import TextReader, Vocabulary
from rollout.server.text.spans import SpanBuilder
from rollout.server.text.tokenizer import bad_words_token_ids
from rollout.server.wire.errors import ApiError, as_api_error, error_body

CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is left to read it


@dataclass(slots=True)
class Delta:
    """What is new of one choice since its last Delta.

    `text` is None where no text was asked for. One entry a token: `logprobs` (the sampled token first, then what else
    the engine was asked for; None where no logprobs were), `sampling_mask` (ids of the support, None for an unfiltered
    step; None where all are). `routed_experts` are rows as in TokenOutput, None where the model has none. `spans` cover
    the whole output, and come once the choice has ended.
    """

    index: int
    token_ids: list[int]
    text: str | None
    logprobs: list[list[TokenLogprob]] | None
    sampling_mask: list[array[int] | None] | None
    routed_experts: bytes | None
    spans: list[WeightVersionSpan] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class _Choice:
    """Collects the outputs of one choice, up to the token that completes a stop string."""

    def __init__(self, index: int, *, with_logprobs: bool, reader: TextReader | None, with_text: bool) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._with_logprobs = with_logprobs
        self._reader = reader
        self._with_text = with_text
        self._spans = SpanBuilder()
        self._clear()

    def _clear(self) -> None:
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[list[TokenLogprob]] = []
        self._masks: list[array[int] | None] = []
        self._routed: list[bytes] = []

    def add(self, output: TokenOutput) -> bool:
        """Take the next output; one that comes after the end is ignored. True where it completes a stop string."""
        if self.finish_reason is not None:
            return False
        if output.token_id is not None:
            self.num_tokens += 1
            self._token_ids.append(output.token_id)
            self._masks.append(None if output.sampling_mask is None else mask_ids(output.sampling_mask))
            if self._with_logprobs and output.logprobs:
                self._logprobs.append(output.logprobs)
            if output.routed_experts is not None:
                self._routed.append(output.routed_experts)
            self._spans.append(output)
        self.finish_reason, self._stop_reason = output.finish_reason, output.stop_reason
        if self._reader is None:
            return False
        text = self._reader.read(output.token_id, output.finish_reason)
        if self._with_text:
            self._text.append(text)
        if self._reader.stop is None:
            return False
        self.finish_reason, self._stop_reason = FinishReason.STOP, self._reader.stop
        return True

    @property
    def has_news(self) -> bool:
        """Whether a Delta would say anything."""
        return bool(self._token_ids or self.finish_reason is not None or any(self._text))

    def take(self) -> Delta:
        """What came since the last call."""
        delta = Delta(
            index=self.index,
            token_ids=self._token_ids,
            text="".join(self._text) if self._with_text else None,
            logprobs=self._logprobs if self._with_logprobs else None,
            sampling_mask=self._masks if any(mask is not None for mask in self._masks) else None,
            routed_experts=b"".join(self._routed) if self._routed else None,
            spans=self._spans.spans() if self.finish_reason is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )
        self._clear()
        return delta


class Generation:
    """One request. Enter it (`with`) to send it to the engine, then iterate for lists of Delta, or `collect`.

    A list holds at most one Delta a choice: a reader who falls behind gets several tokens at once. A choice whose text
    completes a stop string ends there, also in the engine. Leaving the `with` block aborts what still runs, without
    which its blocks would stay taken. Raises EngineError where the engine fails; where another one begins the request
    again, what `collect` has read so far is dropped. `rank` pins it to one engine.
    `prompt_logprobs` (one entry a prompt token, the first None) is set with the first Delta, where asked for.
    """

    def __init__(
        self,
        server: Server,
        request: AddRequest,
        vocabulary: Vocabulary | None,
        *,
        with_text: bool,
        rank: int | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.params = request.sampling_params
        self.vocabulary = vocabulary
        self._server, self._request, self._rank = server, request, rank
        self._with_text = with_text
        self._stream: RequestStream | None = None
        self._begin()

    def _begin(self) -> None:
        self._restarts = 0 if self._stream is None else self._stream.restarts
        self.prompt_logprobs: list[list[TokenLogprob] | None] | None = None
        self.cached_tokens = 0
        vocabulary, params = self.vocabulary, self.params
        self._choices = [
            _Choice(
                index,
                with_logprobs=params.logprobs is not None,
                reader=TextReader(vocabulary, self.prompt_token_ids, params) if vocabulary is not None else None,
                with_text=self._with_text,
            )
            for index in range(params.n)
        ]

    @property
    def prompt_tokens(self) -> int:
        """For usage: the length of the prompt, however many choices."""
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        """For usage: the tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self._choices)

    def __enter__(self) -> Self:
        self._stream = self._server.engine.submit(self._request, self._rank)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._stream is not None
        self._stream.__exit__(kind, error, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        while True:
            touched = await self._advance()
            deltas = [choice.take() for choice in touched if choice.has_news]
            if deltas:
                assert self._stream is not None
                self._stream.passed_on = True
                return deltas

    async def collect(self) -> list[Delta]:
        """The whole of every choice, in order."""
        with contextlib.suppress(StopAsyncIteration):
            while True:
                await self._advance()
        return [choice.take() for choice in self._choices]

    async def _advance(self) -> list[_Choice]:
        """Read what the engine has said; the choices it spoke of. Raises StopAsyncIteration at the end."""
        assert self._stream is not None, "enter the generation first"
        touched: dict[int, _Choice] = {}
        outputs = await anext(self._stream)
        if self._stream.restarts != self._restarts:
            self._begin()
        for output in outputs:
            choice = touched[output.index] = self._choices[output.index]
            if choice.add(output):
                self._stream.end_choice(output.index)
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
            if output.prompt_logprobs is not None:
                self.prompt_logprobs = output.prompt_logprobs
        return list(touched.values())


async def prepare(
    server: Server,
    *,
    token_ids: list[int],
    params: SamplingParams,
    headers: Headers,
    detokenize: bool,
    request_id_prefix: str = "generate-tokens-",
    request_id: str | None = None,
    model: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
) -> Generation:
    """Check every value of a request, and make it ready to be entered. `detokenize`: its Deltas shall have text.

    The id is the prefix and the X-Request-Id header, else `request_id`, else a random one. `params` are resolved in
    place. Raises ApiError, ParameterError or EngineError, naming the field.
    """
    server.check_accepting()
    server.check_model(model)
    check_cache_salt(cache_salt)
    rank = data_parallel_rank(server, headers)
    check_prompt(server, token_ids)
    resolve_params(server, params, len(token_ids))
    vocabulary = None
    if detokenize:
        vocabulary = await require_vocabulary(server, "Text needs")
    elif params.stop:
        vocabulary = await require_vocabulary(server, "Stop strings need", param="stop")
    bad_words = []
    if params.bad_words:
        bad_words = await asyncio.to_thread(bad_words_token_ids, await server.tokenizer.get(), params.bad_words)
    check_satisfiable(params, bad_words, server.engine.info)
    request = AddRequest(
        request_id=make_request_id(headers, request_id, request_id_prefix),
        prompt_token_ids=token_ids,
        sampling_params=params,
        bad_words_token_ids=bad_words,
        priority=priority,
        cache_salt=cache_salt,
        return_sampling_mask=server.config.return_sampling_mask,
    )
    server.engine.check_room(params.n)  # again when it is entered; here a stream can still be a plain 503
    return Generation(server, request, vocabulary, with_text=detokenize, rank=rank)


def make_request_id(headers: Headers, request_id: str | None, prefix: str) -> str:
    """The id that a client reads, and may abort by: its own, behind what kind of request it is, or a random one."""
    return f"{prefix}{headers.get('x-request-id') or request_id or uuid.uuid4().hex[:16]}"


async def require_vocabulary(server: Server, what: str, *, param: str | None = None) -> Vocabulary:
    """The tokenizer's vocabulary; a 400 where the server has no tokenizer, for `what` ("Text needs") one."""
    vocabulary = await server.tokenizer.vocabulary()
    if vocabulary is None:
        message = f"{what} a tokenizer, and this server has none: use token ids, and stop_token_ids."
        raise ApiError(400, message, param=param)
    return vocabulary


def check_cache_salt(cache_salt: str | None) -> None:
    """Raise a 400 for a salt that is no salt."""
    if cache_salt == "":
        message = "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"
        raise ApiError(400, message, param="cache_salt")


def data_parallel_rank(server: Server, headers: Headers) -> int | None:
    """The rank that a client pins its request to; a header that is no integer counts as absent.

    Raises a 400 for a rank that isn't there.
    """
    try:
        rank = int(headers["x-data-parallel-rank"])
    except (KeyError, ValueError):
        return None
    if not 0 <= rank < (size := len(server.engine.ranks)):
        raise ApiError(400, f"data_parallel_rank {rank} is out of range [0, {size}).")
    return rank


def check_prompt(server: Server, token_ids: list[int]) -> None:
    """Raise a 400 for no id, for one outside the vocabulary, and for a prompt that leaves no room for one token."""
    if not token_ids:
        raise ApiError(400, "The decoder prompt cannot be empty.", param="prompt")
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


def resolve_params(server: Server, params: SamplingParams, prompt_len: int) -> None:
    """Check the values, then fill in and cut to what this model and prompt allow. Raises ParameterError."""
    info = server.engine.info
    params.validate(
        vocab_size=info.vocab_size,
        max_logprobs=server.engine_config.max_logprobs,
        max_num_seqs=info.max_num_seqs,
    )
    room = info.max_model_len - prompt_len
    params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    params.min_tokens = min(params.min_tokens, params.max_tokens)
    params.top_k = min(params.top_k, info.vocab_size)


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


async def answer(request: Request, work: Coroutine[object, object, bytes]) -> Response:
    """The JSON that `work` makes, as one answer. A client that leaves first cancels it, and with it its generations."""
    answering = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(answering.result(), media_type="application/json")
    finally:
        answering.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def sse(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return sse(error_body(error))


class EventStream(StreamingResponse):
    """Server-sent events, ready-made, and `last` after them. An exception of `events` is told by an `error_event`.

    When the client leaves, `events` is closed at once, and with it the generations that it has entered.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        last: bytes = sse(b"[DONE]"),
        error_event: Callable[[ApiError], bytes] = _error_event,
    ) -> None:
        self._events = _guarded(events, last, error_event)
        super().__init__(self._events, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _guarded(
    events: AsyncGenerator[bytes, None], last: bytes, error_event: Callable[[ApiError], bytes]
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                yield event
        except Exception as error:
            yield error_event(as_api_error(error))
    yield last
