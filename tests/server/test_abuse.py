"""A thousand requests that no server should get, beside work that must come out as if they weren't there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from tests.support import abuse, text_server, tiny_models
from tests.support.engine_utils import prompt
from tests.support.wait import eventually

MAX_LEN, MAX_SEQS, BODY_LIMIT = 128, 8, 1 << 19
FLAGS = {
    "--port": 0,
    "--dtype": "float32",
    "--max-num-seqs": MAX_SEQS,
    "--num-gpu-blocks-override": 24,
    "--num-threads": 1,
    "--max-body-bytes": BODY_LIMIT,
    "--receive-timeout-s": 1.0,
}
ROUND = 250
GROWTH_BYTES = 8 << 20  # what allocators keep may vary by so much; the bodies of one round are far more


@dataclass
class Served:
    """A server in a process of its own, its engine in another."""

    url: str
    pid: int
    vocab_size: int

    def memory(self) -> int:
        """Resident bytes of both."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return sum(_resident(pid) for pid in (str(self.pid), *children))

    def is_idle(self) -> bool:
        """Nothing runs or waits, and no block is in use."""
        text = httpx.get(self.url + "/metrics", timeout=60).text
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        values = [re.search(rf"^vllm:{name}{{.*}} (.*)$", text, re.MULTILINE) for name in names]
        return [float(value[1]) for value in values if value] == [0, 0, 0]


def _resident(pid: str) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = text_server.tokenizer()
    config = tiny_models.config("llama")
    config.vocab_size, config.max_position_embeddings = len(tokenizer), MAX_LEN
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    flags = [str(part) for pair in FLAGS.items() for part in pair]
    command = [sys.executable, "-m", "rollout.cli", "serve", str(folder), "--enable-scale-out", "--batch-invariant"]
    # One arena: what is freed can be used again by any thread, so that memory says what is held.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" on ")[1].split()[0]
        yield Served(url, process.pid, len(tokenizer))
    finally:
        process.terminate()
        process.wait(20)
        process.communicate()


def real_requests() -> list[tuple[str, dict[str, Any]]]:
    """What others go on asking: path and body."""
    sampled = {"max_tokens": 12, "logprobs": 2, "seed": 7, "n": 2, "top_p": 0.9}
    return [
        (abuse.PATH, {"token_ids": prompt(30), "sampling_params": {"max_tokens": 20, "temperature": 0, "logprobs": 1}}),
        (abuse.PATH, {"token_ids": prompt(45, 1), "sampling_params": sampled}),
        (
            "/v1/completions",
            {"prompt": "a cat", "max_tokens": 15, "seed": 3, "logprobs": 1, "return_token_ids": True},
        ),
    ]


def told(url: str, request: tuple[str, dict[str, Any]]) -> Any:
    """The choices of the answer: ids, logprobs and all."""
    path, body = request
    response = httpx.post(url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def abuse_round(served: Served, number: int) -> None:
    """So many requests; those that are half sent end when the server closes them."""
    kinds = abuse.kinds(served.url, served.vocab_size, MAX_LEN, MAX_SEQS, BODY_LIMIT)
    with ThreadPoolExecutor(8) as pool:
        seeds = range(number * ROUND, (number + 1) * ROUND)
        left_open = pool.map(lambda seed: kinds[seed % len(kinds)](seed), seeds)
        for connection in [item for item in left_open if isinstance(item, socket.socket)]:
            with connection:
                answer = connection.recv(65536)
                assert answer == b"" or answer.startswith(b"HTTP/1.1 408"), answer


def test_a_thousand_abuses_change_nothing_for_anyone_else(served: Served) -> None:
    undisturbed = [told(served.url, request) for request in real_requests()]
    over = threading.Event()

    def work(request: tuple[str, dict[str, Any]], expected: Any) -> int:
        done = 0
        while not over.is_set() or not done:
            assert told(served.url, request) == expected
            done += 1
        return done

    memory = []
    with ThreadPoolExecutor(len(undisturbed)) as pool:
        working = [pool.submit(work, *pair) for pair in zip(real_requests(), undisturbed, strict=True)]
        try:
            for number in range(4):
                abuse_round(served, number)
                memory.append(served.memory())
        finally:
            over.set()
        assert all(task.result(120) for task in working)
    eventually(served.is_idle, 60)
    assert max(memory[2:]) - memory[1] < GROWTH_BYTES, memory
    assert httpx.get(served.url + "/health").status_code == 200
