"""The leader's side: it starts the followers, tells them what to do, and notices when one is lost."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from torch import Tensor

from rollout.config import EngineConfig
from rollout.kernels.attention.base import RaggedBatch
from rollout.messages import EngineDied, Reply
from rollout.model.runner import ModelRunner
from rollout.model.sharding import check_plan
from rollout.tensor_parallel import group
from rollout.tensor_parallel.commands import CopyBlocks, Forward, FromFollower, Join, Joined, Started, ToFollower
from rollout.weights.errors import WeightUpdateError
from rollout.weights.receiver import Answer

logger = logging.getLogger(__name__)

NOTICE_S = 5.0
"""How long a lost follower and the failure that it causes in the leader may be apart."""
EXIT_S = 10.0

_encode = msgspec.msgpack.Encoder().encode


class FollowerLostError(RuntimeError):
    """A rank of this engine is gone, or out of step: the engine can't go on."""


class FollowerProcess:
    """One follower's process and the socket pair to it. Losing either end of the pair ends the other process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.reason: str | None = None
        self.started, self.joined = threading.Event(), threading.Event()
        self._socket, theirs = socket.socketpair()
        limit = struct.pack("ll", int(group.COLLECTIVE_TIMEOUT_S), 0)  # of a command to one that doesn't read
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollout.tensor_parallel.follower", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self.connection = Connection(os.dup(self._socket.fileno()))
        self._lock = threading.Lock()

    def send(self, command: ToFollower) -> None:
        """Send a command. Any thread may; one that can't arrive any more is dropped: the loss is noticed elsewhere."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.send_bytes(_encode(command))

    def end(self, timeout_s: float) -> None:
        """Hang up, and kill the process where that doesn't end it in time."""
        self._socket.shutdown(socket.SHUT_RDWR)  # closing it would not, while a thread reads
        self._socket.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Team:
    """The followers of this process, which is rank 0, from their start to the end of one of them, which ends all.

    `wake` is called, on any thread, when a follower is lost. Where this process doesn't get to notice, stuck in a
    collective, `died` is called with the reason. `mesh` is what `weights.shares` gathers over.
    """

    def __init__(
        self, config: EngineConfig, wake: Callable[[], None] = lambda: None, died: Callable[[str], None] | None = None
    ) -> None:
        self.size = config.tensor_parallel_size
        self._wake, self._died = wake, died
        self._ids = itertools.count()
        self._calls: dict[int, Answer] = {}
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._lost, self._noticed = threading.Event(), threading.Event()
        group.check_devices(config)
        self._store = group.open_store(self.size)
        self._followers = [FollowerProcess(rank) for rank in range(1, self.size)]
        for follower in self._followers:
            follower.send(Join(config, follower.rank, self._store.port))
            threading.Thread(target=self._listen, args=(follower,), name="follower", daemon=True).start()

    def load(self, config: EngineConfig) -> LeadingRunner:
        """Meet the followers, and load every rank's share. Raises FollowerLostError, and what loading it raises."""
        self._wait(lambda follower: follower.started)
        with self.in_step():
            self.mesh = group.join(config, self._store, 0)
            runner = LeadingRunner(config, self)
        self._wait(lambda follower: follower.joined)
        return runner

    def _wait(self, event: Callable[[FollowerProcess], threading.Event]) -> None:
        for follower in self._followers:
            if not event(follower).wait(group.COLLECTIVE_TIMEOUT_S):
                raise FollowerLostError(
                    f"tensor-parallel rank {follower.rank} kept rank 0 waiting for {group.COLLECTIVE_TIMEOUT_S:g} s"
                )
        self.check()

    def send(self, command: ToFollower) -> None:
        for follower in self._followers:
            follower.send(command)

    def call(self, command: Callable[[int, int], ToFollower]) -> list[Answer]:
        """Send every follower `command(rank, call_id)`, which it answers; an error is a WeightUpdateError."""
        answers = []
        for follower in self._followers:
            answer: Answer = Future()
            call_id = next(self._ids)
            answers.append(answer)
            with self._lock:
                reason = self._reason
                if reason is None:
                    self._calls[call_id] = answer
            if reason is None:
                follower.send(command(follower.rank, call_id))
            else:
                answer.set_exception(WeightUpdateError(503, reason))
        return answers

    def check(self) -> None:
        """Raise FollowerLostError where a follower is lost."""
        if self._reason is not None:
            self._noticed.set()
            raise FollowerLostError(self._reason)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Work that all ranks do together: its failure names the rank that caused it, and ends the followers."""
        try:
            yield
        except RuntimeError as error:
            self._lost.wait(NOTICE_S)
            self._noticed.set()
            self._kill()
            self.check()
            told = str(error).strip().split("\n")[0][:300]
            raise FollowerLostError(f"tensor-parallel rank 0 failed in a step of {self.size} ranks: {told}") from error

    def close(self) -> None:
        """End the followers, and leave the process group."""
        self._noticed.set()
        for follower in self._followers:
            follower.end(EXIT_S)
        group.leave()

    def _listen(self, follower: FollowerProcess) -> None:
        decode = msgspec.msgpack.Decoder(FromFollower).decode
        try:
            while True:
                match decode(follower.connection.recv_bytes()):
                    case Started():
                        follower.started.set()
                    case Joined():
                        follower.joined.set()
                    case Reply(call_id, result, error):
                        with self._lock:
                            answer = self._calls.pop(call_id, None)
                        if answer is not None and error is None:
                            answer.set_result(result)
                        elif answer is not None and error is not None:
                            answer.set_exception(WeightUpdateError(error.status, error.message))
                    case EngineDied(reason):
                        follower.reason = reason
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            if not self._noticed.is_set():
                self._lose(follower, error)

    def _lose(self, follower: FollowerProcess, error: Exception) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            follower.process.wait(NOTICE_S / 2)
        code = follower.process.poll()
        why = follower.reason or (f"{type(error).__name__} {error}" if code is None else f"exit code {code}")
        with self._lock:
            self._reason = self._reason or f"tensor-parallel rank {follower.rank} ended: {why}"
            waiting, self._calls = list(self._calls.values()), {}
        self._lost.set()
        for answer in waiting:
            answer.set_exception(WeightUpdateError(503, self._reason))
        for other in self._followers:
            other.started.set()
            other.joined.set()
        self._wake()
        if not self._noticed.wait(2 * NOTICE_S) and self._died is not None:
            self._kill()
            self._died(self._reason)

    def _kill(self) -> None:
        for follower in self._followers:
            follower.process.kill()


class LeadingRunner(ModelRunner):
    """Rank 0's model: each step is announced to the followers, who compute it along."""

    def __init__(self, config: EngineConfig, team: Team) -> None:
        self.team: Team | None = None  # while it loads, so do the followers: there is nothing to tell
        super().__init__(config)
        self.team = team

    def forward(
        self, token_ids: np.ndarray, batch: RaggedBatch, head_rows: np.ndarray, drawn: Tensor | None = None
    ) -> Tensor:
        """As `ModelRunner.forward`. Raises FollowerLostError."""
        assert drawn is None  # the followers know tokens only
        if self.team is None:
            return super().forward(token_ids, batch, head_rows)
        parts = (token_ids, batch.query_start, batch.context_lens, batch.block_tables, head_rows)
        self.team.send(Forward(*(part.tobytes() for part in parts)))
        with self.team.in_step():
            return super().forward(token_ids, batch, head_rows)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if pairs and self.team is not None:
            self.team.send(CopyBlocks(pairs))
        super().copy_blocks(pairs)


def load_team(
    config: EngineConfig, wake: Callable[[], None], died: Callable[[str], None] | None
) -> tuple[Team, LeadingRunner]:
    """Start the followers and load every rank's share of the model.

    Raises ValueError where the model can't be shared, and what loading it raises.
    """
    check_plan(config)
    team = Team(config, wake, died)
    try:
        return team, team.load(config)
    except BaseException:
        team.close()
        raise
