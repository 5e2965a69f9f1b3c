"""A trainer that dies, stalls or is overtaken at every point of a push: the server serves one whole version throughout.

The trainers are processes forked from one that has imported everything; each runs a WeightSender up to its point.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.launch import serve
from tests.engine.test_engine_restart import FLAGS, engine_of
from tests.support.engine_utils import TOLERANCE, prompt, teacher_forced
from tests.support.push_reference import single
from tests.support.stopping_trainer import TIMEOUT_S, trainer, weights
from tests.support.wait import eventually
from trainer_bridge.client import RolloutClient
from trainer_bridge.push import control
from trainer_bridge.push.control import WeightPushError
from trainer_bridge.push.sender import WeightSender

ZYGOTE = multiprocessing.get_context("forkserver")
# Not the tests' own modules, which it does not find; a child does.
ZYGOTE.set_forkserver_preload(["transformers.models.llama.modeling_llama", "trainer_bridge.push.sender"])


class Trainer:
    """A trainer process that has come to its point."""

    def __init__(self, url: str, seed: int, point: str, packed: int) -> None:
        self.pipe, theirs = ZYGOTE.Pipe()
        self.process = ZYGOTE.Process(target=trainer, args=(url, seed, point, packed, theirs), daemon=True)
        self.process.start()
        theirs.close()
        assert self.hear() == point

    def hear(self) -> Any:
        assert self.pipe.poll(60), "the trainer says nothing"
        return self.pipe.recv()

    def go_on(self) -> None:
        self.pipe.send("go on")

    def end(self) -> None:
        self.process.kill()
        self.process.join(30)


class Server:
    """The server, and which model serves under which epoch."""

    def __init__(self, client: RolloutClient, path: Path) -> None:
        self.client, self.path = client, path
        self.seeds = {0: 0}
        self.labels = {0: "default"}
        self._last_seed = 0

    @property
    def epoch(self) -> int:
        return max(self.seeds)

    def new_seed(self) -> int:
        """Of weights that have not been seen yet."""
        self._last_seed += 1
        return self._last_seed

    def took(self, seed: int, label: str) -> None:
        """A push has committed."""
        self.labels[self.epoch + 1] = label
        self.seeds[self.epoch + 1] = seed

    def check(self) -> None:
        """Info and tokens are those of the last commit, and of no other weights."""
        info = self.client.weight_info()
        assert (info["epoch"], info["weight_version"]) == (self.epoch, self.labels[self.epoch])
        assert info["weights"] == "valid"
        asked = {"temperature": 0, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
        (choice,) = self.client.generate(prompt(30), asked).choices
        assert [(span.epoch, span.version) for span in choice.spans] == [(self.epoch, self.labels[self.epoch])]
        model = weights(self.seeds[self.epoch])
        assert choice.token_ids == teacher_forced(model, prompt(30), choice.token_ids).argmax(-1).tolist()
        got = torch.tensor(choice.logprobs)
        torch.testing.assert_close(got, single(model, prompt(30), choice.token_ids), atol=TOLERANCE, rtol=0)

    def settle(self) -> dict[str, Any]:
        """Wait until no update is under way; /weight_info then."""
        eventually(lambda: self.client.weight_info()["state"] not in ("open", "receiving", "ready"), TIMEOUT_S + 15)
        return self.client.weight_info()

    def push(self, **options: Any) -> None:
        """The next trainer's push works."""
        seed = self.new_seed()
        with WeightSender.connect(self.client, weights(seed), timeout_s=30, **options) as sender:
            assert sender.push(f"seed {seed}").epoch == self.epoch + 1
        self.took(seed, f"seed {seed}")
        self.check()
        assert self.client.weight_info()["last_error"] is None

    @contextmanager
    def trainer(self, point: str, packed: int = 0) -> Iterator[tuple[Trainer, int]]:
        seed = self.new_seed()
        doomed = Trainer(self.client.base_url, seed, point, packed)
        try:
            yield doomed, seed
        finally:
            doomed.end()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faults")
    weights(0).save_pretrained(folder / "model")
    with serve(folder / "model", folder / "log", *FLAGS) as url, RolloutClient(url, timeout_s=60) as client:
        yield Server(client, folder / "model")


INIT, START, UPDATE, FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
LOST = "broadcast was lost or took over"
SILENT = "no call of the trainer for 2 s"

