"""RolloutClient and AsyncRolloutClient against a real server, and against answers no good server gives."""

from __future__ import annotations

import asyncio
import http.server
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rollout import launch
from rollout.config import ServerConfig
from tests.support import fake_engine
from tests.support.server_harness import RunningServer, running_server
from tests.support.wait import eventually
from trainer_bridge.client import AsyncRolloutClient, Generation, RolloutClient, RolloutError, Span

PROMPT = [fake_engine.RELABEL, 20]
SPANS = [Span("v7", 0, 2, 0, "current"), Span("v8", 2, 3, 1, "current"), Span("v8", 3, 4, 1, "mixed")]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ServerConfig(tokens_only=True, return_sampling_mask=True, api_key=("secret",), served_model_name="smol")
    with running_server(config) as running:
        yield running


class Blocking:
    """The async client behind plain calls, so that one test serves both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncRolloutClient(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await method(*args, **kwargs)

        return lambda *args, **kwargs: self._runner.run(call(*args, **kwargs))

    def stream(self, *args: Any, **kwargs: Any) -> list[Generation]:
        async def collect() -> list[Generation]:
            return [generation async for generation in self._client.stream(*args, **kwargs)]

        return self._runner.run(collect())


CLIENTS = pytest.mark.parametrize("kind", [RolloutClient, Blocking])


@CLIENTS
def test_an_answer_is_parsed_whole(server: RunningServer, kind: Any) -> None:
    client = kind(server.url, api_key="secret")
    generation = client.generate(PROMPT, {"max_tokens": 4, "logprobs": 0}, n=2, request_id="mine")
    assert (generation.request_id, generation.prompt_token_ids) == ("generate-tokens-mine", PROMPT)
    first, second = generation.choices
    assert (first.token_ids, second.token_ids) == ([21, 22, 23, 24], [31, 32, 33, 34])
    assert (first.index, second.index, first.finish_reason, first.stop_reason) == (0, 1, "length", None)
    assert first.logprobs == [-0.5] * 4
    assert first.spans == SPANS
    assert first.sampling_mask is None
    (masked,) = client.generate([fake_engine.MASKED, 20], {"max_tokens": 2, "stop_token_ids": [22]}).choices
    assert (masked.sampling_mask, masked.stop_reason, masked.logprobs) == ([None, [5, 22]], 22, None)
    client.close()


@CLIENTS
def test_a_stream_is_the_answer_in_pieces(server: RunningServer, kind: Any) -> None:
    client = kind(server.url, api_key="secret")
    pieces = [g.choices[0] for g in client.stream(PROMPT, {"max_tokens": 4, "logprobs": 0}, extra={"priority": 1})]
    assert [t for piece in pieces for t in piece.token_ids] == [21, 22, 23, 24]
    assert [logprob for piece in pieces for logprob in piece.logprobs or ()] == [-0.5] * 4
    assert [piece.spans for piece in pieces][-1] == SPANS
    assert not any(piece.spans for piece in pieces[:-1])
    assert server.stats()["added"][-1]["priority"] == 1
    client.close()


@CLIENTS
def test_control(server: RunningServer, kind: Any) -> None:
    client = kind(server.url, api_key="secret")
    client.wait_until_ready(5)
    assert client.health()
    client.pause()
    assert client.is_paused()
    client.resume()
    assert not client.is_paused()
    assert client.models()[0]["id"] == "smol"
    assert client.post("/update_weight_version", {"new_version": "v3"})["success"]
    assert client.weight_info()["weight_version"] == "v3"
    assert (client.abort(["generate-tokens-none"]), client.abort_all()) == (0, 0)
    client.close()


@CLIENTS
def test_refusals_are_typed(server: RunningServer, kind: Any) -> None:
    client = kind(server.url, api_key="secret")
    for ask in (client.generate, lambda *args: list(client.stream(*args))):
        with pytest.raises(RolloutError) as refusal:
            ask([1], {"top_p": 0})
        assert (refusal.value.status, refusal.value.type, refusal.value.param) == (400, "BadRequestError", "top_p")
        assert "top_p must be in (0, 1]" in refusal.value.message
    client.close()
    stranger = kind(server.url)
    with pytest.raises(RolloutError) as refusal:
        stranger.generate([1])
    assert refusal.value.status == 401
    stranger.close()


@CLIENTS
def test_a_server_that_is_not_there(kind: Any) -> None:
    client = kind("http://127.0.0.1:9")  # the discard port
    assert not client.health()
    with pytest.raises(RolloutError) as failure:
        client.wait_until_ready(0.3)
    assert (failure.value.status, failure.value.type) == (0, "TransportError")
    client.close()


def test_leaving_a_stream_early_aborts_the_request(server: RunningServer) -> None:
    with RolloutClient(server.url, api_key="secret") as client:
        stream = client.stream([fake_engine.SLOW, 20], {"max_tokens": 500})
        next(stream)
        before = server.stats()["aborted"]
        stream.close()
        eventually(lambda: server.stats()["running"] == 0)
    assert len(server.stats()["aborted"]) == len(before) + 1, "it did not end by itself"


def test_cancelling_a_call_aborts_the_request(server: RunningServer) -> None:
    async def run() -> None:
        async with AsyncRolloutClient(server.url, api_key="secret") as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.generate([fake_engine.NEVER]), 0.5)

    asyncio.run(run())
    eventually(lambda: server.stats()["running"] == 0)


CHUNK = 'data: {"request_id": "a\u2028b", "choices": [{"index": 0, "token_ids": [1]}]}\n\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHUNK + "data: [DONE]\n\n", None),
        (CHUNK, "ended before [DONE]"),
        (CHUNK + 'data: {"error": {"message": "died", "type": "X", "param": null, "code": 503}}\n\n', "died"),
    ],
)
def test_streams_that_end_badly_are_errors(text: str, expected: str | None) -> None:
    client = RolloutClient("http://test")
    client._http = httpx.Client(
        base_url="http://test", transport=httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    )
    stream = client.stream([1])
    assert next(stream).choices[0].token_ids == [1]
    if expected is None:
        assert list(stream) == []
    else:
        with pytest.raises(RolloutError, match=expected.replace("[", r"\[")):
            list(stream)


def test_a_proxy_that_answers_html() -> None:
    client = RolloutClient("http://test")
    for status, expected in ((502, (502, "HTTPError")), (200, (0, "ProtocolError"))):
        answer = httpx.Response(status, text="<html>Bad Gateway</html>")
        client._http = httpx.Client(
            base_url="http://test", transport=httpx.MockTransport(lambda request, answer=answer: answer)
        )
        with pytest.raises(RolloutError) as failure:
            client.generate([1])
        assert (failure.value.status, failure.value.type) == expected


def test_the_client_imports_nothing_of_the_server() -> None:
    """Of the engine's packages only the table of sampling parameters, and neither torch nor numpy."""
    code = "import trainer_bridge.client, sys; print(*(m for m in sys.modules if m.split('.')[0] in {names}))"
    code = code.replace("{names}", "('rollout', 'torch', 'numpy', 'transformers')")
    result = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert set(result.stdout.split()) == {"rollout", "rollout.sampling", "rollout.sampling.params", "rollout.version"}


