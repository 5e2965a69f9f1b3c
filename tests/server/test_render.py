"""Render → generate → derender: together they are /v1/chat/completions or /v1/completions, whole and streamed."""

from __future__ import annotations

import contextlib
import json
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import ServerConfig
from rollout.server.answers.derender import Derenderer
from rollout.server.text.detokenizer import Vocabulary
from rollout.server.wire.chat import ChatCompletionRequest
from rollout.server.wire.completions import CompletionRequest
from rollout.server.wire.render import (
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
)
from tests.support import fake_engine, text_server, tiny_tokenizers
from tests.support.text_server import events, ok, refusal

GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "Hi?"}
ASKED: dict[str, Any] = {
    "max_tokens": 9,
    "return_token_ids": True,
    "return_weight_versions": True,
    "stop": ["`a", "gh"],
    "n": 2,
}
OWN = ("id", "created", "system_fingerprint")


def same(derendered: dict[str, Any], direct: dict[str, Any]) -> None:
    """Equal but for what names the answer, and the prompt's ids where generate wasn't asked for them."""
    assert {k: v for k, v in derendered.items() if k not in OWN} == {k: v for k, v in direct.items() if k not in OWN}


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 1}])
def test_a_chat_in_three_steps_is_the_chat_in_one(client: httpx.Client, logprobs: dict[str, Any]) -> None:
    body = {"messages": [USER], **ASKED, **logprobs}
    rendered = ok(client.post(f"{CHAT}/render", json=body))
    generated = ok(client.post(GENERATE, json=rendered))
    derendered = ok(client.post(f"{CHAT}/derender", json={"generate_response": generated, "chat_request": body}))
    same(derendered, ok(client.post(CHAT, json=body)))
    assert derendered["choices"][0]["message"]["content"] == "^_"
    assert derendered["id"] == f"generate-tokens-{rendered['request_id']}"


@pytest.mark.parametrize("prompt", ["a", [97], ["a", "xx"], [[97], [120, 120]]])
@pytest.mark.parametrize("logprobs", [{}, {"logprobs": 1}])
def test_a_completion_in_three_steps_is_the_completion_in_one(
    client: httpx.Client, prompt: Any, logprobs: dict[str, Any]
) -> None:
    body = {"prompt": prompt, **ASKED, **logprobs}
    rendered = ok(client.post(f"{COMPLETIONS}/render", json=body))
    generated = [ok(client.post(GENERATE, json=one)) for one in rendered]
    together = {"generate_responses": generated, "completion_request": body}
    same(ok(client.post(f"{COMPLETIONS}/derender", json=together)), ok(client.post(COMPLETIONS, json=body)))


def test_a_streamed_chat_in_three_steps(client: httpx.Client) -> None:
    body = {
        "messages": [USER],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 1,
        **ASKED,
    }
    rendered = ok(client.post(f"{CHAT}/render", json=body))
    direct = events(client.post(CHAT, json=body))
    states: dict[int, Any] = {}
    texts: dict[int, str] = {}
    chunks = []
    for generated in events(client.post(GENERATE, json=rendered)):
        index = generated["choices"][0]["index"] if generated["choices"] else None
        call = {"stream": True, "generate_chunk": generated, "chat_request": body}
        answer = ok(client.post(f"{CHAT}/derender", json={**call, "stream_state": states.get(cast(int, index))}))
        if index is None:
            assert answer["chunk"]["choices"] == []
            assert answer["chunk"]["usage"] == direct[-1]["usage"]
            continue
        (choice,) = answer["chunk"]["choices"]
        assert choice["delta"].get("role") == (None if index in states else "assistant")
        states[index] = answer["stream_state"]
        texts[index] = texts.get(index, "") + choice["delta"]["content"]
        chunks.append(choice)
    whole = ok(client.post(CHAT, json={**body, "stream": False, "stream_options": None}))
    for expected in whole["choices"]:
        pieces = [chunk for chunk in chunks if chunk["index"] == expected["index"]]
        assert texts[expected["index"]] == expected["message"]["content"]
        assert [i for piece in pieces for i in piece["token_ids"]] == expected["token_ids"]
        assert [e for p in pieces for e in p["logprobs"]["content"]] == expected["logprobs"]["content"]
        for key in ("finish_reason", "stop_reason", "weight_versions"):
            assert pieces[-1][key] == expected[key]


