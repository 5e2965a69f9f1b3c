"""Tool calls and reasoning: what models write, in any pieces, and what is nothing of the kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.config import ReasoningParser, ServerConfig, ToolCallParser
from rollout.outputs import FinishReason
from rollout.sampling.params import ParameterError
from rollout.server.text.call_formats import CALL_FORMATS, REASONING_FORMATS, calls_schema
from rollout.server.text.calls import AnswerReader
from rollout.server.wire.answer import Answer, Delta, encode_json
from rollout.server.wire.chat import ChatCompletionRequest, ChatWriter
from tests.support.trace import count_lines

TOOLS: dict[str, Any] = {"f": {"properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}, "g": {}}
F, G = ("f", {"city": "Paris", "n": 3}), ("g", {})
ONE = '{"name": "f", "arguments": {"city": "Paris", "n": 3}}'
TWO = '{"name": "g", "parameters": {}}'
Said = tuple[str, str, list[tuple[str | None, Any]]]

XML = "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
ARGUMENTS = '{"city": "Paris", "n": 3}'

WRITTEN: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>", "Let me see.\n", [F, G]),
    ("hermes", f"<tool_call>{ONE}", "", [F]),
    ("hermes", f"<tool_call>{ONE}</tool_call>\n  And so on.  ", "\n  And so on.  ", [F]),
    ("hermes", "<tool_call>nonsense</tool_call> a < b", "<tool_call>nonsense</tool_call> a < b", []),
    ("hermes", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ("hermes", "a <tool", "a <tool", []),
    ("llama3_json", f"<|python_tag|>{ONE}; {TWO}", "", [F, G]),
    ("llama3_json", f" {ONE}", "", [F]),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("llama3_json", f"No: {ONE}", f"No: {ONE}", []),
    ("llama3_json", "{" * 5000, "{" * 5000, []),
    ("mistral", f"Yes [TOOL_CALLS][{ONE}, {TWO}]", "Yes ", [F, G]),
    ("mistral", f"[TOOL_CALLS]f{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}", "", [F, G]),
    ("qwen3_coder", f"{XML}</tool_call>\n<tool_call><function=g>\n</function></tool_call>", "", [F, G]),
    ("qwen3_coder", "<tool_call>f</tool_call>", "<tool_call>f</tool_call>", []),
    (
        "glm45",
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>n</arg_key>"
        "<arg_value>3</arg_value>\n</tool_call><tool_call>g</tool_call>",
        "",
        [F, G],
    ),
    (
        "deepseek_v3",
        f"Hm<｜tool▁calls▁begin｜>{V3.format('f', ARGUMENTS)}\n{V3.format('g', '{}')}<｜tool▁calls▁end｜>",
        "Hm",
        [F, G],
    ),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜>{V31.format('f', ARGUMENTS)}{V31.format('g', '{}')}", "", [F, G]),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|>{KIMI.format('f', ARGUMENTS)}{KIMI.format('g', '{}')}<|tool_calls_section_end|>",
        "",
        [F, G],
    ),
]


def read(pieces: Sequence[str], **reader: Any) -> Said:
    """Reasoning, content and calls."""
    made = AnswerReader(tools=TOOLS, **reader)
    parts = [*map(made.take, pieces), made.end()]
    calls: dict[int, tuple[str | None, str]] = {}
    for call in (call for part in parts for call in part.calls):
        if call.index not in calls:
            assert call.id
            assert call.name
            calls[call.index] = call.name, call.arguments
        else:
            assert call.id is None
            calls[call.index] = calls[call.index][0], calls[call.index][1] + call.arguments
    assert list(calls) == list(range(len(calls)))
    told = [(name, arguments) for name, arguments in calls.values()]
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts), told


def decoded(said: Said) -> Said:
    return said[0], said[1], [(name, json.loads(arguments)) for name, arguments in said[2]]


@pytest.mark.parametrize(("name", "text", "content", "calls"), WRITTEN)
def test_what_models_write_is_read_whole_and_letter_by_letter(
    name: str, text: str, content: str, calls: list[Any]
) -> None:
    for pieces in ([text], list(text)):
        assert decoded(read(pieces, calls=CALL_FORMATS[name])) == ("", content, calls)


def test_every_format_is_among_them() -> None:
    assert {name for name, *_ in WRITTEN} == CALL_FORMATS.keys()


THOUGHT: list[tuple[str, bool, str, str, str]] = [
    ("qwen3", False, "<think>\nhm\n</think>\n\nYes", "\nhm\n", "\n\nYes"),
    ("qwen3", True, "hm</think>Yes", "hm", "Yes"),
    ("qwen3", False, "Yes, <think>", "", "Yes, <think>"),
    ("qwen3", False, " <th", "", " <th"),
    ("qwen3", True, "hm </thi", "hm </thi", ""),
    ("deepseek_r1", False, "hm</think>Yes", "hm", "Yes"),
    ("deepseek_r1", False, "<think>hm", "hm", ""),
    ("mistral", False, "[THINK]hm[/THINK]Yes", "hm", "Yes"),
    ("seed_oss", False, "<seed:think>hm</seed:think>", "hm", ""),
    ("qwen3", False, " " * 999 + "<think>hm", "", " " * 999 + "<think>hm"),
]


@pytest.mark.parametrize(("name", "begun", "text", "reasoning", "content"), THOUGHT)
def test_reasoning_is_apart(name: str, begun: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert read(pieces, reasoning=REASONING_FORMATS[name], begun=begun) == (reasoning, content, [])


MARKS = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[",
        "]",
        "{",
        "}",
        ";",
        " ",
        "\n",
        "<",
        "a",
    ),
    *("<function=f>", "</function>", "<parameter=n>", "</parameter>", "<|python_tag|>", '"name": "f"', ONE, TWO, "g"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", V3.format("f", "{}"), KIMI.format("f", "{}")),
]


@settings(max_examples=400, deadline=None)
@given(
    text=st.lists(st.sampled_from(MARKS), max_size=12).map("".join),
    calls=st.sampled_from([None, *CALL_FORMATS.values()]),
    reasoning=st.sampled_from([None, *REASONING_FORMATS.values()]),
    begun=st.booleans(),
    data=st.data(),
)
def test_any_cut_of_any_text_gives_what_the_whole_gives(
    text: str, calls: Any, reasoning: Any, begun: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reader = {"calls": calls, "reasoning": reasoning, "begun": begun}
    whole = read([text], **reader)
    assert read(pieces, **reader) == whole
    assert read(list(text), **reader) == whole
    if calls is None and reasoning is None:
        assert whole == ("", text, [])


def test_forced_calls_are_read_from_json() -> None:
    text = f"[{ONE}, {TWO}]"
    for pieces in ([text], list(text)):
        assert decoded(read(pieces, required=True)) == ("", "", [F, G])
        assert read(pieces[:1], named="f")[2] == [("f", pieces[0])]
    assert read(list(ARGUMENTS), named="f") == ("", "", [("f", ARGUMENTS)])
    assert read([text[:-3]], required=True) == ("", text[:-3], [])
    assert read(["[1]"], required=True) == ("", "[1]", [])


@pytest.mark.parametrize("unit", ["<tool_call>", "<tool_call></tool_call>", " ", "</think>", "<", "{"])
def test_the_work_is_linear_in_the_text(unit: str) -> None:
    def steps(times: int) -> int:
        return count_lines(lambda: read(list(unit * times), calls=CALL_FORMATS["hermes"]))

    few, many = steps(200), steps(800)
    assert many < 4.5 * few


def answered(text: str, pieces: Sequence[str], config: ServerConfig, **body: Any) -> tuple[Any, list[Any]]:
    """A choice whose text is this, whole and streamed, as clients read it."""
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], tools=TOOL_LIST, **body)
    answer = Answer("id", "smol", [1], None, 1)
    stop = FinishReason.STOP
    whole = ChatWriter(request, config, [answer]).whole([(answer, Delta(0, [5], text, finish_reason=stop))])
    writer = ChatWriter(request, config, [answer])
    deltas = [Delta(0, [5], piece) for piece in pieces] + [Delta(0, [6], "", finish_reason=stop)]
    chunks = [chunk for delta in deltas for chunk in writer.chunk(answer, delta)]
    return json.loads(encode_json(whole)), [json.loads(encode_json(chunk)) for chunk in chunks]


TOOL_LIST: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()
]
PARSING = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")


def test_a_chat_tells_reasoning_and_calls_apart_whole_and_streamed() -> None:
    text = f"<think>hm</think>So:<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>"
    whole, chunks = answered(text, list(text), PARSING)
    (choice,) = whole["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hm", "hm", "So:")
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [F, G]
    assert choice["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "So:"
    streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["type"]) for call in streamed] == [(0, "function"), (1, "function")]
    assert [call["function"] for call in streamed] == functions
    assert len({call["id"] for call in streamed}) == 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_parsers_or_tools_all_of_it_is_text() -> None:
    text = f"<think>hm</think><tool_call>{ONE}</tool_call>"
    whole, chunks = answered(text, [text], ServerConfig())
    assert whole["choices"][0]["message"]["content"] == text
    assert "tool_calls" not in whole["choices"][0]["message"]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
    whole, _ = answered(text, [text], PARSING, tool_choice="none")
    assert whole["choices"][0]["message"]["content"] == f"<tool_call>{ONE}</tool_call>"


def test_a_named_call_streams_its_arguments_and_ends_with_stop() -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    whole, chunks = answered(ARGUMENTS, list(ARGUMENTS), ServerConfig(), tool_choice=choice)
    message = whole["choices"][0]["message"]
    assert (message["content"], whole["choices"][0]["finish_reason"]) == (None, "stop")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": ARGUMENTS}
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "f", "arguments": "{"}
    assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS


def test_a_forced_call_that_was_cut_off_is_text() -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    whole, _ = answered(ARGUMENTS[:-1], [], ServerConfig(), tool_choice=choice)
    message = whole["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (ARGUMENTS[:-1], None)


def test_what_a_tools_schema_refers_to_is_found_where_one_must_be_called() -> None:
    node = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
    schema: Any = {"properties": {"$ref": {"$ref": "#/$defs/node"}, "enum": {"$ref": "#"}}, "$defs": {"node": node}}
    schema["const"] = {"$ref": "#/$defs/node"}
    made = calls_schema({"first": {}, "second": schema})
    place = "#/items/anyOf/1/properties/parameters"
    moved = made["items"]["anyOf"][1]["properties"]["parameters"]
    assert moved["properties"] == {"$ref": {"$ref": f"{place}/$defs/node"}, "enum": {"$ref": place}}
    assert moved["const"] == schema["const"]
    validator = jsonschema.Draft202012Validator(made)
    del moved["const"]
    assert validator.is_valid([{"name": "second", "parameters": {"$ref": {"n": 1, "next": {"n": 2}}}}])
    assert not validator.is_valid([{"name": "second", "parameters": {"$ref": {"n": 1, "next": {"n": "2"}}}}])
    assert not validator.is_valid([{"name": "second", "parameters": {"enum": {"$ref": {"n": "x"}}}}])
    deep: Any = {}
    for _ in range(5000):
        deep = {"not": deep}
    with pytest.raises(ParameterError, match="too deeply"):
        calls_schema({"deep": deep})


def test_parsers_see_special_tokens() -> None:
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], tools=TOOL_LIST)
    for config, skips in ((PARSING, False), (ServerConfig(), True)):
        params = body.to_sampling_params()
        body.adapt(params, config)
        assert params.skip_special_tokens is skips
    with pytest.raises(ValueError, match="enable_auto_tool_choice needs a tool_call_parser"):
        ServerConfig(enable_auto_tool_choice=True)


def test_the_flags_name_every_format() -> None:
    assert set(get_args(ToolCallParser)) == CALL_FORMATS.keys()
    assert set(get_args(ReasoningParser)) == REASONING_FORMATS.keys()
