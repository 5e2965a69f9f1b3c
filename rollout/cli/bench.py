"""The commands of `rollout bench`. Imported with the command line, so it imports nothing slow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from rollout.bench.fleet_model import PRESETS, FleetModel, PresetName, measured
from rollout.config import flag
from rollout.flags import config_from, with_flags
from rollout.launch import serve_command, split_command


class LoadByDefault(TyperGroup):
    """`rollout bench --url URL` is `rollout bench load --url URL`, and `--simulate` is `simulate`, and so on."""

    flags = ("--profile", "--fidelity", "--simulate")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name in self.flags:
            if args and args[0].startswith("-") and name in args:
                args = [name.removeprefix("--"), *(arg for arg in args if arg != name)]
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = ["load", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    cls=LoadByDefault,
    help="Measure servers and engines. Without a command's name, options are those of `load`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Option(help="Measure the server at this address; it needs --enable-scale-out.")]
Key = Annotated[str | None, typer.Option(help="Send this bearer key to the server.")]
Rounds = Annotated[int, typer.Option(min=1, help="Measure this many rounds, after one or more that warm up.")]
Seed = Annotated[int, typer.Option(help="Draw prompts, lengths and failures from this seed.")]
Vocab = Annotated[
    int | None,
    typer.Option(min=1, help="Draw prompts from ids below this. Default: what config.json says."),
]
Model = Annotated[Path, typer.Argument(help="A transformers folder.")]
Flags = Annotated[list[str] | None, typer.Argument(help="Flags of `rollout serve`, after `--`.")]
Command = Annotated[
    str | None,
    typer.Option(help="Start this command line in place of `rollout serve MODEL`; it says {port} where the port goes."),
]


@dataclass(frozen=True)
class Figures:
    """Where the figures go."""

    json: Path | None = flag(None, "Write every figure to this file as JSON.")


def command(function: Callable[..., tuple[list[Any], dict[str, Any]]]) -> None:
    """Add a command to `rollout bench`. The function gets its options, and returns tables and figures: the tables are
    printed, the figures written to --json. What a server or a value makes impossible is one line, and
    exit code 1."""

    @bench.command()
    @with_flags(Figures)
    @functools.wraps(function)
    def run(*, json: Path | None, **values: Any) -> None:
        from rich.console import Console

        from rollout.bench import report
        from trainer_bridge.client import RolloutError

        try:
            tables, figures = function(**values)
        except (RolloutError, ValueError, RuntimeError, OSError) as error:
            typer.echo(f"rollout bench: {error}", err=True)
            raise typer.Exit(1) from None
        Console().print(*tables, sep="\n")
        report.save(json, figures)


@contextlib.contextmanager
def progress(**totals: int) -> Iterator[list[Callable[[], None]]]:
    """A progress bar for each name, and the functions that advance them. The work is done in this order."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bars:
        tasks = [bars.add_task(name, total=total, start=False) for name, total in totals.items()]
        bars.start_task(tasks[0])

        def advance(index: int) -> None:
            bars.advance(tasks[index])
            if bars.tasks[index].finished and index + 1 < len(tasks):
                bars.start_task(tasks[index + 1])

        yield [functools.partial(advance, index) for index in range(len(tasks))]


def status(text: str) -> contextlib.AbstractContextManager[Any]:
    """Say what is being done, while the context lasts."""
    from rich.console import Console

    return Console().status(text)


def server_command(model: Path, flags: list[str] | None, given: str | None) -> list[str]:
    """The command line of the server that is measured. Raises ValueError where a given one has no place for a port."""
    return split_command(given) if given else serve_command(model, "--enable-scale-out", *(flags or ()))


@dataclass(frozen=True)
class Against:
    """A second server beside the first."""

    against: str | None = flag(None, "Measure the server at this address, too, in turn with the first.")
    against_api_key: str | None = flag(None, "Send this bearer key to the second server.")
    pause: float = flag(3.0, "Wait this many seconds before each turn of two servers: one may spin on after a load.")

    def __post_init__(self) -> None:
        if self.pause < 0:
            raise ValueError(f"pause must be at least 0, got {self.pause}")


