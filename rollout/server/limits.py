"""How large a request may be and how slowly it may come: without limits, a few clients could hold all memory."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class BodyLimit:
    """ASGI middleware: answers 413 to a body of more than `max_bytes`, as soon as that much of it has been announced
    or has come, and 408 to one whose next part keeps it waiting for `timeout_s`."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = next((value for name, value in scope.get("headers", ()) if name == b"content-length"), b"")
        announced = int(length) if length.isdigit() else 0
        received, complete = 0, False

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # all that is left to come is the client's leaving
                return await receive()
            if announced > self._max_bytes:
                raise self._too_large()
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await receive()
            except TimeoutError:
                reason = f"The next part of the body did not come within {self._timeout_s:g} s: send it without breaks."
                raise HTTPException(408, reason, headers={"Connection": "close"}) from None
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> HTTPException:
        message = f"The body is larger than {self._max_bytes} bytes (--max-body-bytes): send less in one request."
        return HTTPException(413, message, headers={"Connection": "close"})


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
