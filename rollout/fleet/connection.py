"""The way to one engine, and the usual one: a process of this machine and the sockets to it.

Imports nothing slow: the engine process is started first of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from rollout.config import EngineConfig
from rollout.folders import OwnedFolder
from rollout.messages import FromEngine, ToEngine

EngineTarget = Callable[[EngineConfig, str, str], None]
OnMessage = Callable[[FromEngine], None]
OnFailure = Callable[[str], None]


def run_engine(config: EngineConfig, to_engine: str, from_engine: str) -> None:
    """The real engine process; imported in the child only, since it imports torch."""
    from rollout.engine.process import run_engine as run

    run(config, to_engine, from_engine)


class EngineConnection(Protocol):
    """One life of an engine: messages to it and from it, until it ends.

    `last_message_at` is the event loop's time of its last message. `address` is the host name or IP under which other
    engines reach a socket that this one opens. After `end`, `ended` is True and no message of it is delivered any more.
    """

    ended: bool
    last_message_at: float
    address: str

    @property
    def pid(self) -> int | None:
        """Its process, where that is on this machine."""

    def send(self, message: ToEngine) -> None:
        """Send, without waiting, in order."""

    def end(self) -> None:
        """Ask it to end, and take no more notice of it."""

    async def close(self, timeout_s: float) -> None:
        """End it, by force after the timeout, and free what it took."""


EngineStarter = Callable[[int, EngineConfig, OnMessage, OnFailure], EngineConnection]
"""Starts an engine of this rank and configuration; returns at once. Needs a running event loop.

OnMessage gets the engine's messages in order, OnFailure the reason, once, when it is gone.
"""

# Between an engine's exit and the report of it: time to read what it sent last, its reason above all.
_LAST_WORDS_S = 0.3
_CONNECTED_S = 0.02
# How often a thread of the engine looks whether the others are done before it sleeps: for about a millisecond, longer
# than what lies between two loops of a step (with 5,000 one stream lost a sixth of its speed). libgomp's own 300,000
# take 20 ms: where another process wants a core, each of a step's loops would spin away what its last thread needs.
_SPINS = "20000"


def processes(target: EngineTarget) -> EngineStarter:
    """Engines as processes of this machine that run `target`, a picklable function of (config, address to receive
    from, address to send to). Each rank sees CUDA devices of its own."""

    def connect(rank: int, config: EngineConfig, on_message: OnMessage, on_failure: OnFailure) -> EngineConnection:
        return ProcessConnection(f"engine {rank}", partial(_on_devices, target, rank), config, on_message, on_failure)

    return connect


def _on_devices(target: EngineTarget, rank: int, config: EngineConfig, to_engine: str, from_engine: str) -> None:
    """Run `target` where it sees the CUDA devices of this rank only; comes before anything touches CUDA.

    Where there are CUDA devices, but too few for this rank, the engine dies with that for its reason.
    """
    first, count = rank * config.tensor_parallel_size, config.tensor_parallel_size
    if config.device != "cpu":
        import torch  # here: neither the server's process nor a test's engine has a use for it

        if 0 < (seen := torch.cuda.device_count()) < first + count:  # the driver is asked, nothing is started
            from rollout.engine.process import end

            end(
                zmq.Context(),
                from_engine,
                f"engine {rank} needs the CUDA devices {first} to {first + count - 1}, but there are {seen}: lower "
                "--data-parallel-size or --tensor-parallel-size, or serve with --device cpu",
            )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = [str(n) for n in range(first + count)] if visible is None else visible.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named[first : first + count])
    target(config, to_engine, from_engine)


def _child(target: EngineTarget, config: EngineConfig, to_engine: str, from_engine: str) -> None:
    """Run `target`; end when the spawning process is gone, however early, and however busy the other threads are."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server ends its engine itself
    share_cores()

    def exit_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, name="parent watch", daemon=True).start()
    target(config, to_engine, from_engine)


def share_cores() -> None:
    """Have this process's OpenMP threads sleep soon where they wait, unless the environment says how they are to; to
    be called before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


class ProcessConnection:
    """A process, spawned at once. A successor gets a connection, and sockets, of its own.

    `on_failure` is told when the process exits or sends what can't be read.
    """

    address = "127.0.0.1"

    def __init__(
        self, name: str, target: EngineTarget, config: EngineConfig, on_message: OnMessage, on_failure: OnFailure
    ) -> None:
        self._on_message, self._on_failure = on_message, on_failure
        self._loop = asyncio.get_running_loop()
        self.last_message_at = self._loop.time()
        self.ended = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._unsent: deque[bytes] = deque()
        self._folder = OwnedFolder("rollout-")  # no one else may speak to the engine
        addresses = [f"ipc://{self._folder.path}/{name}" for name in ("to_engine", "from_engine")]
        self._context = zmq.asyncio.Context()
        # Sending never waits (NOBLOCK, no high-water mark), so it is a plain call that keeps the order of its callers.
        self._to_engine = zmq.Context(self._context).socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket, address in zip((self._to_engine, self._from_engine), addresses, strict=True):
            socket.set_hwm(0)
            socket.bind(address)
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_child, args=(target, config, *addresses), name=name, daemon=True)
        self.process.start()
        self._loop.add_reader(self.process.sentinel, self._on_exit)
        self._receiving = self._loop.create_task(self._receive())
        self._closing: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def send(self, message: ToEngine) -> None:
        """Send, without waiting; kept until the engine is connected. Raises what msgspec says of bad values."""
        self._unsent.append(self._encode(message))
        if len(self._unsent) == 1:
            self._send()

    def _send(self) -> None:
        while self._unsent and not self.ended:
            try:
                self._to_engine.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:  # it may have spoken before its other socket was connected
                self._loop.call_later(_CONNECTED_S, self._send)
                return
            self._unsent.popleft()

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._loop.remove_reader(self.process.sentinel)
            self._receiving.cancel()
            self.process.terminate()

    async def close(self, timeout_s: float) -> None:
        """End the process (SIGTERM, then SIGKILL after the timeout), wait for it, and free the sockets."""
        self.end()
        self._closing = self._closing or self._loop.create_task(self._close(timeout_s))
        await asyncio.shield(self._closing)

    async def _close(self, timeout_s: float) -> None:
        await asyncio.gather(self._receiving, return_exceptions=True)
        await asyncio.to_thread(self.process.join, timeout_s)
        if self.process.is_alive():
            self.process.kill()
            await asyncio.to_thread(self.process.join, timeout_s)
        self._to_engine.close(linger=0)
        self._from_engine.close(linger=0)
        self._context.term()
        self._folder.close()

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        with contextlib.suppress(asyncio.CancelledError):
            try:
                while True:
                    data = await self._from_engine.recv()
                    self.last_message_at = self._loop.time()
                    self._on_message(decoder.decode(data))
            except msgspec.MsgspecError as error:
                self._on_failure(f"the engine sent a message of the wrong form: {error}")

    def _on_exit(self) -> None:
        self._loop.remove_reader(self.process.sentinel)
        self._loop.call_later(_LAST_WORDS_S, self._report_exit)

    def _report_exit(self) -> None:
        if not self.ended:
            self._on_failure(f"it exited with code {self.process.exitcode}")
