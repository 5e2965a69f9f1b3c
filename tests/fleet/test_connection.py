"""Which devices an engine's process sees, and how its threads wait."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from rollout.config import EngineConfig
from rollout.engine import process
from rollout.fleet.connection import _on_devices


class Ended(Exception):
    """The process would be gone."""


def start(rank: int, *, tensor_parallel_size: int = 1, device: Any = "auto") -> str:
    """Start an engine's process, but for the engine: the devices that it sees."""
    seen: list[str] = []
    config = EngineConfig(model="m", tensor_parallel_size=tensor_parallel_size, device=device)
    _on_devices(lambda *args: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]), rank, config, "to", "from")
    return seen[0]


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.device_count in the place of a driver, and the process stays."""

    def end(context: Any, address: str, reason: str) -> None:
        raise Ended(reason)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(process, "end", end)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_each_rank_sees_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert start(1) == "7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert start(0, tensor_parallel_size=2) == "5,7"


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [(2, 1, "engine 2 needs the CUDA devices 2 to 2, but there are 2"), (1, 2, "the CUDA devices 2 to 3, but there")],
)
def test_an_engine_without_a_gpu_beside_others_with_one_does_not_serve_from_the_cpu(
    rank: int, size: int, message: str
) -> None:
    with pytest.raises(Ended, match=message):
        start(rank, tensor_parallel_size=size)


def test_engines_on_a_cpu_need_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(5, device="cpu") == "5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert start(5) == "5"


def spins(**environment: str) -> str:
    """What the OpenMP of torch says of how often a thread of an engine's process looks before it sleeps."""
    code = "from rollout.fleet.connection import share_cores; share_cores(); import torch"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "OMP_DISPLAY_ENV": "VERBOSE", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return next(line.split("'")[1] for line in ran.stderr.splitlines() if "GOMP_SPINCOUNT" in line)


def test_threads_that_wait_for_another_sleep_soon() -> None:
    """They used to spin for 20 ms at each of a step's hundreds of loops, on the core that the last one waited for:
    beside one busy process a step took ten times as long."""
    assert spins() == "20000"
    assert spins(GOMP_SPINCOUNT="77") == "77"
    assert int(spins(OMP_WAIT_POLICY="ACTIVE")) > 10**9
