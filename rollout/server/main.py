"""The life of the server process: bind, start the engine, serve, and end within seconds when told to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import time
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import uvloop

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.connection import EngineTarget, run_engine
from rollout.fleet.errors import EngineError
from rollout.fleet.fleet import Fleet
from rollout.folders import OwnedFolder

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

# How long answers in flight may take to be written once their requests have been aborted.
_GRACE_S = 4
# Connections that wait to be accepted.
_BACKLOG = 2048
# Of the garbage collector, which holds every thread for as long as it looks: at young objects after so many, at those
# that outlived it each 20th time, at all each 400th.
_COLLECTED_AFTER = (10_000, 20, 20)


def serve(engine_config: EngineConfig, config: ServerConfig, *, target: EngineTarget = run_engine) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0, or 1 where the address is taken or no engine starts."""
    started = time.perf_counter()
    try:
        listener = listen(config.host, config.port)
    except (OSError, OverflowError) as error:
        print(f"rollout: can't listen on {config.host}:{config.port}: {error}", file=sys.stderr)
        return 1
    with listener, contextlib.ExitStack() as stack:
        try:
            engine_config = with_own_snapshot_folder(engine_config, stack)
        except OSError as error:
            folder = engine_config.keep_weight_snapshot
            print(f"rollout: can't write to --keep-weight-snapshot {folder}: {error.strerror}", file=sys.stderr)
            return 1
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        return runner.run(_serve(engine_config, config, listener, target, started))


def with_own_snapshot_folder(config: EngineConfig, stack: contextlib.ExitStack) -> EngineConfig:
    """Snapshots go to a folder of this server's own, which ends with the stack: the next server has its own epochs.

    Raises OSError where it can't be made.
    """
    if config.keep_weight_snapshot is None:
        return config
    own = stack.enter_context(OwnedFolder("rollout-", config.keep_weight_snapshot))
    return replace(config, keep_weight_snapshot=str(own.path))


def announce(model: str, host: str, port: int, started: float) -> None:
    """Print where the server is, and how long it took since `started` (`time.perf_counter`)."""
    host = f"[{host}]" if ":" in host else host
    print(f"rollout: serving {model} on http://{host}:{port} ({time.perf_counter() - started:.1f} s)", flush=True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens: from here on, no other server gets this port. Who connects while the engine loads is
    answered once it has. Raises OSError or OverflowError where the address or the port can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)


async def _serve(
    engine_config: EngineConfig, config: ServerConfig, listener: socket.socket, target: EngineTarget, started: float
) -> int:
    stop_requested, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop_requested.is_set() else stop_requested).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    stopping = asyncio.create_task(stop_requested.wait())
    engine = Fleet(
        engine_config,
        size=config.data_parallel_size,
        target=target,
        stall_timeout_s=config.engine_stall_timeout_s,
        start_timeout_s=config.engine_start_timeout_s,
        restarts=config.engine_restarts,
    )
    engine.start()
    try:
        loading = asyncio.create_task(engine.wait_ready(config.engine_start_timeout_s))
        await asyncio.sleep(0)
        from rollout.server.app import create_app  # imports the HTTP stack while the model loads

        if not await _ended(loading, stopping):
            return 0
        app = create_app(engine, engine_config, config)
        from rollout.server.api.adapters import load_modules

        if not await _ended(asyncio.create_task(load_modules(app.state.server)), stopping):
            return 0
        gc.freeze()  # what was imported stays
        gc.set_threshold(*_COLLECTED_AFTER)
        await _serve_http(app, engine, config, listener, stopping, hurry, started)
        return 0
    except EngineError as error:
        print(f"rollout: {error}", file=sys.stderr)
        return 1
    finally:
        stopping.cancel()
        await engine.stop()


async def _ended(task: asyncio.Task[Any], stopping: asyncio.Task[bool]) -> bool:
    """Wait for the task, and raise what it raises; False where the server is told to stop before."""
    await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        task.cancel()
        return False
    task.result()
    return True


async def _serve_http(
    app: FastAPI,
    engine: Fleet,
    config: ServerConfig,
    listener: socket.socket,
    stopping: asyncio.Task[bool],
    hurry: asyncio.Event,
    started: float,
) -> None:
    http = http_server(app, config)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    while not http.started and not serving.done():
        await asyncio.sleep(0.01)
    announce(app.state.server.model_name, config.host, listener.getsockname()[1], started)
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    await drain(app, engine, config.shutdown_timeout, hurry)
    http.should_exit = True
    await serving


async def drain(app: FastAPI, engine: Fleet, timeout_s: float, hurry: asyncio.Event) -> None:
    """Answer new requests with a 503, and abort those in flight after this long, or once `hurry` is set."""
    app.state.server.stopping = True
    deadline = time.monotonic() + timeout_s
    while engine.error is None and engine.in_flight and time.monotonic() < deadline and not hurry.is_set():
        await asyncio.sleep(0.02)
    with contextlib.suppress(EngineError):
        engine.abort(None)


def http_server(app: FastAPI, config: ServerConfig) -> uvicorn.Server:
    """The HTTP server of this app; it leaves signals alone."""
    import uvicorn

    from rollout.server.limits import PromptProtocol

    class Protocol(PromptProtocol):
        """Bounds how long a body may take, by this server's configuration."""

        timeout_s = config.receive_timeout_s

    class HttpServer(uvicorn.Server):
        """uvicorn's server, which leaves signals to this module."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            yield  # signals are this module's business

    return HttpServer(
        uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            log_level=config.uvicorn_log_level,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
