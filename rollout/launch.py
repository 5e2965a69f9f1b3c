"""Servers as child processes: of the demo, the examples, the benchmark and the tests."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05

_SERVING = re.compile(r"serving .* on (http://\S+)")


@dataclass(frozen=True)
class Launched:
    """A running server: its address, its process, and when that began (`time.perf_counter`)."""

    url: str
    pid: int
    began: float


@contextlib.contextmanager
def serve(model: str | Path, log: Path, *flags: str) -> Iterator[str]:
    """The address of `rollout serve MODEL FLAGS` on a free port, while the context lasts; its output goes to `log`.

    What is left of `rollout.serve` where a test or a benchmark needs no client, or flags that it would set itself.
    The server ends with this process, even where that is killed. Raises RuntimeError as `launch` does.
    """
    with launch(serve_command(model, *flags), log) as server:
        yield server.url


def serve_command(model: str | Path, *flags: str) -> list[str]:
    """The command line of a server on a free port, which ends when the process that started it is gone."""
    return [sys.executable, "-m", "rollout.cli.child", "serve", str(model), "--port", "0", *flags]


def split_command(command: str) -> list[str]:
    """A command line as a list. Raises ValueError where it has no place for the port."""
    if "{port}" not in command:
        raise ValueError(f"the command must say where the port goes, as {{port}}: {command!r}")
    return shlex.split(command)


@contextlib.contextmanager
def launch(
    command: Sequence[str],
    log: Path | None = None,
    *,
    timeout_s: float = START_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Launched]:
    """Run a server in a process group of its own while the context lasts; yield it once /health answers 200.

    `{port}` in the command stands for a free port; without it, the server must print its address as rollout's does.
    `environment` is added to this process's own. Raises RuntimeError, with the end of what the server printed, where it
    isn't healthy within `timeout_s`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    arguments = [part.replace("{port}", port) for part in command]
    url = None if arguments == list(command) else f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        log = log or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
        with open(log, "w") as output:
            began = time.perf_counter()
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                env={**os.environ, **(environment or {})},
            )
        stack.callback(_stop, process)
        yield Launched(_healthy_address(process, url, log, timeout_s), process.pid, began)


def _healthy_address(process: subprocess.Popen[bytes], url: str | None, log: Path, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if url is None and (serving := _SERVING.search(log.read_text(errors="replace"))):
            url = serving[1]
        if url is not None and _is_healthy(url):
            return url
        time.sleep(_POLL_S)
    why = f"is not healthy after {timeout_s:g} s" if process.poll() is None else f"has ended ({process.returncode})"
    printed = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"the server {why}: `{shlex.join(map(str, process.args))}`. The end of {log}:\n{printed}")  # type: ignore[arg-type]


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
