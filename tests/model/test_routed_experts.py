"""The experts that each token went to, against the top k of transformers' own router logits."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.engine.engine import Engine
from rollout.fleet.connection import run_engine
from rollout.messages import AddRequest
from rollout.model.routed_experts import find_routers
from rollout.outputs import RoutingShape, TokenOutput
from rollout.server.generation import routed_experts
from rollout.server.wire.answer import npy
from tests.support import text_server, tiny_models
from tests.support.engine_utils import Outputs, engine, ids, prompt, request, run
from tests.support.server_harness import running_server
from tests.support.wait import eventually


@dataclass(frozen=True)
class Tiny:
    """Two unrelated sets of weights of one mixture-of-experts model: folders, and transformers' models."""

    folders: list[Path]
    models: list[PreTrainedModel]


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("moe")
    folders = [tiny_models.build(request.param, root / str(seed), seed) for seed in range(2)]
    models = [AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval() for folder in folders]
    return Tiny(folders, models)


def start(tiny: Tiny, **config: Any) -> Engine:
    return engine(tiny.folders[0], enable_return_routed_experts=True, **config)


@torch.inference_mode()
def expected(model: PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    """(tokens, layers, experts per token), the likeliest expert first."""
    output = model(input_ids=torch.tensor([token_ids]), use_cache=False, output_router_logits=True)
    k = model.config.num_experts_per_tok
    return torch.stack([logits.topk(k).indices for logits in output.router_logits], 1).numpy()


def reported(engine: Engine, outputs: Iterable[TokenOutput]) -> np.ndarray:
    """The rows of a choice as a client reads them."""
    assert engine.runner.routing is not None
    rows = b"".join(output.routed_experts or b"" for output in outputs)
    return np.load(io.BytesIO(base64.b64decode(npy(routed_experts(rows, engine.runner.routing.shape)))))


def assert_routed(engine: Engine, model: PreTrainedModel, requests: Iterable[AddRequest], outputs: Outputs) -> None:
    """Each choice reports prompt + output - 1 rows, and they are transformers'."""
    for item in requests:
        for index in range(item.sampling_params.n):
            choice = outputs[item.request_id, index]
            rows = reported(engine, choice)
            tokens = item.prompt_token_ids + ids(choice)
            assert rows.dtype == np.uint8
            assert rows.tolist() == expected(model, tokens[:-1]).tolist()


@pytest.mark.parametrize(
    "config", [{}, {"batch_invariant": True, "block_size": 16}, {"enable_prefix_caching": False}], ids=str
)
def test_chunks_groups_and_prefix_hits(tiny: Tiny, config: dict[str, Any]) -> None:
    e = start(tiny, max_num_batched_tokens=20, **config)
    group = request("group", prompt(50), n=4, max_tokens=9)
    first = [group, request("short", prompt(3), max_tokens=20), request("logprobs", prompt(30), prompt_logprobs=1)]
    first += [request("twin", prompt(50), n=2, max_tokens=7), request("another", prompt(50), max_tokens=5)]
    assert_routed(e, tiny.models[0], first, run(e, first))
    longer = request("again", [*prompt(50), 7], n=2, max_tokens=5, temperature=0.5)
    assert_routed(e, tiny.models[0], [longer], run(e, [longer]))
    hits = e.stats["prefix_hit_tokens"]
    assert hits == 0 if config.get("enable_prefix_caching") is False else hits >= 48


def test_preempted_sequences_tell_each_row_once(tiny: Tiny) -> None:
    e = start(tiny, num_gpu_blocks_override=24, max_model_len=90, max_num_seqs=8, max_num_batched_tokens=16)
    requests = [request(str(i), prompt(12, i), max_tokens=40) for i in range(6)]
    outputs = run(e, requests)
    assert e.stats["preemptions"] > 0
    assert_routed(e, tiny.models[0], requests, outputs)


def push(engine: Engine, folder: Path) -> None:
    """Receive these weights and commit them."""
    call = engine.weights.call
    call("init_weight_transfer_engine", {"init_info": {"backend": "disk"}}).result(20)
    call("start_weight_update", {}).result(20)
    call("update_weights", {"update_info": {"path": str(folder)}}).result(20)
    finishing = call("finish_weight_update", {})
    eventually(lambda: engine.commit_weights() or finishing.done())
    finishing.result(20)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_row_stays_as_it_was_when_its_successor_was_sampled(tiny: Tiny, policy: str) -> None:
    e = start(tiny, kv_policy=policy)
    old, new = tiny.models
    item = request("crosses", prompt(21), max_tokens=16)
    e.add_request(item)
    outputs = [output for _ in range(6) for output in e.step()]
    push(e, tiny.folders[1])
    while e.has_work:
        outputs += e.step()
    e.weights.close()
    tokens = item.prompt_token_ids + ids(outputs)
    rows, before = reported(e, outputs), len(item.prompt_token_ids) + 5
    assert len(rows) == len(tokens) - 1
    assert rows[:before].tolist() == expected(old, tokens[:before]).tolist()
    if policy == "recompute":
        assert rows[before:].tolist() == expected(new, tokens[:-1])[before:].tolist()
    assert (rows != expected(old, tokens[:-1])).any()


def test_a_prompt_that_starts_again_is_routed_by_the_new_weights(tiny: Tiny) -> None:
    e = start(tiny, max_num_batched_tokens=16)
    item = request("starts again", prompt(40), n=2)
    e.add_request(item)
    assert e.step() == []
    push(e, tiny.folders[1])
    outputs: Outputs = {}
    while e.has_work:
        for output in e.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
    e.weights.close()
    assert_routed(e, tiny.models[1], [item], outputs)


def test_layers_without_experts_say_zero(tmp_path: Path) -> None:
    config = tiny_models.config("qwen3_moe")
    config.mlp_only_layers = [1]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    e = engine(tmp_path, enable_return_routed_experts=True)
    item = request("mixed", prompt(20), ignore_eos=True)
    rows = reported(e, run(e, [item])["mixed", 0])
    assert rows.shape == (27, 3, 2)
    assert not rows[:, 1].any()
    assert Counter(rows[:, 2].ravel().tolist()).keys() > {0, 1}


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        engine(tiny_models.build("llama", tmp_path), enable_return_routed_experts=True)


def test_without_the_flag_nothing_is_reported(tiny: Tiny) -> None:
    e = engine(tiny.folders[0])
    (choice,) = run(e, [request("plain", prompt(5))]).values()
    assert e.runner.routing is None
    assert all(output.routed_experts is None for output in choice)


def test_routers_are_found_by_layer(tiny: Tiny) -> None:
    routers = find_routers(tiny.models[0])
    assert [routers[layer] is block.mlp.gate for layer, block in enumerate(tiny.models[0].model.layers)] == [True] * 3


def test_more_than_256_experts_take_two_bytes() -> None:
    rows = np.arange(12, dtype=np.uint16) * 30
    text = npy(routed_experts(rows.tobytes(), RoutingShape(2, 3, "uint16")))
    assert np.load(io.BytesIO(base64.b64decode(text))).tolist() == rows.reshape(2, 2, 3).tolist()


# -- as clients get it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("served")
    tokenizer = text_server.tokenizer()
    config = tiny_models.config("qwen3_moe")
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "enable_return_routed_experts": True}
    with (
        running_server(model=str(folder), target=run_engine, **options) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def decoded(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


GENERATE = "/inference/v1/generate"
# Letters only, so that a stop string can be one.
LETTERS = {"allowed_token_ids": list(b"abcdefgh"), "temperature": 1.0, "max_tokens": 9}


def test_whole_answers_and_joined_chunks_carry_the_rows(client: httpx.Client, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = prompt(20)
    body = {"token_ids": ids, "sampling_params": {**LETTERS, "n": 2, "seed": 5}}
    choices = client.post(GENERATE, json=body).json()["choices"]
    for choice in choices:
        assert decoded(choice["routed_experts"]).tolist() == expected(model, ids + choice["token_ids"][:-1]).tolist()
    streamed: dict[int, list[np.ndarray]] = {0: [], 1: []}
    for line in client.post(GENERATE, json={**body, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            (chunk,) = json.loads(line[6:])["choices"]
            streamed[chunk["index"]].append(decoded(chunk["routed_experts"]))
    for choice in choices:
        joined = np.concatenate(streamed[choice["index"]])
        assert joined.tolist() == decoded(choice["routed_experts"]).tolist()


@pytest.mark.parametrize("start", [0, 1, 13, 20])
def test_a_later_turn_leaves_out_the_rows_that_an_earlier_one_was_told(client: httpx.Client, start: int) -> None:
    body = {"token_ids": prompt(20), "sampling_params": {**LETTERS, "n": 2, "seed": 5}}
    whole = client.post(GENERATE, json=body).json()["choices"]
    body["sampling_params"] |= {"routed_experts_prompt_start": start}
    rest = client.post(GENERATE, json=body).json()["choices"]
    for choice, shorter in zip(whole, rest, strict=True):
        assert shorter["token_ids"] == choice["token_ids"]
        assert decoded(shorter["routed_experts"]).tolist() == decoded(choice["routed_experts"])[start:].tolist()
    streamed: list[np.ndarray] = []
    for line in client.post(GENERATE, json={**body, "stream": True}).text.splitlines():
        if line.startswith("data: {") and (chunk := json.loads(line[6:])["choices"][0])["index"] == 1:
            streamed.append(decoded(chunk["routed_experts"]))
    assert np.concatenate(streamed).tolist() == decoded(rest[1]["routed_experts"]).tolist()
    completion = {"prompt": prompt(20), "max_tokens": 3, "routed_experts_prompt_start": start}
    (choice,) = client.post("/v1/completions", json=completion).json()["choices"]
    assert len(decoded(choice["routed_experts"])) == 20 + 3 - 1 - start


def test_rows_end_where_a_stop_string_does(client: httpx.Client) -> None:
    body = {"token_ids": prompt(20), "sampling_params": {**LETTERS, "seed": 6}, "output_mode": "text"}
    (free,) = client.post(GENERATE, json=body).json()["choices"]
    body["sampling_params"] |= {"stop": [free["text"][3]]}
    (stopped,) = client.post(GENERATE, json=body).json()["choices"]
    count = free["text"].index(free["text"][3]) + 1
    assert stopped["token_ids"] == free["token_ids"][:count]
    assert decoded(stopped["routed_experts"]).tolist() == decoded(free["routed_experts"])[: 19 + count].tolist()


def test_the_other_endpoints_carry_them_too(client: httpx.Client) -> None:
    completion = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "return_token_ids": True})
    (choice,) = completion.json()["choices"]
    rows = len(choice["prompt_token_ids"]) + len(choice["token_ids"]) - 1
    assert decoded(choice["routed_experts"]).shape == (rows, 3, 2)
    chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
    assert decoded(chat.json()["choices"][0]["routed_experts"]).shape[1:] == (3, 2)
