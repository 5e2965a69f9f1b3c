"""`/v1/chat/completions` and `/v1/messages` over the fake engine: what prompt a chat becomes, and what is refused.

Prompts are compared with transformers' own rendering of the template that tests/text_server.py serves.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from rollout.config import ServerConfig
from rollout.server.errors import ApiError
from rollout.server.wire.answer import Answer
from rollout.server.wire.anthropic import MessagesRequest
from rollout.server.wire.messages import MessagesWriter
from tests.support import text_server
from tests.support.text_server import events, ok, refusal

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
TOKENIZER = text_server.tokenizer()
USER = {"role": "user", "content": "Hi?"}
WEATHER = {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


def chat(client: httpx.Client, *messages: Any, **more: Any) -> Any:
    body = {"messages": messages or [USER], "max_tokens": 3, "return_token_ids": True, **more}
    return ok(client.post(CHAT, json=body))


def prompt_of(answer: Any) -> str:
    return TOKENIZER.decode(answer["prompt_token_ids"])


def rendered(*messages: Any, **more: Any) -> str:
    """What transformers makes of it."""
    options = {"add_generation_prompt": not more.get("continue_final_message"), **more}
    return TOKENIZER.apply_chat_template(list(messages), tokenize=False, **options)


CHATS: list[tuple[list[Any], dict[str, Any], list[Any]]] = [
    ([USER], {}, [USER]),
    ([{"role": "system", "content": "Be brief."}, USER], {}, [{"role": "system", "content": "Be brief."}, USER]),
    (
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}],
        {},
        [{"role": "user", "content": "Hi\nyou"}],
    ),
    ([USER], {"tools": TOOLS}, [USER]),
    ([USER], {"add_generation_prompt": False}, [USER]),
    (
        [USER, {"role": "assistant", "content": "I am"}],
        {"add_generation_prompt": False, "continue_final_message": True},
        [USER, {"role": "assistant", "content": "I am"}],
    ),
    (
        [{**USER, "name": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        {},
        [USER, {"role": "assistant", "tool_calls": [CALL]}],
    ),
    (
        [{"role": "assistant", "content": "4", "reasoning_content": "2+2"}, USER],
        {},
        [{"role": "assistant", "content": "4", "reasoning_content": "2+2"}, USER],
    ),
]


@pytest.mark.parametrize(("messages", "options", "expected"), CHATS)
def test_a_chat_becomes_the_prompt_that_transformers_makes(
    client: httpx.Client, messages: list[Any], options: dict[str, Any], expected: list[Any]
) -> None:
    answer = chat(client, *messages, **options)
    assert prompt_of(answer) == rendered(*expected, **options)
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])


def test_arguments_of_a_call_are_an_object_in_the_prompt_and_stay_what_they_are_if_they_are_no_json(
    client: httpx.Client,
) -> None:
    def call(arguments: Any) -> dict[str, Any]:
        function = {"name": "weather", "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}

    assert prompt_of(chat(client, call('{"city": "Rome"}'))) == rendered(call({"city": "Rome"}))
    assert prompt_of(chat(client, call('{"city": '))) == rendered(call('{"city": '))
    assert prompt_of(chat(client, call(""))) == rendered(call({}))


def test_variables_of_the_template(client: httpx.Client) -> None:
    assert prompt_of(chat(client, chat_template_kwargs={"mood": "glad"})) == rendered(USER, mood="glad")


def test_limits_and_stops_of_a_chat(client: httpx.Client) -> None:
    # the prompt ends with "]", so the answer is ^_`abc...
    answer = chat(client, max_tokens=2, max_completion_tokens=5)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "^_`ab"
    assert choice["token_ids"] == [*b"^_`ab"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    (choice,) = chat(client, stop="`a", max_tokens=9, return_weight_versions=True)["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("^_", "`a")
    assert [(s["start"], s["end"]) for s in choice["weight_versions"]] == [(0, 4)]


def test_logprobs_of_a_chat_have_as_many_candidates_as_asked(client: httpx.Client) -> None:
    def content(**more: Any) -> Any:
        return chat(client, max_tokens=1, **more)["choices"][0]["logprobs"]["content"][0]

    def top(**more: Any) -> list[str]:
        return [candidate["token"] for candidate in content(**more)["top_logprobs"]]

    assert content(logprobs=True) == {"token": "^", "logprob": -0.5, "bytes": [94], "top_logprobs": []}
    assert top(logprobs=True, top_logprobs=2) == ["^", "\x00"]
    assert top(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True) == ["token_id:94", "token_id:0"]
    # the fake engine takes ids 0, 1, ... whatever is asked; what counts is how many reach the client
    assert top(logprob_token_ids=[7, 8]) == top(logprobs=True, logprob_token_ids=[7, 8]) == ["^", "\x00", "\x01"]
    assert chat(client)["choices"][0]["logprobs"] is None


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: httpx.Client) -> None:
    options: dict[str, Any] = {"n": 2, "max_tokens": 9, "stop": ["cd", "n"], "return_token_ids": True}
    options |= {"logprobs": True, "top_logprobs": 1, "return_weight_versions": True}
    whole = chat(client, **options)
    body = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}, **options}
    *chunks, totals = events(client.post(CHAT, json=body))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert totals["choices"] == []
    assert totals["usage"].items() <= whole["usage"].items()
    assert {chunk["id"] for chunk in chunks} == {totals["id"]}
    for choice in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        first, *rest = pieces
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["delta"]["content"] for piece in rest) == choice["message"]["content"]
        assert [i for piece in rest for i in piece["token_ids"]] == choice["token_ids"]
        assert [e for piece in rest for e in piece["logprobs"]["content"]] == choice["logprobs"]["content"]
        for key in ("finish_reason", "stop_reason", "weight_versions"):
            assert [piece.get(key) for piece in rest] == [None] * (len(rest) - 1) + [choice[key]]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"messages": []}, "body.messages", "at least 1 item"),
        ({"messages": [{"content": "a"}]}, "body.messages.0.role", "Field required"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.1.content",
            "'image_url'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "isn't in `tools`"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice", "this model has none"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice", "'required' or"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "'required' or"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS}, "tool_choice", "'no'"),
        (
            {"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}},
            "tool_choice",
            "send one",
        ),
        ({"response_format": {"type": "structural_tag"}}, "body.response_format.type", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "'json_schema' field must be provided"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}},
            "response_format",
            "send one of them",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "`logprobs` must be set to true"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "got -2"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs", "max allowed: 20"),
        ({"continue_final_message": True}, "continue_final_message", "Cannot set both"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        ({"chat_template_kwargs": {"mood": "broken"}}, "messages", "no such mood"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "surrogate"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, None, "maximum model length of 2048"),
    ],
)
def test_refusals_of_a_chat_name_the_field(
    client: httpx.Client, change: dict[str, Any], param: str | None, says: str
) -> None:
    body = json.dumps({"messages": [USER], "max_tokens": 3, **change})
    response = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    status, at, message = refusal(response)
    assert (status, at) == (400, param)
    assert says in message


def test_a_trusted_template_of_a_request_runs_in_the_sandbox() -> None:
    with (
        text_server.text_server(trust_request_chat_template=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        template = "{% for m in messages %}<{{ m.role }}>{% endfor %}"
        assert prompt_of(chat(client, chat_template=template)) == "<user>"
        for wrong, says in (
            ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "is unsafe"),
            ("{% for %}", "Expected an expression"),
            ("{{ messages[9].role.x }}", "no element 9"),
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ):
            response = client.post(CHAT, json={"messages": [USER], "chat_template": wrong})
            status, param, message = refusal(response)
            assert (status, param) == (400, "messages")
            assert says in message
        empty = client.post(CHAT, json={"messages": [USER], "chat_template": "{# nothing #}"})
        assert refusal(empty) == (400, "prompt", "The decoder prompt cannot be empty.")


def test_a_tokenizer_without_a_template_refuses_chats_and_says_so() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_server, "CHAT_TEMPLATE", None)
        with text_server.text_server() as server:
            status, _, message = refusal(httpx.post(server.url + CHAT, json={"messages": [USER]}, timeout=60))
    assert status == 400
    assert "chat_template is not set" in message


# -- /v1/messages


def message(client: httpx.Client, *messages: Any, **more: Any) -> Any:
    body = {"messages": messages or [USER], "max_tokens": 3, "return_token_ids": True, **more}
    return ok(client.post(MESSAGES, json=body))


def anthropic_events(response: httpx.Response) -> list[Any]:
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
TOOL: dict[str, Any] = {"name": "weather", "description": "of a city", "input_schema": WEATHER["parameters"]}
AS_NUMBER = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}}}
TURNS: list[tuple[list[Any], dict[str, Any], list[Any], dict[str, Any]]] = [
    ([USER], {"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, USER], {}),
    (
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}],
        {"system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "Hi\nyou"}],
        {},
    ),
    (
        [USER, {"role": "assistant", "content": "I am"}],
        {},
        [USER, {"role": "assistant", "content": "I am"}],
        {"continue_final_message": True},
    ),
    (
        [
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, USE]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Rain"}]},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        {"tools": [TOOL]},
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
            {"role": "user", "content": "And now?"},
        ],
        {"tools": TOOLS},
    ),
]


@pytest.mark.parametrize(("turns", "fields", "expected", "options"), TURNS)
def test_a_message_becomes_the_prompt_of_the_chat_that_it_stands_for(
    client: httpx.Client, turns: list[Any], fields: dict[str, Any], expected: list[Any], options: dict[str, Any]
) -> None:
    assert prompt_of(message(client, *turns, **fields)) == rendered(*expected, **options)


def test_a_message_says_of_its_tokens_what_it_is_asked(client: httpx.Client) -> None:
    asked: dict[str, Any] = {"return_weight_versions": True, "logprobs": True, "top_logprobs": 1, "max_tokens": 9}
    whole = message(client, stop_sequences=["`a"], **asked)
    assert whole["content"] == [{"type": "text", "text": "^_"}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "`a")
    assert whole["token_ids"] == [*b"^_`a"]
    assert [token["token"] for token in whole["logprobs"]["content"]] == ["^", "_", "`", "a"]
    assert [(s["start"], s["end"]) for s in whole["weight_versions"]] == [(0, 4)]
    assert whole["usage"] == {"input_tokens": len(whole["prompt_token_ids"]), "output_tokens": 4}

    body = {"messages": [USER], "stream": True, "stop_sequences": ["`a"], "return_token_ids": True, **asked}
    start, block, *deltas, block_end, end, stop = anthropic_events(client.post(MESSAGES, json=body))
    assert start["message"]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert (block["type"], block_end["type"], stop["type"]) == (
        "content_block_start",
        "content_block_stop",
        "message_stop",
    )
    assert "".join(delta["delta"]["text"] for delta in deltas) == "^_"
    assert [i for delta in deltas for i in delta["token_ids"]] == whole["token_ids"]
    assert [e for delta in deltas for e in delta["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "`a"}
    assert (end["usage"], end["weight_versions"]) == (whole["usage"], whole["weight_versions"])


def test_a_plain_message_has_anthropics_fields_only(client: httpx.Client) -> None:
    plain = ok(client.post(MESSAGES, json={"messages": [USER], "max_tokens": 3}))
    assert list(plain) == ["id", "type", "role", "content", "model", "stop_reason", "usage"]
    assert plain["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content", "'image'"),
        ({"system": [IMAGE]}, "system", "'image'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
            "messages.0.content",
            "'image'",
        ),
        ({"messages": []}, "body.messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "is empty"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "body.messages.0.role", "'user'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "isn't in `tools`"),
        ({"tool_choice": {"type": "tool", "name": "no"}, "tools": [TOOL]}, "tool_choice", "'no'"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice", "isn't in `tools`"),
        ({"tool_choice": {"type": "any"}, "tools": [TOOL], **AS_NUMBER}, "tool_choice", "send one"),
        ({"tool_choice": {"type": "sometimes"}}, "body.tool_choice.type", "'any'"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
            "leave it out",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"a": "b" * 99_999}}}},
            "output_config.format",
            "at most 65536 characters",
        ),
        ({"output_config": {"style": "x"}}, "body.output_config.style", "not permitted"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "'web_search'"),
        ({"n": 2}, "n", "got 2"),
        ({"top_logprobs": 2}, "top_logprobs", "`logprobs` must be set to true"),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"temperature": 3}, "temperature", "got 3"),
        ({"stop_sequences": [""]}, None, "empty string"),
    ],
)
def test_refusals_of_a_message_name_the_field(
    client: httpx.Client, change: dict[str, Any], param: str | None, says: str
) -> None:
    status, at, text = refusal(client.post(MESSAGES, json={"messages": [USER], "max_tokens": 3, **change}))
    assert (status, at) == (400, param)
    assert says in text


def test_an_error_within_a_stream_is_an_event_of_anthropics() -> None:
    body = MessagesRequest(messages=[USER], max_tokens=1)
    writer = MessagesWriter(body, ServerConfig(), [Answer("id", "smol", [1], None, prompt_tokens=1)])
    name, data = writer.error(ApiError(503, "gone")).decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "ServiceUnavailableError", "message": "gone"},
    }
