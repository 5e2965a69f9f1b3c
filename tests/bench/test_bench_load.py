"""`rollout bench load`: what it sends, what it counts, and what it makes of the counts."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from rollout.bench.loads import DEFAULT_LOADS, LOADS, Load, ServerInfo, choose, inspect
from rollout.bench.measure import Comparison, Result, Round, compare
from rollout.cli.bench import bench
from rollout.sampling.grammar import GrammarCompiler, as_grammar, next_tokens
from rollout.sampling.params import StructuredOutputsParams
from tests.support import tiny_models
from tests.support.foreign_server import ForeignServer, counting, foreign_server
from tests.support.server_harness import running_server
from tests.support.tiny_tokenizers import of_tiny_models

SERVER = ServerInfo("http://a", None, "m", "1", 4096, 100)


def invoke(*arguments: str) -> str:
    ran = CliRunner().invoke(bench, list(arguments))
    assert ran.exit_code == 0, ran.output
    return ran.output


def refused(*arguments: str) -> str:
    ran = CliRunner().invoke(bench, list(arguments))
    assert ran.exit_code == 1, ran.output
    return ran.output


def requests_of(server: ForeignServer) -> Counter[tuple[int, int, int, bool]]:
    """How often each (prompt length, n, max_tokens, streamed) was asked for."""
    return Counter(
        (
            len(body["token_ids"]),
            body["sampling_params"]["n"],
            body["sampling_params"]["max_tokens"],
            body.get("stream", False),
        )
        for body in server.bodies
    )


# -- the loads


@pytest.mark.parametrize(
    ("name", "requests", "n", "prompt", "output"),
    [("grpo", 8, 8, 256, 128), ("singles", 64, 1, 256, 128), ("single", 1, 1, 32, 128), ("group", 1, 32, 1024, 64)],
)
def test_the_default_loads_ask_for_what_they_say(name: str, requests: int, n: int, prompt: int, output: int) -> None:
    assert name in DEFAULT_LOADS
    load = LOADS[name]
    prompts = load.prompts(0, 0, 49152)
    assert [len(p) for p in prompts] == [prompt] * requests
    assert (load.n, load.max_tokens) == (n, output)
    assert load.output_tokens == requests * n * output


def test_prompts_differ_between_rounds_servers_and_seeds_but_not_in_length() -> None:
    load = LOADS["many"]
    prompts = [load.prompts(seed, number, 1000, copy=copy) for seed in (0, 1) for number in (0, 1) for copy in (0, 1)]
    assert len({tuple(p) for ps in prompts for p in ps}) == 8 * 256
    assert [len(p) for p in prompts[0]] == [len(p) for p in prompts[1]] != [len(p) for p in prompts[2]]
    assert load.prompts(0, 0, 1000) == prompts[0]
    lengths = [len(p) for ps in prompts for p in ps]
    assert min(lengths) >= 32
    assert 3800 < max(lengths) <= 3968
    assert all(0 <= token < 1000 for ps in prompts for p in ps for token in p)


def test_streaming_can_be_forced_and_unknown_loads_are_refused() -> None:
    assert [load.stream for load in choose(["grpo", "single"], None)] == [False, True]
    assert [load.stream for load in choose(["grpo", "single"], True)] == [True, True]
    assert [load.name for load in choose(None, False)] == list(DEFAULT_LOADS)
    with pytest.raises(ValueError, match="no load 'rgpo'"):
        choose(["rgpo"], None)


# -- the figures


def test_figures_of_made_up_rounds() -> None:
    load = Load("l", "", 1, 1, 1, 1, 1)
    first = Result(SERVER, [Round(2.0, 100, 100, 0.1, [0.5]), Round(1.0, 100, 90, 0.1, [0.1, 0.2])])
    second = Result(SERVER, [Round(4.0, 100, 100, 0.1), Round(5.0, 100, 100, 0.1)])
    speed = first.tokens_per_second
    assert (speed.median, speed.min, speed.max) == (70.0, 50.0, 90.0)
    assert first.all_tokens_per_second.max == 190.0
    assert first.first_token is not None
    assert (first.first_token.median, first.first_token.max) == (0.2, 0.5)
    assert second.first_token is None
    ratio = Comparison(load, [first, second]).ratio
    assert ratio is not None
    assert ratio.median == pytest.approx(70 / 22.5)
    assert (ratio.min, ratio.max) == (pytest.approx(50 / 25), pytest.approx(90 / 20))
    assert Comparison(load, [first]).ratio is None


# -- against servers


class LlamaStandIn(BaseHTTPRequestHandler):
    """Answers as llama.cpp's server does, by its README and its sources (server-task.cpp, server-context.cpp)."""

    bodies: ClassVar[list[dict[str, Any]]]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        model = {
            "id": "smol.gguf",
            "object": "model",
            "owned_by": "llamacpp",
            "meta": {"n_vocab": 77, "n_ctx_train": 64},
        }
        props = {"default_generation_settings": {"n_ctx": 512}, "total_slots": 64, "build_info": "b1-0"}
        self.reply({"/v1/models": {"object": "list", "data": [model]}, "/props": props}[self.path])

    def do_POST(self) -> None:
        assert self.path == "/completion"
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        number = body["n_predict"]
        final = {"content": "", "tokens": [], "stop": True, "tokens_predicted": number, "stop_type": "limit"}
        if not body["stream"]:
            choices = [{**final, "index": i, "tokens": [5] * number} for i in range(body.get("n_cmpl", 1))]
            self.reply(choices if len(choices) > 1 else choices[0])
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in [{"index": 0, "content": "a", "tokens": [5], "stop": False}] * (number - 1) + [
            {**final, "index": 0}
        ]:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def reply(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_llama_cpps_server_is_asked_in_its_own_words() -> None:
    LlamaStandIn.bodies = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), LlamaStandIn)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        assert inspect(url, None, None) == ServerInfo(url, None, "smol.gguf", "b1-0", 512, 77, completion=True)
        with foreign_server() as ours:
            options = ["--load", "grpo", "--load", "single", "--rounds", "1", "--warmup", "0", "--pause", "0"]
            printed = invoke("--url", ours.url, "--against", url, *options, "--vocab-size", "50")
        assert "b1-0" in printed
        asked = Counter((len(b["prompt"]), b.get("n_cmpl"), b["n_predict"], b["stream"]) for b in LlamaStandIn.bodies)
        assert asked == {(256, 8, 128, False): 8, (32, None, 128, True): 1}
        for body in LlamaStandIn.bodies:  # what was sampled is what a trainer needs: at temperature 1, with logprobs
            assert (body["temperature"], body["samplers"], body["n_probs"]) == (1.0, ["temperature"], 1)
            assert (body["ignore_eos"], body["cache_prompt"], body["return_tokens"]) == (True, False, True)
        assert "its grammars are another language" in refused("--url", url, "--load", "schema", "--rounds", "1")
    finally:
        http.shutdown()
        http.server_close()


