"""The command line: `rollout serve | bench | demo | verify | replay`. The flags of `serve` are
the fields of the two configurations.

Imported again by the engine process as it starts, so it imports nothing slow.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import typer

from rollout.config import EngineConfig, ServerConfig
from rollout.flags import config_from, flags_of

# Commands that live in modules of their own, imported only when the command line is used.
COMMANDS = {
    "bench": "rollout.cli.bench",
    "demo": "rollout.cli.demo",
    "verify": "rollout.cli.verify",
    "replay": "rollout.cli.replay",
}

app = typer.Typer(
    name="rollout",
    help="The generation backend for reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    pass  # makes `serve` a subcommand, also while it is the only one


def _with_flags(*configs: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = flags_of(*configs)
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return function

    return decorate


@app.command()
@_with_flags(EngineConfig, ServerConfig)
def serve(**values: Any) -> None:
    """Serve MODEL over HTTP until SIGTERM or Ctrl-C."""
    engine_config, server_config = config_from(EngineConfig, values), config_from(ServerConfig, values)
    if server_config.data_parallel_backend == "ray":
        try:
            from rollout.server.ray import serve as run
        except ImportError as error:
            raise typer.BadParameter(
                f"{error}: pip install 'rollout-engine[ray]'", param_hint="--data-parallel-backend"
            ) from None
    else:
        from rollout.server.main import serve as run

    raise typer.Exit(run(engine_config, server_config))


def main() -> None:
    """The entry point of the `rollout` script."""
    for name, module in COMMANDS.items():
        if importlib.util.find_spec(module):
            command = getattr(importlib.import_module(module), name)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
    app()
