"""`rollout serve --data-parallel-backend ray`: this application on a cluster, until SIGTERM."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import ray
from ray import serve as ray_serve
from ray._private.utils import read_ray_address
from ray.exceptions import RayError

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.connection import EngineTarget, run_engine
from rollout.fleet.errors import EngineError
from rollout.server.main import announce, listen
from rollout.server.ray.ingress import LOGGING, build

_NAME = "rollout"
# The head node: Serve's own processes are there, and a cluster without it is none.
_ON_HEAD = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
_DRAINED_S, _END_S = 5.0, 10.0
_PROBE_S, _TURN_S = 2.0, 0.05


def serve(engine_config: EngineConfig, config: ServerConfig, *, target: EngineTarget = run_engine) -> int:
    """Serve on the cluster of RAY_ADDRESS, or of this machine, or one started for it, until SIGTERM or SIGINT.

    Returns the exit code: 0, or 1 where the address is taken, there is no such cluster, Serve runs on it already, or no
    engine starts. Takes everything of it along when it ends.
    """
    started = time.perf_counter()
    try:
        with listen(config.host, config.port) as listener:
            port = listener.getsockname()[1]
    except (OSError, OverflowError) as error:
        print(f"rollout: can't listen on {config.host}:{config.port}: {error}", file=sys.stderr)
        return 1
    try:
        _connect()
    except (ConnectionError, RuntimeError, RayError) as error:
        print(f"rollout: no Ray cluster: {error}", file=sys.stderr)
        return 1
    except SystemExit:  # what Ray makes of SIGTERM while it starts
        ray.shutdown()
        return 0
    try:
        if _serve_runs():
            print(
                "rollout: Ray Serve runs on this cluster already, at an address of its own: deploy beside its "
                "applications with ray.serve.run(rollout.server.ray.build(…), name=…, route_prefix=…)",
                file=sys.stderr,
            )
            return 1
        return _serve(engine_config, config, target, port, started)
    finally:
        ray.shutdown()


def _connect() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports home unless told otherwise
    address = os.environ.get("RAY_ADDRESS") or read_ray_address()
    if "RAY_ADDRESS" not in os.environ and not _answers(address):
        address = "local"
    dashboard = False if address == "local" else None
    ray.init(address, logging_level=logging.WARNING, namespace=_NAME, include_dashboard=dashboard)


def _answers(address: str | None) -> bool:
    """Whether a cluster that was started on this machine still runs: Ray leaves the address of a killed one behind."""
    host, _, port = (address or "").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_S):
            return True
    except (OSError, ValueError):
        return False


def _serve_runs() -> bool:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _signals() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Two events: SIGTERM or SIGINT has come; another one has. Ray's own code is no place to raise from."""
    stop, hurry = threading.Event(), threading.Event()

    def on_signal(number: int, frame: object) -> None:
        (hurry if stop.is_set() else stop).set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop, hurry
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(engine_config: EngineConfig, config: ServerConfig, target: EngineTarget, port: int, started: float) -> int:
    def deploy() -> Any:
        http = {"host": config.host, "port": port}
        ray_serve.start(proxy_location="HeadOnly", http_options=http, logging_config=LOGGING)
        app = build(engine_config, config, target=target, ray_actor_options=_ON_HEAD)
        return ray_serve.run(app, name=_NAME, route_prefix="/")

    with _signals() as (stop, hurry):
        deploying = _in_thread(deploy)
        try:
            if not _done(deploying, stop):
                return 0
            handle = deploying.result()
            announce(config.served_model_name or engine_config.model, config.host, port, started)
            stop.wait()
            draining = _in_thread(lambda: handle.drain.remote(config.shutdown_timeout).result())
            _done(draining, hurry, config.shutdown_timeout + _DRAINED_S)
            return 0
        except (RuntimeError, TimeoutError, RayError) as error:
            print(f"rollout: {_reason(error)}", file=sys.stderr)
            return 1
        finally:
            _done(_in_thread(ray_serve.shutdown), hurry, _END_S)  # its controller goes on where this takes too long
            _done(deploying, hurry, _END_S)  # a call of Ray after its shutdown would start another cluster


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Do it on a thread that ends with the process, so that what hangs there holds up nothing."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="rollout ray", daemon=True).start()
    return done


def _done(work: Future[Any], unless: threading.Event, timeout_s: float = math.inf) -> bool:
    """Wait for it; False where the event or the time comes first."""
    deadline = time.monotonic() + timeout_s
    while not work.done() and time.monotonic() < deadline:
        if unless.wait(_TURN_S):
            return False
    return work.done()


def _reason(error: Exception) -> str:
    """Why no engine started: the last line of a traceback of the replica, which Serve has as text only."""
    with contextlib.suppress(RayError, KeyError):
        text = ray_serve.status().applications[_NAME].deployments["rollout"].message
        if found := re.findall(r"^[\w.]*(?:Error|Exception): .*$", text, re.MULTILINE):
            return str(found[-1]).removeprefix(f"{EngineError.__module__}.EngineError: ")
    return str(error)
