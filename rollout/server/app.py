"""The HTTP application over a started engine."""

from __future__ import annotations

import functools

from fastapi import Depends, FastAPI

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.fleet import Fleet
from rollout.server.api import adapters, control, generate, pages, render, sglang, skyrl, sleep, tokenize, weights
from rollout.server.auth import PROBES, BearerAuth, SiteGuard, api_keys, is_loopback
from rollout.server.context import ServerContext
from rollout.server.errors import install_error_handlers
from rollout.server.limits import BodyLimit, known_query, prompt_bytes
from rollout.server.text.tokenizer import BackgroundTokenizer
from rollout.server.wire.openapi import install_openapi
from rollout.version import __version__


def create_app(engine: Fleet, engine_config: EngineConfig, config: ServerConfig) -> FastAPI:
    """The app that serves these engines, which must be ready; its state is `app.state.server`. Needs a running loop."""
    app = FastAPI(title="rollout", version=__version__, docs_url=None, redoc_url=None)
    tokenizer = BackgroundTokenizer(
        config.tokenizer or engine_config.model,
        enabled=not (config.tokens_only or config.skip_tokenizer_init),
        chat_template=config.chat_template,
    )
    server = app.state.server = ServerContext(engine, engine_config, config, tokenizer)
    engine.max_queued = config.max_queued_requests
    engine.adapters.reserved = (server.model_name, engine_config.model)
    app.include_router(pages.router)
    for router in (control.router, weights.router, sglang.router, skyrl.router):
        app.include_router(router, dependencies=[Depends(known_query)])
    app.include_router(generate.router)
    app.include_router(tokenize.router)
    for router in (generate.scale_out_router, render.router):
        off = generate.disabled(router, "Scale-out endpoints", "--enable-scale-out")
        app.include_router(router if server.scale_out else off)
    off = generate.disabled(adapters.router, "Adapters", "--enable-lora")
    app.include_router(adapters.router if engine_config.enable_lora else off)
    for router in (sleep.router, sglang.memory_router):
        off = generate.disabled(router, "The endpoints of sleep", "--enable-sleep-mode")
        if engine_config.enable_sleep_mode:
            app.include_router(router, dependencies=[Depends(known_query)])
        else:
            app.include_router(off)
    install_error_handlers(app)
    install_openapi(app)
    open_paths = PROBES | ({"/abort_requests"} if config.tokens_only else set())
    keys = api_keys(config.api_key)
    if keys:
        app.add_middleware(BearerAuth, keys=keys, open_paths=open_paths, pages=pages.PAGES)
    else:
        app.add_middleware(SiteGuard, allowed=config.allowed_hosts, loopback=is_loopback(config.host))
    app.add_middleware(
        BodyLimit,
        max_bytes=config.max_body_bytes,
        timeout_s=config.receive_timeout_s,
        prompt_bytes=functools.cache(lambda: prompt_bytes(server.model)),
    )
    return app
