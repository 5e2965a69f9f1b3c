"""The exact mode over real HTTP: bits that survive the trip, `rollout verify`, and rollouts that are sampled again."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from rollout.cli.main import app
from rollout.cli.replay import replay
from rollout.cli.verify import verify
from rollout.launch import serve
from tests.support import tiny_models
from tests.support.engine_utils import prompt
from tests.support.exact_rollouts import (
    Rollout,
    differing,
    exact_engine,
    request,
    roll_out,
    threads,
    trainer_logprobs,
    trainers_model,
)
from trainer_bridge import RolloutClient, WeightSender
from trainer_bridge.client import Choice, Generation, Span
from trainer_bridge.loop import records

FLAGS = ["--tokens-only", "--device", "cpu", "--num-threads", "1", "--return-sampling-mask"]
EXACT = [*FLAGS, "--dtype", "bfloat16", "--batch-invariant", "--logprobs-mode", "processed_logprobs"]
PARAMS = {"max_tokens": 20, "logprobs": 0, "seed": 5, "ignore_eos": True, "top_p": 0.9, "repetition_penalty": 1.1}

app.command("verify")(verify)
app.command("replay")(replay)


@dataclass
class Server:
    """A server, a client of it, and the folder of the weights it was started with."""

    url: str
    client: RolloutClient
    model: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Batch-invariant, bfloat16, one thread."""
    path = tiny_models.build("qwen3", folder / "model")
    with serve(path, folder / "log", *EXACT) as url, RolloutClient(url, timeout_s=60) as client:
        yield Server(url, client, path)


