"""Many pushes and many requests, some dropped in the middle: what the server's processes hold stays as it was."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rollout.launch import launch, serve_command
from tests.support import tiny_models
from tests.support.engine_utils import prompt
from tests.support.wait import eventually
from trainer_bridge.client import RolloutClient
from trainer_bridge.push.sender import WeightSender

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--max-model-len", "128"]
SCALE = float(os.environ.get("ROLLOUT_FLAT_SCALE", "1"))
PUSHES = [round(SCALE * count) for count in (100, 300, 1000)]
REQUESTS = [round(SCALE * count) for count in (1000, 3000, 10000)]
MIB = 1 << 20
SPARE_THREADS, SPARE_DESCRIPTORS, SPARE_BYTES = 8, 24, 96 * MIB
"""What a process may hold more at the end than after the first part, in which pools and caches fill."""


@dataclass(frozen=True)
class Held:
    threads: int
    descriptors: int
    rss: int

    @classmethod
    def by(cls, process: psutil.Process) -> Held:
        return cls(process.num_threads(), process.num_fds(), process.memory_info().rss)

    def __str__(self) -> str:
        return f"{self.threads:7} {self.descriptors:6} {self.rss / MIB:8.1f}"


class Server:
    def __init__(self, client: RolloutClient, pid: int) -> None:
        self.client = client
        server = psutil.Process(pid)
        (engine,) = [p for p in server.children() if any("spawn_main" in part for part in p.cmdline())]
        self.processes = {"server": server, "engine": engine}

    def held(self) -> dict[str, Held]:
        """Once nothing is running."""
        eventually(lambda: self._metric("vllm:num_requests_running") == 0, 60)
        return {name: Held.by(process) for name, process in self.processes.items()}

    def _metric(self, name: str) -> float:
        lines = self.client._http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    def check_flat(self, what: str, counts: list[int], do: Callable[[range], None]) -> None:
        """Do so many; print what is held after each part, and compare the end with the end of the first part."""
        print(f"\n{what:>9}  server: threads  fds  RSS MiB   engine: threads  fds  RSS MiB")
        rows: list[dict[str, Held]] = []
        for begin, end in itertools.pairwise([0, 0, *counts]):
            do(range(begin, end))
            rows.append(self.held())
            print(f"{end:9}  {' ' * 7}{rows[-1]['server']}   {' ' * 7}{rows[-1]['engine']}", flush=True)
        for name in self.processes:
            first, last = rows[1][name], rows[-1][name]
            assert last.threads <= first.threads + SPARE_THREADS, (name, first, last)
            assert last.descriptors <= first.descriptors + SPARE_DESCRIPTORS, (name, first, last)
            assert last.rss <= first.rss + SPARE_BYTES, (name, first, last)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    command = serve_command(tiny_models.build("llama", tmp_path / "model"), *FLAGS)
    with launch(command, tmp_path / "log") as running, RolloutClient(running.url, timeout_s=60) as client:
        yield Server(client, running.pid)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_pushes_leave_nothing_behind(server: Server) -> None:
    """Every tenth is by a new sender that takes over, and before every twentieth an update is begun and dropped."""
    models = [tiny_models.model("llama", seed) for seed in (1, 2)]
    with contextlib.ExitStack() as connected:

        def connect(number: int) -> WeightSender:
            connected.close()
            model = models[number // 10 % 2]
            sender = WeightSender.connect(server.client, model, packed=number % 20 == 0, timeout_s=60)
            return connected.enter_context(sender)

        def push(numbers: range) -> None:
            for number in numbers:
                if number % 10 == 0:
                    senders[:] = [connect(number)]
                if number % 20 == 5:
                    senders[0]._servers.start({}, None)
                    senders[0]._servers.drop()
                senders[0].push(f"push {number}", verify=number % 7 == 0)

        senders: list[WeightSender] = []
        server.check_flat("pushes", PUSHES, push)
    assert server.client.weight_info()["epoch"] == PUSHES[-1]


@pytest.mark.long
@pytest.mark.timeout(0)
def test_requests_leave_nothing_behind(server: Server) -> None:
    """Of five, one is left by its client in the middle of its stream, and one is aborted by its id."""

    def ask(number: int) -> None:
        choose = random.Random(number)
        token_ids = prompt(choose.choice([2, 30, 60]), choose.randrange(20))
        params = {"max_tokens": choose.choice([1, 8, 16]), "n": choose.choice([1, 1, 2]), "logprobs": 0}
        params["ignore_eos"] = True
        if number % 5 > 1:
            assert server.client.generate(token_ids, params).choices[0].finish_reason == "length"
            return
        with contextlib.closing(server.client.stream(token_ids, params | {"max_tokens": 60})) as stream:
            begun = list(itertools.islice(stream, choose.randrange(1, 3)))
            assert begun
            if number % 5 == 1:
                server.client.abort([begun[0].request_id])
                assert all(piece.choices for piece in stream)

    with ThreadPoolExecutor(8) as pool:
        server.check_flat("requests", REQUESTS, lambda numbers: list(pool.map(ask, numbers)) and None)