# Where it is, in how many buffers it sends, and what the server says of it then: None where no update had begun.
POINTS = [
    (f"before {INIT}", 0, None),
    (f"sent {INIT}", 0, None),
    (f"after {INIT}", 0, None),
    (f"before {START}", 0, None),
    (f"after {START}", 0, rf"{SILENT} \(open\)"),
    (f"sent {UPDATE}", 0, LOST),
    ("broadcast 0", 0, rf"{LOST}|{SILENT} \(open\)"),  # it announces on another thread
    ("broadcast 9", 0, LOST),
    ("broadcast 1", 2, LOST),
    (f"after {UPDATE}", 2, rf"{SILENT} \(receiving\)"),
    (f"before {FINISH}", 0, rf"{SILENT} \(receiving\)"),
    ("prepared", 2, rf"{SILENT} \(ready\)"),
]


@pytest.mark.parametrize(
    ("point", "packed", "error", "end"),
    [(*point, signal.SIGKILL) for point in POINTS]
    + [(*point, signal.SIGSTOP) for point in POINTS if point[0] in (f"sent {INIT}", f"after {START}", "broadcast 9")],
)
def test_a_trainer_lost_before_the_commit(
    server: Server, point: str, packed: int, error: str | None, end: signal.Signals
) -> None:
    before = server.client.weight_info()
    with server.trainer(point, packed) as (doomed, _):
        os.kill(doomed.process.pid, end)
        server.check()
        info = server.settle()
        if error is None:
            assert info == before
        else:
            assert info["state"] == "aborted"
            assert re.search(error, info["last_error"])
        server.check()
        server.push()


def received_and_unread(engine: int) -> int:
    """Bytes that wait in the sockets of this process's network namespace for the stopped engine to read them."""
    sockets = {os.readlink(path) for path in Path(f"/proc/{engine}/fd").iterdir() if path.is_symlink()}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in sockets)


def test_a_trainer_killed_with_half_a_buffer_sent(server: Server) -> None:
    """The engine stands still while the buffer fills what the sockets hold; then the other half never comes."""
    engine = engine_of(server.path)
    with server.trainer("broadcast 0", packed=1) as (doomed, _):
        eventually(lambda: server.client.weight_info()["state"] == "receiving")
        server.check()  # by the time of its answer the engine's thread waits in the broadcast
        os.kill(engine, signal.SIGSTOP)
        try:
            doomed.go_on()
            eventually(lambda: received_and_unread(engine) > 100_000)
            doomed.end()
        finally:
            os.kill(engine, signal.SIGCONT)
        info = server.settle()
        assert info["state"] == "aborted"
        # Where the sockets have held all of it, it is the trainer's next call that never comes.
        assert LOST in info["last_error"] or "no call of the trainer" in info["last_error"]
        assert info["bytes"] == 0
        server.check()
        server.push()


@pytest.mark.parametrize("point", [f"sent {FINISH}", f"after {FINISH}"])
def test_a_trainer_killed_after_it_asked_for_the_commit(server: Server, point: str) -> None:
    with server.trainer(point) as (doomed, seed):
        doomed.end()
        info = server.settle()
        assert (info["state"], info["last_error"]) == ("committed", None)
        server.took(seed, "doomed")
        server.check()
        server.push()


def test_a_trainer_killed_while_it_had_paused_the_server(server: Server) -> None:
    server.client.pause("keep")
    with server.trainer("broadcast 9") as (doomed, _):
        doomed.end()
        assert server.settle()["state"] == "aborted"
    assert server.client.is_paused()
    server.client.resume()
    server.check()
    server.push()


def test_a_second_trainer_is_refused_until_the_first_has_died(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "TURN_S", 0.0)
    with server.trainer("broadcast 9") as (doomed, _):
        for _ in range(2):
            with pytest.raises(WeightPushError, match=r'409.*"force": true'):
                WeightSender.connect(server.client, weights(1), timeout_s=30)
        assert server.client.weight_info()["state"] == "receiving"
        doomed.end()

        def accepted() -> bool:
            try:
                WeightSender.connect(server.client, weights(1), timeout_s=30).close()
            except WeightPushError:
                return False
            return True

        eventually(accepted, TIMEOUT_S + 15)
        server.check()
        server.push()


@pytest.mark.parametrize("point", [f"after {START}", "broadcast 9", "prepared"])
def test_a_second_trainer_takes_over_by_force(server: Server, point: str) -> None:
    with server.trainer(point) as (overtaken, _):
        server.push(force=True)
        overtaken.go_on()
        error = overtaken.hear()
        assert isinstance(error, WeightPushError), error
        server.check()
