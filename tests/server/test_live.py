"""The page at / and /docs: what they show, to whom, what they keep, and that nothing a client says becomes markup."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.fleet import Fleet
from rollout.server import live
from rollout.server.api.pages import PAGES, _listing
from rollout.server.app import create_app
from rollout.server.errors import ApiError
from rollout.server.text.tokenizer import BackgroundTokenizer
from tests.support import fake_engine, text_server
from tests.support.chromium import chromium_page
from tests.support.server_harness import RunningServer
from tests.support.wait import eventually

HTML = (Path(live.__file__).parent / "live.html").read_text()
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

Events = Iterator[dict[str, Any]]


@contextlib.contextmanager
def watching(server: RunningServer, **headers: str) -> Iterator[Events]:
    """What the page is told, event after event."""
    with httpx.stream("GET", f"{server.url}/live", headers=headers, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


def until(events: Events, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first event of which this holds, of a minute's."""
    return next(event for event, _ in zip(events, range(60), strict=False) if holds(event))


def generate(server: RunningServer) -> None:
    body = {"token_ids": [fake_engine.RELABEL, 65], "sampling_params": {"max_tokens": 6}}
    httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=60).raise_for_status()


def push(server: RunningServer, label: str) -> None:
    httpx.post(f"{server.url}/finish_weight_update", json={"weight_version": label}, timeout=60).raise_for_status()


def test_a_push_and_an_answer_are_seen(server: RunningServer) -> None:
    with watching(server) as events:
        before = next(events)
        (engine,) = before["engines"]
        assert (before["model"], before["error"], before["answer"]) == ("smol", None, None)
        assert (engine["rank"], engine["up"], engine["cache"], engine["restarts"]) == (0, True, 0.25, 0)
        assert before["staleness"] == [2, 4]
        epoch = before["weights"]["epoch"] + 1
        push(server, HOSTILE)
        pushed = until(events, lambda event: event["weights"]["epoch"] == epoch)
        assert (pushed["weights"]["version"], pushed["weights"]["bytes"]) == (HOSTILE, 4096 * epoch)
        generate(server)
        answered = until(events, lambda event: event["answer"] is not None)
        spans = [(s["version"], s["epoch"], s["kv"], s["tokens"]) for s in answered["answer"]]
        assert spans == [("v7", 0, "current", 2), ("v8", 1, "current", 1), ("v8", 1, "mixed", 3)]
        assert not any("text" in span for span in answered["answer"]), "nobody has asked for it to be shown"
        assert until(events, lambda event: event["engines"][0].get("tokens_per_s") == 0)


def test_texts_are_shown_only_where_a_flag_says_so() -> None:
    with text_server.text_server(live_answers=True) as server, watching(server) as events:
        next(events)
        generate(server)
        answered = until(events, lambda event: event["answer"] is not None)
        assert [span["text"] for span in answered["answer"]] == ["BC", "D", "EFG"]


def test_requests_are_logged_where_a_flag_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rollout.server.generation")
    with text_server.text_server(enable_log_requests=True) as server:
        generate(server)
        body = {
            "token_ids": [fake_engine.RELABEL, 65],
            "request_id": "two\nlines",
            "sampling_params": {"max_tokens": 600},
        }
        with httpx.stream("POST", f"{server.url}/inference/v1/generate", json={**body, "stream": True}) as left:
            next(left.iter_lines())
        eventually(lambda: len(caplog.records) == 2)
    first, second = (record.__dict__["fields"] for record in caplog.records)
    told = {name: first[name] for name in ("prompt_tokens", "completion_tokens", "choices", "choices_ended", "engine")}
    assert told == {"prompt_tokens": 2, "completion_tokens": 6, "choices": 1, "choices_ended": 1, "engine": 0}
    assert first["weight_version"] == "v8"
    assert "2 prompt tokens, 6 sampled, 1 of 1 choices ended" in caplog.messages[0]
    assert second["request_id"].endswith("two\nlines")
    assert "\n" not in caplog.messages[1]
    with text_server.text_server() as server:
        generate(server)
    assert len(caplog.records) == 2


