"""A trainer for a process of its own: it pushes what it is told to, and does to itself the fault it is told to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from transformers import PreTrainedModel

from tests.support.stopping_trainer import weights
from trainer_bridge.push import transaction
from trainer_bridge.push.control import DisplacedError, ServerControl, WeightPushError
from trainer_bridge.push.group import TrainerGroup
from trainer_bridge.push.sender import WeightSender

ZYGOTE = multiprocessing.get_context("forkserver")
# Not the tests' own modules, which it does not find; a child does.
ZYGOTE.set_forkserver_preload(["transformers.models.llama.modeling_llama", "trainer_bridge.push.sender"])
TIMEOUT_S = 3.0
"""What these trainers ask for: the longest that a server waits for one of them."""
LONGEST_PUSH_S = 120.0
START_S = 240.0

_drawing = threading.Lock()

FaultKind = Literal["kill", "stop", "cut", "full"]
BUFFER_BYTES = 2 << 20
"""Of a packed push, which so takes several."""


@dataclass(frozen=True)
class Spec:
    """Which weights: those of a seed, after so many small changes."""

    seed: int
    changes: int = 0


@dataclass(frozen=True)
class Fault:
    """`kill`, `stop` (SIGSTOP) or `cut` (all connections) at the `at`-th point of a push, or a `full` disk."""

    kind: FaultKind
    at: int = 0


@dataclass(frozen=True)
class Push:
    """Push these weights under this label; `joins` anew before, by these arguments of `WeightSender.connect`."""

    label: str
    spec: Spec
    joins: dict[str, Any] | None
    options: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None


@dataclass(frozen=True)
class Outcome:
    """`how` it ended; `epoch` of a success, `text` of an error. `joined`: the next push needs no new sender."""

    how: Literal["committed", "displaced", "refused", "bug", "died"]
    text: str = ""
    epoch: int = -1
    joined: bool = False


@torch.no_grad()
def change(model: PreTrainedModel, seed: int, number: int) -> None:
    """The small change of this number: few elements, to which every logprob is sensitive."""
    draw = torch.Generator().manual_seed(1000 * seed + number)
    parameters = dict(model.named_parameters())
    norm = parameters["model.norm.weight"]
    norm[torch.randint(len(norm), (8,), generator=draw)] = 3 * torch.randn(8, generator=draw)
    rows = parameters[f"model.layers.{number % 3}.self_attn.o_proj.weight"]
    rows[number % len(rows)] = torch.randn(rows.shape[1], generator=draw)


def made(spec: Spec) -> PreTrainedModel:
    """The model of these weights."""
    with _drawing:  # from torch's global generator
        model = weights(spec.seed)
    for number in range(1, spec.changes + 1):
        change(model, spec.seed, number)
    return model


class _Points:
    """Counts the points of a push, which several threads pass, and strikes at the chosen one."""

    def __init__(self) -> None:
        self._fault: Fault | None = None
        self._passed = 0
        self._lock = threading.Lock()
        call, broadcast = ServerControl.call, TrainerGroup.broadcast

        def counted_call(server: ServerControl, *arguments: Any, **options: Any) -> dict[str, Any]:
            self._passing()
            answer = call(server, *arguments, **options)
            self._passing()
            return answer

        def counted_broadcast(group: TrainerGroup, *arguments: Any) -> None:
            self._passing()
            broadcast(group, *arguments)

        ServerControl.call = counted_call  # type: ignore[method-assign, assignment]
        TrainerGroup.broadcast = counted_broadcast  # type: ignore[method-assign, assignment]

    def _passing(self) -> None:
        with self._lock:
            number, self._passed = self._passed, self._passed + 1
        if self._fault is None or self._fault.at != number:
            return
        if self._fault.kind == "cut":
            cut_connections()
        elif self._fault.kind != "full":
            os.kill(os.getpid(), signal.SIGKILL if self._fault.kind == "kill" else signal.SIGSTOP)

    @contextlib.contextmanager
    def armed(self, fault: Fault | None) -> Iterator[None]:
        full = fault is not None and fault.kind == "full"
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._passed, self._fault = 0, fault
        try:
            if full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
            yield
        finally:
            self._fault = None
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def cut_connections() -> None:
    """Shut down every TCP connection of this process: of HTTP, of the store and of the group."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # not of one that listens
                    connection.shutdown(socket.SHUT_RDWR)


def trainer(url: str, folder: Path, parent: Connection) -> None:
    """Carry out each `Push` that comes through the pipe and answer with its `Outcome`, until the pipe closes."""
    torch.set_num_threads(1)
    transaction.PACKED_BUFFER_BYTES = BUFFER_BYTES
    points = _Points()
    model, has = made(Spec(0)), Spec(0)
    sender: WeightSender | None = None
    while True:
        try:
            push: Push = parent.recv()
        except EOFError:
            return
        try:
            if has.seed != push.spec.seed or has.changes > push.spec.changes:
                has = Spec(push.spec.seed)
                model.load_state_dict(weights(has.seed).state_dict())
            for number in range(has.changes + 1, push.spec.changes + 1):
                change(model, has.seed, number)
            has = push.spec
            with points.armed(push.fault):
                if push.joins is not None:
                    if sender is not None:
                        sender.close()
                    sender = None
                    disk: dict[str, Any] = {"disk_path": folder} if push.joins.get("backend") == "disk" else {}
                    sender = WeightSender.connect(url, model, **push.joins, **disk)
                assert sender is not None
                outcome = Outcome("committed", epoch=sender.push(push.label, **push.options).epoch, joined=True)
        except DisplacedError as error:
            outcome = Outcome("displaced", str(error))
        except WeightPushError as error:
            outcome = Outcome("refused", str(error), joined=sender is not None)
        except Exception:
            outcome = Outcome("bug", traceback.format_exc())
        parent.send(outcome)


class Driver:
    """A trainer's process, and another one in its place where it has died."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: Any = None
        self.struck = False

    @staticmethod
    def warm_up() -> None:
        """Have the process that the trainers are forked from import all that they need."""
        first = ZYGOTE.Process(target=os.getpid)
        first.start()
        first.join(START_S)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def push(self, push: Push, url: str, choose: random.Random) -> Outcome:
        """Have it done; a process that stops itself goes on after some seconds."""
        if not self.alive:
            self.close()
            self._pipe, theirs = ZYGOTE.Pipe()
            self._process = ZYGOTE.Process(target=trainer, args=(url, self._folder, theirs), daemon=True)
            self._process.start()
            theirs.close()
        self.struck = False
        self._pipe.send(push)
        deadline = time.monotonic() + LONGEST_PUSH_S
        try:
            while not self._pipe.poll(0.02):
                if time.monotonic() > deadline:
                    raise AssertionError(f"{push} has not ended after {LONGEST_PUSH_S} s")
                if self._is_stopped():
                    self.struck = True
                    time.sleep(choose.uniform(0.2, 2.5 * TIMEOUT_S))
                    os.kill(self._process.pid, signal.SIGCONT)
            outcome: Outcome = self._pipe.recv()
            return outcome
        except (EOFError, ConnectionError):
            self._process.join(30)
            self.struck = True
            return Outcome("died", f"exit code {self._process.exitcode}")

    def _is_stopped(self) -> bool:
        try:
            return bool(psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(30)
            self._pipe.close()
