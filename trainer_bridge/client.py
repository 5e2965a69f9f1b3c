"""A client for token-in/token-out servers: `RolloutClient`, and `AsyncRolloutClient` with the same methods.

What both do is written once, as functions that yield the requests to send and are sent the answers (`_Steps`).

Speaks the protocol of `/inference/v1/generate` and its control endpoints; what only a `rollout` server says (a span's
epoch and cache state) is None elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeAlias, TypeVar

import httpx

from trainer_bridge.wire import (
    Choice,
    EventParser,
    Generation,
    Patience,
    RolloutError,
    Span,
    check_success,
    connection_errors,
    generate_body,
    not_taken,
    parse_generation,
    read_answer,
)

__all__ = ["AsyncRolloutClient", "Choice", "Generation", "PauseMode", "RolloutClient", "RolloutError", "Span"]

PauseMode = Literal["abort", "wait", "keep"]
SleepTag = Literal["weights", "kv_cache"]

_GENERATE = "/inference/v1/generate"
_CONNECT_TIMEOUT_S = 10.0
_POLL_S = 0.1

P = ParamSpec("P")
T = TypeVar("T")
Pieces = TypeVar("Pieces")
"""What iterates over the pieces of an answer."""


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))


def _call(method: str, path: str, body: Any = None, timeout_s: float | None = None) -> dict[str, Any]:
    """A request, as the arguments of httpx's `request`."""
    timeout = {} if timeout_s is None else {"timeout": _timeout(timeout_s)}
    return {"method": method, "url": path, "json": body, **timeout}


_Steps: TypeAlias = Generator[dict[str, Any] | float, Any, T]
"""A method of the clients: it yields requests (`_call`), whose answers' JSON it is sent, and seconds to sleep."""


