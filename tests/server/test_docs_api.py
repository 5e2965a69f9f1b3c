"""docs/api.md: every request on the page is sent, in its order, and answered with the keys that the page shows."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.connection import run_engine
from rollout.fleet.fleet import Fleet
from rollout.server.app import create_app
from tests.support.server_harness import running_server

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
BLOCKS = re.compile(
    r"^### (?P<title>[^\n]*)$|^```sh\n(?P<curl>curl .*?)\n```(?:\n\n```(?P<kind>json|text)\n(?P<shown>.*?)\n```)?",
    re.M | re.S,
)


@dataclass
class Example:
    """One request of the page, under its heading, and the answer below it."""

    heading: str
    method: str
    path: str
    headers: dict[str, str]
    body: str | None
    shown: Any


def read(curl: str, heading: str, kind: str | None, shown: str) -> Example:
    method, headers, body, url = None, {}, None, ""
    words = iter(shlex.split(curl.replace("\\\n", " "))[1:])
    for word in words:
        match word:
            case "-s":
                pass
            case "-X":
                method = next(words)
            case "-H":
                name, _, value = next(words).partition(": ")
                headers[name] = value
            case "-d":
                body = next(words)
            case _:
                url = word
    parts = urlsplit(url)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    answer = json.loads(shown) if kind == "json" else shown
    return Example(heading, method or ("GET" if body is None else "POST"), path, headers, body, answer)


def examples() -> Iterator[Example]:
    heading = ""
    for block in BLOCKS.finditer(TEXT):
        if block["title"]:
            heading = block["title"]
        else:
            yield read(block["curl"], heading, block["kind"], block["shown"] or "")


EXAMPLES = list(examples())


@pytest.fixture(scope="module")
def answers(smollm2: Path) -> list[httpx.Response]:
    """What a live server answers to the page from top to bottom."""
    config = ServerConfig(served_model_name="smol", enable_scale_out=True)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "num_threads": 1, "enable_sleep_mode": True}
    with (
        running_server(config, model=str(smollm2), target=run_engine, **options) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        return [
            client.request(
                example.method,
                example.path,
                headers=example.headers,
                content=example.body and example.body.replace("path/to/model", str(smollm2)),
            )
            for example in EXAMPLES
        ]


def keys(value: Any) -> Any:
    """The nested keys, in order; the first of a list of objects stands for all."""
    if isinstance(value, dict):
        random = r"[0-9a-f]{16}"  # the id of an update
        return [("id" if re.fullmatch(random, key) else key, keys(item)) for key, item in value.items()]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [keys(value[0])]
    return None


def parts(text: str) -> list[Any]:
    """The keys of the first and the last event of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [keys(events[0]), keys(events[-1])]


@pytest.mark.smollm2
@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=lambda i: f"{i}-{EXAMPLES[i].heading}")
def test_the_answer_is_as_shown(answers: list[httpx.Response], number: int) -> None:
    example, answer = EXAMPLES[number], answers[number]
    assert answer.status_code == 200, answer.text
    if not example.shown:
        assert not answer.content
    elif isinstance(example.shown, str) and "data: {" in example.shown:
        assert parts(answer.text) == parts(example.shown)
    elif isinstance(example.shown, str):
        assert all(re.sub(r"[\d.]+$", "", line) in answer.text for line in example.shown.splitlines()[:-1])
    else:
        assert keys(answer.json()) == keys(example.shown)


@pytest.mark.parametrize("example", {e.heading: e for e in EXAMPLES}.values(), ids=lambda e: e.heading)
def test_the_last_request_under_a_heading_is_its_own(example: Example) -> None:
    assert example.heading == f"{example.method} {example.path.partition('?')[0]}"


def test_every_endpoint_is_on_the_page() -> None:
    config = ServerConfig(enable_scale_out=True, skip_tokenizer_init=True)
    document = create_app(Fleet(EngineConfig()), EngineConfig(), config).openapi()
    there = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    headings = set(re.findall(r"^### ((?:GET|POST) .*)$", TEXT, re.MULTILINE))
    assert headings == there
    refused = {"POST /init_broadcaster", "POST /update_weights_from_tensor", "POST /update_weights_from_ipc"}
    beside_a_trainer = {
        *("POST /init_weights_update_group", "POST /destroy_weights_update_group", "POST /collective_rpc"),
        *("POST /update_weights_from_distributed", "POST /end_weight_update", "POST /pull_weights"),
    }
    adapters = {f"POST {at}{verb}load_lora_adapter" for at in ("/v1/", "/") for verb in ("", "un")}  # need a folder
    assert there - {example.heading for example in EXAMPLES} == refused | beside_a_trainer | adapters
