"""How large a request may be and how slowly it may come: without limits, a few clients could hold all memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rollout.messages import EngineReady
from rollout.server.auth import PROBES
from rollout.server.errors import ApiError, as_api_error, error_response
from rollout.server.wire.body import Body

_ONE_PROMPT = frozenset(
    {
        "/inference/v1/generate",
        "/v1/chat/completions",
        "/v1/chat/completions/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    }
)
# Bodies up to this size are parsed on the event loop.
_SMALL_BYTES = 1 << 20
# What a body may hold beside its prompt: stop strings, bad words, tools, escapes.
_OTHER_BYTES = 8 << 20
# Of a token id or a logit bias in JSON, or of a token's text; most take far less.
_BYTES_A_TOKEN = 64
_MAX_CONTAINERS = 1_000_000
_MAX_STRINGS = 2_000_000
# Of lists and objects of more than _SMALL_BYTES, each of which is gone through once more.
_MAX_DEPTH = 16
# How long the rest of a body that nobody reads may come before its connection is closed, in seconds.
_LINGER_S = 1.0


def prompt_bytes(model: EngineReady) -> int:
    """More bytes than a body of one prompt takes that this model can continue, with lists of all its ids beside it."""
    return _OTHER_BYTES + _BYTES_A_TOKEN * (model.max_model_len + model.vocab_size)


class BodyLimit:
    """ASGI middleware: answers 413 to a body of more than `max_bytes`, or `prompt_bytes()` on a path that takes one
    prompt, as soon as that much of it has been announced or has come, and 408 to one whose next part keeps it waiting
    for `timeout_s`.

    A connection whose request is answered before all of its body has come is closed: within a second, in which the
    rest is read and dropped, since a client that still sends might not see the answer.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float, prompt_bytes: Callable[[], int]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._prompt_bytes = prompt_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        length = headers.get(b"content-length", b"")
        announced = int(length) if length.isdigit() else 0
        received, complete, answered = 0, not announced and b"transfer-encoding" not in headers, False
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        limit = min(self._max_bytes, self._prompt_bytes()) if path in _ONE_PROMPT else self._max_bytes

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # all that is left to come is the client's leaving
                return await receive()
            if announced > limit:
                raise self._too_large(limit)
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await receive()
            except TimeoutError:
                reason = f"The next part of the body did not come within {self._timeout_s:g} s: send it without breaks."
                raise HTTPException(408, reason) from None
            received += len(message.get("body", b""))
            if received > limit:
                raise self._too_large(limit)
            complete = not message.get("more_body", False)
            return message

        async def answering(message: Message) -> None:
            nonlocal answered
            answered = True
            if message["type"] == "http.response.start" and not complete:
                if b"expect" not in headers:  # such a client sends nothing before it is told to
                    with contextlib.suppress(TimeoutError, HTTPException):
                        async with asyncio.timeout(min(_LINGER_S, self._timeout_s)):
                            while not complete:
                                await limited()
                if not complete:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        try:
            await self._app(scope, limited, answering)
        except Exception as error:
            if not answered:  # else the app's outermost middleware answers, past `answering`
                await error_response(as_api_error(error))(scope, limited, answering)
            raise  # to the log

    def _too_large(self, limit: int) -> HTTPException:
        why = "--max-body-bytes" if limit == self._max_bytes else "no prompt of the model's length takes more"
        return HTTPException(413, f"The body is larger than {limit} bytes ({why}): send less in one request.")


async def require_json(request: Request) -> None:
    """Raise a 400 for a body that doesn't call itself JSON."""
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and content_type != "application/json":
        raise RequestValidationError(["Unsupported Media Type: Only 'application/json' is allowed"])


