"""The HTTP application over a started engine."""

from __future__ import annotations

from fastapi import FastAPI

from rollout import __version__
from rollout.config import EngineConfig, ServerConfig
from rollout.server.api import control, generate, weights
from rollout.server.auth import PROBES, BearerAuth
from rollout.server.engine_client import EngineClient
from rollout.server.errors import install_error_handlers
from rollout.server.limits import BodyLimit
from rollout.server.state import Server
from rollout.server.tokenizer import BackgroundTokenizer


def create_app(engine: EngineClient, engine_config: EngineConfig, config: ServerConfig) -> FastAPI:
    """The app that serves this engine, which must be ready; its state is `app.state.server`. Needs a running loop."""
    app = FastAPI(title="rollout", version=__version__)
    tokenizer = BackgroundTokenizer(engine_config.model, enabled=not config.tokens_only)
    server = app.state.server = Server(engine, engine_config, config, tokenizer)
    app.include_router(control.router)
    app.include_router(weights.router)
    app.include_router(generate.router if server.scale_out else generate.disabled_router)
    install_error_handlers(app)
    open_paths = PROBES | ({"/abort_requests"} if config.tokens_only else set())
    app.add_middleware(BodyLimit)
    app.add_middleware(BearerAuth, keys=config.api_key, open_paths=open_paths)
    return app