def test_what_is_rendered_says_what_was_asked(client: httpx.Client) -> None:
    body = {
        "messages": [USER],
        "temperature": 0.5,
        "logit_bias": {"97": 2},
        "max_completion_tokens": 7,
        "logprobs": True,
        "top_logprobs": 3,
        "cache_salt": "s",
        "priority": -1,
        "bad_words": ["x"],
        "seed": 5,
    }
    rendered = ok(client.post(f"{CHAT}/render", json=body, headers={"X-Request-Id": "9"}))
    assert rendered["request_id"] == "chatcmpl-9"
    assert (rendered["cache_salt"], rendered["priority"], rendered["model"]) == ("s", -1, "smol")
    expected = {"temperature": 0.5, "logit_bias": {"97": 2.0}, "max_tokens": 7, "logprobs": 3, "bad_words": ["x"]}
    assert rendered["sampling_params"].items() >= (expected | {"seed": 5}).items()
    unlimited = ok(client.post(f"{CHAT}/render", json={"messages": [USER]}))
    room = fake_engine.MAX_MODEL_LEN - len(unlimited["token_ids"])
    assert unlimited["sampling_params"]["max_tokens"] == room


CHUNK = {"request_id": "r", "choices": [{"token_ids": [97]}]}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (f"{CHAT}/derender", {"generate_response": {**CHUNK, "output_mode": "text"}}, "Input should be 'tokens'"),
        (f"{COMPLETIONS}/derender", {"generate_responses": [{**CHUNK, "output_mode": "text"}]}, "'tokens'"),
        (f"{CHAT}/derender", {"stream": True, "generate_chunk": {**CHUNK, "output_mode": "text"}}, "'tokens'"),
        (f"{CHAT}/derender", {"generate_response": {**CHUNK, "choices": [{"token_ids": [2**40]}]}}, "vocabulary"),
        (f"{CHAT}/derender", {"stream": True, "generate_chunk": {**CHUNK, "choices": CHUNK["choices"] * 2}}, "got 2"),
        (f"{COMPLETIONS}/derender", {"generate_responses": []}, "at least 1"),
        (f"{COMPLETIONS}/derender", {"generate_responses": [CHUNK], "prompt_tokens": [1, 2]}, "got 2 for 1"),
        (f"{COMPLETIONS}/derender", {"generate_responses": [CHUNK], "prompt_token_ids": [[1], [2]]}, "got 2 for 1"),
        (f"{COMPLETIONS}/derender", {"generate_responses": [CHUNK], "prompt_token_ids": [[2**40]]}, "vocabulary"),
        (f"{COMPLETIONS}/derender", {"stream": True, "generate_chunk": CHUNK, "prompt_token_ids": [2**40]}, "vocab"),
        (
            f"{CHAT}/derender",
            {"generate_response": {**CHUNK, "choices": [{"token_ids": [97], "logprobs": {"content": []}}]}},
            "an entry a token",
        ),
        (
            f"{CHAT}/derender",
            {
                "generate_response": {
                    **CHUNK,
                    "choices": [{"token_ids": [97], "logprobs": {"content": [{"token_id": 2**40, "logprob": 0}]}}],
                }
            },
            "vocabulary",
        ),
        (f"{CHAT}/derender", {"generate_response": CHUNK, "prompt_token_ids": [2**70]}, "vocabulary"),
        (f"{CHAT}/derender", {"generate_response": {**CHUNK, "prompt_token_ids": [2**70]}}, "vocabulary"),
        (
            f"{COMPLETIONS}/derender",
            {"stream": True, "generate_chunk": CHUNK, "stream_state": {"context": [2**70]}},
            "vocabulary",
        ),
        (f"{CHAT}/derender", {"generate_response": {**CHUNK, "choices": [{"routed_experts": {}}]}}, "routed_experts"),
        (f"{COMPLETIONS}/render", {"prompt": "a", "echo": True}, "echo can't be rendered"),
        (f"{COMPLETIONS}/render", {"prompt": "a", "n": 0}, "at least 1, got 0"),
        (f"{CHAT}/render", {"messages": [USER], "chat_template": "x"}, "--trust-request-chat-template"),
        (f"{CHAT}/render", {"messages": [{"role": "user", "content": "a" * 3000}]}, "maximum model length"),
    ],
)
def test_refusals(client: httpx.Client, path: str, body: dict[str, Any], says: str) -> None:
    status, _, message = refusal(client.post(path, json=body))
    assert status == 400
    assert says in message


