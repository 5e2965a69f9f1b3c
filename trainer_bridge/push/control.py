"""The control calls of a weight push, to one server over HTTP and to several at once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from trainer_bridge.client import RolloutClient, RolloutError

T = TypeVar("T")
TURN_S = 15.0
"""Longest wait for another trainer's update to stop counting as alive, which takes a server 10 s."""


class WeightPushError(RuntimeError):
    """A push that did not happen: the server keeps the weights it had. The next push joins a fresh group by itself.

    (After a failed push in place the server's weights are invalid, until a whole push succeeds.)
    """


class RefusedError(WeightPushError):
    """The server answered with an error: `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[RefusedError], tuple[str, int]]:
        return type(self), (str(self), self.status)  # it may have to reach another process


class DisplacedError(RefusedError):
    """Another trainer has taken the server over: no call of this sender has an effect any more.

    Only a new `WeightSender.connect` takes it back (with `force` while the other one is at work).
    """


@dataclass(frozen=True)
class Committed:
    """A commit of ours on one server: its label, its epoch, and the bytes that the server received."""

    version: str
    epoch: int
    bytes: int


class ServerControl:
    """One server. `owner` is what tells our calls from another trainer's, `update_id` those of one push from another's.

    `open`: it has an update of ours that it has neither dropped nor committed.
    """

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float, owner: str) -> None:
        self.base_url = base_url
        self.open = False
        self._ids = {"owner": owner}
        self._timeout_s = timeout_s
        self._client = RolloutClient(base_url, api_key=api_key, timeout_s=timeout_s)

    def close(self) -> None:
        self._client.close()

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The JSON answer. Raises RefusedError for an error (the server has then dropped the update itself)."""
        try:
            answer: dict[str, Any] = self._client.request(method, path, body, timeout_s=timeout_s)
        except RolloutError as error:
            if not error.status:
                raise WeightPushError(f"{method} {path} got no answer: {error}") from error
            self.open = False
            displaced = error.status == 409 and error.param == "owner"
            raise (DisplacedError if displaced else RefusedError)(
                f"{self.base_url}: {method} {path} was refused with {error.status}: {error.message}", error.status
            ) from error
        return answer

    def wait_for_turn(self) -> None:
        """Wait while another trainer's update counts as alive, until that stops or for as long as it takes to stop."""
        deadline = time.monotonic() + TURN_S
        while time.monotonic() < deadline and self.call("GET", "/weight_info").get("takeover_s", 0.0) > 0:
            time.sleep(0.25)

    def join(self, info: dict[str, Any], *, rejoin: bool) -> None:
        """Have the server join; `rejoin`: unless another trainer has joined since we did."""
        body = {"init_info": info, "owner": self._ids["owner"], "rejoin": rejoin}
        self.call("POST", "/init_weight_transfer_engine", body)

    def start(self, body: dict[str, Any], update_id: str) -> None:
        self._ids["update_id"] = update_id
        self.update_call("start", body)
        self.open = True

    def update_call(
        self, name: Literal["start", "finish", "abort"], body: dict[str, Any], *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """A call of the update that was started last."""
        return self.call("POST", f"/{name}_weight_update", body | self._ids, timeout_s=timeout_s)

    def announce(self, update_info: dict[str, Any], timeout_s: float) -> None:
        """Have the server receive what is announced; returns once it has."""
        self.call("POST", "/update_weights", {"update_info": update_info} | self._ids, timeout_s=timeout_s)

    def commit(self, body: dict[str, Any]) -> Committed:
        """Commit. Where the answer is lost, the server is asked whether this very update was committed."""
        try:
            answer = self.update_call("finish", body)
        except RefusedError:
            raise
        except WeightPushError as error:
            answer = self._look_up_commit(error, body)
        self.open = False
        return Committed(answer["weight_version"], int(answer["epoch"]), int(answer.get("bytes", 0)))

    def _look_up_commit(self, lost: WeightPushError, body: dict[str, Any]) -> dict[str, Any]:
        deadline, ours = time.monotonic() + self._timeout_s, self._ids["update_id"]
        while True:
            info = self.call("GET", "/weight_info")
            epoch = info.get("committed_updates", {}).get(ours)
            if epoch is not None:
                return info | body | {"epoch": epoch}
            if info.get("update_id") != ours or time.monotonic() > deadline:
                raise lost
            time.sleep(0.05)

    def abort_quietly(self) -> None:
        """Free the server for the next push at once; it would come to that by its own timeout."""
        if self.open:
            self.open = False
            with contextlib.suppress(WeightPushError):
                self.update_call("abort", {}, timeout_s=min(5.0, self._timeout_s))

    def address_here(self) -> str:
        """This machine's address as the server can reach it: that of the route there."""
        parts = urlsplit(self.base_url)
        host, port = parts.hostname or "127.0.0.1", parts.port or 80
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])


def on_all(servers: Sequence[ServerControl], work: Callable[[int, ServerControl], T]) -> list[T]:
    """`work(index, server)` of each at the same time, in their order; raises the first error once all have ended."""
    return [result(future, "a call to the server failed") for future in ended(servers, work)]


def ended(servers: Sequence[ServerControl], work: Callable[[int, ServerControl], T]) -> list[Future[T]]:
    """The same, with its results and errors, all of them there."""
    futures = [in_thread(partial(work, index, server)) for index, server in enumerate(servers)]
    wait(futures)  # every call in them has its own timeout
    return futures


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run on a daemon thread: one that is stuck must not keep the trainer from exiting."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-sender", daemon=True).start()
    return future


def result(future: Future[T], what: str) -> T:
    """A future's result; any failure of it as a WeightPushError."""
    try:
        return future.result()
    except WeightPushError:
        raise
    except Exception as error:
        raise WeightPushError(f"{what}: {error}") from error
