"""`rollout serve` as a process of the demo, which ends with it even where the demo is killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 15.0

_SERVING = re.compile(r"serving .* on (http://\S+)")


@contextlib.contextmanager
def serve(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """The address of a server of `model` on a free port, while the context lasts; what it prints goes to `log`.

    Raises RuntimeError, with the end of the log, where it doesn't start.
    """
    command = [sys.executable, "-m", __name__, "serve", str(model), "--port", "0", *flags]
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield _address(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if serving := _SERVING.search(log.read_text()):
            return serving[1]
        time.sleep(0.1)
    why = "is not ready" if process.poll() is None else f"ended with exit code {process.returncode}"
    raise RuntimeError(f"the server {why}; the end of {log}:\n{log.read_text()[-2000:]}")


def _end_with(parent: int) -> None:
    """Send this process SIGTERM when its parent is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


if __name__ == "__main__":
    from rollout.cli.main import main

    _end_with(os.getppid())
    main()