@command
@with_flags(Against)
def load(
    url: Url = "http://127.0.0.1:8000",
    api_key: Key = None,
    loads: Annotated[
        list[str] | None,
        typer.Option(
            "--load",
            help="Run this load: grpo, singles, single, group (these four by default), few, many, json, schema or sse. "
            "May be repeated.",
        ),
    ] = None,
    rounds: Rounds = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Run this many rounds of each load before the measured ones.")] = 1,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Stream the answers, or don't, whatever the load says.")
    ] = None,
    seed: Seed = 0,
    vocab_size: Vocab = None,
    **other: Any,
) -> tuple[list[Any], dict[str, Any]]:
    """Measure throughput and time to first token under RL's loads.

    Of one server, or of two in turn and the ratio between them.
    """
    from rollout.bench import report
    from rollout.bench.loads import choose, inspect
    from rollout.bench.measure import compare

    chosen = choose(loads, stream)
    servers, second = [inspect(url, api_key, vocab_size)], config_from(Against, other)
    if second.against is not None:
        servers.append(inspect(second.against, second.against_api_key, vocab_size))
    times = len(servers) * (warmup + rounds)
    settings = {"rounds": rounds, "warmup": warmup, "seed": seed}
    with progress(**{load.name: load.requests * times for load in chosen}) as advance:
        comparisons = [
            compare(load, servers, **settings, pause=second.pause, on_answer=on_answer)
            for load, on_answer in zip(chosen, advance, strict=True)
        ]
    return [report.loads_table(comparisons)], report.loads_json(comparisons, **settings)


@command
def start(
    model: Model, flags: Flags = None, rounds: Rounds = 3, command: Command = None
) -> tuple[list[Any], dict[str, Any]]:
    """Measure how long a server takes to start.

    The seconds from exec to /health and to the first token, in fresh processes.
    """
    from rollout.bench.start import measure, table

    parts = server_command(model, flags, command)
    with progress(starts=1 + rounds) as (advance,):
        starts = measure(parts, rounds, advance)
    return [table(starts)], {"command": parts, "starts": starts}


