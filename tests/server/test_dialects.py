"""Clients of other trainers: TRL's own, unmodified, and the bodies of vLLM's, prime-rl's and SkyRL's, against a server.

`test_call_orders.py` has their weight updates from end to end; here are the calls and bodies that it doesn't have.
vLLM's are those of `vllm/distributed/weight_transfer/clients.py`, prime-rl's of `utils/client.py` and its `renderers`,
SkyRL's of `inference_servers/remote_inference_client.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import torch
import trl.generation.vllm_client
from accelerate import PartialState
from transformers import PreTrainedModel
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
from trl.experimental.async_grpo.vllm_client import VLLMClient

from rollout.launch import serve
from tests.support import tiny_models, tiny_trl
from tests.support.engine_utils import TOLERANCE, prompt, teacher_forced
from tests.support.push_reference import single
from tests.support.weight_updates import update_info
from tests.weights.test_call_orders import Trainer, parameters
from trainer_bridge.client import RolloutClient

FLAGS = ["--enable-scale-out", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
FLAGS += ["--served-model-name", "policy", "--logprobs-mode", "processed_logprobs", "--max-model-len", "512"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    folder = tmp_path_factory.mktemp("server")
    path = tiny_trl.build(folder / "model")
    with serve(path, folder / "log", *FLAGS) as url, RolloutClient(url, timeout_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """What is served until the last two tests push."""
    return tiny_models.model("llama", 0)


def check_samples(client: RolloutClient, model: PreTrainedModel, epoch: int) -> None:
    (choice,) = client.generate(prompt(20), {"max_tokens": 5, "logprobs": 0}).choices
    expected = single(model, prompt(20), choice.token_ids)
    torch.testing.assert_close(torch.tensor(choice.logprobs), expected, atol=TOLERANCE, rtol=0)
    assert [span.epoch for span in choice.spans] == [epoch]


def test_trls_asynchronous_client(client: RolloutClient) -> None:
    PartialState()  # TRL's logger wants it
    theirs = VLLMClient(client.base_url, server_timeout=30)
    theirs.wait_for_server_ready()
    assert theirs.get_max_model_len() == 512
    assert theirs.get_dtype() == "torch.float32"
    info = theirs.get_server_info()
    assert info["lora_config"] is None  # so TRL doesn't try to send adapters
    assert info["parallel_config"]["data_parallel_size"] == 1
    assert theirs.get_world_size() == 1
    theirs.pause()
    assert client.is_paused()
    theirs.resume()
    assert not client.is_paused()
    with pytest.raises(Exception, match="Request failed: 40"):
        theirs.finish_weight_update()  # nothing was begun
    with pytest.raises(Exception, match="--enable-lora"):
        theirs.load_lora_adapter("policy-v1", "/nowhere")


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_trls_own_rollout_loop(client: RolloutClient, model: PreTrainedModel, temperature: float) -> None:
    """The request that TRL's default rollout worker makes, by its own code."""
    loop = object.__new__(_AsyncRolloutLoop)
    vars(loop).update(
        model_name="policy", lora_name=None, max_tokens=12, temperature=temperature, top_p=1.0, top_k=0, min_p=None
    )
    vars(loop).update(repetition_penalty=1.0, request_timeout=60, vllm_server_url=client.base_url, _counters=Counter())

    async def turn() -> tuple[list[int], list[float]]:
        async with aiohttp.ClientSession() as loop.session:
            return await loop._generate_one_turn(prompt(20))

    ids, logprobs = asyncio.run(turn())
    assert len(ids) == len(logprobs) > 0
    table = (teacher_forced(model, prompt(20), ids) / temperature).log_softmax(-1)
    expected = table.gather(-1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)


