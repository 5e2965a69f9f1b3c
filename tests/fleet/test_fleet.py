"""Two engines behind one address: one version, no request lost unsaid, and whole again after a death by themselves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rollout.config import ServerConfig
from tests.support import fake_engine, refusing_engine, tiny_models
from tests.support.engine_utils import prompt
from tests.support.fleet_server import FleetServer, RankKiller, check_greedy, fleet
from tests.support.server_harness import RunningServer, running_server
from tests.support.wait import eventually
from trainer_bridge.client import Choice, RolloutClient, RolloutError
from trainer_bridge.loop.metrics import of_server
from trainer_bridge.push.sender import WeightPushError, WeightSender


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetServer]:
    with fleet(tmp_path_factory.mktemp("fleet"), "--enable-sleep-mode") as running:
        yield running


def push(server: FleetServer, seed: int, version: str) -> int:
    with WeightSender.connect(server.client, tiny_models.model("llama", seed), timeout_s=60) as sender:
        return sender.push(version).epoch


_seeds = itertools.count(1)


@pytest.fixture
def serving(server: FleetServer) -> tuple[int, int, str]:
    """Seed, epoch and label of what a push has just brought to all ranks."""
    seed = next(_seeds)
    return seed, push(server, seed, f"step-{seed}"), f"step-{seed}"


def test_every_rank_answers_as_one_engine_does(server: FleetServer, serving: tuple[int, int, str]) -> None:
    model = tiny_models.model("llama", serving[0])
    server.check_serves(*serving)
    lengths = range(20, 52, 4)
    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(lambda length: server.generate(length=length), lengths))
    for length, answer in zip(lengths, answers, strict=True):
        check_greedy(answer, model, length)
    assert server.client.request("GET", "/get_world_size") == {"world_size": 2}
    assert server.client.request("GET", "/get_world_size?include_dp=false") == {"world_size": 1}
    assert server.client.request("GET", "/server_info")["vllm_config"]["parallel_config"] == {"data_parallel_size": 2}
    with pytest.raises(RolloutError, match=r"data_parallel_rank 2 is out of range \[0, 2\)"):
        server.generate(2)
    metrics = httpx.get(f"{server.client.base_url}/metrics", timeout=20).text
    for rank in (0, 1):
        assert f'rollout:engine_up{{engine="{rank}",model_name="{server.path}"}} 1.0' in metrics
        assert f'rollout:weight_epoch{{engine="{rank}",model_name="{server.path}"}} {serving[1]:.1f}' in metrics
    logged = of_server(server.client)
    assert (logged["server/weight_epoch"], logged["server/engine_up"]) == (serving[1], 2)


def test_a_rank_that_dies_asleep_comes_back_asleep_with_the_fleets_weights(
    server: FleetServer, serving: tuple[int, int, str]
) -> None:
    server.client.sleep(1)
    server.kill(1)
    server.wait_whole(1)  # its weights came from an engine that sleeps
    assert server.client.is_sleeping()
    with pytest.raises(RolloutError, match="the weights are asleep"):
        server.client.post("/update_weights", {"weight_dir": str(server.path)})
    server.client.wake_up()
    server.check_serves(*serving)


def test_an_epoch_names_the_same_weights_on_every_rank(server: FleetServer, serving: tuple[int, int, str]) -> None:
    """Streams on both ranks through five pushes and a relabelling: an epoch has one label per push, in one order."""
    seen: list[tuple[int, str]] = []
    over = threading.Event()

    def read(rank: int) -> list[tuple[int, int, str]]:
        spans = []
        with pinned(server, rank) as client:
            while not over.is_set():
                (choice,) = client.generate(prompt(30), {"max_tokens": 60, "ignore_eos": True}).choices
                assert [s.start for s in choice.spans] == [0, *(s.end for s in choice.spans[:-1])]
                assert choice.spans[-1].end == 60
                spans += [(rank, s.epoch, s.version) for s in choice.spans]
        return spans

    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(read, rank) for rank in (0, 1, 0, 1)]
        with WeightSender.connect(server.client, tiny_models.model("llama", 7), timeout_s=60) as sender:
            for number in range(5):
                pushed = sender.push(f"push-{number}", kv_policy="recompute")
                seen.append((pushed.epoch, pushed.version))
        over.set()
        found = [span for future in reading for span in future.result(60)]
    assert [epoch for epoch, _ in seen] == list(range(serving[1] + 1, serving[1] + 6))
    known = {(serving[1], serving[2]), *seen}
    for rank in (0, 1):
        own = {(epoch, version) for r, epoch, version in found if r == rank}
        assert own <= known
        assert len(own) > 2
    server.client.post("/update_weight_version", {"new_version": "renamed"})
    server.check_serves(7, seen[-1][0], "renamed")


def restarts(server: FleetServer, rank: int) -> float:
    metrics = httpx.get(f"{server.client.base_url}/metrics", timeout=20).text
    (line,) = [ln for ln in metrics.splitlines() if ln.startswith(f'rollout:engine_restarts_total{{engine="{rank}"')]
    return float(line.split()[-1])


def test_a_rank_killed_mid_generation(server: FleetServer, serving: tuple[int, int, str]) -> None:
    """What was passed on fails by name, what was not is begun again; the rank comes back with the fleet's weights."""
    model, before = tiny_models.model("llama", serving[0]), restarts(server, 1)
    with pinned(server, 0) as other, pinned(server, 1) as doomed, ThreadPoolExecutor(12) as pool:
        streams = [client.stream(prompt(20), {"max_tokens": 500, "ignore_eos": True}) for client in (other, doomed)]
        for stream in streams:
            next(stream)
        server.client.pause("keep")
        lengths = range(30, 40)
        waiting = [pool.submit(server.generate, length=length, max_tokens=16) for length in lengths]
        bound = pool.submit(server.generate, 1)
        eventually(lambda: sum(_running(server)) == 13)
        assert _running(server)[1] > 4
        server.kill(1)
        with pytest.raises(RolloutError, match=r"Engine 1 is being restarted.*exited with code -9") as failed:
            list(streams[1])
        assert failed.value.status == 503
        with pytest.raises(RolloutError, match="Engine 1 is being restarted"):
            bound.result(60)
        assert server.client.health()
        with pytest.raises(RolloutError, match="Engine 1 is being restarted"):
            server.generate(1)
        server.client.resume()
        for length, future in zip(lengths, waiting, strict=True):
            check_greedy(future.result(60), model, length)
        assert list(streams[0])[-1].choices[0].finish_reason == "length"
    server.wait_whole(1)
    server.check_serves(*serving)
    assert restarts(server, 1) == before + 1


