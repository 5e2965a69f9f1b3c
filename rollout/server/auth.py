"""Bearer keys. Every path is guarded but the liveness probes; keys are compared in constant time and never logged."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.server.errors import ApiError, error_response

PROBES = frozenset({"/health", "/ping"})


class BearerAuth:
    """ASGI middleware: answers 401 to a request without one of `keys`, unless its path is in `open_paths`.

    Whether the request carried a key is left in `request.state.authenticated` (true where no key is configured), for
    the one open path that does less without it.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str] = PROBES) -> None:
        self._app = app
        # Digests have one length: comparing them tells nothing about a key's.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authenticated = not self._digests or self._has_key(scope)
        scope.setdefault("state", {})["authenticated"] = authenticated
        if authenticated or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        message = "This server needs a key: send the header `Authorization: Bearer KEY` with one given by --api-key."
        refusal = ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
        await error_response(refusal)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, always
        return scheme.lower() == b"bearer" and any(matches)
