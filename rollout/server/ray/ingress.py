"""The server as one Ray Serve deployment: the HTTP application, in the replica that owns the engines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import FastAPI
from ray import serve
from starlette.types import Receive, Scope, Send

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.client import RESTART_WINDOW_S
from rollout.fleet.connection import EngineTarget, run_engine
from rollout.fleet.fleet import Fleet
from rollout.fleet.ray.connection import RayEngines
from rollout.server.app import create_app
from rollout.server.auth import api_keys
from rollout.server.main import drain, with_own_snapshot_folder

# Serve's own lines about every request are none of ours.
LOGGING = {"log_level": "WARNING", "enable_access_log": False}
# What Serve itself does at the end, after `drain`: ask for the destructor, and wait for it.
_GRACE_S = 5.0
# How soon Serve sees that the replica is gone.
_HEALTH_S = 2.0


class Ingress:
    """The replica: one, since one process must see every commit. Its engines and their places end with it."""

    app: ClassVar[FastAPI]  # of this process

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engine_config: EngineConfig, config: ServerConfig, target: EngineTarget
    ) -> None:
        start_s = self._patience_s = config.engine_start_timeout_s
        self._alive = time.monotonic()
        self._own = contextlib.ExitStack()
        engine_config = with_own_snapshot_folder(engine_config, self._own)  # which all nodes share
        # Half the time to be placed, so that a cluster without room is named as that.
        self.engines = RayEngines(engine_config, target, placement_timeout_s=start_s / 2)
        self.engine = Fleet(
            engine_config,
            size=config.data_parallel_size,
            start_engine=self.engines,
            stall_timeout_s=config.engine_stall_timeout_s,
            start_timeout_s=RESTART_WINDOW_S + start_s,  # a successor may have to wait for a node first
            restarts=config.engine_restarts,
        )
        self.engine.start()
        try:
            await self.engine.wait_ready(start_s)
            Ingress.app = create_app(self.engine, engine_config, config)
        except BaseException:
            await self._stop()
            raise

    async def check_health(self) -> None:
        """Raises where there has been no engine for as long as one may take to come back: Serve starts another replica,
        which serves the model of its configuration."""
        error = self.engine.error
        self._alive = time.monotonic() if error is None else self._alive
        if error is not None and time.monotonic() > self._alive + self._patience_s:
            raise error

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let those in flight finish for this long, then abort them."""
        await drain(Ingress.app, self.engine, timeout_s, hurry=asyncio.Event())

    async def __del__(self) -> None:
        await self._stop()

    async def _stop(self) -> None:
        await self.engine.stop()
        self.engines.close()
        self._own.close()


class _App:
    """The ASGI application that Serve is given before there is a replica."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Ingress.app(scope, receive, send)


def build(
    engine_config: EngineConfig,
    config: ServerConfig,
    *,
    target: EngineTarget = run_engine,
    **options: Any,
) -> serve.Application:
    """The application for `serve.run`. `options` are Serve's for the deployment, such as `ray_actor_options`.

    The API keys are those of the configuration or of this process's environment. Host and port are Serve's own,
    so any Host header is served. Serve reports a failed start with the reason in `serve.status()`, after one retry at
    most.
    """
    config = replace(config, host="", api_key=tuple(api_keys(config.api_key)))
    ingress: serve.Deployment = serve.deployment()(serve.ingress(_App())(Ingress))
    ours: dict[str, Any] = {
        "name": "rollout",
        "num_replicas": 1,
        "max_ongoing_requests": 1_000_000,  # the application has its own bound: --max-queued-requests
        "health_check_period_s": _HEALTH_S,
        "graceful_shutdown_timeout_s": _GRACE_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": 1,
        "logging_config": LOGGING,
    }
    return ingress.options(**ours | options).bind(engine_config, config, target)