def command(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


# -- bits


def as_rollouts(params: dict[str, Any], answer: Generation) -> list[Rollout]:
    item = request("r", answer.prompt_token_ids, **params)
    return [
        Rollout(item, c.token_ids, c.logprobs or [], c.sampling_mask or [None] * len(c.token_ids))
        for c in answer.choices
    ]


def test_bits_survive_json_and_msgpack(server: Server) -> None:
    """The engine's own numbers, the server's answer, the server's stream, and the trainer's forward pass."""
    prompts = [prompt(30), prompt(140)]
    answers = [server.client.generate(ids, PARAMS, n=3) for ids in prompts]
    rollouts = [rollout for answer in answers for rollout in as_rollouts({**PARAMS, "n": 3}, answer)]
    values = [value for rollout in rollouts for value in rollout.logprobs]
    assert values == [struct.unpack("f", struct.pack("f", value))[0] for value in values]  # each is a float32
    assert len(set(values)) > 50
    with threads(1):
        engine = exact_engine(server.model, "bfloat16")
        own = roll_out(engine, [request(str(i), ids, **PARAMS, n=3) for i, ids in enumerate(prompts)])
    assert [(r.token_ids, r.logprobs, r.masks) for r in own.values()] == [
        (r.token_ids, r.logprobs, r.masks) for r in rollouts
    ]
    pieces: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for event in server.client.stream(prompts[0], PARAMS, n=3):
        for piece in event.choices:
            pieces[piece.index] += piece.logprobs or ()
    assert list(pieces.values()) == [r.logprobs for r in rollouts[:3]]
    with threads(2):
        model = trainers_model(server.model, "bfloat16")
        assert differing(rollouts, trainer_logprobs(model, rollouts)) == (0, 6 * 20)


def test_the_server_says_what_it_is(server: Server) -> None:
    info = server.client.weight_info()
    assert {name: info[name] for name in (*records.SERVER_FACTS, "kv_policy")} == {
        "dtype": "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "batch_invariant": True,
        "kv_policy": "recompute",
    }


# -- rollout verify


def test_verify_finds_no_differing_bit(server: Server) -> None:
    result = command("verify", "--url", server.url, "--model", server.model, "--requests", "6", "--max-tokens", "12")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{(4 + 1 + 1 + 4 + 1 + 1) * 12} sampled tokens scored again: 0 differing")


def test_verify_tells_the_gap_of_a_server_without_the_mode(folder: Path, server: Server) -> None:
    with serve(server.model, folder / "fast-log", *FLAGS, "--dtype", "float32", "--attention-backend", "torch") as url:
        result = command("verify", "--url", url, "--model", server.model, "--requests", "4", "--max-tokens", "24")
    assert result.exit_code == 1, result.output
    assert "scored again: 0 differing" not in result.output
    assert "doesn't state batch_invariant: this gap is to be expected" in result.output


def test_verify_says_that_the_weights_are_others(server: Server, tmp_path: Path) -> None:
    other = tiny_models.build("qwen3", tmp_path, seed=1)
    result = command("verify", "--url", server.url, "--model", other)
    assert result.exit_code == 2
    assert "the server's weights are not those of" in result.output
    assert "model.embed_tokens.weight" in result.output or "lm_head.weight" in result.output


# -- records


def recorded(server: Server, **params: Any) -> records.Record:
    params = {**PARAMS, **params}
    answer = server.client.generate(prompt(25), params)
    return records.record(
        answer.prompt_token_ids,
        params,
        answer.choices,
        model=server.model,
        info=server.client.weight_info(),
        checksum=records.checksum(server.client),
    )


def test_a_record_is_read_as_it_was_written(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    written = [recorded(server, n=3), recorded(server, temperature=0, seed=None)]
    for item in written:
        records.append(path, item)
    assert list(records.read(path)) == written
    assert written[0].seed == 5
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0].keys() == {"request", "weights", "server", "choices"}
    assert lines[0]["weights"] == {
        "model": str(server.model),
        "version": "default",
        "epoch": 0,
        "checksum": records.checksum(server.client),
    }
    with pytest.raises(ValueError, match="draw 63 bits for it"):
        recorded(server, seed=None)
    path.write_text('{"request": {"token_ids": [1]}, "weights": {}, "server": {}, "choices": []}\n')
    with pytest.raises(ValueError, match=r"line 1 is no rollout record.*lacks request.sampling_params, weights.model"):
        list(records.read(path))


def test_a_record_gives_the_same_rollout_on_another_server(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    records.append(path, recorded(server, n=2))
    records.append(path, recorded(server, temperature=0))
    result = command("replay", path)
    assert result.exit_code == 0, result.output
    assert result.output.count("20 tokens, the same ids and logprob bits") == 3


def test_replay_tells_what_differs(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    item = recorded(server)
    (choice,) = item.choices
    nudged = list(choice.logprobs or ())
    nudged[3] = float(torch.tensor(nudged[3]).nextafter(torch.tensor(0.0)))
    records.append(path, replace(item, choices=[replace(choice, logprobs=nudged)]))
    records.append(path, replace(item, choices=[replace(choice, token_ids=[*choice.token_ids[:7], 3, 3, 3])]))
    records.append(path, replace(item, weights={**item.weights, "checksum": "0" * 64}))
    records.append(path, replace(item, server={**item.server, "dtype": "float32"}))
    records.append(path, replace(item, weights={**item.weights, "version": "step-9", "epoch": 9}))
    result = command("replay", path, "--url", server.url)
    assert result.exit_code == 1
    *lines, _ = result.output.split("\n")
    assert len(lines) == 4
    assert "record 1, choice 0: 20 tokens, the same ids; before that 1 logprobs differ" in lines[0]
    assert "record 2, choice 0: 20 tokens, other ids from token 7 on; before that 0 logprobs differ" in lines[1]
    assert "record 3: not compared, the server has other weights" in lines[2]
    assert "record 4: not compared, the server's arithmetic is {'dtype': 'bfloat16'}" in lines[3]
    result = command("replay", path, "--url", server.url, "--version", "step-7")
    assert (result.exit_code, result.output) == (2, "none of 5 records was begun by weights 'step-7'\n")
    path.write_text("[]\n")
    result = command("replay", path, "--url", server.url)
    assert result.exit_code == 2
    assert "line 1 is no rollout record" in result.output


def test_only_what_the_records_weights_sampled_is_compared() -> None:
    spans = [Span("default", 0, 2, 0, "current"), Span("step-1", 2, 4, 1, "current")]
    choice = Choice(0, [5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0], None, spans, "length", None)
    item = records.record([1], {"seed": 1}, [choice], model="m", info={})
    again = Generation("r", [1], [replace(choice, token_ids=[5, 6, 9], logprobs=[-1.0, -2.0, -9.0])])
    assert records.compare(item, again) == [records.ReplayedChoice(0, 2, 2, None, 0, 0.0)]
    shorter = Generation("r", [1], [replace(choice, token_ids=[5], logprobs=[-1.5])])
    (comparison,) = records.compare(item, shorter)
    assert (comparison.first_difference, comparison.differing_logprobs, comparison.largest_gap) == (1, 1, 0.5)
    assert not comparison.same


# -- a pushed policy


def test_a_pushed_policy_is_exact_and_its_checkpoint_replays(server: Server, tmp_path: Path) -> None:
    model = trainers_model(tiny_models.build("qwen3", tmp_path / "new", seed=2), "bfloat16")
    with WeightSender.connect(server.client, model, timeout_s=30) as sender:
        sender.push("step-1")
    model.save_pretrained(tmp_path / "step-1")
    item = recorded(server, n=2)
    assert item.weights["version"] == "step-1"
    rollouts = as_rollouts({**PARAMS, "n": 2}, Generation("r", prompt(25), item.choices))
    assert differing(rollouts, trainer_logprobs(model, rollouts)) == (0, 2 * 20)
    path = tmp_path / "rollouts.jsonl"
    records.append(path, item)
    result = command("replay", path, "--model", tmp_path / "step-1", "--version", "step-1")
    assert result.exit_code == 0, result.output
    result = command("verify", "--url", server.url, "--model", tmp_path / "step-1", "--requests", "3")
    assert result.exit_code == 0, result.output
