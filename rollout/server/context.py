"""What the endpoints share."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import Depends, Request

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.fleet import Fleet
from rollout.messages import EngineReady
from rollout.server.errors import ApiError
from rollout.server.live import LivePage
from rollout.server.metrics import Metrics
from rollout.server.text.grammars import GrammarChecker
from rollout.server.text.tokenizer import BackgroundTokenizer

logger = logging.getLogger(__name__)

# Of names that clients make up: how many characters of each are shown, how many a request, and how many are logged.
_MAX_NAME, _MAX_NAMES, _MAX_LOGGED_NAMES = 64, 16, 256

PauseMode = Literal["abort", "wait", "keep"]


@dataclass
class ServerContext:
    """The engines and the settings behind one app. `pause_mode` is that of the pause in force, None while serving."""

    engine: Fleet
    engine_config: EngineConfig
    config: ServerConfig
    tokenizer: BackgroundTokenizer
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    pause_mode: PauseMode | None = None
    stopping: bool = False
    logged_names: set[str] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def scale_out(self) -> bool:
        """Whether token-in/token-out is served."""
        return self.config.enable_scale_out or self.config.tokens_only

    @cached_property
    def model(self) -> EngineReady:
        """The facts about the model, as the first engine stated them."""
        return self.engine.info

    @cached_property
    def model_name(self) -> str:
        """The name clients use."""
        return self.config.served_model_name or self.engine_config.model

    @cached_property
    def metrics(self) -> Metrics:
        """What /metrics says."""
        model, config = self.model, self.engine_config
        cache = {
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        return Metrics(self.model_name, model, cache)

    @cached_property
    def live(self) -> LivePage:
        """What the page at / shows."""

        def told() -> dict[str, Any]:
            return {"model": self.model_name, "paused": self.pause_mode, "stopping": self.stopping}

        return LivePage(self.engine, self.tokenizer, told, shows_answers=self.config.live_answers)

    def check_accepting(self, choices: int) -> None:
        """Raise a 503 where a request of so many choices can't be taken now: no engine or no weights, an abort or wait
        pause, stopping, a full queue."""
        reason = None
        if self.stopping:
            reason = "The server is shutting down."
        elif self.pause_mode in ("abort", "wait"):
            reason = f"Generation is paused (mode={self.pause_mode}); retry after POST /resume."
        if reason is not None:
            raise ApiError(503, reason, headers={"Retry-After": "1"})
        self.engine.check_room(choices)

    def abort_for_update(self) -> None:
        """End all that runs, as SGLang's weight calls may ask, unless this server is told to let it go on."""
        if self.config.pause_generation_aborts:
            self.engine.abort(None)

    def ignored_header(self, names: Sequence[str]) -> dict[str, str]:
        """The header that names fields of a body that this server doesn't know; each name is logged once, too."""
        if not names:
            return {}
        # Percent-encoded: a name may hold anything, line breaks included.
        shown = [quote(name[:_MAX_NAME], safe="", errors="replace") for name in names[:_MAX_NAMES]]
        for name in shown:
            if name not in self.logged_names and len(self.logged_names) < _MAX_LOGGED_NAMES:
                self.logged_names.add(name)
                logger.warning("a request has a field %s, which this server doesn't know and ignores", name)
        more = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
        return {"X-Ignored-Parameters": ", ".join(shown + more)}

    def check_model(self, name: str | None, *, param: str = "model") -> str | None:
        """The adapter that this model stands for, None for the base, by its served name or its path. Raises a 404 where
        there is none."""
        if not name or name in (self.model_name, self.engine_config.model):
            return None
        if self.engine.adapters.find(name) is None:
            adapters = "".join(f", {version.name}" for version in self.engine.adapters.current[:_MAX_NAMES])
            message = f"The model `{name}` does not exist. Valid aliases: {self.model_name}{adapters}."
            raise ApiError(404 if param == "model" else 400, message, param=param)  # in SGLang's dialect a 400
        return name


async def _server(request: Request) -> ServerContext:
    server: ServerContext = request.app.state.server
    return server


ServerDep = Annotated[ServerContext, Depends(_server)]
