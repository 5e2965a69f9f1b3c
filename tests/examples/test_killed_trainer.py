"""kill -9 on trainer and server in the middle of a run: it resumes, ends, and both sides hold the same weights."""

from __future__ import annotations

import hashlib
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from tests.support import tiny_models
from trainer_bridge import RolloutClient
from trainer_bridge.loop import checkpoint

GRPO = Path(__file__).parents[2] / "examples" / "grpo.py"
STEPS = 20
TIMEOUT_S = 240


class Process:
    """A command that can be killed and started again, and the lines that it prints."""

    def __init__(self, lines: queue.SimpleQueue[str], *command: str | Path) -> None:
        self._lines = lines
        self._command = list(map(str, command))
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait(TIMEOUT_S)


@contextmanager
def running(lines: queue.SimpleQueue[str], *command: str | Path) -> Iterator[Process]:
    process = Process(lines, *command)
    try:
        yield process
    finally:
        process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def run_through(trainer: Process, trainer_lines: queue.SimpleQueue[str], on_step: Callable[[int], None]) -> None:
    """Follow the trainer until it says its last step. (One that it was killed after, it may not have said.)"""
    step, said = 0, ""
    while step < STEPS:
        try:
            line = trainer_lines.get(timeout=TIMEOUT_S)
        except queue.Empty:
            pytest.fail(f"silent for {TIMEOUT_S} s after:\n{said}")
        said += line
        if not line and trainer.poll() not in (None, 0, -signal.SIGKILL):
            pytest.fail(f"the trainer ended with {trainer.poll()} after:\n{said}")
        if found := re.match(r"step (\d+): reward", line):
            step = int(found[1])
            on_step(step)


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
@pytest.mark.timeout(600)
def test_a_run_survives_kills_of_either_side(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    model = tiny_models.build("llama", tmp_path / "model")
    port, rng = free_port(), random.Random(seed)
    url, output = f"http://127.0.0.1:{port}", tmp_path / "output"
    kills = list(zip(sorted(rng.sample(range(1, STEPS - 1), 4)), ["trainer", "server"] * 2, strict=True))
    flags = ["--tokens-only", "--logprobs-mode", "processed_logprobs", "--num-threads", "1", "--port", str(port)]
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    train = [sys.executable, GRPO, model, "--url", url, "--output", output, "--steps", str(STEPS)]
    train += ["--learning-rate", "1e-2", "--max-tokens", "12", "--groups-per-step", "2", "--group-size", "4"]
    with ExitStack() as stack:
        server_lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        serve = [sys.executable, "-m", "rollout.cli", "serve", model, "--dtype", "float32", *flags]
        server = stack.enter_context(running(server_lines, *serve))
        trainer = stack.enter_context(running(lines, *train))

        def strike(step: int) -> None:
            if kills and kills[0][0] <= step:
                victim = {"trainer": trainer, "server": server}[kills.pop(0)[1]]
                threading.Event().wait(rng.random() / 2)  # wherever in its next step it happens to be then
                victim.kill()
                victim.start()

        run_through(trainer, lines, strike)
        assert trainer.wait() == 0
        assert not kills
        assert (trainer.starts, server.starts) == (3, 3)
        with RolloutClient(url) as client:
            assert client.weight_info()["weight_version"] == f"step-{STEPS}"
            theirs = client.post("/weight_checker", {"action": "checksum"})["checksums"]
        state = checkpoint.load(output / "checkpoint.pt")
        assert state is not None
        assert state["step"] == STEPS
        ours = digests(state["trainer"]["policy"])
        assert theirs == {name: ours[name] for name in theirs}
        assert len(theirs) >= len(ours) - 1  # a tied head is one tensor
        assert theirs != digests({name: tiny_models.model("llama").state_dict()[name] for name in theirs})