@command
def http(
    model: Model,
    flags: Flags = None,
    rounds: Rounds = 3,
    seed: Seed = 0,
    command: Command = None,
    vocab_size: Vocab = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Measure what HTTP costs in CPU time a token.

    Of the server process at 64 streams, of a bare engine, and of routing.
    """
    from rollout.bench import routing
    from rollout.bench.http_cost import LOAD_NAMES, bare_engine, measure, table
    from rollout.bench.loads import LOADS

    parts = server_command(model, flags, command)
    total = sum(LOADS[name].requests for name in LOAD_NAMES) * (1 + rounds)
    with progress(answers=total) as (advance,):
        costs = measure(parts, rounds, seed, vocab_size, advance)
    bare = None if command else bare_engine(model, flags or (), rounds, seed)
    load, size = LOADS["singles"], vocab_size or 32768
    routes = [routing.fleet_cost(load, ranks, seed, size, rounds) for ranks in routing.RANKS]
    figures = {"command": parts, "costs": costs, "bare_engine": bare, "routing": routes}
    return [table(costs, bare), routing.table(routes)], figures


@command
def profile(
    model: Model,
    flags: Flags = None,
    load: Annotated[str, typer.Option(help="Run this load.")] = "grpo",
    operators: Annotated[
        int,
        typer.Option(min=0, help="List this many of torch's operators, the slowest first, in a table of their own."),
    ] = 15,
    seed: Seed = 0,
) -> tuple[list[Any], dict[str, Any]]:
    """Measure where the time of an engine's step goes.

    By its phases, the model's modules, and torch's operators.
    """
    from rollout.bench.bare import engine_config
    from rollout.bench.loads import choose
    from rollout.bench.profile import as_json, measure, tables

    (chosen,) = choose([load], None)
    with status(f"{chosen.name}: {chosen.about}"):
        found, top = measure(engine_config(model, flags or ()), chosen, seed, operators=operators)
    return [*tables(found, top)], {"load": chosen, **as_json(found, top)}


@command
def host(
    against: Annotated[
        list[Path] | None, typer.Option(help="Measure this source tree as well, in turn. May be repeated.")
    ] = None,
    rounds: Rounds = 3,
) -> tuple[list[Any], dict[str, Any]]:
    """Measure an engine step's CPU time beside a GPU.

    The device computes nothing here, so no GPU is needed.
    """
    from rollout.bench.host import measure, table

    trees = [Path(__file__).parents[2], *(against or ())]
    with progress(processes=rounds * len(trees)) as (advance,):
        found = measure(trees, rounds, advance)
    return [table(trees, found)], {"trees": [{"path": str(t), "seconds": s} for t, s in zip(trees, found, strict=True)]}


@command
def gpu(
    section: Annotated[
        list[str] | None,
        typer.Option(
            help="Run this section: versions, kernels, engine, commits, capture, pushes, sleep, exact or speed; all by "
            "default. May be repeated."
        ),
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Run everything on a CPU with tiny shapes.")] = False,
) -> tuple[list[Any], dict[str, Any]]:
    """Try all that runs on a CUDA device, in ten minutes.

    Decode steps are measured beside those of its peers.
    """
    from rollout.bench.gpu import measure, table

    with status("each section for at most some minutes"):
        rows = measure(section or (), dry=dry)
    return [table(rows, dry)], {"dry": dry, "rows": rows}


@command
def fidelity(
    model: Model,
    url: Url = "http://127.0.0.1:8000",
    api_key: Key = None,
    requests: Annotated[int, typer.Option(min=1, help="Send this many prompts.")] = 16,
    n: Annotated[int, typer.Option(min=1, help="Ask for this many samples of each prompt.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Sample this many tokens of each.")] = 64,
    seed: Seed = 0,
) -> tuple[list[Any], dict[str, Any]]:
    """Measure the gap between a server's logprobs and transformers'.

    The tokens are sampled from MODEL without filters.
    """
    from rollout.bench.fidelity import REFERENCES, measure, table
    from trainer_bridge.client import RolloutClient

    totals = {"sampled": requests, "scored": requests * n * len(REFERENCES)}
    size = {"requests": requests, "n": n, "max_tokens": max_tokens, "seed": seed}
    with RolloutClient(url, api_key=api_key) as client, progress(**totals) as (on_answer, on_score):
        found = measure(client, model, **size, on_answer=on_answer, on_score=on_score)
    return [table(found)], {"url": url, "fidelity": found}


@command
def roofline(
    model: Model,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Measure weights and products of this dtype.")
    ] = "bfloat16",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute with this many threads. Default: torch's.")
    ] = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Measure this CPU's memory bandwidth and arithmetic.

    They bound how fast the linear layers of MODEL can be.
    """
    import torch

    from rollout.bench.roofline import machine, steps, table

    if threads is not None:
        torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    with status("measuring"):
        found = machine(kind)
        roofs = steps(found, model, kind)
    return [table(found, roofs, kind)], {"dtype": dtype, "roofline": found, "steps": roofs}


@command
def push(
    model: Annotated[Path, typer.Option(help="Push the weights of this transformers folder.")],
    url: Url = "http://127.0.0.1:8000",
    api_key: Key = None,
    streams: Annotated[int, typer.Option(min=1, help="Keep this many requests open during the push.")] = 4,
    n: Annotated[int, typer.Option(min=1, help="Ask for this many choices of each request.")] = 1,
    prompt_len: Annotated[int, typer.Option(min=1, help="Give each prompt this many tokens.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measure for this many seconds before the push.")] = 5.0,
) -> tuple[list[Any], dict[str, Any]]:
    """Measure what a push of weights does to open streams.

    Their throughput, and the gaps between their tokens, under either KV policy.
    """
    from rollout.bench.push import run, table
    from trainer_bridge.client import RolloutClient

    with RolloutClient(url, api_key=api_key) as client, status("pushing"):
        pushes = run(client, model, streams=streams, n=n, prompt_len=prompt_len, seconds=seconds)
    return [table(pushes)], {"pushes": pushes}


@command
@with_flags(FleetModel)
def simulate(
    context: typer.Context,
    engines: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Simulate this many engines; may be repeated. Default: 8 to 1,024."),
    ] = None,
    preset: Annotated[
        PresetName, typer.Option(help="Take the figures that no other flag gives from this preset.")
    ] = "smollm2-cpu",
    measurements: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Take figures from what load, http or push wrote with --json; may be repeated."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Measure this many of the trainer's steps; others come first.")
    ] = 10,
    seed: Seed = 0,
    **values: Any,
) -> tuple[list[Any], dict[str, Any]]:
    """Compute from one engine's figures what many would do.

    Their throughput, push time and staleness; nothing is measured.
    """
    from rollout.bench.simulate import DEFAULT_ENGINES, as_json, remedies, simulate, tables

    found = dict(PRESETS[preset])
    for file in measurements or ():
        found |= measured(file)
    sources = {name: context.get_parameter_source(name) for name in found}
    found = {name: found[name] for name, source in sources.items() if source and source.name == "DEFAULT"}
    fleet = config_from(FleetModel, values | found)  # flags win
    counts = engines or DEFAULT_ENGINES
    results = []
    with progress(fleets=len(counts)) as (advance,):
        for count in counts:
            results.append(simulate(fleet, count, steps=steps, seed=seed))
            advance()
    return [*tables(results), *remedies(results)], as_json(fleet, results, preset=preset, steps=steps, seed=seed)
