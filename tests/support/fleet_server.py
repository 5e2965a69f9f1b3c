"""`rollout serve --data-parallel-size` as a process, and its engines' processes by rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rollout.launch import serve
from tests.support import tiny_models
from tests.support.engine_utils import TOLERANCE, prompt, teacher_forced
from tests.support.push_reference import single
from tests.support.server_harness import children
from tests.support.wait import eventually
from trainer_bridge.client import Choice, RolloutClient
from trainer_bridge.push.sources import ModuleSource

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--engine-restarts", "9"]
RESTART_S = 240.0


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


class FleetServer:
    """A running fleet of the tiny llama; `pids` are its engines' processes, by rank."""

    def __init__(self, path: Path, client: RolloutClient, size: int) -> None:
        self.path, self.client, self.size = path, client, size
        self.pids = sorted(self._engines())

    def _engines(self) -> set[int]:
        (server,) = [c for c in children(os.getpid()) if str(self.path).encode() in command(c)]
        return {c for c in children(server) if b"spawn_main" in command(c)}

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def ranks(self) -> list[dict[str, Any]]:
        ranks: list[dict[str, Any]] = self.client.weight_info()["ranks"]
        return ranks

    def wait_whole(self, *killed: int) -> None:
        """Until all ranks serve again, and at one version."""
        eventually(lambda: len(self.ranks()) == self.size and len(self._engines()) == self.size, RESTART_S)
        (found,) = {(r["epoch"], r["weight_version"], r["weights"]) for r in self.ranks()}
        assert found[2] == "valid"
        fresh = sorted(self._engines() - set(self.pids))
        assert len(fresh) == len(killed)
        for rank, pid in zip(killed, fresh, strict=True):
            self.pids[rank] = pid

    def generate(self, rank: int | None = None, length: int = 50, **params: Any) -> Choice:
        """Greedy, with logprobs; on this rank, where one is given."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        with RolloutClient(self.client.base_url, timeout_s=60, headers=headers) as client:
            params = {"temperature": 0, "max_tokens": 8, "logprobs": 0} | params
            (choice,) = client.generate(prompt(length), params).choices
            return choice

    def check_serves(self, seed: int, epoch: int, version: str) -> None:
        """Every rank's greedy ids and logprobs are those of the tiny model of this seed, under this name."""
        model = tiny_models.model("llama", seed)
        for rank in range(self.size):
            check_greedy(self.generate(rank), model)
            assert [(s.epoch, s.version, s.kv) for s in self.generate(rank).spans] == [(epoch, version, "current")]
        assert [(r["epoch"], r["weight_version"]) for r in self.ranks()] == [(epoch, version)] * self.size
        assert self.client.post("/weight_checker", {"action": "checksum"})["checksums"]


def check_greedy(choice: Choice, model: PreTrainedModel, length: int = 50) -> None:
    """Ids and logprobs against transformers' own forward pass."""
    assert choice.token_ids == teacher_forced(model, prompt(length), choice.token_ids).argmax(-1).tolist()
    expected = single(model, prompt(length), choice.token_ids)
    torch.testing.assert_close(torch.tensor(choice.logprobs), expected, atol=TOLERANCE, rtol=0)


class RankKiller(ModuleSource):
    """Weights whose fifth tensor is never sent: a rank is killed first, once."""

    def __init__(self, model: torch.nn.Module, server: FleetServer, rank: int) -> None:
        super().__init__(model)
        self._server, self._rank, self.armed = server, rank, True

    def tensors(self) -> Iterator[torch.Tensor]:
        for index, tensor in enumerate(super().tensors()):
            if index == 5 and self.armed:
                self.armed = False
                self._server.kill(self._rank)
            yield tensor


@contextmanager
def fleet(folder: Path, *flags: str, size: int = 2) -> Iterator[FleetServer]:
    """A fleet of the tiny llama of seed 0."""
    path = tiny_models.build("llama", folder / "model")
    flags = (*FLAGS, "--data-parallel-size", str(size), *flags)
    with serve(path, folder / "log", *flags) as url, RolloutClient(url, timeout_s=60) as client:
        yield FleetServer(path, client, size)
