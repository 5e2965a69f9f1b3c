"""The commands of `rollout bench`. Imported with the command line, so it imports nothing slow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(help="Measure a running server.", no_args_is_help=True)

UrlOption = Annotated[str, typer.Option(help="The server, with token-in/token-out on.")]
KeyOption = Annotated[str | None, typer.Option(help="Its bearer key, if it wants one.")]
ModelOption = Annotated[Path, typer.Option(help="The transformers folder whose weights are pushed.")]
StreamsOption = Annotated[int, typer.Option(min=1, help="Requests that are open during the push.")]
PromptOption = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
SecondsOption = Annotated[float, typer.Option(min=0.1, help="How long to measure before the push.")]


@bench.callback()
def _root() -> None:
    pass  # keeps `push` a subcommand while it is the only one


@bench.command()
def push(
    model: ModelOption,
    url: UrlOption = "http://127.0.0.1:8000",
    api_key: KeyOption = None,
    streams: StreamsOption = 4,
    prompt_len: PromptOption = 64,
    seconds: SecondsOption = 5.0,
) -> None:
    """What a push of the weights does to open streams: token gaps and throughput, under either KV policy."""
    from rich.console import Console

    from rollout.bench.push import run

    run(url, api_key, model, streams=streams, prompt_len=prompt_len, seconds=seconds, console=Console())