def test_two_foreign_servers_in_turn(tmp_path: Path) -> None:
    with foreign_server() as first, foreign_server() as second:
        options = ["--load", "grpo", "--load", "single", "--rounds", "3", "--pause", "0", "--vocab-size", "50"]
        file = tmp_path / "figures.json"
        printed = invoke("--url", first.url, "--against", second.url, *options, "--json", str(file))
    for server in (first, second):
        assert requests_of(server) == {(256, 8, 128, False): 8 * 4, (32, 1, 128, True): 4}
        assert all(body["sampling_params"]["ignore_eos"] for body in server.bodies)
        assert all(body["sampling_params"]["temperature"] == 1 for body in server.bodies)
        assert all(token < 50 for body in server.bodies for token in body["token_ids"])
    sent = [tuple(body["token_ids"]) for server in (first, second) for body in server.bodies]
    assert len(set(sent)) == len(sent)  # no prefix cache helps

    figures = json.loads(file.read_text())
    assert {"cpu", "cores", "load_average"} <= figures["machine"].keys()
    assert (figures["rounds"], figures["warmup"], figures["seed"]) == (3, 1, 0)
    grpo, single = figures["loads"]
    assert [server["url"] for server in grpo["servers"]] == [first.url, second.url]
    assert [server["version"] for server in grpo["servers"]] == ["0.0-foreign"] * 2
    for server in grpo["servers"]:
        assert [r["output_tokens"] for r in server["rounds"]] == [8 * 8 * 128] * 3
        assert [r["prompt_tokens"] for r in server["rounds"]] == [8 * 256] * 3
        assert server["first_token_seconds"] is None
        speeds = sorted(r["output_tokens"] / r["seconds"] for r in server["rounds"])
        assert server["tokens_per_second"] == {"median": speeds[1], "min": speeds[0], "max": speeds[2]}
    medians = [server["tokens_per_second"]["median"] for server in single["servers"]]
    assert single["ratio"]["median"] == pytest.approx(medians[0] / medians[1])
    for server in single["servers"]:
        times = [when for r in server["rounds"] for when in r["first_tokens"]]
        assert len(times) == 3
        assert server["first_token_seconds"]["max"] == max(times)
        assert all(0 < when < r["seconds"] for r in server["rounds"] for when in r["first_tokens"])
    assert f"A {first.url}" in printed
    assert "A / B" in printed


