"""One engine of two processes: its tokens and weights against one process's, transformers' own, and torch's slices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rollout.config import EngineConfig, ServerConfig
from rollout.engine.engine import Engine
from rollout.engine.process import run_engine
from rollout.outputs import TokenOutput
from rollout.tensor_parallel.team import FollowerLostError
from rollout.weights.errors import WeightUpdateError
from tests.support import tiny_models
from tests.support.engine_utils import (
    TOLERANCE,
    Outputs,
    assert_exact,
    engine,
    ids,
    logprobs,
    prompt,
    request,
    run,
    spans,
    teacher_forced,
)
from tests.support.push_reference import as_stamped
from tests.support.server_harness import children, is_alive, running_server
from tests.support.wait import eventually
from tests.support.weight_updates import saved_tensors, sha256, update_info
from trainer_bridge.client import RolloutClient
from trainer_bridge.push.sender import WeightSender

MODELS = ["llama", "qwen3_moe"]  # tied and dense; fused experts, norms between shards
REQUESTS = [
    request("greedy", prompt(30), temperature=0, max_tokens=12),
    request("group", prompt(9, 1), n=3, seed=3, temperature=1.0),  # forks: copies blocks
    request("scored", prompt(40, 2), temperature=0, max_tokens=1, prompt_logprobs=0),
]


class Team:
    """A two-process engine in this process, and its trainer: rank 0 of a gloo group of three."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.engine: Engine = engine(folder, tensor_parallel_size=2, weight_update_timeout_s=20, **config)
        self.ids: dict[str, str] = {}
        self.follower = self.engine.team._followers[0].process

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.settle(self.engine.weights.call(method, {**self.ids, **params}))

    def settle(self, answer: Future[dict[str, Any]]) -> dict[str, Any]:
        """The answer, for which the engine may have to turn."""
        deadline = time.monotonic() + 30
        while not answer.done():
            assert time.monotonic() < deadline
            self.engine.commit_weights()
            time.sleep(0.005)
        return answer.result()

    def join(self, world_size: int = 3, **init_info: Any) -> None:
        timeout = timedelta(seconds=20)
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, timeout, wait_for_workers=False)
        info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": store.port, "world_size": world_size}
        body = {"init_info": {**info, **init_info}, **self.ids}
        joining = self.engine.weights.call("init_weight_transfer_engine", body)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("rollout", store), 0, world_size, timeout)
        self.settle(joining)

    def send(self, tensors: dict[str, torch.Tensor]) -> None:
        """Start an update, and broadcast these to all ranks."""
        self.call("start_weight_update")
        receiving = self.engine.weights.call("update_weights", {"update_info": update_info(tensors), **self.ids})
        for tensor in tensors.values():
            self.group.broadcast(tensor.detach().contiguous(), 0).wait()
        self.settle(receiving)

    def checksums(self) -> dict[str, str]:
        return self.call("weight_checker", action="checksum")["checksums"]

    def shares(self) -> dict[str, torch.Tensor]:
        return self.engine.store.parameters.live.tensors


@contextmanager
def team(folder: Path, **config: Any) -> Iterator[Team]:
    running = Team(folder, **config)
    try:
        yield running
    finally:
        running.engine.close()
    assert running.follower.returncode is not None


