"""How models write tool calls and reasoning, by the names that vLLM's parsers have; `calls.py` reads texts by it.

Sources: the models' chat templates, and those parsers. A reader is linear in the text of a call, and raises ValueError
for one that isn't well formed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollout.sampling.grammar import each_schema
from rollout.sampling.params import ParameterError

Tools = Mapping[str, Mapping[str, Any]]
"""Name → the JSON schema of its arguments."""


@dataclass
class ToolCall:
    """A call that the model asks for, `arguments` as JSON; of a named tool's, more of them."""

    name: str | None
    arguments: str
    index: int = 0
    id: str | None = None


def _call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not name:
        raise ValueError("a call has a name")
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def call_from_object(found: Any) -> ToolCall:
    """A call that is an object with a name and arguments."""
    if not isinstance(found, dict) or "name" not in found:
        raise ValueError("a call is an object with a name")
    return _call(found["name"], found.get("arguments", found.get("parameters", {})))


def _json(body: str, tools: Tools) -> list[ToolCall]:
    return [call_from_object(json.loads(body))]


def _json_objects(body: str, tools: Tools) -> list[ToolCall]:
    """Objects with semicolons or white space between them."""
    decoder, calls, at = json.JSONDecoder(), list[ToolCall](), 0
    while at < len(body):
        if body[at] in "; \n\t\r":
            at += 1
            continue
        found, at = decoder.raw_decode(body, at)
        calls.append(call_from_object(found))
    return calls


def _mistral(body: str, tools: Tools) -> list[ToolCall]:
    """A list of objects, or a name and its arguments for each marker."""
    if body.lstrip().startswith("["):
        found = json.loads(body)
        return [call_from_object(item) for item in found]
    calls = []
    for part in body.split("[TOOL_CALLS]"):
        name, brace, rest = part.partition("{")
        arguments = brace + rest.strip()
        json.loads(arguments)
        calls.append(_call(name.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip(), arguments))
    return calls


def _value(text: str, schema: Any) -> Any:
    """An argument that is written without quotes where it is a string."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _properties(tools: Tools, name: str) -> Mapping[str, Any]:
    found = tools.get(name, {}).get("properties")
    return found if isinstance(found, Mapping) else {}


def _between(text: str, begin: str, end: str) -> list[str]:
    """What stands between each `begin` and the next `end`."""
    return [part.partition(end)[0] for part in text.split(begin)[1:]]


def _qwen3_coder(body: str, tools: Tools) -> list[ToolCall]:
    calls = []
    for function in _between(body, "<function=", "</function>"):
        name, closed, rest = function.partition(">")
        if not closed:
            raise ValueError("a function's name is closed")
        known, arguments = _properties(tools, name.strip()), {}
        for parameter in _between(rest, "<parameter=", "</parameter>"):
            key, _, value = parameter.partition(">")
            arguments[key.strip()] = _value(value.removeprefix("\n").removesuffix("\n"), known.get(key.strip()))
        calls.append(_call(name.strip(), arguments))
    if not calls:
        raise ValueError("a call has a function")
    return calls


def _glm45(body: str, tools: Tools) -> list[ToolCall]:
    name, *pairs = body.split("<arg_key>")
    known, arguments = _properties(tools, name.strip()), {}
    for pair in pairs:
        key, _, rest = pair.partition("</arg_key>")
        (value,) = _between(rest, "<arg_value>", "</arg_value>")
        arguments[key.strip()] = _value(value, known.get(key.strip()))
    return [_call(name.strip(), arguments)]


def _section(
    begin: str, separator: str, end: str, name_of: Callable[[str], str]
) -> Callable[[str, Tools], list[ToolCall]]:
    def read(body: str, tools: Tools) -> list[ToolCall]:
        calls = []
        for call in _between(body, begin, end):
            name, _, arguments = call.partition(separator)
            arguments = arguments.strip().removeprefix("```json").removesuffix("```").strip()
            json.loads(arguments)
            calls.append(_call(name_of(name.strip()), arguments))
        if not calls:
            raise ValueError("a section has calls")
        return calls

    return read


class CallFormat(NamedTuple):
    """How a model writes calls: from `begin` to `end`, or to the text's end. `alone`: only at the start of the text."""

    begin: str
    end: str | None
    read: Callable[[str, Tools], list[ToolCall]]
    alone: bool = False


def _deepseek_v3(body: str, tools: Tools) -> list[ToolCall]:
    calls = []
    for call in _between(body, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        name, newline, arguments = call.partition("<｜tool▁sep｜>")[2].partition("\n")
        arguments = arguments.strip().removeprefix("```json").removesuffix("```").strip()
        if not newline:
            raise ValueError("a call has arguments")
        json.loads(arguments)
        calls.append(_call(name.strip(), arguments))
    if not calls:
        raise ValueError("a section has calls")
    return calls


_V31 = _section("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", str)
_KIMI = _section(
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    lambda name: name.removeprefix("functions.").rpartition(":")[0] or name,
)

CALL_FORMATS: dict[str, CallFormat] = {
    "deepseek_v3": CallFormat("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek_v3),
    "deepseek_v31": CallFormat("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _V31),
    "glm45": CallFormat("<tool_call>", "</tool_call>", _glm45),
    "hermes": CallFormat("<tool_call>", "</tool_call>", _json),
    "kimi_k2": CallFormat("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _KIMI),
    "llama3_json": CallFormat("{", None, lambda body, tools: _json_objects("{" + body, tools), alone=True),
    "mistral": CallFormat("[TOOL_CALLS]", None, _mistral),
    "qwen3_coder": CallFormat("<tool_call>", "</tool_call>", _qwen3_coder),
}


class ReasoningFormat(NamedTuple):
    """The marks around reasoning. `always`: it has begun with the answer, also where the prompt doesn't end with it."""

    begin: str
    end: str
    always: bool = False


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "deepseek_v3": ReasoningFormat("<think>", "</think>"),
    "glm45": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}


def tools_by_name(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """The schemas of OpenAI's functions by their names; what is none is left out."""
    found = {}
    for tool in tools or ():
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            found[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return found


def calls_schema(tools: Tools) -> dict[str, Any]:
    """What an answer is that must call a tool: a list of names and arguments (vLLM's form)."""
    each = [
        {
            "type": "object",
            "properties": {
                "name": {"enum": [name]},
                "parameters": _moved(arguments_schema(schema), f"#/items/anyOf/{number}/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, (name, schema) in enumerate(tools.items())
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": each}}


def _moved(schema: Any, place: str) -> Any:
    """A schema that has moved to this place: what it refers to within itself has moved with it. Raises ParameterError
    for one that is nested too deeply."""

    def move(one: dict[str, Any]) -> dict[str, Any]:
        to = one.get("$ref")
        return one | {"$ref": place + to.removeprefix("#")} if isinstance(to, str) and to.startswith("#") else one

    try:
        return each_schema(schema, move)
    except RecursionError:
        raise ParameterError("A tool's schema is nested too deeply.", "tools") from None


def arguments_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's arguments: an object, where it says no more."""
    return dict(schema) if schema else {"type": "object"}