def pinned(server: FleetServer, rank: int, timeout_s: float = 60.0) -> RolloutClient:
    headers = {"X-data-parallel-rank": str(rank)}
    return RolloutClient(server.client.base_url, timeout_s=timeout_s, headers=headers)


def _running(server: FleetServer) -> list[int]:
    """Choices that run or wait, by rank."""
    found = [0] * server.size
    for line in httpx.get(f"{server.client.base_url}/metrics", timeout=20).text.splitlines():
        if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{")):
            found[int(line.partition('engine="')[2][0])] += int(float(line.split()[-1]))
    return found


def test_a_rank_killed_mid_push(server: FleetServer, serving: tuple[int, int, str]) -> None:
    """Nobody commits, the old version serves everywhere, and the same sender's next push reaches all."""
    killer = RankKiller(tiny_models.model("llama", 50), server, 0)
    with WeightSender.connect(server.client, killer, packed=False, timeout_s=60) as sender:
        with pytest.raises(WeightPushError, match="Engine 0 is being restarted"):
            sender.push("never")
        check_greedy(server.generate(1), tiny_models.model("llama", serving[0]))
        server.wait_whole(0)
        server.check_serves(*serving)
        assert sender.push("fifty").epoch == serving[1] + 1
        server.check_serves(50, serving[1] + 1, "fifty")
        # A push to those that are left, while one is away, is what that one comes back with.
        server.kill(1)
        eventually(lambda: len(server.ranks()) == 1)
        assert sender.push("alone").epoch == serving[1] + 2
        server.wait_whole(1)
    server.check_serves(50, serving[1] + 2, "alone")


def test_a_sender_joins_again_after_a_rank_came_back(server: FleetServer) -> None:
    with WeightSender.connect(server.client, tiny_models.model("llama", 60), timeout_s=60) as sender:
        epoch = sender.push("sixty").epoch
        server.client.pause("keep")
        server.kill(1)
        server.wait_whole(1)
        assert server.client.weight_info()["transfer"] == "stale"
        with pytest.raises(RolloutError, match=r"409.*init_weight_transfer_engine: call it again"):
            server.client.post("/start_weight_update", {})
        assert server.client.is_paused()
        assert [_is_frozen(server, rank) for rank in (0, 1)] == [True, True]
        server.client.resume()
        server.check_serves(60, epoch, "sixty")
        assert sender.push("sixty-one").epoch == epoch + 1
    server.check_serves(60, epoch + 1, "sixty-one")


def _is_frozen(server: FleetServer, rank: int) -> bool:
    with pinned(server, rank, timeout_s=1) as client:
        try:
            client.generate(prompt(20), {"max_tokens": 1})
        except RolloutError as error:
            return "ReadTimeout" in str(error)
    return False


def test_all_ranks_killed_lose_what_nobody_has(server: FleetServer, serving: tuple[int, int, str]) -> None:
    """Then they wait, all under one epoch, for a push."""
    for rank in (0, 1):
        server.kill(rank)
    eventually(lambda: not server.client.health())
    eventually(lambda: server.client.health() and len(server.ranks()) == 2, 200)
    assert [(r["epoch"], r["weights"]) for r in server.ranks()] == [(serving[1], "invalid")] * 2
    with pytest.raises(RolloutError, match="are lost"):
        server.generate()
    assert push(server, 80, "eighty") == serving[1] + 1
    server.pids = sorted(server._engines())
    server.check_serves(80, serving[1] + 1, "eighty")


def test_engines_join_and_leave_while_it_serves(server: FleetServer, serving: tuple[int, int, str]) -> None:
    stop = threading.Event()

    def generate() -> list[Choice]:
        answers = []
        while not stop.is_set():
            answers.append(server.generate(length=40, max_tokens=12))
        return answers

    with ThreadPoolExecutor(3) as pool:
        busy = [pool.submit(generate) for _ in range(3)]
        size = {"new_data_parallel_size": 3}
        assert "3 data parallel" in server.client.post("/scale_elastic_ep", size, timeout_s=200)["message"]
        server.size = 3
        server.check_serves(*serving)
        server.client.post("/scale_elastic_ep", {"new_data_parallel_size": 2}, timeout_s=200)
        server.size = 2
        server.check_serves(*serving)
        stop.set()
        answers = [answer for future in busy for answer in future.result(60)]
    model = tiny_models.model("llama", serving[0])
    for answer in answers[:: len(answers) // 8]:
        check_greedy(answer, model, 40)
    assert {a.finish_reason for a in answers} == {"length"}
    assert push(server, 90, "ninety") == serving[1] + 1
    server.check_serves(90, serving[1] + 1, "ninety")


@pytest.mark.long
def test_engines_of_two_processes_each(tmp_path: Path) -> None:
    with fleet(tmp_path, "--tensor-parallel-size", "2") as server:
        assert server.client.request("GET", "/get_world_size") == {"world_size": 4}
        assert server.client.request("GET", "/get_world_size?include_dp=false") == {"world_size": 2}
        with WeightSender.connect(server.client, tiny_models.model("llama", 1), timeout_s=60) as sender:
            assert sender.push("one").epoch == 1
            server.check_serves(1, 1, "one")
            sums = server.client.post("/weight_checker", {"action": "checksum"})
            server.kill(1)
            server.wait_whole(1)
            server.check_serves(1, 1, "one")
            assert server.client.post("/weight_checker", {"action": "compare", "baseline": sums["checksums"]})["match"]
            assert sender.push("two").epoch == 2
        server.check_serves(1, 2, "two")


# -- with an engine that fails when it must not


def test_all_commit_or_none_and_who_fails_alone_comes_back(tmp_path: Path) -> None:
    path = tiny_models.build("llama", tmp_path / "model")
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "restarts": 2}
    config = ServerConfig(served_model_name="smol", enable_scale_out=True, skip_tokenizer_init=True)
    with (
        running_server(config, model=str(path), target=refusing_engine.run_engine, size=2, **options) as server,
        RolloutClient(server.url, timeout_s=60) as client,
    ):
        running = FleetServer.__new__(FleetServer)
        running.path, running.client, running.size = path, client, 2
        push(running, 1, "one")
        running.check_serves(1, 1, "one")
        with pytest.raises(WeightPushError, match="engine 1: spoiled"):
            push(running, 2, refusing_engine.REFUSE_CHECK)
        running.check_serves(1, 1, "one")
        assert server.engine.ranks[1].restarts == 0
        push(running, 3, refusing_engine.REFUSE_COMMIT)
        eventually(lambda: len(running.ranks()) == 2 and server.engine.ranks[1].restarts == 1, 120)
        running.check_serves(3, 2, refusing_engine.REFUSE_COMMIT)
        # A whole update in one call is one for all, too.
        folder = tiny_models.build("llama", tmp_path / "next", seed=4)
        assert client.post("/update_weights", {"weight_dir": str(folder)})["status"] == "ok"
        running.check_serves(4, 3, refusing_engine.REFUSE_COMMIT)
        assert {r["state"] for r in running.ranks()} == {"committed"}
        # A group that is too small for all is refused before anybody joins it.
        info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
        with pytest.raises(RolloutError, match=r"world_size 2 leaves 1 .* this server takes 2"):
            client.post("/init_weight_transfer_engine", {"init_info": info})


# -- with engines that sample by a rule


def ask(server: RunningServer, prompt: list[int], rank: int | None = None, **params: object) -> httpx.Response:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 40} | params}
    return httpx.post(f"{server.url}/inference/v1/generate", json=body, headers=headers, timeout=30)


