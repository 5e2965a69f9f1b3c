"""Engines as actors of a Ray cluster whose nodes come and go: the same answers, and one version of the weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from ray import serve as ray_serve

import rollout.server.ray
from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.connection import run_engine
from rollout.fleet.errors import EngineError
from rollout.fleet.fleet import Fleet
from rollout.fleet.ray.connection import RayEngines
from rollout.launch import serve
from rollout.server.main import listen
from tests.support import fake_engine, server_harness, tiny_models
from tests.support.engine_utils import prompt, teacher_forced
from tests.support.local_ray import RayCluster, ray_cluster
from tests.support.wait import eventually
from trainer_bridge.client import RolloutClient, RolloutError
from trainer_bridge.push.sender import WeightPushError, WeightSender
from trainer_bridge.push.sources import ModuleSource

# Nodes that go and come take minutes of two cores: those tests are long ones.
FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-gpu-blocks-override", "256"]
BACK_S = 400.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(nodes=2) as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.timeout(900)
def test_on_a_cluster_that_has_an_owner(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLLOUT_API_KEY", "sesame")  # of this process, not of the nodes
    config = ServerConfig(data_parallel_size=2, tokens_only=True)
    app = rollout.server.ray.build(
        EngineConfig(model=str(tmp_path), device="cpu"),
        config,
        target=fake_engine.run_engine,
        ray_actor_options={"num_cpus": 0},
    )
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    ray_serve.start(proxy_location="HeadOnly", http_options={"port": port})
    try:
        ray_serve.run(app, name="ours", route_prefix="/ours")
        url = f"http://127.0.0.1:{port}/ours"

        def check_serves() -> None:
            for path, status in {"/health": 200, "/v1/models": 401}.items():
                assert httpx.get(url + path).status_code == status
            with RolloutClient(url, api_key="sesame") as client:
                assert client.request("GET", "/get_world_size") == {"world_size": 2}
                assert client.generate([5], {"max_tokens": 3}).choices[0].token_ids == [6, 7, 8]

        check_serves()
        # Ray starts the replica again where it dies, and the places of its engines are free for the next ones.
        (replica,) = [p for p in psutil.process_iter(["cmdline"]) if "ray::ServeReplica:ours" in str(p.info["cmdline"])]
        replica.kill()
        eventually(lambda: not healthy(url), BACK_S)
        eventually(lambda: healthy(url), BACK_S)
        check_serves()
        ray_serve.delete("ours")
        eventually(lambda: cluster.placed() == {} and cluster.cpus_taken() == 0, BACK_S)
    finally:
        ray_serve.shutdown()


def healthy(url: str) -> bool:
    """Whether it says so within 2 s."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    return False


class Server:
    """`rollout serve` on the cluster, and the seed of the tiny model that each epoch should serve.

    Each rank has one restart: to wait for a node must not cost another.
    """

    def __init__(self, cluster: RayCluster, client: RolloutClient) -> None:
        self.cluster, self.client, self.url = cluster, client, client.base_url
        self.seeds = {0: 0}

    def generate(self, rank: int | None, token_ids: list[int], **params: Any) -> httpx.Response:
        """The answer of this rank, or of any."""
        body = {"token_ids": token_ids, "sampling_params": {"temperature": 0, "max_tokens": 8, **params}}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        return httpx.post(f"{self.url}/inference/v1/generate", json=body, headers=headers, timeout=240)

    def push(self, version: str) -> None:
        """Push weights unrelated to all before them."""
        seed = max(self.seeds.values()) + 1
        with WeightSender.connect(self.client, tiny_models.model("llama", seed), timeout_s=240) as sender:
            pushed = sender.push(version)
        assert pushed.epoch == max(self.seeds) + 1
        self.seeds[pushed.epoch] = seed

    def check_one_version(self, version: str, ranks: int = 2) -> None:
        """Every rank's greedy ids are those of the newest weights alone, under their name."""
        epoch = max(self.seeds)
        model = tiny_models.model("llama", self.seeds[epoch])
        for rank in range(ranks):
            answer = self.generate(rank, prompt(50))
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            expected = teacher_forced(model, prompt(50), choice["token_ids"]).argmax(-1)
            assert choice["token_ids"] == expected.tolist(), rank
            assert [(s["epoch"], s["version"]) for s in choice["weight_versions"]] == [(epoch, version)], rank
        info = self.client.weight_info()
        assert (info["epoch"], info["weight_version"]) == (epoch, version)

    def wait_for(self, rank: int) -> None:
        """Wait until this rank serves."""
        eventually(lambda: self.generate(rank, prompt(5), max_tokens=1).status_code == 200, BACK_S)


