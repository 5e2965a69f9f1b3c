"""The command `rollout replay`. Imported with the command line, so it imports nothing slow."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trainer_bridge.client import RolloutClient
    from trainer_bridge.loop.records import Record, ReplayedChoice


def replay(
    file: Annotated[Path, typer.Argument(help="Records as trainer_bridge.loop.records writes them.", metavar="FILE")],
    url: Annotated[
        str | None,
        typer.Option(help="Use the running server at this address. Default: start one, and end it afterwards."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Start the server with this model. Default: the one that the record names.")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Replay what the weights of this label sampled. Default: those of epoch 0.")
    ] = None,
    line: Annotated[int | None, typer.Option(min=1, help="Replay this record only, by its number in the file.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Send this bearer key to the running server.")] = None,
) -> None:
    """Sample recorded rollouts again, and compare the bits.

    The same request, seed and weights give the same tokens and logprobs. Exit code 0 if all that could be compared is
    the same, 1 if something differs, 2 if nothing could be compared.
    """
    from trainer_bridge.loop import records

    try:
        numbered = [(n, item) for n, item in enumerate(records.read(file), start=1) if line in (None, n)]
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None
    chosen = [(n, item) for n, item in numbered if _is_of(item, version)]
    if not chosen:
        which = "the weights of epoch 0 (name others with --version)" if version is None else f"weights {version!r}"
        typer.echo(f"none of {len(numbered)} records was begun by {which}")
        raise typer.Exit(2)
    with _server(url, model or chosen[0][1].weights["model"], chosen[0][1], api_key) as client:
        raise typer.Exit(_replay_all(client, chosen))


def _is_of(item: Record, version: str | None) -> bool:
    return item.weights["epoch"] in (0, None) if version is None else item.weights["version"] == version


def _replay_all(client: RolloutClient, chosen: list[tuple[int, Record]]) -> int:
    """Replay the numbered records, say what came of each, and return the exit code."""
    from trainer_bridge.loop import records

    info = client.weight_info()
    checksum = records.checksum(client) if any(item.weights.get("checksum") for _, item in chosen) else None
    compared = differing = 0
    for number, item in chosen:
        wrong = {name: info.get(name) for name, value in item.server.items() if value != info.get(name)}
        if item.weights.get("checksum") not in (None, checksum):
            typer.echo(f"record {number}: not compared, the server has other weights (checksum {checksum})")
            continue
        if wrong:
            was = {name: item.server[name] for name in wrong}
            typer.echo(f"record {number}: not compared, the server's arithmetic is {wrong}, the record's was {was}")
            continue
        again = client.generate(item.request["token_ids"], item.request["sampling_params"])
        for choice in records.compare(item, again):
            compared += choice.tokens
            differing += not choice.same
            typer.echo(f"record {number}, choice {choice.index}: {_verdict(choice)}")
    if not compared:
        typer.echo("nothing could be compared")
        return 2
    if differing and not info.get("batch_invariant"):
        typer.echo("The server isn't batch-invariant, so a difference is expected: start both with --batch-invariant.")
    return int(differing > 0)


def _verdict(choice: ReplayedChoice) -> str:
    later = f"; {choice.skipped} more were sampled by later weights" if choice.skipped else ""
    if choice.same:
        return f"{choice.tokens} tokens, the same ids and logprob bits{later}"
    ids = "the same ids" if choice.first_difference is None else f"other ids from token {choice.first_difference} on"
    return (
        f"{choice.tokens} tokens, {ids}; before that {choice.differing_logprobs} logprobs differ, "
        f"by at most {choice.largest_gap:.3g}{later}"
    )


@contextlib.contextmanager
def _server(url: str | None, model: str, item: Record, api_key: str | None) -> Iterator[RolloutClient]:
    """A client of the running server, or of one that serves `model` as the record's did."""
    from rollout.launch import serve
    from trainer_bridge.client import RolloutClient

    with contextlib.ExitStack() as stack:
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            flags = ["--tokens-only", "--return-sampling-mask"]
            flags += ["--batch-invariant"] if item.server.get("batch_invariant") else []
            for name in ("dtype", "logprobs_mode"):
                if item.server.get(name):
                    flags += [f"--{name.replace('_', '-')}", item.server[name]]
            url = stack.enter_context(serve(Path(model), Path(folder) / "server.log", *flags))
        yield stack.enter_context(RolloutClient(url, api_key=api_key))