@pytest.fixture
def synchronous(client: RolloutClient, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The client of TRL's GRPOTrainer in server mode, which refuses to be made where vLLM isn't installed."""
    monkeypatch.setattr(trl.generation.vllm_client, "is_vllm_available", lambda min_version=None: True)
    return trl.generation.vllm_client.VLLMClient(client.base_url, connection_timeout=30)


def test_trls_synchronous_client_generates(synchronous: Any, model: PreTrainedModel) -> None:
    assert synchronous.model == "policy"
    assert synchronous.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    prompts = [prompt(20), prompt(7)]
    got = synchronous.generate(prompts, n=2, max_tokens=6, logprobs=0)
    assert got["prompt_ids"] == prompts
    assert len(got["completion_ids"]) == 4
    for i, (ids, logprobs) in enumerate(zip(got["completion_ids"], got["logprobs"], strict=True)):
        expected = single(model, prompts[i // 2], ids)
        torch.testing.assert_close(torch.tensor(logprobs)[:, 0], expected, atol=TOLERANCE, rtol=0)
        assert got["logprob_token_ids"][i] == [[token] for token in ids]
    assert got["completion_ids"][0] != got["completion_ids"][1]


def test_trls_synchronous_client_asks_for_several_logprobs_and_greedy(synchronous: Any, model: PreTrainedModel) -> None:
    got = synchronous.generate([prompt(9)], temperature=0.0, max_tokens=5, logprobs=3)
    (ids,) = got["completion_ids"]
    table = teacher_forced(model, prompt(9), ids)
    assert ids == table.argmax(-1).tolist()
    assert [row[0] for row in got["logprob_token_ids"][0]] == ids


def test_trls_synchronous_client_scores_sequences(synchronous: Any, model: PreTrainedModel) -> None:
    sequence = prompt(16)
    scored = synchronous.get_sequence_logprobs([sequence], [10], top_logprobs=4)
    expected = single(model, sequence[:10], sequence[10:])
    best = teacher_forced(model, sequence[:10], sequence[10:]).log_softmax(-1).topk(4)
    assert scored["logprob_token_ids"][0] == best.indices.tolist()
    torch.testing.assert_close(torch.tensor(scored["logprobs"][0]), best.values, atol=TOLERANCE, rtol=0)
    for got, token, want in zip(scored["actual_logprobs"][0], sequence[10:], expected.tolist(), strict=True):
        if got[0] != -float("inf"):  # TRL's word for a token outside the top k
            assert got[0] == pytest.approx(want, abs=TOLERANCE), token


def test_trls_synchronous_client_around_weights(
    synchronous: Any, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its control calls are taken; its transport isn't: NCCL, from a CUDA device, through vLLM's own classes."""
    synchronous.reset_prefix_cache()
    assert synchronous.get_server_info()["weight_transfer_config"] is not None
    epoch = client.weight_info()["epoch"]
    Trainer(client).init(packed=True)
    with pytest.raises(Exception, match="409"), synchronous.weight_update():
        pass  # nothing was sent: TRL's finish must not commit that
    assert client.weight_info()["epoch"] == epoch
    client.post("/abort_weight_update")
    monkeypatch.setattr(trl.generation.vllm_client, "get_ip", lambda: "127.0.0.1", raising=False)
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        synchronous.init_communicator("cpu")


def test_prime_rl_renders_and_generates(client: RolloutClient, model: PreTrainedModel) -> None:
    """The token-in body of its `renderers`, through the address with /v1 that it is configured with."""
    params = {"temperature": 1.0, "max_tokens": 5, "top_p": 1.0, "seed": 3, "min_tokens": 0}
    params |= {"stop_token_ids": [tiny_models.EOS_TOKEN_ID], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": "policy", "token_ids": prompt(11), "sampling_params": params, "cache_salt": "4", "priority": 0}
    answer = client.post("/inference/v1/generate", body)
    assert answer["request_id"]
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    expected = single(model, prompt(11), choice["token_ids"])
    got = torch.tensor([entry["logprob"] for entry in content])
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_prime_rl_models_and_adapters(client: RolloutClient) -> None:
    assert "policy" in [model["id"] for model in client.models()]
    with httpx.Client(base_url=client.base_url) as http:
        assert http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": "/nowhere"}).status_code == 403


def test_prime_rl_over_nccl_fails_at_the_first_step(client: RolloutClient, tmp_path: Path) -> None:
    """It looks away when /init_broadcaster is refused. What it sends next must not be taken for an update."""
    before = client.weight_info()
    with httpx.Client(base_url=client.base_url) as http:
        info = {"host": "127.0.0.1", "port": 29501, "rank_offset": 0, "inference_world_size": 1, "timeout": 1200}
        refused = http.post("/init_broadcaster", json=info | {"quantize_in_weight_transfer": False})
        assert 400 <= refused.status_code < 500
        (tmp_path / "NCCL_READY").touch()
        for weight_dir in (tmp_path.as_posix(), None):
            answer = http.post("/update_weights", json={"weight_dir": weight_dir})
            assert 400 <= answer.status_code < 500, answer.text  # it asks again after a 5xx only
    after = client.weight_info()
    assert (after["epoch"], after["weight_version"], after["weights"]) == (before["epoch"], "default", "valid")


def test_skyrl_generates_and_controls(client: RolloutClient, model: PreTrainedModel) -> None:
    """Its GET carries a JSON body, its ids go through /tokenize and /detokenize."""

    async def calls() -> tuple[Any, ...]:
        async with aiohttp.ClientSession(client.base_url) as session:

            async def call(method: str, path: str, json: Any = None, **options: Any) -> Any:
                async with session.request(method, path, json=json, **options) as answer:
                    answer.raise_for_status()
                    return await answer.json() if answer.content_length else None

            size = await call("GET", "/get_world_size", {})
            await call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})
            await call("POST", "/resume")
            await call("POST", "/reset_prefix_cache", {"reset_running_requests": False})
            tokens = await call(
                "POST", "/tokenize", {"model": "policy", "prompt": "some text", "add_special_tokens": True}
            )
            params = {"temperature": 1.0, "max_tokens": 6, "logprobs": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
            params |= {"stop": None, "skip_special_tokens": True, "include_stop_str_in_output": True}
            body = {"sampling_params": params, "model": "policy", "token_ids": tokens["tokens"]}
            generated = await call("POST", "/inference/v1/generate", body, headers={"X-Session-ID": "7"})
            ids = generated["choices"][0]["token_ids"]
            return size, tokens, generated, await call("POST", "/detokenize", {"model": "policy", "tokens": ids})

    size, tokens, generated, text = asyncio.run(calls())
    assert size == {"world_size": 1}
    assert bytes(tokens["tokens"]) == b"some text"
    (choice,) = generated["choices"]
    expected = single(model, tokens["tokens"], choice["token_ids"])
    got = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    assert text["prompt"] == tiny_trl.tokenizer().decode(choice["token_ids"])
    assert choice["finish_reason"] in ("stop", "length")


def test_vllms_http_weight_sync_client(client: RolloutClient) -> None:
    """`packed` in init_info; start and finish without a body. Last, since the server has other weights afterwards."""
    trainer = Trainer(client)
    trainer.init(packed=True)
    for seed in (5, 6):
        pushed = tiny_models.model("llama", seed)
        epoch = client.weight_info()["epoch"]
        trainer.post("/start_weight_update")
        trainer.update_beside_broadcast(update_info(parameters(pushed)), parameters(pushed), packed=True)
        trainer.post("/finish_weight_update")
        check_samples(client, pushed, epoch + 1)


def test_trls_asynchronous_client_pushes(client: RolloutClient) -> None:
    """Its calls, in the order of its WeightTransferClient, around a broadcast that goes over gloo here."""
    theirs = VLLMClient(client.base_url)
    trainer = Trainer(client)
    trainer.init(packed=True)
    pushed, epoch = tiny_models.model("llama", 8), client.weight_info()["epoch"]
    theirs.pause()
    theirs.start_weight_update()
    sending = threading.Thread(target=trainer.broadcast, args=[parameters(pushed)], kwargs={"packed": True})
    sending.start()
    theirs.update_weights(update_info(parameters(pushed)), timeout=60)
    sending.join(20)
    theirs.finish_weight_update()
    theirs.resume()
    check_samples(client, pushed, epoch + 1)