async def known_query(request: Request) -> None:
    """Raise a 400 for a query parameter that the path doesn't have, where it changes anything: /pause?mod=keep would
    end what runs."""
    if request.method == "GET" or request.url.path in PROBES:
        return
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = [field.alias for field in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            message = f"{name[:64]!r} is no query parameter of {route.path}: {takes}."
            raise ApiError(400, message, param=name[:64])


class BoundedRoute(APIRoute):
    """A route for bodies of JSON, the large ones of which are looked through, parsed and validated on a thread: it
    takes long. In pieces, between which other threads run, since Python's lock is held for each."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, which reads bodies this way."""
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            await require_json(request)
            reading = _BoundedRequest(request.scope, request.receive)
            try:
                body = await reading.body()
            except ClientDisconnect:
                return Response()  # which nobody reads
            if len(body) > _SMALL_BYTES:
                model: EngineReady = request.app.state.server.model
                most = 2 * max(model.max_model_len, model.vocab_size)
                reading.large = await asyncio.to_thread(self._read, body, most)
            return await handle(reading)

        return bounded

    def _read(self, body: bytes, max_numbers: int) -> Any:
        """The body as the model of it that this route takes, or as JSON where it takes single fields."""
        parsed, field = parse_large(body, max_numbers), self.body_field
        kind = None if field is None else field.field_info.annotation
        if field is None or not (isinstance(kind, type) and issubclass(kind, Body)):
            return parsed
        made, errors = field.validate(parsed, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        return made  # which pydantic, asked again, takes as it is


class _BoundedRequest(Request):
    large: Any = None

    async def json(self) -> Any:
        return await super().json() if self.large is None else self.large


def parse_large(body: bytes, max_numbers: int) -> Any:
    """What this JSON says. Raises a 400 before it is parsed where a list would hold more than `max_numbers` numbers,
    or the body too many lists, objects and strings, and RequestValidationError where it is no JSON.

    Parsed, such a list would take ten times the memory of its text, and its parsing would hold Python's lock for long.
    """
    numbers = containers = quotes = 0
    for start in range(0, len(body), _SMALL_BYTES):
        piece = body[start : start + _SMALL_BYTES]
        containers += piece.count(b"[") + piece.count(b"{")
        quotes += piece.count(b'"')
        if containers > _MAX_CONTAINERS or quotes // 2 > _MAX_STRINGS:
            most = f"{_MAX_CONTAINERS} lists and objects, or {_MAX_STRINGS} strings"
            raise HTTPException(400, f"The body holds more than {most}: send less in one request.")
        # Within a list of numbers there is no quote and no bracket, and a comma after each of them but the last.
        for place, run in enumerate(piece.replace(b"]", b'"').split(b'"')):
            numbers = run.count(b",") + (numbers if place == 0 else 0)
            if numbers >= max_numbers:
                raise HTTPException(
                    400, f"The body holds a list of more than {max_numbers} numbers; no list of ids here is so long."
                )
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found = {"type": "json_invalid", "loc": ("body",), "msg": f"JSON decode error: {error}", "input": {}}
        raise RequestValidationError([found]) from None


def _decode(data: bytes | msgspec.Raw, depth: int = 0) -> Any:
    """What this JSON says; where it is large, part by part."""
    if len(data) <= _SMALL_BYTES:
        return msgspec.json.decode(data)
    if depth == _MAX_DEPTH:
        raise HTTPException(400, f"The body nests large lists and objects {depth} deep: no request does.")
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw] | list[msgspec.Raw])
    except msgspec.ValidationError:  # a text, or a number
        return msgspec.json.decode(data)
    if isinstance(parts, dict):
        return {name: _decode(part, depth + 1) for name, part in parts.items()}
    return [_decode(part, depth + 1) for part in parts]


class PromptProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, which closes a connection whose request line and headers take more than `timeout_s` to come.

    It also tells every request of a closed connection that its client has gone: uvicorn tells the last one only, so
    that an earlier, pipelined one would run on. `timeout_s` is a class attribute: uvicorn makes the instances.
    """

    timeout_s: float
    _timer: asyncio.TimerHandle | None = None
    _open: tuple[RequestResponseCycle, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # has stopped the timer that ends idle connections, also for a mere line break
        if self._timer is None and self.cycle is not None and self.cycle.response_complete and not self.pipeline:
            self._await_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_headers()

    def on_headers_complete(self) -> None:
        self._cancel()
        super().on_headers_complete()
        self._open = (*(cycle for cycle in self._open if not cycle.response_complete), self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)
        self._leave()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)  # and close, whatever is still to be answered
        self._leave()

    def _leave(self) -> None:
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _await_headers(self) -> None:
        self._cancel()
        self._timer = self.loop.call_later(self.timeout_s, self._drop)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self) -> None:
        # An answer to an earlier, pipelined request may still be on its way: it ends with the connection.
        self.transport.abort()