def test_two_servers_pause_before_each_turn_and_alternate_who_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str | float] = []

    async def run_round(
        load: Load, server: ServerInfo, prompts: list[list[int]], on_answer: Callable[[], None]
    ) -> Round:
        turns.append(server.url)
        return Round(1.0, 1, 1, 0.0)

    monkeypatch.setattr("rollout.bench.measure.run_round", run_round)
    monkeypatch.setattr("rollout.bench.measure.time", SimpleNamespace(sleep=turns.append))
    settings: dict[str, Any] = {"rounds": 2, "warmup": 1, "seed": 0, "pause": 2.5, "on_answer": lambda: None}
    other = dataclasses.replace(SERVER, url="http://b")
    compare(LOADS["single"], [SERVER, other], **settings)
    a, b = SERVER.url, other.url
    assert turns == [2.5, a, 2.5, b, 2.5, b, 2.5, a, 2.5, a, 2.5, b]
    turns.clear()
    assert len(compare(LOADS["single"], [SERVER], **settings).results[0].rounds) == 2
    assert turns == [a] * 3


def test_our_own_server_gets_the_same_requests(tmp_path: Path) -> None:
    with running_server() as server:
        file = tmp_path / "figures.json"
        # Ids that the fake engine takes as commands are not drawn.
        loads = ["--load", "sse", "--load", "json"]
        invoke("load", "--url", server.url, *loads, "--rounds", "1", "--vocab-size", "900", "--json", str(file))
        assert len(server.stats()["added"]) == 2 * 64 * 2  # the warm-up included
    sse, whole = json.loads(file.read_text())["loads"]
    assert len(sse["servers"][0]["rounds"][0]["first_tokens"]) == 64
    assert whole["servers"][0]["rounds"][0]["output_tokens"] == 64 * 128
    assert sse["servers"][0]["model"] == "smol"


def test_the_vocabulary_is_read_from_the_model_on_this_machine(tmp_path: Path) -> None:
    model = tiny_models.build("llama", tmp_path / "model")
    with foreign_server(root=str(model)) as server:
        assert inspect(server.url, None, None).vocab_size == tiny_models.config("llama").vocab_size
        assert inspect(server.url, None, 7).vocab_size == 7
    with foreign_server() as server:
        assert "--vocab-size" in refused("--url", server.url, "--load", "single")


# -- what can't be measured


def test_a_server_that_stops_early_is_not_compared() -> None:
    def short(body: dict) -> list[dict]:
        choices = counting(body)
        choices[-1]["token_ids"].pop()
        return choices

    with foreign_server(short) as server:
        for form in ("--stream", "--no-stream"):
            printed = refused("--url", server.url, "--load", "grpo", "--vocab-size", "50", "--warmup", "0", form)
            assert "127]" in printed
            assert "8 x 128" in printed


def test_a_context_that_the_server_does_not_take_is_refused_before_it_is_sent() -> None:
    with foreign_server(limit=300) as server:
        printed = refused("--url", server.url, "--load", "grpo", "--vocab-size", "50")
        assert "384" in printed
        assert "300" in printed
        assert not server.bodies


def test_no_server_at_all() -> None:
    assert "127.0.0.1:1" in refused("--url", "http://127.0.0.1:1", "--vocab-size", "50")


@pytest.mark.parametrize("command", ["profile", "fidelity", "simulate"])
def test_commands_may_be_written_as_flags(command: str) -> None:
    helps = [
        CliRunner().invoke(bench, arguments).output for arguments in ([command, "--help"], [f"--{command}", "--help"])
    ]
    assert helps[0] == helps[1]
    assert f" {command} [OPTIONS]" in helps[0]


def test_the_schema_of_a_load_is_served_and_cannot_end_early() -> None:
    schema = LOADS["schema"].schema
    assert schema is not None
    grammar = as_grammar(StructuredOutputsParams(json=schema))
    state = GrammarCompiler(of_tiny_models(), 256, [1]).compile(grammar).begin()
    for token in json.dumps([{"name": "a", "age": 1, "kind": "home"}] * 20)[:-1].encode():
        state.append(token)
    assert state.error is None
    assert not next_tokens([state], 256)[0, 0] & 2  # EOS
