"""The plugin for verl, beside stand-ins of the classes that it derives from; tests.peers.verl_client has verl's own."""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import fake_engine, verl_standin
from tests.support.server_harness import RunningServer, running_server
from tests.support.verl_standin import RECORDED, config
from tests.support.weight_updates import UpdaterServer, llama, same_weights
from trainer_bridge.push.control import WeightPushError


@pytest.fixture(scope="module")
def plugin() -> Iterator[Any]:
    with verl_standin.plugin() as module:
        yield module


@pytest.fixture(scope="module")
def generating() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def weights_of(model: Any, walked: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.named_parameters():
        walked.append(name)
        yield name, tensor
    yield "a.counter", torch.zeros(2, dtype=torch.int64)  # no weight, and no server knows it


def drain(received: Any) -> list[Any]:
    async def all_of_it() -> list[Any]:
        return [pair async for pair in received]

    return asyncio.run(all_of_it())


def test_it_is_found_under_its_name(plugin: Any) -> None:
    assert verl_standin._Replicas.found["rollout"]() is plugin.Replica
    assert verl_standin._Engines.found["rollout"] is plugin.CheckpointEngineOfServers
    path = plugin.base._ROLLOUT_REGISTRY["rollout", "async"]
    assert path == f"{plugin.ServerAdapter.__module__}.ServerAdapter"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("BaseRollout", "ServerAdapter"),
        ("CheckpointEngine", "CheckpointEngineOfServers"),
        ("RolloutReplica", "Replica"),
        ("vLLMHttpServer", "ServerHandle"),
    ],
)
def test_signatures_are_verls(plugin: Any, theirs: str, ours: str) -> None:
    made = getattr(plugin, ours)
    assert not getattr(made, "__abstractmethods__", None)
    for name, recorded in RECORDED[theirs].items():
        method = vars(made).get(name)
        if method is None or name == "__init__":
            continue
        function = getattr(method, "__func__", method)
        taken = inspect.signature(function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        expected = {*recorded["required"], *recorded["optional"]} - {"self", "cls"}
        if theirs == "vLLMHttpServer":  # what only disaggregation and vLLM's own methods pass
            expected -= {"kv_transfer_params", "reset_prefix_cache"}
        assert takes_any or expected <= taken.keys(), name
        waits = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        assert waits == recorded["async"], name


def test_every_call_of_verls_has_a_method(plugin: Any) -> None:
    assert [name for name in RECORDED["called"] if not hasattr(plugin.ServerHandle, name)] == []


def test_rank_0_pushes_to_all_servers_and_all_ranks_gather(plugin: Any) -> None:
    with UpdaterServer(llama(0)) as one, UpdaterServer(llama(0)) as other:
        urls = [one.url, other.url]
        ranks = [plugin.CheckpointEngineOfServers(1 << 20, rank == 0, urls=urls, timeout_s=20.0) for rank in (0, 1)]
        for step in (1, 2):
            walked: list[list[str]] = [[], []]
            trained = llama(step)
            told = [
                asyncio.run(rank.send_weights(weights_of(trained, names), step))
                for rank, names in zip(ranks, walked, strict=True)
            ]
            assert walked[0] == walked[1] == [name for name, _ in trained.named_parameters()]
            assert told[0]["rollout/push_bytes"] == sum(p.nbytes for p in trained.parameters())
            assert told[1] == {}
            for server in (one, other):
                assert same_weights(server.model, trained)
                assert server.call("weight_info")["weight_version"] == str(step)
        assert drain(ranks[1].receive_weights(2)) == []


def test_a_failed_push_leaves_the_old_weights_and_finishes_the_gathers(plugin: Any) -> None:
    with UpdaterServer(llama(0)) as server:
        engine = plugin.CheckpointEngineOfServers(1 << 20, True, urls=[server.url], timeout_s=20.0)
        asyncio.run(engine.send_weights(weights_of(llama(1), []), 1))
        walked: list[str] = []
        wrong = llama(2, hidden_size=48)
        with pytest.raises(WeightPushError, match="parameters changed since the first push"):
            asyncio.run(engine.send_weights(weights_of(wrong, walked), 2))
        assert walked == [name for name, _ in wrong.named_parameters()]
        assert same_weights(server.model, llama(1))
        asyncio.run(engine.send_weights(weights_of(llama(3), []), 3))
        assert same_weights(server.model, llama(3))


@pytest.mark.parametrize("rank", [0, 1])
def test_in_one_worker_group_rank_0_pushes_by_the_adapter(
    plugin: Any, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    with UpdaterServer(llama(0)) as server:
        adapter = plugin.ServerAdapter(config([server.url], checkpoint_engine={"backend": "naive"}), None, None)
        assert (adapter.replica_rank, adapter.is_leader_rank) == (rank, True)
        walked: list[str] = []
        asyncio.run(adapter.update_weights(weights_of(llama(1), walked), global_steps=7, base_sync_done=True))
        assert len(walked) == len(list(llama(1).named_parameters()))
        assert same_weights(server.model, llama(0 if rank else 1))
        with pytest.raises(ValueError, match=r"lora\.merge=True"):
            asyncio.run(adapter.update_weights(iter(()), peft_config={"r": 8}))


def test_the_adapter_takes_no_other_backends_weights(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    asked: dict[str, Any] = {"replica_rank": 3}
    adapter = plugin.ServerAdapter(config(["http://127.0.0.1:1"]), None, None, **asked)
    assert adapter.replica_rank == 3
    engine = plugin.CheckpointEngineOfServers(1, urls=["http://127.0.0.1:1"])
    asyncio.run(adapter.update_weights(engine.receive_weights(1), global_steps=1))  # asks nobody anything
    for backend, form in (("nccl", "named_tensors"), ("rollout", "delta_flush")):
        other = plugin.ServerAdapter(config(["http://x"], checkpoint_engine={"backend": backend}), None, None)
        with pytest.raises(ValueError, match="doesn't reach a rollout server"):
            asyncio.run(other.update_weights(iter(()), form))
    with pytest.raises(ValueError, match=r"engine_kwargs.rollout.urls"):
        plugin.ServerAdapter(config([]), None, None)


def ask(handle: Any, **params: Any) -> Any:
    return handle.generate(prompt_ids=[97, 98], sampling_params=params, request_id="r", image_data=None)


def test_answers_are_as_verl_reads_them(plugin: Any, generating: RunningServer) -> None:
    async def run() -> None:
        handle = plugin.ServerHandle(generating.url, config([generating.url]))
        await handle.wait_until_ready()
        told = await ask(handle, temperature=0.5, top_p=1.0, top_k=-1, logprobs=True)
        assert told.token_ids == list(range(99, 105))  # as many as response_length allows
        assert len(told.log_probs) == 6
        assert (told.stop_reason, told.extra_fields) == ("completed", {"global_steps": None})
        sent = generating.stats()["added"][-1]["sampling_params"]
        assert (sent["max_tokens"], sent["temperature"], sent["logprobs"]) == (6, 0.5, 0)
        assert (await ask(handle, max_new_tokens=2)).log_probs is None
        assert generating.stats()["added"][-1]["sampling_params"]["max_tokens"] == 2
        certain = plugin.ServerHandle(generating.url, config([], full_determinism=True, ignore_eos=True))
        await ask(certain)
        sent = generating.stats()["added"][-1]["sampling_params"]
        assert (sent["seed"], sent["ignore_eos"]) == (42, True)
        with pytest.raises(ValueError, match="tempreture"):
            await ask(handle, tempreture=1)
        with pytest.raises(RuntimeError, match=r"\(400\).*temperature"):
            await ask(handle, temperature=-1.0)
        with pytest.raises(ValueError, match="takes text alone"):
            await handle.generate([1], {}, "r", image_data=["an image"])

    asyncio.run(run())


def test_steps_are_those_of_the_weights_that_sampled_it(plugin: Any) -> None:
    spans = [types.SimpleNamespace(version=label) for label in ("3", "4")]
    told = plugin._steps(types.SimpleNamespace(spans=spans))
    assert told == {"global_steps": 4, "min_global_steps": 3, "max_global_steps": 4}
    spans.insert(0, types.SimpleNamespace(version="default"))
    assert plugin._steps(types.SimpleNamespace(spans=spans)) == {"global_steps": 4}


def test_a_push_ends_nothing_and_a_replica_that_leaves_ends_all(plugin: Any, generating: RunningServer) -> None:
    async def run() -> None:
        handle = plugin.ServerHandle(generating.url, config([generating.url], response_length=500, prompt_length=500))
        slow = asyncio.create_task(handle.generate([fake_engine.SLOW], {}, "slow"))
        while not generating.stats()["running"]:
            await asyncio.sleep(0.01)
        assert await handle.abort_all_requests() == {"aborted_count": 0, "request_ids": []}
        assert (await ask(handle, max_tokens=1)).stop_reason == "completed"  # beside the push
        assert not slow.done()
        assert (await handle.abort_all_requests(reject_request=True))["aborted_count"] == 1
        assert (await slow).stop_reason == "aborted"
        assert (await ask(handle)).stop_reason == "aborted"
        await handle.resume_generation()
        assert (await ask(handle)).stop_reason == "completed"

    asyncio.run(run())


def test_a_replica_is_the_server_of_its_number_and_waits_for_no_gpu(
    plugin: Any, generating: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[dict[str, Any]] = []

    class Remote:
        """ray.remote of a class, in this process."""

        def __init__(self, cls: type) -> None:
            self.cls = cls

        def options(self, **options: Any) -> Remote:
            named.append(options)
            return self

        def remote(self, *args: Any) -> Any:
            made = self.cls(*args)
            made.wait_until_ready = types.SimpleNamespace(remote=made.wait_until_ready)
            return made

    monkeypatch.setattr(plugin, "ray", types.SimpleNamespace(remote=Remote))
    replica = plugin.Replica(1, config(["http://127.0.0.1:1", f"{generating.url}/"]), None)
    asyncio.run(replica.init_standalone())
    assert replica._server_address == generating.url.removeprefix("http://")
    assert replica.servers == [replica._server_handle]
    assert named[0]["name"] == "rollout_server_1_0"
    assert replica.resource_pool[1]["use_gpu"] is False
    assert replica.workers == ("worker",)
    assert not replica.rollout_worker_use_gpu()
