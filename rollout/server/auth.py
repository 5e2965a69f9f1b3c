"""API keys. Every path is guarded but the liveness probes; keys are compared in constant time and never logged."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Collection, Mapping, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.server.errors import ApiError, error_response

PROBES = frozenset({"/health", "/ping"})
ENVIRONMENT = ("ROLLOUT_API_KEY", "VLLM_API_KEY")


def api_keys(flags: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """The keys of the flags; without any, those of the environment."""
    return list(flags) or [environment[name] for name in ENVIRONMENT if environment.get(name)]


class BearerAuth:
    """ASGI middleware: answers 401 to a request without one of `keys`, unless its path is in `open_paths`.

    The key is a bearer token, or an `x-api-key` header as Anthropic's clients send it.

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
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # behind a prefix, such as Ray Serve's
        if authenticated or path in self._open_paths:
            await self._app(scope, receive, send)
            return
        message = "This server needs a key: send one that it was started with as `Authorization: Bearer KEY`."
        refusal = ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
        await error_response(refusal)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        headers = dict(reversed(scope["headers"]))  # of several, the first counts
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        sent = [token.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()]
        digests = [hashlib.sha256(key).digest() for key in sent]
        matches = [hmac.compare_digest(digest, known) for digest in digests for known in self._digests]
        return any(matches)  # of all of them, always: how long it takes tells nothing