def test_routed_experts_are_told_as_generate_told_them(client: httpx.Client) -> None:
    generated = {**CHUNK, "choices": [{"token_ids": [97], "finish_reason": "length", "routed_experts": "k05VTVBZ"}]}
    chat = ok(client.post(f"{CHAT}/derender", json={"generate_response": generated}))
    completion = ok(client.post(f"{COMPLETIONS}/derender", json={"generate_responses": [generated]}))
    for answer in (chat, completion):
        assert answer["choices"][0]["routed_experts"] == "k05VTVBZ"


def test_both_are_part_of_scale_out() -> None:
    with text_server.text_server(enable_scale_out=False) as server:
        for kind in (CHAT, COMPLETIONS):
            for step in ("render", "derender"):
                status, _, message = refusal(httpx.post(f"{server.url}{kind}/{step}", json={}, timeout=60))
                assert status == 403
                assert "--enable-scale-out" in message


def test_the_requests_of_several_prompts_have_ids_of_their_own(client: httpx.Client) -> None:
    for prompts, ids in ((["a", "b"], ["cmpl-h-0", "cmpl-h-1"]), (["a"], ["cmpl-h"])):
        answer = ok(client.post(f"{COMPLETIONS}/render", json={"prompt": prompts}, headers={"X-Request-Id": "h"}))
        assert [one["request_id"] for one in answer] == ids


VOCABULARIES = [
    Vocabulary(make())
    for make in (tiny_tokenizers.byte_level, tiny_tokenizers.byte_fallback, tiny_tokenizers.word_piece)
]
IDS = st.lists(st.one_of(st.integers(0, 280), st.sampled_from([*"aé你😀".encode()])), max_size=24)
STOPS = st.sampled_from([[], ["ab"], ["a", "éa"], ["\ufffd"], ["你", "the"]])


def derenderer(vocabulary: Vocabulary) -> Derenderer:
    return Derenderer(ServerConfig(), "smol", vocabulary, eos_token_ids=[98])


def test_the_prompts_ids_say_whether_a_completion_begins_with_a_space() -> None:
    vocabulary = VOCABULARIES[1]
    hi, the = vocabulary.tokenizer.convert_tokens_to_ids(["▁Hi", "▁the"])
    whole = {"request_id": "r", "choices": [{"token_ids": [the], "finish_reason": "length"}]}
    for ids, text in ((None, "the"), ([[hi]], " the"), ([None], "the")):
        body = DerenderCompletionRequest(generate_responses=[whole], prompt_token_ids=ids)
        made = derenderer(vocabulary).completion(body)
        assert made.choices[0].text == text
        assert made.usage.prompt_tokens == (1 if text == " the" else 0)
        prompt = ids[0] if ids else None
        chunked = DerenderCompletionStreamRequest(stream=True, generate_chunk=whole, prompt_token_ids=prompt)
        chunk, _ = derenderer(vocabulary).completion_chunk(chunked)
        assert chunk.choices[0].text == text


