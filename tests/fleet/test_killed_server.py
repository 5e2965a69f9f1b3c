"""What a server that was killed leaves behind: engines that end, and folders that its successor removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from rollout.config import EngineConfig
from rollout.folders import OwnedFolder
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]


def wait_for_ever(config: EngineConfig, to_engine: str, from_engine: str) -> None:
    """An engine that is still importing, as far as its server can tell."""
    Path(config.model).write_text(str(os.getpid()))
    time.sleep(3600)


KILLED = """
import asyncio, os, signal, sys
from rollout.config import EngineConfig
from rollout.fleet.connection import ProcessConnection
from tests.fleet.test_killed_server import wait_for_ever

async def serve():
    started = ProcessConnection("engine", wait_for_ever, EngineConfig(model=sys.argv[1]), print, print)
    if sys.argv[2] == "later":
        while not os.path.exists(sys.argv[1]):
            await asyncio.sleep(0.01)
    print(started.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(serve())
"""


@pytest.mark.parametrize("when", ["at once", "later"])
def test_an_engine_whose_server_dies_while_it_imports_ends(tmp_path: Path, when: str) -> None:
    script = tmp_path / "server.py"
    script.write_text(KILLED)
    temporary = Path(tempfile.mkdtemp())  # the path of a socket in it has to be short
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "pid"), when],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    pid = int(run.stdout)
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 60)
    (left,) = temporary.iterdir()
    assert left.name.startswith("rollout-")
    with OwnedFolder("rollout-", temporary) as successor:
        assert list(temporary.iterdir()) == [successor.path]
    temporary.rmdir()


def test_a_folder_whose_owner_lives_is_left_alone(tmp_path: Path) -> None:
    with OwnedFolder("rollout-", tmp_path) as first, OwnedFolder("rollout-", tmp_path) as second:
        assert first.path.stat().st_mode & 0o777 == 0o700
        assert set(tmp_path.iterdir()) == {first.path, second.path}
        first.close()
        first.close()
        assert list(tmp_path.iterdir()) == [second.path]


def test_folders_that_others_made_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rollout-results").mkdir()
    (tmp_path / "rollout-notes").write_text("mine")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / ".owner").touch()
    (tmp_path / "rollout-link").symlink_to(precious)
    fifo = tmp_path / "rollout-fifo"
    fifo.mkdir()
    os.mkfifo(fifo / ".owner")
    before = set(tmp_path.iterdir()) - {fifo}
    OwnedFolder("rollout-", tmp_path).close()
    assert before <= set(tmp_path.iterdir())
    assert (precious / ".owner").exists()
