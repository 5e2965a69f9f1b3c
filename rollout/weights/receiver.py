"""The connection to one trainer, from its init_weight_transfer_engine to the next one or a shutdown."""

from __future__ import annotations

import functools
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from rollout.weights.bodies import InitInfo
from rollout.weights.errors import WeightUpdateError, as_update_error
from rollout.weights.transport import Transport
from rollout.weights.transport.broadcast import BroadcastTransport
from rollout.weights.transport.disk import DiskTransport
from rollout.weights.transport.ipc import IpcTransport

logger = logging.getLogger(__name__)

Answer = Future[dict[str, Any]]
"""Of a control call: its JSON body, or a WeightUpdateError."""
LONGEST_TIMEOUT_S = 3600.0
"""Most that a trainer may ask for: what it leaves behind holds a thread, and memory, for so long."""

MOST_RECEIVERS = 8
"""Connections at once whose threads run: a join, or a receive, may outlast the trainer that it waits for."""


class Receiver:
    """A transport, and the one thread that may block in it.

    `expire` is called on that thread while it waits for the trainer's next call. `lock` is the updater's, under which
    the thread changes what its calls read. `spent` says why no update can come over this connection any more.
    `timeout_s` is the transport's.
    """

    def __init__(
        self, transport: Transport, device: torch.device, expire: Callable[[Receiver], None], lock: threading.RLock
    ) -> None:
        self.transport, self.timeout_s = transport, transport.timeout_s
        self.joined = self.stopped = False
        self.spent: str | None = None
        self._device, self._expire, self._lock = device, expire, lock
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"weights-{transport.name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs: after `stop`, until the job at hand has ended."""
        return self._thread.is_alive()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those submitted before."""
        self._jobs.put(job)

    def join(self, answer: Answer, result: dict[str, Any]) -> None:
        """Meet the trainer, on the thread; `answer` gets `result`, or what went wrong."""
        self.submit(lambda: self._join(answer, result))
        # The store's handshake and the group's each keep to the timeout, unless whoever listens there never speaks.
        deadline = threading.Timer(2 * self.timeout_s + 1, self._give_up_joining, (answer,))
        deadline.daemon = True
        deadline.start()
        answer.add_done_callback(lambda _: deadline.cancel())

    def _join(self, answer: Answer, result: dict[str, Any]) -> None:
        failure: WeightUpdateError | None = None
        try:
            with on_device(self._device):
                self.transport.connect()
        except Exception as error:
            failure = as_update_error(error)
        with self._lock:
            if failure is None and self.stopped:
                failure = WeightUpdateError(409, "the transfer was shut down or taken over while joining")
            if failure is not None:
                self.stop()
            self.joined = failure is None
            if answer.done():
                return
            if failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(result)

    def _give_up_joining(self, answer: Answer) -> None:
        with self._lock:
            if answer.done():
                return
            self.stop()
            answer.set_exception(
                WeightUpdateError(
                    503,
                    f"no trainer's store answered at {self.transport.peer} (as init_info says) within "
                    f"2 · {self.timeout_s:g} s: is it the trainer's, and is the port its own?",
                )
            )

    def spend(self, reason: str) -> None:
        """Give the group up after a failure that may have left values in flight: they'd be taken for the next update's.

        Closing it also ends a broadcast that the trainer is stuck in.
        """
        if self.transport.spent_by_failure and self.spent is None:
            self.spent = reason
            self._end()

    def stop(self) -> None:
        """Leave the trainer's group, once the job at hand returns."""
        self.stopped = True
        self._end()

    def _end(self) -> None:
        self.transport.interrupt()
        self._jobs.put(None)

    def _run(self) -> None:
        tick = min(5.0, self.timeout_s / 4)
        while True:
            try:
                job = self._jobs.get(timeout=tick)
            except queue.Empty:
                self._expire(self)
                continue
            if job is None:
                break
            job()
            del job  # it holds the update's buffers
        try:
            self.transport.close()
        except Exception:
            logger.exception("closing the %s transport failed", self.transport.name)


class TrainerConnection:
    """The receiver of the trainer that joined last, and those before it whose threads have not ended yet.

    `timeout_s` holds for trainers that don't say their own.
    """

    def __init__(
        self, timeout_s: float, device: torch.device, expire: Callable[[Receiver], None], lock: threading.RLock
    ) -> None:
        self._timeout_s, self._device = timeout_s, device
        self._expire, self._lock = expire, lock
        self._receiver: Receiver | None = None
        self._all: list[Receiver] = []

    def transport_for(self, info: InitInfo) -> Transport:
        """The transport that a trainer asks for. Raises WeightUpdateError 400."""
        timeout_s = self._timeout_s if info.timeout_s is None else info.timeout_s
        longest = max(LONGEST_TIMEOUT_S, self._timeout_s)
        if not (math.isfinite(timeout_s) and 0 < timeout_s <= longest):
            raise WeightUpdateError(
                400, f"init_info.timeout_s must be a positive number of seconds, at most {longest:g}, got {timeout_s}"
            )
        if info.backend == "disk":
            return DiskTransport(timeout_s)
        kind = IpcTransport if info.backend == "ipc" else BroadcastTransport
        return kind(info, timeout_s, self._device)

    def check_room(self) -> None:
        """Raise WeightUpdateError 503 where too many trainers that nobody waits for still hold threads."""
        self._all = [receiver for receiver in self._all if receiver.alive]
        if len(self._all) >= MOST_RECEIVERS:
            raise WeightUpdateError(
                503,
                f"{len(self._all)} connections to trainers have not ended yet: their joins or receives wait for "
                "trainers that may be gone, each until its timeout. Try again then",
            )

    def new_receiver(self, transport: Transport) -> Receiver:
        """A receiver, within the bound. Raises as `check_room`."""
        self.check_room()
        receiver = Receiver(transport, self._device, self._expire, self._lock)
        self._all.append(receiver)
        return receiver

    def join(self, transport: Transport, answer: Answer, result: dict[str, Any]) -> None:
        """Leave the trainer of before and meet this one; `answer` gets `result`, or what went wrong."""
        self.leave()
        self._receiver = self.new_receiver(transport)
        self._receiver.join(answer, result)

    def receiver(self) -> Receiver:
        """The receiver, where an update can come over it. Raises WeightUpdateError otherwise."""
        receiver = self._receiver
        if receiver is None or receiver.stopped:
            raise WeightUpdateError(400, "no weight transfer is configured: call init_weight_transfer_engine first")
        if not receiver.joined:
            raise WeightUpdateError(
                409, "init_weight_transfer_engine is still joining the trainer: wait for its answer"
            )
        if receiver.spent is not None:
            raise WeightUpdateError(
                409,
                f"the last update left its group unusable ({receiver.spent}): "
                "call init_weight_transfer_engine again with a fresh group",
            )
        return receiver

    def leave(self) -> None:
        if self._receiver is not None:
            self._receiver.stop()
            self._receiver = None


@contextmanager
def beside_decoding(tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Copy these tensors off their device on a stream of one's own: decode steps queue behind what the default has."""
    device = next(iter(tensors.values())).device
    with on_device(device, torch.cuda.Stream(device) if device.type == "cuda" else None):
        yield


@contextmanager
def on_device(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """On CUDA, work on `stream` (by default one for all updates), behind the kernels that still read what is now
    staging, to its end."""
    if device.type != "cuda":
        yield
        return
    stream = stream or _side_stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