def chunks_of(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """The ids cut anywhere, into at least one piece."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@given(st.data(), st.sampled_from(VOCABULARIES), IDS, IDS, st.booleans(), STOPS)
def test_any_chunking_derenders_to_the_text_of_the_whole(
    data: st.DataObject, vocabulary: Vocabulary, prompt: list[int], ids: list[int], skip: bool, stop: list[str]
) -> None:
    prompt, ids = ([i % len(vocabulary.tokenizer) for i in some] for some in (prompt, ids))
    request = CompletionRequest(prompt="x", stop=stop, skip_special_tokens=skip)
    request.min_tokens = data.draw(st.integers(0, 3))
    reader = derenderer(vocabulary)
    whole = {"request_id": "r", "prompt_token_ids": prompt, "choices": [{"token_ids": ids, "finish_reason": "length"}]}
    expected = reader.completion(
        DerenderCompletionRequest.model_validate({"generate_responses": [whole], "completion_request": request})
    )
    state: dict[str, Any] | None = None
    text = ""
    pieces = chunks_of(data, ids)
    for number, piece in enumerate(pieces):
        choice = {"token_ids": piece, "finish_reason": "length" if number == len(pieces) - 1 else None}
        chunk = {"request_id": "r", "choices": [choice], "prompt_token_ids": None if state else prompt}
        call = {"stream": True, "generate_chunk": chunk, "stream_state": state, "completion_request": request}
        made, after = reader.completion_chunk(DerenderCompletionStreamRequest.model_validate(call))
        text += made.choices[0].text
        if stop and text == expected.choices[0].text:
            return  # a stop string may be complete, after which no chunk comes
        state = json.loads(after.model_dump_json())
    assert text == expected.choices[0].text
    if not stop and vocabulary is VOCABULARIES[0]:
        assert text == vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)


PARSING = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
CALLS = [f'<tool_call>{{"name": "{name}", "arguments": {{"a": "é"}}}}</tool_call>' for name in ("f", "g")]
SAID = st.lists(st.sampled_from(["<think>", "</think>", "hm", " ", *CALLS, "<tool_call>", "b"]), max_size=7)


@given(st.data(), SAID, st.sampled_from(["", "<think>", "</think>\n"]))
def test_any_chunking_of_a_chat_has_the_parts_of_the_whole(data: st.DataObject, said: list[str], prompt: str) -> None:
    ids = [*"".join(said).encode()]
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], tools=tools)
    reader = Derenderer(PARSING, "smol", VOCABULARIES[0], eos_token_ids=[])

    def generated(piece: list[int], finish_reason: str | None) -> dict[str, Any]:
        return {"request_id": "r", "choices": [{"token_ids": piece, "finish_reason": finish_reason}]}

    call = {"generate_response": generated(ids, "stop"), "chat_request": request}
    call["prompt_token_ids"] = [*prompt.encode()]
    (whole,) = reader.chat(DerenderChatRequest.model_validate(call)).choices
    state: dict[str, Any] | None = None
    told: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    pieces = chunks_of(data, ids)
    for number, piece in enumerate(pieces):
        chunk = generated(piece, "stop" if number == len(pieces) - 1 else None)
        call = {"stream": True, "generate_chunk": chunk, "stream_state": state, "chat_request": request}
        call["prompt_token_ids"] = None if state else [*prompt.encode()]
        made, after = reader.chat_chunk(DerenderChatStreamRequest.model_validate(call))
        delta = made.choices[0].delta
        told["reasoning"] += delta.reasoning or ""
        told["content"] += delta.content or ""
        told["calls"] += [(one.index, one.function.name, one.function.arguments) for one in delta.tool_calls or ()]
        state = json.loads(after.model_dump_json())
    message = whole.message
    assert told["reasoning"] == (message.reasoning or "")
    assert told["content"] == (message.content or "")
    calls = enumerate(message.tool_calls or ())
    assert told["calls"] == [(index, one.function.name, one.function.arguments) for index, one in calls]
    assert made.choices[0].finish_reason == whole.finish_reason


UNITS = [[97], [*"é".encode()], [*"😀".encode()], [256, 257, 258], [259], [260]]
CUT = [b"\xe4\xbd", b"\xa0\xf0", b"\x9f\x98\x80a", b"the", " 好".encode()]


@given(st.data(), st.lists(st.sampled_from(UNITS), min_size=1), st.booleans())
def test_text_offsets_drifted_at_characters_of_several_tokens(
    data: st.DataObject, units: list[list[int]], as_ids: bool
) -> None:
    """An offset is that of the character in which the token's first byte falls, in the text as a whole."""
    ids = [token for unit in units for token in unit]
    spelt = [bytes([i]) if i < 256 else CUT[i - 256] for i in ids]
    text = b"".join(spelt).decode()
    expected = [len(b"".join(spelt[:i]).decode("utf-8", "ignore")) for i in range(len(ids))]
    request = CompletionRequest(prompt="x", return_tokens_as_token_ids=as_ids)
    reader = derenderer(VOCABULARIES[0])

    def generated(piece: list[int], finish_reason: str | None) -> dict[str, Any]:
        logprobs = {"content": [{"token_id": i, "logprob": -1.0} for i in piece]}
        choice = {"token_ids": piece, "finish_reason": finish_reason, "logprobs": logprobs}
        return {"request_id": "r", "choices": [choice]}

    call = {"generate_responses": [generated(ids, "length")], "completion_request": request}
    (choice,) = reader.completion(DerenderCompletionRequest.model_validate(call)).choices
    assert choice.logprobs is not None
    assert (choice.text, choice.logprobs.text_offset) == (text, expected)
    for offset, spelling in zip(expected, spelt, strict=True):
        with contextlib.suppress(UnicodeDecodeError):
            assert text[offset:].startswith(spelling.decode())
    state, offsets = None, list[int]()
    for piece in chunks_of(data, ids):
        chunk = {"generate_chunk": generated(piece, None), "completion_request": request, "stream_state": state}
        made, after = reader.completion_chunk(DerenderCompletionStreamRequest.model_validate({"stream": True, **chunk}))
        assert made.choices[0].logprobs is not None
        offsets += made.choices[0].logprobs.text_offset
        state = after.model_dump()
    assert offsets == expected


@pytest.mark.parametrize(
    ("asked", "shown"),
    [({}, [97, 98, 99]), ({"logprobs": True}, []), ({"logprobs": True, "top_logprobs": 2}, [97, 98])],
    ids=str,
)
def test_a_chat_request_without_logprobs_hid_the_candidates_that_generate_told(
    asked: dict[str, Any], shown: list[int]
) -> None:
    told = [{"token_id": 98, "logprob": -1.0}, {"token_id": 99, "logprob": -2.0}]
    logprobs = {"content": [{"token_id": 97, "logprob": -0.5, "top_logprobs": told}]}
    generated = {"request_id": "r", "choices": [{"token_ids": [97], "logprobs": logprobs}]}
    chat = {"messages": [USER], **asked}
    reader, whole = derenderer(VOCABULARIES[0]), {"generate_response": generated, "chat_request": chat}
    made = reader.chat(DerenderChatRequest.model_validate(whole))
    piece = {"stream": True, "generate_chunk": generated, "chat_request": chat}
    streamed, _ = reader.chat_chunk(DerenderChatStreamRequest.model_validate(piece))
    for choice in (made.choices[0], streamed.choices[0]):
        assert choice.logprobs is not None
        (entry,) = choice.logprobs.content
        assert (entry.token, entry.logprob) == ("a", -0.5)
        assert [top.bytes for top in entry.top_logprobs] == [[token_id] for token_id in shown]


def test_chat_chunks_carry_the_role_once() -> None:
    reader = derenderer(VOCABULARIES[0])
    call = {"stream": True, "generate_chunk": CHUNK}
    made, state = reader.chat_chunk(DerenderChatStreamRequest.model_validate(call))
    assert (made.choices[0].delta.role, made.choices[0].delta.content) == ("assistant", "a")
    again, _ = reader.chat_chunk(DerenderChatStreamRequest.model_validate(call | {"stream_state": state.model_dump()}))
    assert again.choices[0].delta.role is not made.choices[0].delta.role


@pytest.mark.parametrize(
    ("ids", "finish_reason", "stop_reason", "text"),
    [
        ([99, 97], "stop", None, "ca"),  # a stop string, of which nothing else is known
        ([99, 98], "stop", None, "c"),  # EOS
        ([99, 97], "stop", 97, "c"),
        ([99, 97], "stop", "a", "ca"),
        ([99, 98], "length", None, "cb"),
        ([99, 98], None, None, "cb"),
        ([], "abort", None, ""),
        ([0xE4], "abort", None, "\ufffd"),
        ([0xE4], None, None, ""),
    ],
)
def test_the_token_that_ended_a_choice_is_no_text(
    ids: list[int], finish_reason: str | None, stop_reason: int | str | None, text: str
) -> None:
    choice = {"token_ids": ids, "finish_reason": finish_reason, "stop_reason": stop_reason}
    whole = {"generate_responses": [{"request_id": "r", "choices": [choice]}]}
    made = derenderer(VOCABULARIES[0]).completion(DerenderCompletionRequest.model_validate(whole))
    assert made.choices[0].text == text


def test_a_wrong_body_is_told_by_the_name_of_what_it_could_be(client: httpx.Client) -> None:
    status, param, _ = refusal(client.post(f"{CHAT}/derender", json={"generate_response": {"choices": []}}))
    assert (status, param) == (400, "body.DerenderChatRequest.generate_response.request_id")
