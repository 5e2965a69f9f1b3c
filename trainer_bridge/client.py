"""A client for token-in/token-out servers: `RolloutClient`, and `AsyncRolloutClient` with the same methods.

What both do is written once, as coroutines. Over blocking connections these wait for nothing, and end at once.

Speaks the protocol of `/inference/v1/generate` and its control endpoints; what only a `rollout` server says (a span's
epoch and cache state) is None elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import aclosing
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar

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
        options: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {**self.headers, **({"Authorization": f"Bearer {api_key}"} if api_key else {})},
            "timeout": _timeout(timeout_s),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
            "trust_env": False,
        }
        self._open(options)

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
        body = generate_body(prompt_token_ids, sampling_params, n, request_id, extra, stream=True)
        return self._pieces(self._events(body))

    async def _ask(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """The answer's JSON, None for an empty one."""
        timeout = {} if timeout_s is None else {"timeout": _timeout(timeout_s)}
        patience = self._patience()
        while True:
            try:
                with connection_errors(self.base_url):
                    return read_answer(await self._send(method=method, url=path, json=body, **timeout))
            except RolloutError as error:
                await self._wait(patience.pause_s(error))

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[Generation, None]:
        patience, events = self._patience(), EventParser(body["token_ids"])
        while True:
            try:
                with connection_errors(self.base_url):
                    async with aclosing(self._bytes(method="POST", url=_GENERATE, json=body)) as parts:
                        async for data in parts:
                            for generation in events.feed(data):
                                yield generation
                events.check_done(self.base_url)
                return
            except RolloutError as error:
                if events.began:
                    raise
                await self._wait(patience.pause_s(error))

    # What differs: how either waits. Requests are the arguments of httpx's `request`.

    @abstractmethod
    def _open(self, options: dict[str, Any]) -> None: ...

    @abstractmethod
    async def _send(self, **request: Any) -> httpx.Response: ...

    @abstractmethod
    def _bytes(self, **request: Any) -> AsyncGenerator[bytes, None]: ...

    @abstractmethod
    async def _wait(self, seconds: float) -> None: ...

    @abstractmethod
    async def _each(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Any]: ...

    @abstractmethod
    def _pieces(self, events: AsyncGenerator[Generation, None]) -> Pieces: ...


