"""Grammars of a server whose model reasons: what of an answer they leave free, in every dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_engine import SAY
from tests.support.server_harness import RunningServer
from tests.support.text_server import ok, refusal, text_server, tokenizer

MARKS = ("<think>", "</think>")
BEGIN, END = tokenizer(MARKS).encode("<think></think>")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40}
PREFILL: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
ANTHROPICS: Any = {"type": "json_schema", "schema": SCHEMA}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with text_server(added=MARKS, reasoning_parser="qwen3") as running:
        yield running


def answered_with(text: str) -> dict[str, Any]:
    """The fields of a chat whose last message is this, the assistant's, to be continued."""
    return {"messages": [*CHAT["messages"], {"role": "assistant", "content": text}], **PREFILL}


OPEN, BEGUN = {"begin": BEGIN, "end": END}, {"begin": None, "end": END}
CASES: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"json": SCHEMA}}, OPEN),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, OPEN),
    ("/v1/chat/completions", {**CHAT, **answered_with("<think>\n"), "response_format": {"type": "json_object"}}, BEGUN),
    ("/v1/chat/completions", {**CHAT, **answered_with("</think>\n"), "structured_outputs": {"regex": "a"}}, None),
    ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "required"}, OPEN),
    ("/v1/messages", {**CHAT, "output_config": {"format": ANTHROPICS}}, OPEN),
    ("/v1/completions", {"prompt": "a<think>", "structured_outputs": {"json": SCHEMA}}, BEGUN),
    ("/inference/v1/generate", {"token_ids": [97, BEGIN]}, BEGUN),
    ("/inference/v1/generate", {"token_ids": [97, BEGIN, END, 10]}, None),
    ("/inference/v1/generate", {"token_ids": [97]}, OPEN),
    ("/inference/v1/generate", {"token_ids": [97], "reasoning_ended": True}, None),
    ("/inference/v1/generate", {"token_ids": [97], "reasoning_ended": False}, BEGUN),
]


@pytest.mark.parametrize(("path", "body", "thinking"), CASES)
def test_a_grammar_holds_after_the_reasoning(
    server: RunningServer, client: httpx.Client, path: str, body: dict[str, Any], thinking: dict[str, Any] | None
) -> None:
    if "token_ids" in body:
        body = {**body, "sampling_params": {"max_tokens": 2, "structured_outputs": {"json": SCHEMA}}}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-parameters" not in answer.headers
    added = server.stats()["added"][-1]
    assert added["grammar"] is not None
    assert added["thinking"] == thinking


def test_a_request_without_a_grammar_has_none(server: RunningServer, client: httpx.Client) -> None:
    ok(client.post("/v1/chat/completions", json=CHAT))
    assert server.stats()["added"][-1]["thinking"] is None


def test_a_forced_call_may_follow_a_thought(client: httpx.Client) -> None:
    def message(said: str, **fields: Any) -> Any:
        body = {**CHAT, "tools": TOOLS, "cache_salt": SAY + said, "max_tokens": 200, **fields}
        return ok(client.post("/v1/chat/completions", json=body))["choices"][0]["message"]

    named = {"type": "function", "function": {"name": "f"}}
    for said, fields in (
        ('<think>hm</think>[{"name": "f", "parameters": {"a": 1}}]', {"tool_choice": "required"}),
        ('<think>hm</think>{"a": 1}', {"tool_choice": named}),
    ):
        told = message(said, **fields)
        assert told["reasoning_content"] == "hm"
        assert [call["function"] for call in told["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]


def test_an_answer_to_a_prompt_that_has_ended_its_reasoning_has_none(client: httpx.Client) -> None:
    fields = answered_with("<think>\n\n</think>\n\n")
    body = {**CHAT, **fields, "cache_salt": SAY + "<think> a"}
    told = ok(client.post("/v1/chat/completions", json=body))["choices"][0]["message"]
    assert (told["content"], told["reasoning"]) == ("<think> a", None)


def test_marks_of_several_tokens_are_refused_by_name() -> None:
    with (
        text_server(added=["<other>"], reasoning_parser="qwen3") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        for field, value in (("structured_outputs", {"json": SCHEMA}), ("response_format", {"type": "json_object"})):
            status, param, message = refusal(client.post("/v1/chat/completions", json={**CHAT, field: value}))
            assert (status, param) == (400, field)
            assert "'<think>' is 7 tokens" in message
        ok(client.post("/v1/chat/completions", json=CHAT))
