"""What most tests of the server start from. A file whose server must be another one defines its own `server`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support import text_server
from tests.support.server_harness import RunningServer
from tests.support.smollm2 import ANSWER, QUESTION, chat_prompt, greedy


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server that speaks text, over the fake engine."""
    with text_server.text_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    """Connected to `server`."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> tuple[list[int], list[int], list[float]]:
    """A chat's prompt ids, transformers' greedy answer to it, and the logprobs of the answer."""
    prompt = chat_prompt(smollm2, QUESTION)
    ids, text, logprobs = greedy(smollm2, prompt, 12)
    assert text == ANSWER
    return prompt, ids, logprobs
