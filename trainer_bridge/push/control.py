"""The control calls of a weight push, to one server over HTTP and to several at once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx

T = TypeVar("T")


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


class Endpoint(Protocol):
    """Anything that knows a server's address and key, such as RolloutClient."""

    @property
    def base_url(self) -> str:
        """http://host:port."""

    @property
    def api_key(self) -> str | None:
        """The bearer key, if the server wants one."""


class ServerControl:
    """One server. `open`: it has an update of ours that it has neither dropped nor (`committed`) committed."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self.base_url = base_url
        self.open = self.committed = False
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=base_url, headers=headers, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The JSON answer. Raises RefusedError for an error (the server has then dropped the update itself)."""
        try:
            timeout = httpx.Timeout(timeout_s or self._timeout_s, connect=min(10.0, self._timeout_s))
            response = self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise WeightPushError(
                f"{self.base_url}: {method} {path} got no answer: {type(error).__name__}: {error}"
            ) from error
        if response.status_code >= 400:
            self.open = False
            raise RefusedError(
                f"{self.base_url}: {method} {path} was refused with {response.status_code}: {_message(response)}",
                response.status_code,
            )
        answer: dict[str, Any] = response.json()
        return answer

    def start(self, body: dict[str, Any]) -> None:
        """Open an update."""
        self.call("POST", "/start_weight_update", body)
        self.open, self.committed = True, False

    def commit(self, body: dict[str, Any], epoch_before: int) -> dict[str, Any]:
        """Commit; the server's /weight_info after it, which also decides where the answer itself was lost."""
        lost: Exception | None = None
        try:
            self.call("POST", "/finish_weight_update", body)
        except RefusedError:
            raise
        except WeightPushError as error:
            lost = error
        deadline = time.monotonic() + self._timeout_s
        while True:
            info = self.call("GET", "/weight_info")
            if lost is None or info["epoch"] > epoch_before:
                self.open, self.committed = False, True
                return info
            if info["state"] not in ("receiving", "ready") or time.monotonic() > deadline:
                raise lost
            time.sleep(0.05)

    def abort_quietly(self) -> None:
        """Free the server for the next push at once; it would come to that by its own timeout."""
        if self.open:
            self.open = False
            with contextlib.suppress(WeightPushError):
                self.call("POST", "/abort_weight_update", {}, timeout_s=min(5.0, self._timeout_s))

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
    futures = [in_thread(lambda i=i, s=s: work(i, s)) for i, s in enumerate(servers)]  # type: ignore[misc]
    wait(futures)  # every call in them has its own timeout
    return [result(future, "a call to the server failed") for future in futures]


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


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:500]
