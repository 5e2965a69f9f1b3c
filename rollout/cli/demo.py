"""The command `rollout demo`. Imported with the command line, so it imports nothing slow."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.preflight import check_packages


def demo(
    output: Annotated[
        Path,
        typer.Option(
            help="Write reward.png, summary.json, rollouts.jsonl, server.log and a Weights & Biases run to this folder."
        ),
    ] = Path("demo-output"),
    steps: Annotated[
        int, typer.Option(min=4, help="Take this many optimizer steps, each followed by a push of the weights.")
    ] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed the order of questions and the sampling with this.")] = 0,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Train the model of this transformers folder. Default: SmolLM2-135M-Instruct, which is fetched."
        ),
    ] = None,
) -> None:
    """Train a language model by GRPO against a live server.

    The model is a real one (SmolLM2, 135 million parameters), the loop is asynchronous, and two CPU cores are enough.
    """
    fetched = {} if model else {"gguf": "to read the model that is fetched", "accelerate": "likewise"}
    try:
        check_packages("gguf", "wandb", **fetched, matplotlib="to draw reward.png")
    except ValueError as error:
        typer.echo(f"rollout: {error}", err=True)
        raise typer.Exit(1) from None
    from rich.console import Console

    from rollout.demo.loop import run
    from rollout.demo.model import fetch_smollm2

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped then, too
    run(model or fetch_smollm2(), output, steps=steps, seed=seed, console=Console())