@CLIENTS
def test_a_misspelt_parameter_was_sent_and_ignored(kind: Any) -> None:
    client = kind("http://127.0.0.1:9")
    for ask in (client.generate, lambda *args: list(client.stream(*args))):
        with pytest.raises(ValueError, match="'max_token' is no sampling parameter: did you mean max_tokens"):
            ask([1], {"max_token": 5})
        with pytest.raises(ValueError, match="'zzz' is no sampling parameter: there are n, temperature, "):
            ask([1], {"zzz": 5})
    client.close()


@CLIENTS
def test_ids_may_be_numpy_arrays_and_tensors(server: RunningServer, kind: Any) -> None:
    client = kind(server.url, api_key="secret")
    for ids in (np.array(PROMPT), torch.tensor(PROMPT), tuple(PROMPT), list(np.array(PROMPT))):
        answer = client.generate(ids, {"max_tokens": 2})
        assert answer.prompt_token_ids == PROMPT
        assert answer.choices[0].token_ids == [21, 22]
    with pytest.raises(ValueError, match=r"one dimension, got the shape \(1, 2\)"):
        client.generate(torch.tensor([PROMPT]))
    client.close()


def test_a_start_is_waited_for_as_long_as_the_server_waits_for_its_engine() -> None:
    for kind in (RolloutClient, AsyncRolloutClient):
        waits = inspect.signature(kind.wait_until_ready).parameters["timeout_s"].default
        assert waits == launch.START_TIMEOUT_S == ServerConfig().engine_start_timeout_s


@CLIENTS
def test_many_prompts_are_asked_for_in_one_call(server: RunningServer, kind: Any) -> None:
    client = kind(server.url, api_key="secret")
    prompts = [[fake_engine.RELABEL, 20 + i] for i in range(7)]
    for given in (prompts, np.array(prompts), iter(prompts)):
        answers = client.generate_many(given, {"max_tokens": 2}, n=2, concurrency=3)
        assert [answer.prompt_token_ids for answer in answers] == prompts
        assert [[c.token_ids for c in answer.choices] for answer in answers] == [
            [[21 + i, 22 + i], [31 + i, 32 + i]] for i in range(7)
        ]
    assert client.generate_many([]) == []
    with pytest.raises(ValueError, match="one dimension"):
        client.generate_many([PROMPT, torch.tensor([PROMPT])])
    with pytest.raises(RolloutError, match="maximum") as refusal:
        client.generate_many([PROMPT, [1] * 100_000, PROMPT], concurrency=1)
    assert refusal.value.status == 400
    client.close()


@CLIENTS
def test_after_a_failure_no_more_is_sent(busy: str, kind: Any) -> None:
    Busy.refusals, Busy.retry_after = 10, "0"
    client = kind(busy)
    with pytest.raises(RolloutError, match="busy"):
        client.generate_many([[1]] * 10, concurrency=1)
    assert Busy.refusals >= 8  # one more may have been under way
    client.close()


class Busy(http.server.BaseHTTPRequestHandler):
    """Says `refusals` times that it can't now."""

    refusals = 0
    retry_after = "0"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kind = type(self)
        kind.refusals -= 1
        refused = kind.refusals >= 0
        self.send_response(503 if refused else 200)
        self.send_header("Retry-After", kind.retry_after)
        self.end_headers()
        self.wfile.write(b'{"error": "busy"}' if refused else CHUNK.encode() + b"data: [DONE]\n\n")


@pytest.fixture
def busy() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


@CLIENTS
def test_a_busy_server_is_asked_again_when_it_says(busy: str, kind: Any) -> None:
    Busy.refusals, Busy.retry_after = 3, "0"
    client = kind(busy, retry_s=60)
    assert [g.choices[0].token_ids for g in client.stream([1])] == [[1]]
    Busy.refusals, Busy.retry_after = 1, "100"
    with pytest.raises(RolloutError, match="busy") as refusal:  # later than it is worth waiting for
        client.post("/pause", {})
    assert (refusal.value.status, refusal.value.retry_after_s) == (503, 100)
    client.close()
    Busy.refusals = 1
    hasty = kind(busy)
    with pytest.raises(RolloutError, match="busy"):
        list(hasty.stream([1]))
    assert Busy.refusals == 0
    hasty.close()