def _request(method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> _Steps[Any]:
    """The JSON that any path answers (None for an empty body)."""
    return (yield _call(method, path, body, timeout_s))


def _post(path: str, body: Any = None, *, timeout_s: float | None = None) -> _Steps[Any]:
    """POST `body` as JSON, or nothing, and return the JSON answer."""
    return (yield _call("POST", path, body, timeout_s))


def _generate(
    prompt_token_ids: Sequence[int],
    sampling_params: Mapping[str, Any] | None = None,
    *,
    n: int | None = None,
    request_id: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> _Steps[Generation]:
    """Continue a prompt (a list, numpy array or tensor of ids). Cancelling an awaited call aborts the request.

    `extra` holds further fields of the body, such as `priority` or `cache_salt`. Raises ValueError for a name that no
    sampling parameter has; what only another server knows goes, with the rest, into `extra={"sampling_params": …}`.
    """
    body = generate_body(prompt_token_ids, sampling_params, n, request_id, extra, stream=False)
    return parse_generation((yield _call("POST", _GENERATE, body)), body["token_ids"])


def _abort(request_ids: Sequence[str]) -> _Steps[int]:
    """End these requests (ids as answers bear them) with finish_reason "abort". Returns how many were running."""
    return int((yield _call("POST", "/abort_requests", {"request_ids": list(request_ids)}))["aborted"])


def _abort_all() -> _Steps[int]:
    """End every running request. Returns how many."""
    return int((yield _call("POST", "/abort_requests", {}))["aborted"])


def _pause(mode: PauseMode = "keep") -> _Steps[None]:
    """Stop generating: `keep` freezes running requests, `wait` lets them finish first, `abort` ends them."""
    yield _call("POST", f"/pause?mode={mode}")


def _resume() -> _Steps[None]:
    """Generate again."""
    yield _call("POST", "/resume")


def _is_paused() -> _Steps[bool]:
    """Whether the server is paused."""
    return bool((yield _call("GET", "/is_paused"))["is_paused"])


def _sleep(level: int = 1, mode: PauseMode = "abort") -> _Steps[None]:
    """Have the server give the memory of weights and KV cache back. Level 1 keeps the weights in host memory, level 2
    loses them until the next push; `mode` is that of a pause for what runs."""
    yield _call("POST", f"/sleep?level={level}&mode={mode}")


def _wake_up(tags: Sequence[SleepTag] = ("weights", "kv_cache")) -> _Steps[None]:
    """Have it take the memory of these parts again: it generates once both are awake."""
    yield _call("POST", "/wake_up?" + "&".join(f"tags={tag}" for tag in tags))


def _is_sleeping() -> _Steps[bool]:
    """Whether anything of the server is asleep."""
    return bool((yield _call("GET", "/is_sleeping"))["is_sleeping"])


def _models() -> _Steps[list[dict[str, Any]]]:
    """The models served, as /v1/models lists them."""
    return list((yield _call("GET", "/v1/models"))["data"])


def _weight_info() -> _Steps[dict[str, Any]]:
    """The weights that serve: `weight_version`, and on a rollout server epoch, state and last error."""
    return dict((yield _call("GET", "/weight_info")))


def _health() -> _Steps[bool]:
    """Whether the server answers and its engine is alive."""
    try:
        yield _call("GET", "/health", None, _CONNECT_TIMEOUT_S)
    except RolloutError:
        return False
    return True


def _wait_until_ready(timeout_s: float = 120.0) -> _Steps[None]:
    """Return once the server is healthy. Raises the last RolloutError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            yield _call("GET", "/health", None, _CONNECT_TIMEOUT_S)
            return
        except RolloutError:
            if time.monotonic() >= deadline:
                raise
        yield _POLL_S


def _blocking(steps: Callable[P, _Steps[T]]) -> Callable[Concatenate[RolloutClient, P], T]:
    @functools.wraps(steps)
    def method(self: RolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        walk, answer, failed = steps(*args, **kwargs), None, None
        while True:
            try:
                step = walk.throw(failed) if failed else walk.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = failed = None
            try:
                if isinstance(step, float):
                    time.sleep(step)
                else:
                    answer = self._answer_to(step)
            except RolloutError as error:
                failed = error

    return method


def _awaited(steps: Callable[P, _Steps[T]]) -> Callable[Concatenate[AsyncRolloutClient, P], Coroutine[Any, Any, T]]:
    @functools.wraps(steps)
    async def method(self: AsyncRolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        walk, answer, failed = steps(*args, **kwargs), None, None
        while True:
            try:
                step = walk.throw(failed) if failed else walk.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = failed = None
            try:
                answer = await (asyncio.sleep(step) if isinstance(step, float) else self._answer_to(step))
            except RolloutError as error:
                failed = error

    return method


class _Client(ABC, Generic[Pieces]):
    """What both clients are made of.

    `timeout_s` bounds each wait for bytes from the server: for an answer that isn't streamed, the whole generation.
    `headers` go with every request, such as `X-data-parallel-rank`. A request that the server could not take (429, 503,
    nobody listens) is sent again for `retry_s`, after the Retry-After that it names.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
        retry_s: float = 0.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key
        self.timeout_s = timeout_s
        self.headers = dict(headers or {})
        self._patience = functools.partial(Patience, retry_s, not_taken)
        # As many connections as there are requests, no retries, no environment proxies.
        self._options: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {**self.headers, **({"Authorization": f"Bearer {api_key}"} if api_key else {})},
            "timeout": _timeout(timeout_s),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
            "trust_env": False,
        }
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Make the connections, with `_options`."""

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int | None = None,
        request_id: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Pieces:
        """`generate` in pieces, as they are sampled. Closing the iterator early aborts the request."""
        return self._stream(generate_body(prompt_token_ids, sampling_params, n, request_id, extra, stream=True))

    @abstractmethod
    def _stream(self, body: dict[str, Any]) -> Pieces: ...


class RolloutClient(_Client[Generator[Generation, None, None]]):
    """Talks to one server. Every method raises RolloutError. Safe to share between threads; close it, or use `with`."""

    def _open(self) -> None:
        self._http = httpx.Client(**self._options)

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    request = _blocking(_request)
    post = _blocking(_post)
    generate = _blocking(_generate)
    abort = _blocking(_abort)
    abort_all = _blocking(_abort_all)
    pause = _blocking(_pause)
    resume = _blocking(_resume)
    is_paused = _blocking(_is_paused)
    sleep = _blocking(_sleep)
    wake_up = _blocking(_wake_up)
    is_sleeping = _blocking(_is_sleeping)
    models = _blocking(_models)
    weight_info = _blocking(_weight_info)
    health = _blocking(_health)
    wait_until_ready = _blocking(_wait_until_ready)

    def _stream(self, body: dict[str, Any]) -> Generator[Generation, None, None]:
        patience, events = self._patience(), EventParser(body["token_ids"])
        while True:
            try:
                with connection_errors(self.base_url), self._http.stream("POST", _GENERATE, json=body) as response:
                    if not response.is_success:
                        response.read()
                        check_success(response)
                    for data in response.iter_bytes():
                        yield from events.feed(data)
                events.check_done(self.base_url)
                return
            except RolloutError as error:
                if events.began:
                    raise
                time.sleep(patience.pause_s(error))

    def _answer_to(self, request: dict[str, Any]) -> Any:
        patience = self._patience()
        while True:
            try:
                with connection_errors(self.base_url):
                    return read_answer(self._http.request(**request))
            except RolloutError as error:
                time.sleep(patience.pause_s(error))


class AsyncRolloutClient(_Client[AsyncGenerator[Generation, None]]):
    """`RolloutClient` for asyncio: the same methods, awaited; `stream` is an async generator."""

    def _open(self) -> None:
        self._http = httpx.AsyncClient(**self._options)

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    request = _awaited(_request)
    post = _awaited(_post)
    generate = _awaited(_generate)
    abort = _awaited(_abort)
    abort_all = _awaited(_abort_all)
    pause = _awaited(_pause)
    resume = _awaited(_resume)
    is_paused = _awaited(_is_paused)
    sleep = _awaited(_sleep)
    wake_up = _awaited(_wake_up)
    is_sleeping = _awaited(_is_sleeping)
    models = _awaited(_models)
    weight_info = _awaited(_weight_info)
    health = _awaited(_health)
    wait_until_ready = _awaited(_wait_until_ready)

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[Generation, None]:
        patience, events = self._patience(), EventParser(body["token_ids"])
        while True:
            try:
                with connection_errors(self.base_url):
                    async with self._http.stream("POST", _GENERATE, json=body) as response:
                        if not response.is_success:
                            await response.aread()
                            check_success(response)
                        async for data in response.aiter_bytes():
                            for generation in events.feed(data):
                                yield generation
                events.check_done(self.base_url)
                return
            except RolloutError as error:
                if events.began:
                    raise
                await asyncio.sleep(patience.pause_s(error))

    async def _answer_to(self, request: dict[str, Any]) -> Any:
        patience = self._patience()
        while True:
            try:
                with connection_errors(self.base_url):
                    return read_answer(await self._http.request(**request))
            except RolloutError as error:
                await asyncio.sleep(patience.pause_s(error))
