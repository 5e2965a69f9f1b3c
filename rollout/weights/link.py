"""The connection to one trainer, and the thread that may block in it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rollout.weights.transport import Transport

logger = logging.getLogger(__name__)


class Link:
    """A trainer's connection: its transport, and the one thread that may block in it."""

    def __init__(self, transport: Transport, timeout_s: float, expire: Callable[[Link], None]) -> None:
        self.transport = transport
        self.timeout_s = timeout_s
        self.joined = False
        self.spent: str | None = None
        self._expire = expire
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"weights-{transport.name}", daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those submitted before."""
        self._jobs.put(job)

    def spend(self, reason: str) -> None:
        """Give the group up after a failure that may have left values in flight: they'd be taken for the next update's.

        Closing it also ends a broadcast that the trainer is stuck in.
        """
        if self.transport.spent_by_failure and self.spent is None:
            self.spent = reason
            self.stop()

    def stop(self) -> None:
        """Close the transport and end the thread once the job at hand returns."""
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
            del job  # it holds the session's buffers
        try:
            self.transport.close()
        except Exception:
            logger.exception("closing the %s transport failed", self.transport.name)


@contextmanager
def on_device(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on `stream`, behind the kernels that still read what is now staging, and wait for it at the end.

    None, where there is no CUDA, does nothing.
    """
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()
