"""The `openai` package, as it comes, against SmolLM2: sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.support.server_harness import RunningServer
from tests.support.smollm2 import ANSWER, QUESTION, greedy, smollm2_server
from tests.support.text_server import text_server

pytestmark = pytest.mark.smollm2

GREEDY: dict[str, Any] = {"model": "smol", "temperature": 0, "max_tokens": 12}
CHAT: dict[str, Any] = {**GREEDY, "messages": QUESTION}
WITH_TOKENS = {"return_token_ids": True, "return_weight_versions": True}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[RunningServer]:
    with smollm2_server(smollm2) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as made:
        yield made


def in_async(server: RunningServer, work: Any) -> Any:
    """Run a coroutine function of an AsyncOpenAI."""

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
            return await work(client)

    return asyncio.run(run())


def test_a_chat(client: openai.OpenAI, server: RunningServer, expected: Any) -> None:
    prompt, ids, logprobs = expected
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "extra_body": WITH_TOKENS}

    def check(answer: Any) -> None:
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
        assert choice.finish_reason == "stop"
        assert (answer.prompt_token_ids, choice.token_ids) == (prompt, ids)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(ids))
        content = choice.logprobs.content
        assert [token.logprob for token in content] == pytest.approx(logprobs, abs=1e-4)
        assert b"".join(bytes(token.bytes) for token in content[:-1]).decode() == ANSWER
        assert [len(token.top_logprobs) for token in content] == [2] * len(ids)
        (span,) = choice.weight_versions
        assert (span["start"], span["end"], span["version"]) == (0, len(ids), "default")

    check(client.chat.completions.create(**CHAT, **asked))
    check(in_async(server, lambda made: made.chat.completions.create(**CHAT, **asked)))


def test_a_streamed_chat(client: openai.OpenAI, server: RunningServer, expected: Any) -> None:
    prompt, ids, logprobs = expected
    asked: dict[str, Any] = {"logprobs": True, "extra_body": WITH_TOKENS, "stream_options": {"include_usage": True}}

    def check(chunks: list[Any]) -> None:
        first, *middle, totals = chunks
        assert (first.choices[0].delta.role, first.prompt_token_ids) == ("assistant", prompt)
        choices = [chunk.choices[0] for chunk in middle]
        assert "".join(choice.delta.content for choice in choices) == ANSWER
        assert [i for choice in choices for i in choice.token_ids] == ids
        found = [token.logprob for choice in choices for token in choice.logprobs.content]
        assert found == pytest.approx(logprobs, abs=1e-4)
        assert choices[-1].finish_reason == "stop"
        assert totals.usage.completion_tokens == len(ids)

    check(list(client.chat.completions.create(**CHAT, **asked, stream=True)))

    async def streamed(made: openai.AsyncOpenAI) -> list[Any]:
        return [chunk async for chunk in await made.chat.completions.create(**CHAT, **asked, stream=True)]

    check(in_async(server, streamed))


def test_the_sdks_own_accumulation_of_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**CHAT, logprobs=True) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER
    assert final.choices[0].logprobs.content[5].token == " Paris"


def test_a_stop_sequence_whole_and_streamed(client: openai.OpenAI, server: RunningServer) -> None:
    stopped = {**CHAT, "stop": ["zzz", "Paris"]}
    (choice,) = client.chat.completions.create(**stopped).choices
    assert (choice.message.content, choice.finish_reason) == ("The capital of France is ", "stop")
    assert choice.stop_reason == "Paris"

    async def streamed(made: openai.AsyncOpenAI) -> list[Any]:
        return [chunk async for chunk in await made.chat.completions.create(**stopped, stream=True)]

    for chunks in (list(client.chat.completions.create(**stopped, stream=True)), in_async(server, streamed)):
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "The capital of France is "
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_many_chats_at_once(server: RunningServer) -> None:
    async def together(made: openai.AsyncOpenAI) -> list[Any]:
        return await asyncio.gather(*(made.chat.completions.create(**CHAT) for _ in range(6)))

    assert {answer.choices[0].message.content for answer in in_async(server, together)} == {ANSWER}


def test_completions(client: openai.OpenAI, server: RunningServer, smollm2: Path, expected: Any) -> None:
    prompt, ids, logprobs = expected
    text_prompt = "Water boils at"
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": text_prompt}, timeout=60).json()["tokens"]
    text = greedy(smollm2, tokens, 6)[1]

    def check(by_ids: Any, by_text: Any, both: Any) -> None:
        assert by_ids.choices[0].text == ANSWER
        assert by_ids.choices[0].token_ids == ids
        assert by_ids.choices[0].logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert by_ids.choices[0].logprobs.tokens[5] == " Paris"
        assert by_text.choices[0].text == text
        assert [choice.text for choice in both.choices] == [text, text]

    asked = {**GREEDY, "max_tokens": 6}
    with_tokens: dict[str, Any] = {**GREEDY, "logprobs": 1, "extra_body": WITH_TOKENS}
    check(
        client.completions.create(**with_tokens, prompt=prompt),
        client.completions.create(**asked, prompt=text_prompt),
        client.completions.create(**asked, prompt=[text_prompt, text_prompt]),
    )

    async def all_three(made: openai.AsyncOpenAI) -> list[Any]:
        return await asyncio.gather(
            made.completions.create(**with_tokens, prompt=prompt),
            made.completions.create(**asked, prompt=text_prompt),
            made.completions.create(**asked, prompt=[text_prompt, text_prompt]),
        )

    check(*in_async(server, all_three))


def test_streamed_completions(client: openai.OpenAI, server: RunningServer, expected: Any) -> None:
    prompt, ids, _ = expected

    def check(chunks: list[Any]) -> None:
        choices = [chunk.choices[0] for chunk in chunks]
        assert "".join(choice.text for choice in choices) == "The capital of France is "
        assert [i for choice in choices for i in choice.token_ids] == ids[:6]
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "Paris")

    asked: dict[str, Any] = {**GREEDY, "prompt": prompt, "stop": "Paris", "extra_body": WITH_TOKENS, "stream": True}
    check(list(client.completions.create(**asked)))

    async def streamed(made: openai.AsyncOpenAI) -> list[Any]:
        return [chunk async for chunk in await made.completions.create(**asked)]

    check(in_async(server, streamed))


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**{**CHAT, "temperature": 3})
    assert (wrong.value.status_code, wrong.value.param) == (400, "temperature")
    with pytest.raises(openai.NotFoundError, match="`gpt`"):
        client.chat.completions.create(**{**CHAT, "model": "gpt"})
    assert [model.id for model in client.models.list()] == ["smol"]


def test_keys() -> None:
    with text_server(api_key=("secret",)) as server:
        for key, ok in (("secret", True), ("other", False)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=60, max_retries=0) as client:
                if ok:
                    assert client.completions.create(model="smol", prompt="a", max_tokens=2).choices[0].text == "bc"
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.completions.create(model="smol", prompt="a", max_tokens=2)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "people": {"type": "integer", "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def test_an_answer_follows_the_schema_of_its_response_format(client: openai.OpenAI) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    ask: dict[str, Any] = {**CHAT, "max_tokens": 60, "response_format": asked}
    answer = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    assert choice.finish_reason == "stop"
    stream = client.chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content

    completion: dict[str, Any] = {"model": "smol", "prompt": "The capital of Italy is", "max_tokens": 40}
    for structured, form in (
        ({"regex": "[A-Z][a-z]{2,8}, [0-9]{3}"}, r"[A-Z][a-z]{2,8}, \d{3}"),
        ({"choice": ["Rome", "Milan or so"]}, "Rome|Milan or so"),
        ({"grammar": 'start: "<" /[a-z]{3}/ ">"'}, "<[a-z]{3}>"),
    ):
        body = {"structured_outputs": structured}
        made = client.completions.create(**completion, n=3, seed=4, extra_body=body)
        assert all(re.fullmatch(form, choice.text) for choice in made.choices), made.choices


def test_the_tokens_of_a_structured_answer_are_those_of_its_masks(server: RunningServer) -> None:
    asked = {"structured_outputs": {"regex": "[0-9]{4}"}, "max_tokens": 12, "logprobs": 0, "n": 2, "seed": 1}
    body = {"token_ids": [1, 2, 3], "sampling_params": asked}
    answer = httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=60).json()
    for choice in answer["choices"]:
        pairs = [*zip(choice["token_ids"], choice["sampling_mask"], strict=True)]
        assert all(token in mask for token, mask in pairs)
        assert (choice["token_ids"][-1], choice["sampling_mask"][-1]) == (2, [2])


@pytest.mark.parametrize(
    ("format", "why"),
    [({"regex": "(?=a)b"}, "look-around"), ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems")],
)
def test_a_structure_that_cannot_be_had_is_refused_by_name(
    client: openai.OpenAI, format: dict[str, Any], why: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as refused:
        client.chat.completions.create(**CHAT, extra_body={"structured_outputs": format})
    assert refused.value.param == "structured_outputs"


def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("visit", "call")]
    ask: dict[str, Any] = {**CHAT, "max_tokens": 120, "tools": tools}
    required = client.chat.completions.create(**ask, tool_choice="required").choices[0]
    assert required.finish_reason == "tool_calls"
    for call in required.message.tool_calls or []:
        assert call.function.name in ("visit", "call")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    named: Any = {"type": "function", "function": {"name": "call"}}
    stream = client.chat.completions.create(**ask, tool_choice=named, stream=True)
    pieces = [call.function for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [piece.name for piece in pieces if piece.name] == ["call"]
    jsonschema.validate(json.loads("".join(piece.arguments or "" for piece in pieces)), SCHEMA)