class AsyncRolloutClient(_Client[AsyncGenerator[Generation, None]]):
    """`RolloutClient` for asyncio: the same methods, awaited; `stream` is an async generator."""

    def _open(self, options: dict[str, Any]) -> None:
        self._http = httpx.AsyncClient(**options)

    async def _send(self, **request: Any) -> httpx.Response:
        return await self._http.request(**request)

    async def _bytes(self, **request: Any) -> AsyncGenerator[bytes, None]:
        async with self._http.stream(**request) as response:
            if not response.is_success:
                await response.aread()
                check_success(response)
            async for data in response.aiter_bytes():
                yield data

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _each(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Any]:
        places = asyncio.Semaphore(concurrency)

        async def ask(body: dict[str, Any]) -> Any:
            async with places:
                return await self._ask("POST", _GENERATE, body)

        asked = [asyncio.create_task(ask(body)) for body in bodies]
        try:
            return list(await asyncio.gather(*asked))
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _pieces(self, events: AsyncGenerator[Generation, None]) -> AsyncGenerator[Generation, None]:
        return events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The JSON that any path answers (None for an empty body)."""
        return await self._ask(method, path, body, timeout_s)

    async def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """POST `body` as JSON, or nothing, and return the JSON answer."""
        return await self._ask("POST", path, body, timeout_s)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int | None = None,
        request_id: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Continue a prompt (a list, numpy array or tensor of ids). Cancelling an awaited call aborts the request.

        `extra` holds further fields of the body, such as `priority` or `cache_salt`. Raises ValueError for a name that
        no sampling parameter has; what only another server knows goes, with the rest, into
        `extra={"sampling_params": …}`.
        """
        body = generate_body(prompt_token_ids, sampling_params, n, request_id, extra, stream=False)
        return parse_generation(await self._ask("POST", _GENERATE, body), body["token_ids"])

    async def generate_many(
        self,
        prompts: Iterable[Sequence[int]],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int | None = None,
        extra: Mapping[str, Any] | None = None,
        concurrency: int = 256,
    ) -> list[Generation]:
        """`generate` for many prompts, at most `concurrency` of them at a time; the answers come in their order.

        All are checked before the first is sent. The first failure is raised: prompts that wait are then not sent any
        more, and those under way are aborted by the asynchronous client, and awaited by the blocking one.
        """
        bodies = [generate_body(prompt, sampling_params, n, None, extra, stream=False) for prompt in prompts]
        answers = await self._each(bodies, concurrency)
        return [parse_generation(answer, body["token_ids"]) for answer, body in zip(answers, bodies, strict=True)]

    async def abort(self, request_ids: Sequence[str]) -> int:
        """End these requests (ids as answers bear them) with finish_reason "abort". Returns how many were running."""
        return int((await self._ask("POST", "/abort_requests", {"request_ids": list(request_ids)}))["aborted"])

    async def abort_all(self) -> int:
        """End every running request. Returns how many."""
        return int((await self._ask("POST", "/abort_requests", {}))["aborted"])

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating: `keep` freezes running requests, `wait` lets them finish first, `abort` ends them."""
        await self._ask("POST", f"/pause?mode={mode}")

    async def resume(self) -> None:
        """Generate again."""
        await self._ask("POST", "/resume")

    async def is_paused(self) -> bool:
        """Whether the server is paused."""
        return bool((await self._ask("GET", "/is_paused"))["is_paused"])

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Have the server give the memory of weights and KV cache back. Level 1 keeps the weights in host memory, level
        2 loses them until the next push; `mode` is that of a pause for what runs."""
        await self._ask("POST", f"/sleep?level={level}&mode={mode}")

    async def wake_up(self, tags: Sequence[SleepTag] = ("weights", "kv_cache")) -> None:
        """Have it take the memory of these parts again: it generates once both are awake."""
        await self._ask("POST", "/wake_up?" + "&".join(f"tags={tag}" for tag in tags))

    async def is_sleeping(self) -> bool:
        """Whether anything of the server is asleep."""
        return bool((await self._ask("GET", "/is_sleeping"))["is_sleeping"])

    async def models(self) -> list[dict[str, Any]]:
        """The models served, as /v1/models lists them."""
        return list((await self._ask("GET", "/v1/models"))["data"])

    async def weight_info(self) -> dict[str, Any]:
        """The weights that serve: `weight_version`, and on a rollout server epoch, state and last error."""
        return dict(await self._ask("GET", "/weight_info"))

    async def health(self) -> bool:
        """Whether the server answers and its engine is alive."""
        try:
            await self._ask("GET", "/health", timeout_s=_CONNECT_TIMEOUT_S)
        except RolloutError:
            return False
        return True

    async def wait_until_ready(self, timeout_s: float = 600.0) -> None:
        """Return once the server is healthy. Raises the last RolloutError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self._ask("GET", "/health", timeout_s=_CONNECT_TIMEOUT_S)
                return
            except RolloutError:
                if time.monotonic() >= deadline:
                    raise
            await self._wait(_POLL_S)


def _at_once(work: Awaitable[T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        next(work.__await__())
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("a coroutine of a blocking client waits")


def _blocking(
    method: Callable[Concatenate[AsyncRolloutClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RolloutClient, P], T]:
    @functools.wraps(method)
    def call(self: RolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _at_once(method(self, *args, **kwargs))  # type: ignore[arg-type]  # it needs what both have

    return call


class RolloutClient(_Client[Generator[Generation, None, None]]):
    """Talks to one server. Every method raises RolloutError. Safe to share between threads; close it, or use `with`."""

    def _open(self, options: dict[str, Any]) -> None:
        self._http = httpx.Client(**options)

    async def _send(self, **request: Any) -> httpx.Response:
        return self._http.request(**request)

    async def _bytes(self, **request: Any) -> AsyncGenerator[bytes, None]:
        with self._http.stream(**request) as response:
            if not response.is_success:
                response.read()
                check_success(response)
            for data in response.iter_bytes():
                yield data

    async def _wait(self, seconds: float) -> None:
        time.sleep(seconds)

    async def _each(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Any]:
        failed = threading.Event()

        def ask(body: dict[str, Any]) -> Any:
            try:
                return None if failed.is_set() else _at_once(self._ask("POST", _GENERATE, body))
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(concurrency, "generate") as pool:  # it starts no more threads than there are bodies
            asked = [pool.submit(ask, body) for body in bodies]
            try:
                for answer in wait_for(asked, return_when=FIRST_EXCEPTION).done:
                    answer.result()
            finally:
                failed.set()
        return [answer.result() for answer in asked]

    def _pieces(self, events: AsyncGenerator[Generation, None]) -> Generator[Generation, None, None]:
        try:
            while True:
                yield _at_once(anext(events))
        except StopAsyncIteration:
            return
        finally:
            _at_once(events.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    request = _blocking(AsyncRolloutClient.request)
    post = _blocking(AsyncRolloutClient.post)
    generate = _blocking(AsyncRolloutClient.generate)
    generate_many = _blocking(AsyncRolloutClient.generate_many)
    abort = _blocking(AsyncRolloutClient.abort)
    abort_all = _blocking(AsyncRolloutClient.abort_all)
    pause = _blocking(AsyncRolloutClient.pause)
    resume = _blocking(AsyncRolloutClient.resume)
    is_paused = _blocking(AsyncRolloutClient.is_paused)
    sleep = _blocking(AsyncRolloutClient.sleep)
    wake_up = _blocking(AsyncRolloutClient.wake_up)
    is_sleeping = _blocking(AsyncRolloutClient.is_sleeping)
    models = _blocking(AsyncRolloutClient.models)
    weight_info = _blocking(AsyncRolloutClient.weight_info)
    health = _blocking(AsyncRolloutClient.health)
    wait_until_ready = _blocking(AsyncRolloutClient.wait_until_ready)