def test_a_request_that_dies_with_its_engine_is_begun_again_where_there_is_one() -> None:
    with running_server(size=2) as server:
        slow = [fake_engine.SLOW, 5]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, server, slow)
            busy = server.engine.ranks[0]
            eventually(lambda: 0 < busy.work < 38)  # some tokens have come
            doomed = ask(server, [fake_engine.DIE, 1], rank=0)
            assert doomed.status_code == 503
            assert "Engine 0 is not running" in doomed.json()["error"]["message"]
            found = answer.result(30)
        (choice,) = found.json()["choices"]
        assert choice["token_ids"] == list(range(6, 46))
        assert choice["weight_versions"][0]["end"] == 40
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "Engine 0" in ask(server, [1, 2], rank=0).json()["error"]["message"]
        assert ask(server, [1, 2], rank=1).status_code == ask(server, [1, 2]).status_code == 200
        assert server.engine.in_flight == 0
        assert server.engine.ranks[1].work == 0
        # The last one takes the server with it.
        assert ask(server, [fake_engine.DIE, 1]).status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 503


def test_the_least_busy_engine_is_chosen_and_its_work_is_known() -> None:
    with running_server(size=2) as server:
        ranks = server.engine.ranks
        with ThreadPoolExecutor(4) as pool:
            never = [fake_engine.NEVER, 1, 2, 3]
            first = pool.submit(ask, server, never, max_tokens=400, temperature=1, n=2)
            eventually(lambda: ranks[0].work == 801)
            assert [ask(server, [number, 3]).status_code for number in range(3)] == [200] * 3
            assert ranks[0].work == 801
            assert ranks[1].work == 0
            # The same prompt goes where its prefix is, though that rank is busier.
            second = pool.submit(ask, server, never, max_tokens=100, temperature=1)
            eventually(lambda: ranks[0].work == 801 + 101)
            assert httpx.post(f"{server.url}/abort_requests", json={}, timeout=10).json()["aborted"] == 2
            for answer in (first, second):
                assert {c["finish_reason"] for c in answer.result(10).json()["choices"]} == {"abort"}
        assert [rank.work for rank in ranks] == [0, 0]