@pytest.fixture(scope="module")
def server(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ray")
    path = tiny_models.build("llama", folder / "model")
    flags = [*FLAGS, "--data-parallel-backend", "ray", "--data-parallel-size", "2", "--engine-restarts", "1"]
    with serve(path, folder / "log", *flags) as url, RolloutClient(url, timeout_s=240) as client:
        yield Server(cluster, client)
    # SIGTERM takes all of it along, and leaves the cluster to its owner.
    assert cluster.placed() == {}
    eventually(lambda: cluster.cpus_taken() == 0, BACK_S)


class Load:
    """Long requests, enough for both ranks, running until told to stop."""

    def __init__(self, server: Server, count: int) -> None:
        self._pool = ThreadPoolExecutor(count)
        self.tokens = [0] * count
        self._streams: list[Future[str]] = [self._pool.submit(self._read, server, i) for i in range(count)]

    def _read(self, server: Server, index: int) -> str:
        params = {"max_tokens": 400, "ignore_eos": True}
        for event in server.client.stream(prompt(20, seed=index), params):
            for choice in event.choices:
                self.tokens[index] += len(choice.token_ids)
                if choice.finish_reason is not None:
                    return choice.finish_reason
        raise AssertionError("it ended without a word")

    def wait_running(self) -> None:
        eventually(lambda: all(self.tokens), BACK_S)

    def results(self) -> list[str | BaseException]:
        """How each has ended."""
        return [stream.exception(BACK_S) or stream.result() for stream in self._streams]


def test_it_answers_as_a_server_without_ray_does(server: Server) -> None:
    server.check_one_version("default")
    assert len(set(server.cluster.placed().values())) == 2  # a node each
    engine = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_gpu_blocks_override": 256}
    path = str(server.client.models()[0]["root"])
    with server_harness.running_server(model=path, target=run_engine, **engine) as plain:

        def both(send: Any) -> list[httpx.Response]:
            return [send(url) for url in (server.url, plain.url)]

        for params in ({"temperature": 0}, {"seed": 7, "n": 2}):
            body = {"token_ids": prompt(40), "sampling_params": {**params, "max_tokens": 16}}
            a, b = both(lambda url, body=body: httpx.post(f"{url}/inference/v1/generate", json=body))
            a_ids, b_ids = ([c["token_ids"] for c in answer.json()["choices"]] for answer in (a, b))
            assert a_ids == b_ids
        for path, body in [("/inference/v1/generate", {"token_ids": [999]}), ("/nowhere", {}), ("/pause?mode=x", {})]:
            a, b = both(lambda url, path=path, body=body: httpx.post(url + path, json=body))
            assert a.status_code == b.status_code >= 400
            assert a.json() == b.json()


def test_a_stream_comes_bit_by_bit_and_ends_with_its_client(server: Server) -> None:
    stream = server.client.stream(prompt(20), {"max_tokens": 900, "ignore_eos": True})
    assert sum(len(next(stream).choices[0].token_ids) for _ in range(3)) < 100  # and it goes on

    def running() -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    assert running() == 1
    stream.close()
    eventually(lambda: running() == 0, BACK_S)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/inference/v1/generate",
            json={"token_ids": prompt(20), "sampling_params": {"max_tokens": 900, "n": 16, "ignore_eos": True}},
            timeout=0.5,
        )
    eventually(lambda: running() == 0, BACK_S)


def test_a_push_reaches_every_actor(server: Server) -> None:
    server.push("pushed")
    server.check_one_version("pushed")


class NodeRemover(ModuleSource):
    """Weights whose fifth tensor is never sent: the node of a rank is removed first, once."""

    def __init__(self, model: torch.nn.Module, cluster: RayCluster, rank: int) -> None:
        super().__init__(model)
        self._cluster, self._rank, self._armed = cluster, rank, True

    def tensors(self) -> Iterator[torch.Tensor]:
        for index, tensor in enumerate(super().tensors()):
            if index == 5 and self._armed:
                self._armed = False
                self._cluster.remove_node_of(self._rank)
            yield tensor


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_node_is_removed_under_load_and_during_a_push(server: Server) -> None:
    load = Load(server, 6)
    load.wait_running()
    remover = NodeRemover(tiny_models.model("llama", 99), server.cluster, 0)
    version = "torn"
    try:
        with WeightSender.connect(server.client, remover, packed=False, timeout_s=20) as sender:
            server.seeds[sender.push(version).epoch] = 99  # its engine died, and all that live have committed
    except WeightPushError:
        version = "pushed"  # its engine died, and none has
    results = load.results()
    lost = [result for result in results if isinstance(result, BaseException)]
    assert lost
    assert len(lost) < len(results)
    for error in lost:
        assert isinstance(error, RolloutError)
        assert "Engine 0 is being restarted" in str(error)
    assert set(results) - set(lost) == {"length"}
    assert server.generate(None, prompt(9)).status_code == 200
    refused = server.generate(0, prompt(9))
    assert refused.status_code == 503
    assert "Engine 0" in refused.json()["error"]["message"]
    assert server.client.health()
    # Ray gives the rank another node once there is one, and the other rank gives it the weights.
    server.cluster.add_node()
    server.wait_for(0)
    server.check_one_version(version)
    server.push("after")
    server.check_one_version("after")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_engines_join_and_leave_while_it_serves(server: Server) -> None:
    server.cluster.add_node()
    load = Load(server, 4)
    load.wait_running()
    scale = f"{server.url}/scale_elastic_ep"
    assert httpx.post(scale, json={"new_data_parallel_size": 3}, timeout=BACK_S).status_code == 200
    server.check_one_version("after", ranks=3)
    server.push("three")
    server.check_one_version("three", ranks=3)
    assert sorted(server.cluster.placed()) == [0, 1, 2]
    assert load.results() == ["length"] * 4
    load = Load(server, 6)
    load.wait_running()
    assert httpx.post(scale, json={"new_data_parallel_size": 2}, timeout=BACK_S).status_code == 200
    assert load.results() == ["length"] * 6  # it had the time to finish
    server.check_one_version("three")
    assert server.generate(2, prompt(9)).status_code == 400
    eventually(lambda: sorted(server.cluster.placed()) == [0, 1], BACK_S)  # the place is given back


def test_a_cluster_without_room_says_what_it_has(cluster: RayCluster) -> None:
    config = EngineConfig(model="any", device="cpu", num_threads=64)

    async def start() -> None:
        engines = RayEngines(config, run_engine, placement_timeout_s=0.5)
        fleet = Fleet(config, start_engine=engines)
        fleet.start()
        try:
            await fleet.wait_ready(30)
        finally:
            await fleet.stop()
            engines.close()

    with pytest.raises(EngineError, match=r"no node has room for an engine \(64 CPU.*has 1 CPU, 0 GPU.*free in all"):
        asyncio.run(start())
