"""The one trainer that an engine listens to, from init_weight_transfer_engine to the next one or a shutdown."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from rollout.weights.bodies import InitInfo
from rollout.weights.errors import WeightUpdateError, as_update_error
from rollout.weights.link import Link
from rollout.weights.receiver import Answer
from rollout.weights.transport import Transport
from rollout.weights.transport.broadcast import BroadcastTransport
from rollout.weights.transport.disk import DiskTransport

LONGEST_TIMEOUT_S = 1e6


class Connection:
    """The current link, if any. `lock` is the updater's, held by its calls and taken by the joining thread.

    `timeout_s` holds for trainers that don't say their own; `expire` is called by a link that waits for calls.
    """

    def __init__(
        self,
        timeout_s: float,
        device: torch.device,
        on_device: Callable[[], AbstractContextManager[None]],
        expire: Callable[[Link], None],
        lock: threading.RLock,
    ) -> None:
        self._timeout_s, self._device = timeout_s, device
        self._on_device, self._expire, self._lock = on_device, expire, lock
        self._link: Link | None = None

    def transport_for(self, info: InitInfo) -> tuple[Transport, float]:
        """The transport that a trainer asks for, and its timeout in seconds. Raises WeightUpdateError 400."""
        timeout_s = self._timeout_s if info.timeout_s is None else info.timeout_s
        if not (math.isfinite(timeout_s) and 0 < timeout_s <= LONGEST_TIMEOUT_S):
            raise WeightUpdateError(
                400,
                "init_info.timeout_s must be a positive number of seconds, "
                f"at most {LONGEST_TIMEOUT_S:g}, got {timeout_s}",
            )
        if info.backend == "disk":
            return DiskTransport(), timeout_s
        return BroadcastTransport(info, timeout_s, self._device), timeout_s

    def join(self, transport: Transport, timeout_s: float, answer: Answer) -> None:
        """Leave the trainer of before and meet this one, on a thread of its own; `answer` says what came of it."""
        self.drop()
        link = self._link = Link(transport, timeout_s, self._expire)
        link.submit(lambda: self._join(link, answer))
        # The store's handshake and the group's each keep to the timeout, unless whoever listens there never speaks.
        deadline = threading.Timer(2 * timeout_s + 1, self._give_up, (link, answer, timeout_s))
        deadline.daemon = True
        deadline.start()
        answer.add_done_callback(lambda _: deadline.cancel())

    def _give_up(self, link: Link, answer: Answer, timeout_s: float) -> None:
        with self._lock:
            if answer.done():
                return
            if self._link is link:
                self.drop()
            answer.set_exception(
                WeightUpdateError(
                    503,
                    f"no trainer's store answered within 2 · {timeout_s:g} s at the address in init_info: "
                    "is it the trainer's, and is the port its own?",
                )
            )

    def _join(self, link: Link, answer: Answer) -> None:
        try:
            with self._on_device():
                link.transport.connect()
        except Exception as error:
            failure = as_update_error(error)
            with self._lock:
                if self._link is link:
                    self.drop()
                if not answer.done():
                    answer.set_exception(failure)
            return
        with self._lock:
            link.joined = True
            if answer.done():
                return
            if self._link is link:
                answer.set_result({"message": f"Weight transfer initialized ({link.transport.name})"})
            else:
                answer.set_exception(WeightUpdateError(409, "the transfer was shut down or taken over while joining"))

    def usable(self) -> Link:
        """The link, where an update can be received over it. Raises WeightUpdateError otherwise."""
        if self._link is None:
            raise WeightUpdateError(400, "no weight transfer is configured: call init_weight_transfer_engine first")
        if not self._link.joined:
            raise WeightUpdateError(
                409, "init_weight_transfer_engine is still joining the trainer: wait for its answer"
            )
        if self._link.spent is not None:
            raise WeightUpdateError(
                409,
                f"the last update left its group unusable ({self._link.spent}): "
                "call init_weight_transfer_engine again with a fresh group",
            )
        return self._link

    def drop(self) -> None:
        """Leave the trainer's group."""
        if self._link is not None:
            self._link.stop()
            self._link = None