def test_pages_are_behind_the_key_which_a_browser_sends_as_a_password() -> None:
    with text_server.text_server(api_key=("secret",)) as server:
        for path in sorted(PAGES - {"/live"}):
            refused = httpx.get(f"{server.url}{path}", timeout=60)
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"].startswith("Basic realm=")
            for auth in (("anyone", "secret"), ("", "secret")):
                assert httpx.get(f"{server.url}{path}", auth=auth, timeout=60).status_code == 200
            assert httpx.get(f"{server.url}{path}", auth=("secret", "guess"), timeout=60).status_code == 401
        assert httpx.get(f"{server.url}/live", timeout=60).status_code == 401
        with watching(server, Authorization="Bearer secret") as events:
            assert next(events)["error"] is None
        for method, path in (("POST", "/pause"), ("GET", "/v1/models"), ("POST", "/live")):
            refused = httpx.request(method, f"{server.url}{path}", auth=("anyone", "secret"), timeout=60)
            assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        broken = httpx.get(f"{server.url}/", headers={"Authorization": "Basic %%%"}, timeout=60)
        assert broken.status_code == 401


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_loads_nothing_and_runs_nothing_but_its_own(server: RunningServer, path: str) -> None:
    answer = httpx.get(f"{server.url}{path}", timeout=60)
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert re.findall(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", answer.text) == []


def test_the_page_sets_what_it_is_told_as_text_only() -> None:
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(|setAttribute", HTML) == []


def test_docs_lists_every_path_and_escapes_what_it_shows() -> None:
    app = create_app(Fleet(EngineConfig()), EngineConfig(), ServerConfig(skip_tokenizer_init=True))
    document = app.openapi()
    page = _listing(document)
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"<h2><code>{method.upper()} {path}</code></h2>" in page
    for name in document["components"]["schemas"]:
        assert f"<summary>{name}</summary>" in page
    operation = {"description": HOSTILE, "responses": {}, "parameters": [{"name": HOSTILE, "in": "query"}]}
    page = _listing({"paths": {HOSTILE: {"get": operation}}, "components": {"schemas": {HOSTILE: {"title": HOSTILE}}}})
    assert "<img" not in page
    assert "<script" not in page


class Engines:
    """A fleet of one, which counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.ranks = [SimpleNamespace(rank=0, restarts=0)]

    async def stats(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        self.asked += 1
        return {0: {"free_blocks": 1, "num_blocks": 2}}

    async def call(self, method: str, *, timeout_s: float) -> dict[str, Any]:
        return {"weight_version": "v", "epoch": 0}


def test_viewers_share_the_work_and_leave_nothing_behind() -> None:
    engines: Any = Engines()

    async def look() -> None:
        told = {"model": "smol", "paused": None, "stopping": False}
        page = live.LivePage(engines, BackgroundTokenizer("", enabled=False), lambda: told, shows_answers=True)
        with contextlib.ExitStack() as places:
            for _ in range(live.MAX_VIEWERS):
                places.enter_context(page.viewer())
            with pytest.raises(ApiError, match="16 viewers"), page.viewer():
                pass
            seen = await asyncio.gather(*(anext(page.events()) for _ in range(live.MAX_VIEWERS)))
            assert len(set(seen)) == 1
            assert engines.asked == 1
            page.answer = live.ShownAnswer([], [1, 2])
        assert (page.viewers, page.answer, page._ticking) == (0, None, None)
        with page.viewer():
            await anext(page.events())
        assert engines.asked == 2
        told["stopping"] = True
        with page.viewer():
            assert [event async for event in page.events()] == []

    asyncio.run(look())


@pytest.mark.long
@pytest.mark.chromium
def test_chromium_shows_a_hostile_label_as_text() -> None:
    with text_server.text_server(live_answers=True) as server, chromium_page() as page:
        page.open(server.url)
        eventually(lambda: page.evaluate("document.querySelectorAll('#engines td.label').length") == 1, 60)
        push(server, HOSTILE)
        eventually(lambda: page.evaluate("document.querySelector('#pushes td.label')?.textContent") == HOSTILE, 60)
        generate(server)
        colours = "[...document.querySelectorAll('#answer span')].map((e) => [e.textContent, e.style.borderColor])"
        eventually(lambda: page.evaluate(colours), 60)
        first, second, third = page.evaluate(colours)
        assert [first[0], second[0], third[0]] == ["BC", "D", "EFG"]
        assert first[1] != second[1] == third[1] != ""
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.evaluate("document.title") == "rollout"
        page.open(f"{server.url}/docs")
        eventually(lambda: page.evaluate("document.querySelectorAll('h2').length") > 20, 60)
