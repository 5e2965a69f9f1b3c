"""A trainer's pushes into a running server: real processes, real HTTP, gloo, and transformers' word on every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from operator import ge
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout.launch import serve
from tests.support import tiny_models
from tests.support.engine_utils import TOLERANCE, prompt, teacher_forced
from tests.support.push_reference import as_stamped, assert_moved
from tests.support.wait import eventually
from trainer_bridge.client import Choice, Generation, RolloutClient, RolloutError, Span
from trainer_bridge.push.sender import PushResult, WeightPushError, WeightSender

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--kv-policy", "recompute"]
LONG = {"max_tokens": 900, "logprobs": 0, "ignore_eos": True}  # aborted once it has seen what it should


class Server:
    """The server, and which model each of its epochs serves."""

    def __init__(self, client: RolloutClient) -> None:
        self.client = client
        self.models = {0: tiny_models.model("llama", 0)}

    @property
    def serving(self) -> PreTrainedModel:
        return self.models[max(self.models)]

    def push(self, version: str | None, *, dtype: torch.dtype = torch.float32, **options: Any) -> PushResult:
        """Push weights unrelated to all before them, over a connection of its own."""
        model = tiny_models.model("llama", len(self.models))
        for parameter in model.parameters():
            parameter.data = parameter.to(dtype)
        with WeightSender.connect(self.client, model, timeout_s=20) as sender:
            pushed = sender.push(version, **options)
        assert pushed.epoch == max(self.models) + 1
        for parameter in model.parameters():
            parameter.data = parameter.float()
        self.models[pushed.epoch] = model
        return pushed

    def check(self, prompt_ids: list[int], choice: Choice, *, moved: bool = False) -> None:
        """Every token's logprob is that of the weights it is stamped with."""
        got = torch.tensor(choice.logprobs)
        expected = as_stamped(self.models, prompt_ids, choice.token_ids, choice.spans)
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
        if moved:
            assert_moved(self.models, prompt_ids, choice.token_ids, choice.spans, got)

    def check_serves(self, version: str) -> None:
        """A prompt that has been computed before, and its greedy ids, come from the newest weights alone."""
        for _ in range(2):
            (choice,) = self.client.generate(prompt(50), {"temperature": 0, "max_tokens": 8, "logprobs": 0}).choices
            assert choice.spans == [Span(version, 0, 8, max(self.models), "current")]
            self.check(prompt(50), choice)
            table = teacher_forced(self.serving, prompt(50), choice.token_ids)
            assert choice.token_ids == table.argmax(-1).tolist()


class Stream:
    """A streamed request, read on a thread of its own."""

    def __init__(self, client: RolloutClient, prompt_ids: list[int], n: int = 1, **params: Any) -> None:
        self.prompt_ids = prompt_ids
        self.request_id = ""
        self._pieces: list[list[Choice]] = [[] for _ in range(n)]
        pool = ThreadPoolExecutor(1)
        self._reading: Future[None] = pool.submit(self._read, client.stream(prompt_ids, {**LONG, **params}, n=n))
        pool.shutdown(wait=False)

    def _read(self, events: Iterator[Generation]) -> None:
        for event in events:
            self.request_id = event.request_id
            for piece in event.choices:
                self._pieces[piece.index].append(piece)

    @property
    def lengths(self) -> list[int]:
        return [sum(len(piece.token_ids) for piece in pieces) for pieces in self._pieces]

    def go_on(self, count: int = 10) -> None:
        """Wait until every choice has got `count` more tokens."""
        before = self.lengths
        eventually(lambda: self._reading.done() or all(map(ge, self.lengths, [old + count for old in before])), 30)
        assert not self._reading.done(), self._reading.exception()

    def result(self) -> list[Choice]:
        """The whole choices. Raises what the stream raised."""
        self._reading.result(30)
        return [_joined(pieces) for pieces in self._pieces]


def _joined(pieces: list[Choice]) -> Choice:
    *others, last = pieces
    assert not any(piece.spans or piece.finish_reason for piece in others)
    tokens = [token for piece in pieces for token in piece.token_ids]
    logprobs = [value for piece in pieces for value in piece.logprobs or ()]
    return Choice(last.index, tokens, logprobs, None, last.spans, last.finish_reason, last.stop_reason)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    path = tiny_models.build("llama", folder / "model")
    with serve(path, folder / "log", *FLAGS) as url, RolloutClient(url, timeout_s=60) as client:
        yield Server(client)
        assert client.health()


