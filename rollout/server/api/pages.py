"""Pages for people: what the server does now (`/`), and what can be asked of it (`/docs`). Neither loads anything
from elsewhere."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import html
import json
import re
from collections.abc import AsyncGenerator
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollout.server.context import ServerDep

router = APIRouter(include_in_schema=False)

PAGES = frozenset({"/", "/live", "/docs", "/openapi.json", "/metrics"})
"""What a browser opens: there the key may come as the password that it asks for."""

# A viewer who doesn't read, or whose machine is gone, has its place for so long; one that is there connects again.
_LONGEST_S = 600.0


@router.get("/")
async def live_page() -> Response:
    """The page. It has no figures of its own: they come from /live."""
    return _page(_template())


@router.get("/live")
async def live(server: ServerDep) -> Response:
    """Server-sent events, one a second, of what the page shows. Raises a 503 for too many viewers."""
    with contextlib.ExitStack() as place:
        place.enter_context(server.live.viewer())
        return _Events(server.live.events(), place.pop_all())


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Every path of /openapi.json as a list, with what it takes and answers."""
    return _page(_listing(request.app.openapi()))


class _Events(StreamingResponse):
    """What a viewer reads; `place` is given back at the end."""

    def __init__(self, events: AsyncGenerator[bytes, None], place: contextlib.ExitStack) -> None:
        self._place = place
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_S):
                await super().__call__(scope, receive, send)


@cache
def _template() -> str:
    return resources.files("rollout.server").joinpath("live.html").read_text()


@lru_cache(maxsize=4)
def _policy(page: str) -> str:
    """A Content-Security-Policy under which nothing runs but the page's own script and style, and nothing is loaded."""
    allowed = {}
    for tag in ("script", "style"):
        digests = [hashlib.sha256(text.encode()).digest() for text in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.S)]
        allowed[tag] = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; connect-src 'self'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _page(text: str) -> Response:
    headers = {"Content-Security-Policy": _policy(text), "X-Content-Type-Options": "nosniff"}
    return Response(text, media_type="text/html", headers=headers)


def _listing(document: dict[str, Any]) -> str:
    (style,) = re.findall(r"<style>.*?</style>", _template(), re.S)
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>rollout: paths</title>", style, "<h1>Paths</h1>"]
    parts.append("<p>From <a href=openapi.json>openapi.json</a>. <a href=.>What the server does now</a>.</p>")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            told = html.escape(operation.get("description") or operation.get("summary", ""))
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{told}</p>")
            taken = [f"{given['name']} ({given['in']})" for given in operation.get("parameters", ())]
            if taken:
                parts.append(f"<p>Parameters: {html.escape(', '.join(taken))}</p>")
            bodies = {"Body": operation.get("requestBody", {}), "Answer": operation["responses"].get("200", {})}
            for what, body in bodies.items():
                for kind, content in body.get("content", {}).items():
                    parts.append(f"<p>{what} ({html.escape(kind)}): {_schema(content.get('schema', {}))}</p>")
    parts.append("<h1>Schemas</h1>")
    for name, schema in document["components"]["schemas"].items():
        shown = html.escape(json.dumps(schema, indent=1, ensure_ascii=False))
        told = html.escape(name)
        parts.append(f"<details id='{told}'><summary>{told}</summary><pre>{shown}</pre></details>")
    return "\n".join(parts)


def _schema(schema: dict[str, Any]) -> str:
    """A schema as links to those that it names."""
    names = dict.fromkeys(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(schema)))
    links = [f"<a href='#{html.escape(name)}'>{html.escape(name)}</a>" for name in names]
    return ", ".join(links) or f"<code>{html.escape(json.dumps(schema))[:500]}</code>"
