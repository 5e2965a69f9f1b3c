"""Tool calls and thinking in /v1/messages, as the `anthropic` package reads them, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.config import ServerConfig
from rollout.outputs import FinishReason
from rollout.server.wire.answer import Answer, Delta, encode_json
from rollout.server.wire.anthropic import MessagesRequest
from rollout.server.wire.messages import MessagesWriter
from tests.support.fake_engine import EOS, SAY
from tests.support.server_harness import RunningServer
from tests.support.text_server import text_server

TOOLS: Any = [
    {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {"city": {}}}},
    {"name": "time", "input_schema": {"type": "object"}},
]
PARSERS: dict[str, Any] = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2.50]}}</tool_call>'
OTHER = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
THINKING = "<think>Which city?</think>"
ASK: dict[str, Any] = {"model": "smol", "max_tokens": 300, "messages": [{"role": "user", "content": "Rain?"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with text_server(**PARSERS) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=60, max_retries=0) as made:
        yield made


def say(text: str, **fields: Any) -> dict[str, Any]:
    """The arguments of a request that the stand-in engine answers with this text."""
    return {**ASK, "tools": TOOLS, "extra_body": {"cache_salt": SAY + text, "return_token_ids": True}, **fields}


def both_ways(client: anthropic.Anthropic, asked: dict[str, Any]) -> list[Any]:
    """The message, whole and as the package puts a stream together."""
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    return [client.messages.create(**asked), streamed]


def told(message: Any) -> list[Any]:
    """The blocks, without ids."""
    fields = {"type", "text", "thinking", "name", "input"}
    return [block.model_dump(include=fields) for block in message.content]


WEATHER = {"type": "tool_use", "name": "weather", "input": {"city": "Paris", "days": [1, 2.5]}}
TIME = {"type": "tool_use", "name": "time", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "Which city?"}


@pytest.mark.parametrize(
    ("text", "blocks", "reason"),
    [
        (CALL, [WEATHER], "tool_use"),
        (f"{THINKING}So:{CALL}{OTHER}", [THOUGHT, {"type": "text", "text": "So:"}, WEATHER, TIME], "tool_use"),
        (f"{THINKING}\n{OTHER}", [THOUGHT, {"type": "text", "text": "\n"}, TIME], "tool_use"),
        (f"{THINKING}It rains.", [THOUGHT, {"type": "text", "text": "It rains."}], "end_turn"),
        ("<tool_call>nonsense</tool_call>", [{"type": "text", "text": "<tool_call>nonsense</tool_call>"}], "end_turn"),
        ("", [{"type": "text", "text": ""}], "end_turn"),
    ],
)
def test_calls_and_thinking_are_blocks(client: anthropic.Anthropic, text: str, blocks: list[Any], reason: str) -> None:
    for message in both_ways(client, say(text)):
        assert told(message) == blocks
        assert message.stop_reason == reason
        ids = [block.id for block in message.content if block.type == "tool_use"]
        assert len({*ids}) == len(ids)
        assert all(ids)


def test_a_streamed_call_comes_as_json_and_every_token_is_told(client: anthropic.Anthropic) -> None:
    text = f"{THINKING}Look:{CALL}"
    events = list(client.messages.create(**say(text), stream=True))
    starts = [event for event in events if event.type == "content_block_start"]
    kinds = [(event.index, event.content_block.type) for event in starts]
    assert kinds == [(0, "thinking"), (1, "text"), (2, "tool_use")]
    assert starts[2].content_block.input == {}
    deltas: list[Any] = [event for event in events if event.type == "content_block_delta"]
    assert {delta.index: delta.delta.type for delta in deltas} == {
        0: "thinking_delta",
        1: "text_delta",
        2: "input_json_delta",
    }
    pieces = [delta.delta.partial_json for delta in deltas if delta.index == 2]
    assert json.loads("".join(pieces)) == WEATHER["input"]
    assert [i for delta in deltas for i in getattr(delta, "token_ids", ())] == [*text.encode(), EOS]
    order = [event.type for event in events if event.type != "content_block_delta"]
    blocks = ["content_block_start", "content_block_stop"] * 3
    assert order == ["message_start", *blocks, "message_delta", "message_stop"]


def test_a_call_that_is_cut_off_is_text_where_it_is_whole(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "weather"}
    whole = told_by_writer('{"city": "Pa', {"tool_choice": choice}, FinishReason.LENGTH)
    assert (whole["content"], whole["stop_reason"]) == ([{"type": "text", "text": '{"city": "Pa'}], "max_tokens")
    whole = told_by_writer('{"city": "Paris"}', {"tool_choice": choice}, FinishReason.STOP)
    (block,) = whole["content"]
    assert (block["name"], block["input"], whole["stop_reason"]) == ("weather", {"city": "Paris"}, "tool_use")
    calls = json.dumps([{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"city": "Rome"}}])
    whole = told_by_writer(calls, {"tool_choice": {"type": "any"}}, FinishReason.STOP)
    called = [(block["name"], block["input"]) for block in whole["content"]]
    assert called == [("time", {}), ("weather", {"city": "Rome"})]


def told_by_writer(text: str, fields: dict[str, Any], reason: FinishReason) -> Any:
    body = MessagesRequest(max_tokens=9, messages=ASK["messages"], tools=TOOLS, **fields)
    body.check()
    answer = Answer("id", "smol", [1], None, 1)
    writer = MessagesWriter(body, ServerConfig(), [answer])
    return json.loads(encode_json(writer.whole([(answer, Delta(0, [5], text, finish_reason=reason))])))


def test_an_answer_that_must_be_a_call_has_its_form() -> None:
    def asked(choice: Any) -> Any:
        body = MessagesRequest(max_tokens=9, messages=ASK["messages"], tools=TOOLS, tool_choice=choice)
        body.check()
        assert body.structure_param == "tool_choice"
        structure = body.to_sampling_params().structured_outputs
        assert structure is not None
        return structure.json

    assert asked({"type": "tool", "name": "weather"}) == TOOLS[0]["input_schema"]
    assert [one["properties"]["name"] for one in asked({"type": "any"})["items"]["anyOf"]] == [
        {"enum": ["weather"]},
        {"enum": ["time"]},
    ]


def test_a_result_follows_its_call(client: anthropic.Anthropic) -> None:
    first: Any = client.messages.create(**say(f"{THINKING}{CALL}"))
    result: Any = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "No rain."}
    turns = [*ASK["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second: Any = client.messages.create(**say("It doesn't.", messages=turns))
    assert told(second) == [{"type": "text", "text": "It doesn't."}]
    prompt = bytes(i for i in second.prompt_token_ids if i < 256).decode()
    assert '"name": "weather"' in prompt
    assert "(Which city?)" in prompt
    assert "[tool]No rain." in prompt


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.sampled_from([THINKING, "a", " ", "<", CALL, OTHER, "<tool_call>", "</think>"]), max_size=6),
    data=st.data(),
)
def test_a_stream_says_what_the_whole_says(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    body = MessagesRequest(max_tokens=9, messages=ASK["messages"], tools=TOOLS, return_token_ids=True)
    config, answer, stop = ServerConfig(**PARSERS), Answer("id", "smol", [1], None, 1), FinishReason.STOP
    whole = MessagesWriter(body, config, [answer]).whole([(answer, Delta(0, [], text, finish_reason=stop))])
    writer = MessagesWriter(body, config, [answer])
    deltas = [Delta(0, [number], piece) for number, piece in enumerate(pieces)] + [Delta(0, [99], finish_reason=stop)]
    made = [*writer.begin(), *(event for delta in deltas for event in writer.chunk(answer, delta))]
    events = [json.loads(encode_json(event)) for event in made]
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"], said=""))
        if event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            blocks[-1]["said"] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
    streamed = [(b["type"], json.loads(b["said"]) if b["type"] == "tool_use" else b["said"]) for b in blocks]
    expected = json.loads(encode_json(whole))
    whole_blocks = [(b["type"], b.get("text", b.get("thinking", b.get("input")))) for b in expected["content"]]
    assert whole_blocks == joined(streamed)
    assert events[-1]["delta"]["stop_reason"] == expected["stop_reason"]
    assert [i for event in events for i in event.get("token_ids", ())] == [*range(len(pieces)), 99]


def joined(blocks: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """A whole message has one text, where a stream has one before each call."""
    texts = "".join(said for kind, said in blocks if kind == "text")
    rest = [block for block in blocks if block[0] != "text"]
    place = sum(kind == "thinking" for kind, _ in rest)
    return [*rest[:place], *([("text", texts)] if texts or not rest else []), *rest[place:]]
