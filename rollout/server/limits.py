"""How large a body may be: without a limit one endless request would fill the memory."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 64 << 20


class BodyLimit:
    """ASGI middleware: answers 413 to a body of more than `max_bytes`, as soon as that much of it has come."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, f"The body is larger than {self._max_bytes} bytes: send less in one request.")
            return message

        await self._app(scope, limited, send)
