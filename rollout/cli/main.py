"""The command line: `rollout serve | bench | demo | verify | replay`. The flags of `serve` are the fields of the two
configurations.

Imported again by the engine process as it starts, so it imports nothing slow.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout import logs
from rollout.cli.accepted import ServeCommand
from rollout.cli.preflight import check_model, has_tokenizer, read_config_file
from rollout.config import EngineConfig, ServerConfig
from rollout.flags import config_from, with_flags
from rollout.version import __version__

# Commands that live in modules of their own, imported only when the command line is used.
COMMANDS = ("bench", "demo", "verify", "replay")

app = typer.Typer(
    name="rollout",
    help="The generation backend for reinforcement learning of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # click's own help cuts no name of a flag, however narrow the terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollout {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _use_config_file(context: typer.Context, file: Path | None) -> Path | None:
    if file is not None:
        known = {parameter.name for parameter in context.command.params}
        try:
            context.default_map = read_config_file(file, known)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None
    return file


@app.command(cls=ServeCommand)
@with_flags(EngineConfig, ServerConfig, envvar_prefix="ROLLOUT_")
def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=_use_config_file,
            help="Read flags from this YAML file, as `max-num-seqs: 64`. The environment and the command line win.",
        ),
    ] = None,
    **values: Any,
) -> None:
    """Serve MODEL over HTTP until SIGTERM or Ctrl-C.

    Every flag but --api-key can be set in the environment, too: ROLLOUT_PORT=80 is --port 80.
    """
    engine_config, server_config = config_from(EngineConfig, values), config_from(ServerConfig, values)
    if server_config.lora_modules and not engine_config.enable_lora:
        raise typer.BadParameter("needs --enable-lora", param_hint="--lora-modules")
    if engine_config.enable_lora and server_config.data_parallel_backend == "ray":
        raise typer.BadParameter("an engine on another machine has no copy of them: use mp", param_hint="--enable-lora")
    try:
        check_model(engine_config)
    except ValueError as error:
        typer.echo(f"rollout: {error}", err=True)
        raise typer.Exit(1) from None
    logs.configure(engine_config)
    holder = server_config.tokenizer or engine_config.model
    if not (server_config.tokens_only or server_config.skip_tokenizer_init or has_tokenizer(holder)):
        note = "has no tokenizer, so only token ids are served; --tokens-only serves nothing else"
        typer.echo(f"rollout: {holder} {note}", err=True)
    if server_config.data_parallel_backend == "ray":
        try:
            from rollout.server.ray import serve as run
        except ImportError as error:
            raise typer.BadParameter(
                f"{error}: install the extra `ray` of this package", param_hint="--data-parallel-backend"
            ) from None
    else:
        from rollout.server.main import serve as run

    raise typer.Exit(run(engine_config, server_config))


def main() -> None:
    """The entry point of the `rollout` script."""
    if sys.platform == "win32":
        sys.exit("rollout: Windows can't run it; WSL 2 can: `wsl --install`, then install and start rollout in there")
    for name in COMMANDS:
        command = getattr(importlib.import_module(f"rollout.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    app()
