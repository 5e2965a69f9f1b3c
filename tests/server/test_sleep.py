"""The door of a server that sleeps: what is asked of it meanwhile, in which modes, and what is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rollout.config import ServerConfig
from tests.support.fake_engine import SLOW
from tests.support.server_harness import RunningServer, running_server
from tests.support.wait import eventually
from trainer_bridge.client import AsyncRolloutClient, RolloutClient, RolloutError


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(size=2, enable_sleep_mode=True) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[RolloutClient]:
    with RolloutClient(server.url, timeout_s=60) as connected:
        yield connected
        connected.wake_up()


def test_it_sleeps_until_all_parts_are_awake(client: RolloutClient) -> None:
    assert not client.is_sleeping()
    client.sleep()
    client.sleep(1)
    client.wake_up(["weights"])
    assert client.is_sleeping()
    client.wake_up(["kv_cache"])
    assert not client.is_sleeping()
    client.wake_up()
    assert httpx.post(f"{client.base_url}/sleep", timeout=20).content == b""
    assert httpx.post(f"{client.base_url}/wake_up", timeout=20).content == b""
    assert not client.is_sleeping()


def test_a_sleeping_server_refuses_by_name_and_a_patient_client_waits(
    server: RunningServer, client: RolloutClient
) -> None:
    client.sleep()
    answer = httpx.post(f"{server.url}/inference/v1/generate", json={"token_ids": [3, 4], "sampling_params": {}})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "asleep (level 1); retry after POST /wake_up" in answer.json()["error"]["message"]
    client.wake_up(["kv_cache"])
    with pytest.raises(RolloutError, match=r"asleep \(level 1\)"):
        client.generate([3, 4])
    with RolloutClient(server.url, timeout_s=60, retry_s=60) as patient, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(patient.generate, [3, 4], {"max_tokens": 2})
        client.wake_up(["weights"])
        assert asked.result(60).choices[0].token_ids == [5, 6]


def test_abort_ends_what_runs_and_keep_lets_requests_wait(server: RunningServer, client: RolloutClient) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.generate, [SLOW, 4], {"max_tokens": 40})
        eventually(lambda: server.engine.in_flight == 1)
        client.sleep(mode="abort")
        assert running.result(60).choices[0].finish_reason == "abort"
        client.wake_up()
        frozen = pool.submit(client.generate, [SLOW, 4], {"max_tokens": 40})
        eventually(lambda: server.engine.in_flight == 1)
        client.sleep(mode="keep")
        queued = pool.submit(client.generate, [3, 4], {"max_tokens": 2})
        eventually(lambda: server.engine.in_flight == 2)
        assert [frozen.done(), queued.done()] == [False, False]
        client.wake_up()
        assert queued.result(60).choices[0].token_ids == [5, 6]
        assert frozen.result(60).choices[0].finish_reason == "length"


def test_lost_weights_are_a_refusal_until_a_push(client: RolloutClient) -> None:
    client.sleep(2, mode="keep")
    client.wake_up()
    with pytest.raises(RolloutError, match=r"given up by /sleep\?level=2: push them, whole"):
        client.generate([3, 4])
    assert client.health()


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=0", "query.level"),
        ("/sleep?level=3", "query.level"),
        ("/sleep?level=deep", "query.level"),
        ("/sleep?mode=doze", "query.mode"),
        ("/sleep?tags=kv_cache", "tags"),
        ("/wake_up?tags=scheduling", "query.tags.0"),
        ("/wake_up?tags=weights&tags=", "query.tags.1"),
    ],
)
def test_what_is_unknown_is_a_400(client: RolloutClient, path: str, param: str) -> None:
    answer = httpx.post(client.base_url + path, timeout=20)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not client.is_sleeping()


def test_it_needs_its_flag_and_the_key() -> None:
    config = ServerConfig(enable_scale_out=True, api_key=("secret",))
    with running_server(config) as server, RolloutClient(server.url, api_key="secret") as client:
        calls = [("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")]
        for method, path in calls:
            assert httpx.request(method, server.url + path).status_code == 401
            with pytest.raises(RolloutError, match=r"are disabled. Restart rollout serve with --enable-sleep-mode"):
                client.request(method, path)


async def awaited(url: str) -> list[bool]:
    async with AsyncRolloutClient(url) as client:
        await client.sleep(1)
        asleep = await client.is_sleeping()
        await client.wake_up()
        return [asleep, await client.is_sleeping()]


def test_the_awaited_client_has_the_same_methods(server: RunningServer) -> None:
    assert asyncio.run(awaited(server.url)) == [True, False]
