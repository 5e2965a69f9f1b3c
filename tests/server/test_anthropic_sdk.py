"""The `anthropic` package, as it comes, against SmolLM2: sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest

from tests.support.server_harness import RunningServer
from tests.support.smollm2 import ANSWER, QUESTION, chat_prompt, greedy, smollm2_server
from tests.support.text_server import text_server

pytestmark = pytest.mark.smollm2

# Anthropic's client has no temperature of its own any more; the server's field is this one.
ASK: dict[str, Any] = {"model": "smol", "max_tokens": 12, "messages": QUESTION}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
WITH_TOKENS: dict[str, Any] = {
    "extra_body": {"temperature": 0, "return_token_ids": True, "return_weight_versions": True, "logprobs": True}
}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[RunningServer]:
    with smollm2_server(smollm2) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=120, max_retries=0) as made:
        yield made


def in_async(server: RunningServer, work: Any) -> Any:
    """Run a coroutine function of an AsyncAnthropic."""

    async def run() -> Any:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", timeout=120) as client:
            return await work(client)

    return asyncio.run(run())


def test_a_message(client: anthropic.Anthropic, server: RunningServer, expected: Any) -> None:
    prompt, ids, logprobs = expected

    def check(message: Any) -> None:
        assert [block.text for block in message.content] == [ANSWER]
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert (message.usage.input_tokens, message.usage.output_tokens) == (len(prompt), len(ids))
        assert (message.prompt_token_ids, message.token_ids) == (prompt, ids)
        assert [token["logprob"] for token in message.logprobs["content"]] == pytest.approx(logprobs, abs=1e-4)
        assert [span["end"] for span in message.weight_versions] == [len(ids)]

    check(client.messages.create(**ASK, **WITH_TOKENS))
    check(in_async(server, lambda made: made.messages.create(**ASK, **WITH_TOKENS)))


def test_the_length_and_the_system_prompt(client: anthropic.Anthropic, smollm2: Path) -> None:
    system = "You only speak French."
    prompt = chat_prompt(smollm2, [{"role": "system", "content": system}, *QUESTION])
    message = client.messages.create(**{**ASK, "max_tokens": 5}, system=system, **WITH_TOKENS)
    assert message.stop_reason == "max_tokens"
    assert message.prompt_token_ids == prompt
    assert message.token_ids == greedy(smollm2, prompt, 5)[0]


def test_streams(client: anthropic.Anthropic, server: RunningServer, expected: Any) -> None:
    prompt, ids, _ = expected
    with client.messages.stream(**ASK, **GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (ANSWER, "end_turn")
    assert (final.usage.input_tokens, final.usage.output_tokens) == (len(prompt), len(ids))

    async def with_helper(made: anthropic.AsyncAnthropic) -> tuple[str, Any]:
        async with made.messages.stream(**ASK, **GREEDY) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            return text, await stream.get_final_message()

    text, final = in_async(server, with_helper)
    assert text == final.content[0].text == ANSWER

    async def raw(made: anthropic.AsyncAnthropic) -> list[Any]:
        return [event async for event in await made.messages.create(**ASK, **WITH_TOKENS, stream=True)]

    for events in (list(client.messages.create(**ASK, **WITH_TOKENS, stream=True)), in_async(server, raw)):
        assert events[0].message.prompt_token_ids == prompt
        deltas = [event for event in events if event.type == "content_block_delta"]
        assert [i for delta in deltas for i in delta.token_ids] == ids
        assert events[-2].weight_versions[0]["end"] == len(ids)
        assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]


def test_stop_sequences(client: anthropic.Anthropic, server: RunningServer) -> None:
    asked: dict[str, Any] = {**ASK, **GREEDY, "stop_sequences": ["zzz", "Paris"]}

    async def streamed(made: anthropic.AsyncAnthropic) -> Any:
        async with made.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    with client.messages.stream(**asked) as stream:
        in_pieces = stream.get_final_message()
    for message in (client.messages.create(**asked), in_pieces, in_async(server, streamed)):
        assert message.content[0].text == "The capital of France is "
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")


def test_a_prefilled_answer_is_continued(client: anthropic.Anthropic, smollm2: Path) -> None:
    prefilled = [*QUESTION, {"role": "assistant", "content": "The capital of France"}]
    message = client.messages.create(**{**ASK, "messages": prefilled}, **WITH_TOKENS)
    assert message.content[0].text == " is Paris."
    assert message.token_ids == greedy(smollm2, message.prompt_token_ids, 12)[0]


def test_errors_are_the_sdks_own(client: anthropic.Anthropic) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    with pytest.raises(anthropic.BadRequestError, match="'image'"):
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.NotFoundError, match="`claude`"):
        client.messages.create(**{**ASK, "model": "claude"})


def test_keys() -> None:
    ask: dict[str, Any] = {"model": "smol", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    with text_server(api_key=("secret",)) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="secret", timeout=60) as client:
            assert client.messages.create(**ask).content[0].text == "^_"
        with (
            anthropic.Anthropic(base_url=server.url, api_key="other", timeout=60, max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            client.messages.create(**ask)


def test_a_message_follows_the_schema_of_its_output_config(client: anthropic.Anthropic) -> None:
    schema = {"type": "array", "items": {"enum": ["Paris", "Rome"]}, "minItems": 1, "maxItems": 3}
    format: Any = {"type": "json_schema", "schema": schema}
    answer = client.messages.create(**{**ASK, "max_tokens": 60}, **GREEDY, output_config={"format": format})
    (block,) = answer.content
    jsonschema.validate(json.loads(block.text), schema)
    assert answer.stop_reason == "end_turn"
