"""A real HTTP server over the fake engine process, on a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.connection import EngineTarget
from rollout.fleet.fleet import Fleet
from rollout.server.app import create_app
from rollout.server.main import http_server
from tests.support import fake_engine


@dataclass
class RunningServer:
    """Where it listens, and a way to ask its engine behind its back."""

    url: str
    engine: Fleet
    loop: asyncio.AbstractEventLoop

    @property
    def engine_pid(self) -> int:
        """The process to kill."""
        pid = self.engine.ranks[0].pid
        assert pid is not None
        return pid

    def stats(self) -> dict[str, Any]:
        """What the fake engine was asked so far."""
        asked = asyncio.run_coroutine_threadsafe(self.engine.call("stats", timeout_s=10), self.loop)
        return asked.result(10)


def children(pid: int) -> list[int]:
    """The processes that this one has started and that are not waited for yet."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether it runs: a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def running_server(
    config: ServerConfig | None = None,
    *,
    model: str | None = None,
    stall_timeout_s: float = 60.0,
    target: EngineTarget = fake_engine.run_engine,
    size: int = 1,
    restarts: int = 0,
    **engine_options: Any,
) -> Iterator[RunningServer]:
    """Serve as `smol`, token-in/token-out and masks on, from an empty model folder, unless told otherwise.

    The engine is the fake one; `target` may be the real one, `engine_options` are then its configuration.
    """
    config = config or ServerConfig(served_model_name="smol", enable_scale_out=True, return_sampling_mask=True)
    started: list[RunningServer | BaseException] = []
    ready = threading.Event()
    http: list[uvicorn.Server] = []

    async def serve(model: str) -> None:
        engine_config = EngineConfig(model=model, **{"device": "cpu", **engine_options})
        engine = Fleet(engine_config, size=size, target=target, stall_timeout_s=stall_timeout_s, restarts=restarts)
        engine.start()
        try:
            await engine.wait_ready(120)
            app = create_app(engine, engine_config, config)
            http.append(http_server(app, config))
            listener = socket.create_server(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            started.append(RunningServer(url, engine, asyncio.get_running_loop()))
            ready.set()
            await http[0].serve(sockets=[listener])
        finally:
            await engine.stop()

    def run() -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(serve(model or folder))
        except BaseException as error:
            started.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(150)
        assert isinstance(started[0], RunningServer), started
        yield started[0]
    finally:
        for server in http:
            server.should_exit = server.force_exit = True
        thread.join(30)
    assert not thread.is_alive()