@contextmanager
def paused(client: RolloutClient, mode: Any) -> Iterator[None]:
    client.pause(mode)
    try:
        yield
        assert client.is_paused()
    finally:
        client.resume()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_streams_go_on_while_weights_are_pushed(server: Server, policy: Any) -> None:
    streams = [Stream(server.client, prompt(50), n=3), Stream(server.client, prompt(9, seed=1))]
    for version in ("one", "two"):
        for stream in streams:
            stream.go_on()
        server.push(f"{policy} {version}", kv_policy=policy)
    for stream in streams:
        stream.go_on()
    assert server.client.abort([stream.request_id for stream in streams]) == 2
    for stream in streams:
        for choice in stream.result():
            assert choice.finish_reason == "abort"
            assert [span.version for span in choice.spans][1:] == [f"{policy} one", f"{policy} two"]
            kv = "mixed" if policy == "keep" else "current"
            assert [span.kv for span in choice.spans] == ["current", kv, kv]
            server.check(stream.prompt_ids, choice, moved=True)
    server.check_serves(f"{policy} two")


def test_a_push_into_an_idle_server(server: Server) -> None:
    before = server.client.weight_info()
    server.check_serves(before["weight_version"])
    pushed = server.push("idle")
    info = server.client.weight_info()
    assert (info["weight_version"], info["epoch"], info["state"]) == ("idle", before["epoch"] + 1, "committed")
    assert (pushed.version, pushed.epoch, info["last_error"]) == ("idle", info["epoch"], None)
    assert info["bytes"] == pushed.bytes == sum(p.nbytes for p in tiny_models.model("llama").parameters())
    server.check_serves("idle")

    server.push(None)
    server.check_serves("idle")  # without a label it keeps the one there is
    server.client.post("/update_weight_version", {"new_version": "renamed"})
    assert server.client.weight_info()["epoch"] == before["epoch"] + 2
    server.check_serves("renamed")


def test_a_bf16_trainer_pushes_into_a_float32_server(server: Server) -> None:
    server.push("bf16", dtype=torch.bfloat16)
    server.check_serves("bf16")


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_push_commits_while_generation_is_frozen(server: Server, policy: Any) -> None:
    stream = Stream(server.client, prompt(30), n=2)
    stream.go_on()
    with paused(server.client, "keep"):
        queued = Stream(server.client, prompt(50), max_tokens=5)  # accepted, and waits for resume
        server.push(f"frozen {policy}", kv_policy=policy)
        assert server.client.weight_info()["state"] == "committed"
        assert queued.lengths == [0]
    stream.go_on()
    server.client.abort([stream.request_id])
    for choice in stream.result():
        assert [span.version for span in choice.spans][1:] == [f"frozen {policy}"]
        server.check(stream.prompt_ids, choice, moved=True)
    (choice,) = queued.result()
    assert choice.spans == [Span(f"frozen {policy}", 0, 5, max(server.models), "current")]
    server.check(queued.prompt_ids, choice)
    server.check_serves(f"frozen {policy}")


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_push_under_a_pause_that_empties_the_engine(server: Server, mode: Any) -> None:
    stream = Stream(server.client, prompt(30), max_tokens=60)
    stream.go_on(1)
    old = max(server.models)
    with paused(server.client, mode):
        (choice,) = stream.result()
        assert choice.finish_reason == ("length" if mode == "wait" else "abort")
        assert len(choice.token_ids) == 60 or mode == "abort"
        with pytest.raises(RolloutError, match=f"mode={mode}") as refused:
            server.client.generate(prompt(50))
        assert refused.value.status == 503
        server.push(mode)
    assert [span.epoch for span in choice.spans] == [old]
    server.check(stream.prompt_ids, choice)
    server.check_serves(mode)


def _nan(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name][0, 0] = torch.nan


def _misshapen(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][:-1]


def _missing(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


@pytest.mark.parametrize("spoil", [_nan, _misshapen, _missing])
def test_a_push_that_fails_leaves_the_old_weights_and_the_next_one_works(
    server: Server, spoil: Callable[[dict[str, torch.Tensor], str], None]
) -> None:
    server.push("before")
    epoch = max(server.models)
    stream = Stream(server.client, prompt(30))
    stream.go_on()
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = {n: p.detach().clone() for n, p in tiny_models.model("llama", 99).named_parameters()}
    spoil(tensors, name)
    with WeightSender.connect(server.client, tensors, timeout_s=20) as sender:
        with pytest.raises(WeightPushError, match=name):
            sender.push("spoilt")
        info = server.client.weight_info()
        assert (info["weight_version"], info["epoch"], info["state"]) == ("before", epoch, "aborted")
        assert name in info["last_error"]
        stream.go_on()
        server.check_serves("before")
    server.push("after")
    assert server.client.weight_info()["last_error"] is None
    stream.go_on()
    server.client.abort([stream.request_id])
    (choice,) = stream.result()
    assert [span.version for span in choice.spans] == ["before", "after"]
    server.check(stream.prompt_ids, choice, moved=True)
    server.check_serves("after")