def first_half(name: str, whole: torch.Tensor) -> torch.Tensor:
    """What rank 0 of 2 holds of a parameter: rows of what heads and hidden units read, columns of what they write."""
    if name.endswith(("norm.weight", "mlp.gate.weight")):
        return whole
    if name.endswith("gate_up_proj"):
        return torch.cat([half.chunk(2, 1)[0] for half in whole.chunk(2, 1)], 1)
    return whole.chunk(2, -1 if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")) else 0)[0]


def assert_holds(running: Team, model: PreTrainedModel, sums: dict[str, str]) -> None:
    """Rank 0 holds its slice of every parameter, and all ranks' together are the whole ones, bit for bit."""
    wholes = dict(model.named_parameters())
    shares = running.shares()
    assert shares.keys() == wholes.keys()
    assert all(torch.equal(shares[name], first_half(name, whole)) for name, whole in wholes.items())
    assert running.checksums() == sums


@pytest.mark.parametrize("name", MODELS)
def test_one_engine_of_two_ranks(name: str, tmp_path: Path) -> None:
    folders = [tiny_models.build(name, tmp_path / str(seed), seed) for seed in range(2)]
    models = [tiny_models.model(name, seed) for seed in range(2)]
    tensors = [saved_tensors(model, tmp_path / "saved") for model in models]
    sums = [{key: sha256(tensor) for key, tensor in part.items()} for part in tensors]
    routed = {"enable_return_routed_experts": name == "qwen3_moe"}
    alone = run(engine(folders[0], **routed), REQUESTS)
    with team(folders[0], **routed) as running:
        shapes = running.engine.runner.backend.layers
        assert {shape.num_kv_heads for shape in shapes} == {1}  # of 2
        outputs = run(running.engine, REQUESTS)
        assert_exact(models[0], REQUESTS, outputs)
        assert_same(outputs, alone, atol=TOLERANCE)
        assert_holds(running, models[0], sums[0])
        refused_pushes_leave_everything(running, models[0], tensors[1], sums[0])
        push_in_mid_generation(running, models, tensors[1])
        assert_holds(running, models[1], sums[1])
        pushed = run(running.engine, REQUESTS)
    with team(folders[1], **routed) as started:
        assert_same(run(started.engine, REQUESTS), pushed, atol=1e-5)
        assert started.checksums() == sums[1]
        started.call("update_weights", weight_dir=str(folders[0]))
        assert_holds(started, models[0], sums[0])
        a_lost_follower_ends_the_engine(started)


def assert_same(outputs: Outputs, others: Outputs, atol: float) -> None:
    """The same tokens, from the same experts, and the same logprobs within `atol`, also of a scored prompt."""
    assert outputs.keys() == others.keys()
    for key, choice in outputs.items():
        other = others[key]
        assert ids(choice) == ids(other)
        assert [output.routed_experts for output in choice] == [output.routed_experts for output in other]
        torch.testing.assert_close(logprobs(choice), logprobs(other), atol=atol, rtol=0)
    torch.testing.assert_close(prompt_logprobs(outputs), prompt_logprobs(others), atol=atol, rtol=0)


def prompt_logprobs(outputs: Outputs) -> torch.Tensor:
    (scored,) = outputs["scored", 0]
    assert scored.prompt_logprobs is not None
    return torch.tensor([entries[0].logprob for entries in scored.prompt_logprobs if entries])


def refused_pushes_leave_everything(
    running: Team, model: PreTrainedModel, tensors: dict[str, torch.Tensor], sums: dict[str, str]
) -> None:
    with pytest.raises(WeightUpdateError, match=r"leaves 1 ranks \(rank_offset 1 of world_size 2\).* takes 2"):
        running.call(
            "init_weight_transfer_engine",
            init_info={"backend": "gloo", "master_address": "127.0.0.1", "master_port": 1, "world_size": 2},
        )
    running.join()
    with pytest.raises(WeightUpdateError, match=r"sparse.*tensor_parallel_size"):
        running.call("start_weight_update", base_epoch=0)
    with pytest.raises(WeightUpdateError, match=r"in place.*tensor_parallel_size"):
        running.call("start_weight_update", weight_staging="in_place")
    # A value that only the other rank keeps.
    projection = "model.layers.1.self_attn.q_proj.weight"
    broken = tensors[projection].clone()
    broken[-1, -1] = torch.nan
    running.send({**tensors, projection: broken})
    with pytest.raises(WeightUpdateError, match=f"finite.*{projection}"):
        running.call("finish_weight_update")
    assert_serves(running, model, sums, epoch=0)
    running.send(tensors)
    running.call("finish_weight_update", prepare=True)
    assert running.call("weight_info")["state"] == "ready"
    running.call("abort_weight_update")
    running.ids = {"owner": "trainer", "update_id": "first"}
    running.join()
    running.send(tensors)
    for ids_of_another in ({}, {"owner": "another"}, {"owner": "trainer", "update_id": "older"}):
        for method in ("finish_weight_update", "abort_weight_update"):
            stray = running.engine.weights.call(method, {"weight_version": "evil", **ids_of_another})
            with pytest.raises(WeightUpdateError, match=r"owner|another trainer took over|the update that is open"):
                running.settle(stray)
    running.call("finish_weight_update", prepare=True)  # all ranks still have it
    running.call("abort_weight_update")
    running.ids = {}
    running.join()
    running.call("start_weight_update")
    with pytest.raises(WeightUpdateError, match="no such parameter"):
        running.call("update_weights", update_info=update_info({"odd": broken}))
    running.join()
    some = {key: tensor for key, tensor in tensors.items() if key != projection}
    running.send(some)
    with pytest.raises(WeightUpdateError, match=f"lacks 1 of .*{projection}"):
        running.call("finish_weight_update")
    assert_serves(running, model, sums, epoch=0)


def assert_serves(running: Team, model: PreTrainedModel, sums: dict[str, str], epoch: int) -> None:
    assert running.call("weight_info")["epoch"] == epoch
    assert_holds(running, model, sums)
    outputs = run(running.engine, REQUESTS[:1])
    assert_exact(model, REQUESTS[:1], outputs)


def push_in_mid_generation(running: Team, models: list[PreTrainedModel], tensors: dict[str, torch.Tensor]) -> None:
    """Every token is of the weights that it is stamped with: no step mixed two ranks' versions."""
    item = request("long", prompt(12, 5), temperature=1.0, seed=1, max_tokens=40)
    running.engine.add_request(item)
    outputs: list[TokenOutput] = []
    for _ in range(10):
        outputs += running.engine.step()
    running.send(tensors)
    running.call("finish_weight_update", prepare=True)
    for _ in range(5):
        outputs += running.engine.step()
    assert running.call("finish_weight_update", weight_version="v1")["weight_version"] == "v1"
    while running.engine.has_work:
        outputs += running.engine.step()
    assert [span.version for span in spans(outputs)] == ["default", "v1"]
    expected = as_stamped(models, item.prompt_token_ids, ids(outputs), spans(outputs))
    torch.testing.assert_close(logprobs(outputs), expected, atol=TOLERANCE, rtol=0)


def a_lost_follower_ends_the_engine(running: Team) -> None:
    running.engine.add_request(request("long", prompt(12, 5), max_tokens=200))
    running.engine.step()
    running.follower.kill()
    with pytest.raises(FollowerLostError, match="rank 1 ended: exit code -9"):
        run(running.engine, [])
    with pytest.raises(FollowerLostError, match="rank 1 ended"):
        running.engine.step()


def test_a_server_of_two_ranks(tmp_path: Path) -> None:
    """Over HTTP: the trainer's half counts the ranks and reaches both; the follower goes with its engine."""
    folder = tiny_models.build("llama", tmp_path / "model")
    pushed = tiny_models.model("llama", 1)
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "tensor_parallel_size": 2}
    config = ServerConfig(tokens_only=True, enable_scale_out=True)
    with running_server(config, model=str(folder), target=run_engine, **options) as server:
        (follower,) = children(server.engine_pid)
        client = RolloutClient(server.url)
        with WeightSender.connect(client, pushed, timeout_s=20) as sender:
            assert sender.push("v1", verify=True).epoch == 1
        (choice,) = client.generate(prompt(20), {"temperature": 0, "max_tokens": 8, "logprobs": 0}).choices
        assert [(span.version, span.epoch) for span in choice.spans] == [("v1", 1)]
        expected = teacher_forced(pushed, prompt(20), choice.token_ids).log_softmax(-1)
        assert choice.token_ids == expected.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(choice.logprobs), expected.amax(-1), atol=TOLERANCE, rtol=0)
        os.kill(server.engine_pid, 9)
        eventually(lambda: not is_alive(follower), 20)


@pytest.mark.parametrize(
    "options", [{"batch_invariant": True}, {"weight_staging": "in_place"}, {"keep_weight_snapshot": "folder"}]
)
def test_what_it_cannot_be_had_with_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*tensor_parallel_size 2"):
        EngineConfig(tensor_parallel_size=2, **options)


def test_models_that_cannot_be_shared_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_models.build("llama", tmp_path)
    with pytest.raises(ValueError, match="tensor_parallel_size 4 does not divide the 2 key/value heads of LlamaFor"):
        engine(folder, tensor_parallel_size=4)
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1, got 0"):
        engine(folder, tensor_parallel_size=0)
