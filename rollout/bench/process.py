"""A server as a process of the benchmark, whatever program it is."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

STOP_TIMEOUT_S = 30.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Launched:
    """A running server: its address, its process, and when that began (`time.perf_counter`)."""

    url: str
    pid: int
    began: float


def rollout_command(model: Path, flags: Sequence[str] = ()) -> list[str]:
    """The command of a rollout server; `{port}` stands for the port."""
    return [sys.executable, "-m", "rollout.cli", "serve", str(model), "--enable-scale-out", "--port", "{port}", *flags]


def split_command(command: str) -> list[str]:
    """A command line as a list. Raises ValueError where it has no place for the port."""
    if "{port}" not in command:
        raise ValueError(f"the command must say where the port goes, as {{port}}: {command!r}")
    return shlex.split(command)


@contextlib.contextmanager
def launch(command: Sequence[str], *, timeout_s: float) -> Iterator[Launched]:
    """Start the server on a free port, in a process group of its own, and yield it once /health answers 200.

    Raises RuntimeError, with the end of what it printed, where it isn't healthy within `timeout_s`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [part.replace("{port}", str(port)) for part in command]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            if not _healthy(process, url, began + timeout_s):
                why = f"is not healthy after {timeout_s:g} s" if process.poll() is None else "has ended"
                output.seek(0)
                raise RuntimeError(f"`{shlex.join(arguments)}` {why}; it said:\n{output.read()[-2000:]}")
            yield Launched(url, process.pid, began)
        finally:
            _stop(process)


def _healthy(process: subprocess.Popen[bytes], url: str, deadline: float) -> bool:
    with httpx.Client(trust_env=False, timeout=5) as http:
        while process.poll() is None and time.perf_counter() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if http.get(f"{url}/health").status_code == 200:
                    return True
            time.sleep(_POLL_S)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
