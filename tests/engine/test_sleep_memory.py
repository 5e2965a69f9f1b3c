"""A real server that sleeps: the kernel has the engine's memory back, and a trainer's cycle around it serves true
weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from rollout.launch import serve
from tests.support.engine_utils import TOLERANCE, prompt
from tests.support.push_reference import single
from tests.support.wait import eventually
from tests.weights.test_memory import MIB, EngineProcess, children
from trainer_bridge.client import Choice, RolloutClient, RolloutError
from trainer_bridge.push.sender import WeightPushError, WeightSender

CONFIG = LlamaConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    initializer_range=0.05,
)
LONG = 1500
CACHED = LONG * 4 * 2 * 8 * 128 * 4  # bytes of keys and values of so many tokens
NOISE = 24 * MIB


def model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    return made


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("sleep")
    model(0).save_pretrained(folder)
    flags = "--dtype float32 --device cpu --tokens-only --num-threads 1 --enable-sleep-mode --max-num-seqs 8"
    with serve(folder, folder / "log", *flags.split()) as url, RolloutClient(url, timeout_s=120) as client:
        (server,) = children(os.getpid(), str(folder))
        (pid,) = children(server, "--multiprocessing-fork")
        yield EngineProcess(client, pid)


def generate(client: RolloutClient, length: int = LONG) -> Choice:
    (choice,) = client.generate(prompt(length), {"temperature": 0, "max_tokens": 6, "logprobs": 0}).choices
    return choice


def check(choice: Choice, served: PreTrainedModel, epoch: int) -> None:
    expected = single(served, prompt(LONG), choice.token_ids)
    torch.testing.assert_close(torch.tensor(choice.logprobs), expected, atol=TOLERANCE, rtol=0)
    assert [(span.epoch, span.kv) for span in choice.spans] == [(epoch, "current")]


def push(client: RolloutClient, pushed: PreTrainedModel, **options: Any) -> int:
    with WeightSender.connect(client, pushed, timeout_s=60) as sender:
        return sender.push(**options).epoch


def samples(client: RolloutClient, name: str) -> list[Sample]:
    text = httpx.get(f"{client.base_url}/metrics", timeout=20).text
    (family,) = [found for found in text_string_to_metric_families(text) if found.name == name]
    return family.samples


def sleep_states(client: RolloutClient) -> dict[str, float]:
    return {sample.labels["sleep_state"]: sample.value for sample in samples(client, "vllm:engine_sleep_state")}


def test_memory_goes_and_comes_back_and_a_trainer_cycles_around_it(engine: EngineProcess) -> None:
    client = engine.client
    models = [model(seed) for seed in (0, 1, 2)]
    weights = sum(parameter.nbytes for parameter in models[0].parameters())
    assert weights > 4 * NOISE
    assert CACHED > NOISE
    assert push(client, models[1]) == 1  # from now on there is staging
    before, sums = generate(client), client.post("/weight_checker", {"action": "checksum"})
    check(before, models[1], 1)
    full = engine.now

    client.sleep(1)
    assert engine.now < full - weights - CACHED + NOISE
    assert sleep_states(client) == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
    with pytest.raises(RolloutError, match=r"asleep \(level 1\)"):
        generate(client)
    client.wake_up()
    again = generate(client)
    assert again.token_ids == before.token_ids
    assert again.logprobs == pytest.approx(before.logprobs, abs=1e-5)  # chunks follow the clock, a BLAS the chunks
    assert client.post("/weight_checker", {"action": "checksum"}) == sums

    kept = engine.now
    client.sleep(2)
    assert engine.now < kept - weights - CACHED + NOISE
    assert sleep_states(client) == {"awake": 0, "weights_offloaded": 0, "discard_all": 1}
    with pytest.raises(WeightPushError, match="the weights are asleep"):
        push(client, models[2])
    client.wake_up(["weights"])
    assert client.weight_info()["weights"] == "invalid"
    assert push(client, models[2], weight_staging="in_place") == 2  # nothing serves that it could spoil
    with pytest.raises(RolloutError, match=r"asleep \(level 2\)"):
        generate(client)
    client.wake_up(["kv_cache"])
    check(generate(client), models[2], 2)
    assert engine.now < full - weights // 2  # in place, there is no staging
    assert sleep_states(client) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


def test_it_waits_for_what_runs_and_refuses_while_an_update_is_open(engine: EngineProcess) -> None:
    client = engine.client
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, prompt(20), {"max_tokens": 60, "ignore_eos": True})
        eventually(lambda: samples(client, "vllm:num_requests_running")[0].value == 1, 60)
        client.sleep(1, "wait")
        assert running.result(60).choices[0].finish_reason == "length"
    client.wake_up()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.generate, prompt(20), {"max_tokens": 2000, "ignore_eos": True})
        eventually(lambda: samples(client, "vllm:num_requests_running")[0].value == 1, 60)
        falling = pool.submit(client.sleep, 1, "wait")
        eventually(client.is_sleeping, 60)
        client.wake_up()
        assert "woken up while waiting for running requests" in str(falling.exception(60))
        assert not client.is_sleeping()
        client.abort_all()
        assert running.result(60).choices[0].finish_reason == "abort"
        generate(client, 20)
    client.post("/init_weight_transfer_engine", {"init_info": {"backend": "disk"}})
    client.post("/start_weight_update", {})
    with pytest.raises(RolloutError, match="a weight update is open: finish_weight_update or abort_weight_update"):
        client.sleep(2)
    assert not client.is_sleeping()
    client.post("/abort_weight_update", {})
    generate(client, 20)
