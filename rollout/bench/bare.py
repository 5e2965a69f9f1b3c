"""A load on an engine of this process: no HTTP, no messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from rollout.bench.loads import Load
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.flags import config_from, with_flags
from rollout.messages import AddRequest
from rollout.sampling.params import SamplingParams


def engine_config(model: Path, flags: Sequence[str]) -> EngineConfig:
    """The configuration that `rollout serve MODEL FLAGS` gives its engine.

    Raises click's UsageError for a flag that an engine doesn't have.
    """
    app = typer.Typer(add_completion=False)

    @app.command(add_help_option=False)
    @with_flags(EngineConfig)
    def parse(**values: Any) -> EngineConfig:
        config: EngineConfig = config_from(EngineConfig, values)
        return config

    config: EngineConfig = get_command(app).main([str(model), *flags], standalone_mode=False)
    return config


def run(engine: Engine, load: Load, prompts: Sequence[list[int]], step: Callable[[], Any] | None = None) -> int:
    """Run a load to its end; the number of tokens sampled. `step` is called in place of `engine.step`."""
    for number, prompt in enumerate(prompts):
        params = SamplingParams(n=load.n, max_tokens=load.max_tokens, ignore_eos=True)
        engine.add_request(AddRequest(request_id=f"bench-{number}", prompt_token_ids=prompt, sampling_params=params))
    before = engine.stats["sampled_tokens"]
    while engine.has_work:
        (step or engine.step)()
    return engine.stats["sampled_tokens"] - before
