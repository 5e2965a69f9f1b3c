"""Who may ask: API keys and, without any, no page of another site.

Every path is guarded but the liveness probes; keys are compared in constant time and never logged.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import ipaddress
import os
from collections.abc import Collection, Mapping, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.server.errors import ApiError, error_response

PROBES = frozenset({"/health", "/liveness", "/ping"})
_MAX_SHOWN = 200
_PASSWORD = 'Basic realm="rollout: any name, and the API key as password", charset="UTF-8"'
ENVIRONMENT = ("ROLLOUT_API_KEY", "VLLM_API_KEY")


def api_keys(flags: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """The keys of the flags; without any, those of the environment."""
    return list(flags) or [environment[name] for name in ENVIRONMENT if environment.get(name)]


class BearerAuth:
    """ASGI middleware: answers 401 to a request without one of `keys`, unless its path is in `open_paths`.

    The key is a bearer token, or an `x-api-key` header as Anthropic's clients send it; where one of `pages` is read,
    also the password (RFC 7617) that a browser asks its user for. A browser adds that to whatever any site sends here,
    so it counts nowhere else.

    Whether the request carried a key is left in `request.state.authenticated` (true where no key is configured), for
    the one open path that does less without it.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        open_paths: Collection[str] = PROBES,
        pages: Collection[str] = (),
    ) -> None:
        self._app = app
        # Digests have one length: comparing them tells nothing about a key's.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._open_paths, self._pages = frozenset(open_paths), frozenset(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # behind a prefix, such as Ray Serve's
        is_page = scope["method"] == "GET" and path in self._pages
        authenticated = not self._digests or self._has_key(scope, is_page)
        scope.setdefault("state", {})["authenticated"] = authenticated
        if authenticated or path in self._open_paths:
            await self._app(scope, receive, send)
            return
        message = "This server needs a key: send one that it was started with as `Authorization: Bearer KEY`."
        refusal = ApiError(401, message, headers={"WWW-Authenticate": _PASSWORD if is_page else "Bearer"})
        await error_response(refusal)(scope, receive, send)

    def _has_key(self, scope: Scope, is_page: bool) -> bool:
        headers = dict(reversed(scope["headers"]))  # of several, the first counts
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        sent = [token.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()]
        if is_page and scheme.lower() == b"basic":
            with contextlib.suppress(ValueError):
                sent.append(base64.b64decode(token.strip(), validate=True).partition(b":")[2])
        digests = [hashlib.sha256(key).digest() for key in sent]
        matches = [hmac.compare_digest(digest, known) for digest in digests for known in self._digests]
        return any(matches)  # of all of them, always: how long it takes tells nothing


class SiteGuard:
    """ASGI middleware for a server without keys: answers 403 to requests that a web page of another site has sent.

    A browser says whose page sends a request that changes anything (Sec-Fetch-Site, or Origin). With `loopback` the
    name that the server is called by must be one of this machine as well, else a site could have its own name resolved
    to it. Hosts in `allowed` pass both ("*": all do), and so does whatever sends none of these headers.

    Source: the order of checks is that of Go's http.CrossOriginProtection.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str], *, loopback: bool) -> None:
        self._app = app
        self._allowed = frozenset(allowed)
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["authenticated"] = True  # there is no key to send
        refused = self._refused(scope) if scope["type"] == "http" and "*" not in self._allowed else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        message = f"{refused} may not use this server, which has no key: start it with --allowed-hosts or --api-key."
        await error_response(ApiError(403, message))(scope, receive, send)

    def _refused(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host, origin, site = headers.get("host", ""), headers.get("origin"), headers.get("sec-fetch-site")
        name = _host_name(f"//{host}")
        if self._loopback and host and not is_loopback(name) and name not in self._allowed:
            return f"The host name {host[:_MAX_SHOWN]!r}"
        if scope["method"] in ("GET", "HEAD", "OPTIONS") or site in ("same-origin", "none"):
            return None
        if (origin is None and site is None) or _host_name(origin or "") in self._allowed:
            return None
        same = site is None and origin in (f"http://{host}", f"https://{host}")
        return None if same else f"A page of another site ({(origin or site or '')[:_MAX_SHOWN]!r})"


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is one of this machine's own, whoever resolves it."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
