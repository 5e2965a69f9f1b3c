"""`pull` for a request, in a process of its own: a disk that hangs holds that process, and no thread of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time

import msgspec

from rollout.weights.errors import DISK_FAILURES, WeightUpdateError
from rollout.weights.pull import pull

_MOST = 8
_SAID_AFTER_S = 0.2
_MOST_SAID = 4000
_processes: list[asyncio.subprocess.Process | None] = []
"""Those that may still run, None for one that is being started: one that waits for a dead mount outlives its kill."""


async def pull_aside(local_dir: str, base_dir: str, source_dir: str, version: int, *, timeout_s: float) -> None:
    """`pull`, which is ended where it gets no further for `timeout_s` seconds.

    Raises WeightUpdateError: 400 for what is wrong with the folders, 503 where a disk hangs or fails.
    """
    _processes[:] = [process for process in _processes if process is None or process.returncode is None]
    if len(_processes) >= _MOST:
        raise WeightUpdateError(503, f"{_MOST} pulls run or hang already: is a mount down?")
    told = msgspec.json.encode((local_dir, base_dir, source_dir, version)).decode()
    _processes.append(None)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", __name__, told),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    finally:
        _processes.remove(None)
    _processes.append(process)
    assert process.stdout is not None
    outcome = None
    try:
        while line := await asyncio.wait_for(process.stdout.readline(), timeout_s):
            outcome = line.strip() or outcome
    except TimeoutError:
        reason = f"the pull got no further for {timeout_s:g} s: a disk hangs, or another pull into {local_dir} does"
        raise WeightUpdateError(503, reason) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if outcome is None:
        raise WeightUpdateError(503, "the pull's process has ended without a word: the folder has the version before")
    status, message = msgspec.json.decode(outcome, type=tuple[int, str])
    if status != 200:
        raise WeightUpdateError(status, message)


def main(told: str) -> None:
    """The process: a line break on stdout now and then while it gets on, and last a status and a message."""
    said = time.monotonic()

    def progress() -> None:
        nonlocal said
        if time.monotonic() - said > _SAID_AFTER_S:
            said = time.monotonic()
            os.write(1, b"\n")  # fails where the server has gone

    outcome = 200, ""
    try:
        pull(*msgspec.json.decode(told, type=tuple[str, str, str, int]), progress)
    except (OSError, ValueError) as error:
        status = 503 if isinstance(error, OSError) and error.errno in DISK_FAILURES else 400
        outcome = status, str(error)[:_MOST_SAID]
    os.write(1, msgspec.json.encode(outcome) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
