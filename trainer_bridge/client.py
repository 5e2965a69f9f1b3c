"""A client for token-in/token-out servers: `RolloutClient`, and `AsyncRolloutClient` with the same methods.

Speaks the protocol of `/inference/v1/generate` and its control endpoints; what only a `rollout` server says (a span's
epoch and cache state) is None elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

PauseMode = Literal["abort", "wait", "keep"]

_GENERATE = "/inference/v1/generate"
_CONNECT_TIMEOUT_S = 10.0
_POLL_S = 0.1


class RolloutError(Exception):
    """The server refused a request (`status` is HTTP's), could not be reached, or broke off its answer (`status` 0)."""

    def __init__(self, status: int, type: str, message: str, param: str | None = None) -> None:
        super().__init__(f"{type} ({status}): {message}" if status else message)
        self.status = status
        self.type = type
        self.message = message
        self.param = param


@dataclass(frozen=True)
class Span:
    """Output tokens [start, end) were sampled by the weights of this label and, on a rollout server, epoch."""

    version: str
    start: int
    end: int
    epoch: int | None = None
    kv: Literal["current", "mixed"] | None = None


@dataclass(frozen=True)
class Choice:
    """One continuation, or in a stream what is new of it (`spans` then come with the last piece, for the whole).

    `logprobs` are those of `token_ids`, one each, where asked for. `sampling_mask` holds for each token the ids it was
    drawn from, None where that step was unfiltered; None as a whole where no step was filtered.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float] | None
    sampling_mask: list[list[int] | None] | None
    spans: list[Span]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class Generation:
    """An answer, or one event of a stream. `raw` is its JSON: top logprobs, usage, prompt logprobs."""

    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]
    raw: dict[str, Any] = field(repr=False, compare=False, default_factory=dict)


def _generate_body(
    prompt_token_ids: Sequence[int],
    sampling_params: Mapping[str, Any] | None,
    n: int | None,
    request_id: str | None,
    extra: Mapping[str, Any] | None,
    stream: bool,
) -> dict[str, Any]:
    params = dict(sampling_params or {})
    if n is not None:
        params["n"] = n
    body: dict[str, Any] = {"token_ids": list(prompt_token_ids), "sampling_params": params, **(extra or {})}
    if request_id is not None:
        body["request_id"] = request_id
    if stream:
        body["stream"] = True
    return body


def _parse_choice(choice: dict[str, Any]) -> Choice:
    logprobs = choice.get("logprobs")
    return Choice(
        index=choice["index"],
        token_ids=choice["token_ids"],
        logprobs=[entry["logprob"] for entry in logprobs["content"]] if logprobs else None,
        sampling_mask=choice.get("sampling_mask"),
        spans=[
            Span(s["version"], s["start"], s["end"], s.get("epoch"), s.get("kv"))
            for s in choice.get("weight_versions") or ()
        ],
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
    )


def _parse_generation(answer: dict[str, Any], prompt_token_ids: Sequence[int]) -> Generation:
    choices = [_parse_choice(choice) for choice in answer["choices"]]
    return Generation(answer["request_id"], list(prompt_token_ids), choices, answer)


class _EventParser:
    """Server-sent events from the bytes of a stream. (httpx's `iter_lines` would also split at U+2028 in a string.)"""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.done = False
        self._prompt_token_ids = prompt_token_ids
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Generation]:
        """The chunks that these bytes complete. Raises RolloutError for an error event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for event in (line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")):
            if event == b"[DONE]":
                self.done = True
                return
            answer = json.loads(event)
            if "error" in answer:
                raise _error(answer["error"], 0)
            yield _parse_generation(answer, self._prompt_token_ids)

    def check_done(self, base_url: str) -> None:
        """Raise RolloutError where the stream ended early."""
        if not self.done:
            raise RolloutError(0, "TransportError", f"{base_url}: the stream ended before [DONE]")


def _error(error: Any, status: int) -> RolloutError:
    if not isinstance(error, dict):
        error = {"message": str(error)}
    code = error.get("code")
    return RolloutError(
        code if isinstance(code, int) else status,
        error.get("type") or "HTTPError",
        error.get("message") or "no message",
        error.get("param"),
    )


def _check(response: httpx.Response) -> httpx.Response:
    """The response, read, if it is a success. Raises RolloutError with what the server said otherwise."""
    if response.is_success:
        return response
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": response.text[:500] or response.reason_phrase, "type": "HTTPError"}
    raise _error(error, response.status_code)


def _answer(response: httpx.Response) -> Any:
    """The JSON of a success, None for an empty one."""
    content = _check(response).content
    try:
        return json.loads(content) if content else None
    except ValueError:
        raise RolloutError(0, "ProtocolError", f"{response.url} answered no JSON: {response.text[:200]!r}") from None


def _lost(base_url: str, error: httpx.HTTPError) -> RolloutError:
    return RolloutError(0, "TransportError", f"{base_url}: {type(error).__name__}: {error}")


def _abort_body(request_ids: Sequence[str] | None) -> dict[str, Any]:
    return {} if request_ids is None else {"request_ids": list(request_ids)}


def _connection(
    base_url: str, api_key: str | None, timeout_s: float, headers: Mapping[str, str] | None
) -> dict[str, Any]:
    """Arguments of an httpx client: as many connections as there are requests, no retries, no environment proxies."""
    return {
        "base_url": base_url,
        "headers": {**(headers or {}), **({"Authorization": f"Bearer {api_key}"} if api_key else {})},
        "timeout": _timeout(timeout_s),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
        "trust_env": False,
    }


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))


class RolloutClient:
    """Talks to one server. Every method raises RolloutError. Safe to share between threads; close it, or use `with`.

    `timeout_s` bounds each wait for bytes from the server: for an answer that isn't streamed, the whole generation.
    `headers` go with every request, such as `X-data-parallel-rank`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key
        self.timeout_s = timeout_s
        self._http = httpx.Client(**_connection(self.base_url, api_key, timeout_s, headers))

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def request(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The JSON that any path answers (None for an empty body)."""
        try:
            response = self._http.request(method, path, json=body, timeout=_timeout(timeout_s or self.timeout_s))
        except httpx.HTTPError as error:
            raise _lost(self.base_url, error) from error
        return _answer(response)

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """POST `body` as JSON, or nothing, and return the JSON answer."""
        return self.request("POST", path, body, timeout_s=timeout_s)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int | None = None,
        request_id: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Continue a prompt. `extra` holds further fields of the body, such as `priority` or `cache_salt`."""
        body = _generate_body(prompt_token_ids, sampling_params, n, request_id, extra, stream=False)
        return _parse_generation(self.post(_GENERATE, body), prompt_token_ids)

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int | None = None,
        request_id: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Generator[Generation, None, None]:
        """The same in pieces, as they are sampled. Closing the iterator early aborts the request."""
        body = _generate_body(prompt_token_ids, sampling_params, n, request_id, extra, stream=True)
        events = _EventParser(prompt_token_ids)
        try:
            with self._http.stream("POST", _GENERATE, json=body) as response:
                if not response.is_success:
                    response.read()
                    _check(response)
                for data in response.iter_bytes():
                    yield from events.feed(data)
        except httpx.HTTPError as error:
            raise _lost(self.base_url, error) from error
        events.check_done(self.base_url)

    def abort(self, request_ids: Sequence[str]) -> int:
        """End these requests (ids as answers bear them) with finish_reason "abort". Returns how many were running."""
        return int(self.post("/abort_requests", _abort_body(request_ids))["aborted"])

    def abort_all(self) -> int:
        """End every running request. Returns how many."""
        return int(self.post("/abort_requests", _abort_body(None))["aborted"])

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating: `keep` freezes running requests, `wait` lets them finish first, `abort` ends them."""
        self.post(f"/pause?mode={mode}")

    def resume(self) -> None:
        """Generate again."""
        self.post("/resume")

    def is_paused(self) -> bool:
        """Whether the server is paused."""
        return bool(self.request("GET", "/is_paused")["is_paused"])

    def models(self) -> list[dict[str, Any]]:
        """The models served, as /v1/models lists them."""
        return list(self.request("GET", "/v1/models")["data"])

    def weight_info(self) -> dict[str, Any]:
        """The weights that serve: `weight_version`, and on a rollout server epoch, state and last error."""
        return dict(self.request("GET", "/weight_info"))

    def health(self) -> bool:
        """Whether the server answers and its engine is alive."""
        try:
            self.request("GET", "/health", timeout_s=_CONNECT_TIMEOUT_S)
        except RolloutError:
            return False
        return True

    def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        """Return once the server is healthy. Raises the last RolloutError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.request("GET", "/health", timeout_s=_CONNECT_TIMEOUT_S)
                return
            except RolloutError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_POLL_S)


class AsyncRolloutClient:
    """`RolloutClient` for asyncio: the same methods, awaited; `stream` is an async generator."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key
        self.timeout_s = timeout_s
        self._http = httpx.AsyncClient(**_connection(self.base_url, api_key, timeout_s, headers))

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The JSON that any path answers (None for an empty body)."""
        try:
            response = await self._http.request(method, path, json=body, timeout=_timeout(timeout_s or self.timeout_s))
        except httpx.HTTPError as error:
            raise _lost(self.base_url, error) from error
        return _answer(response)

    async def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """POST `body` as JSON, or nothing, and return the JSON answer."""
        return await self.request("POST", path, body, timeout_s=timeout_s)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int | None = None,
        request_id: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Continue a prompt. Cancelling the call aborts the request."""
        body = _generate_body(prompt_token_ids, sampling_params, n, request_id, extra, stream=False)
        return _parse_generation(await self.post(_GENERATE, body), prompt_token_ids)

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int | None = None,
        request_id: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Generation, None]:
        """The same in pieces, as they are sampled. Closing the iterator early aborts the request."""
        body = _generate_body(prompt_token_ids, sampling_params, n, request_id, extra, stream=True)
        events = _EventParser(prompt_token_ids)
        try:
            async with self._http.stream("POST", _GENERATE, json=body) as response:
                if not response.is_success:
                    await response.aread()
                    _check(response)
                async for data in response.aiter_bytes():
                    for generation in events.feed(data):
                        yield generation
        except httpx.HTTPError as error:
            raise _lost(self.base_url, error) from error
        events.check_done(self.base_url)

    async def abort(self, request_ids: Sequence[str]) -> int:
        """End these requests with finish_reason "abort". Returns how many were running."""
        return int((await self.post("/abort_requests", _abort_body(request_ids)))["aborted"])

    async def abort_all(self) -> int:
        """End every running request. Returns how many."""
        return int((await self.post("/abort_requests", _abort_body(None)))["aborted"])

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop generating: `keep` freezes running requests, `wait` lets them finish first, `abort` ends them."""
        await self.post(f"/pause?mode={mode}")

    async def resume(self) -> None:
        """Generate again."""
        await self.post("/resume")

    async def is_paused(self) -> bool:
        """Whether the server is paused."""
        return bool((await self.request("GET", "/is_paused"))["is_paused"])

    async def models(self) -> list[dict[str, Any]]:
        """The models served, as /v1/models lists them."""
        return list((await self.request("GET", "/v1/models"))["data"])

    async def weight_info(self) -> dict[str, Any]:
        """The weights that serve."""
        return dict(await self.request("GET", "/weight_info"))

    async def health(self) -> bool:
        """Whether the server answers and its engine is alive."""
        try:
            await self.request("GET", "/health", timeout_s=_CONNECT_TIMEOUT_S)
        except RolloutError:
            return False
        return True

    async def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        """Return once the server is healthy. Raises the last RolloutError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self.request("GET", "/health", timeout_s=_CONNECT_TIMEOUT_S)
                return
            except RolloutError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_POLL_S)
