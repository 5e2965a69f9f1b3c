"""The commands of `rollout bench`. Imported with the command line, so it imports nothing slow."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperGroup

from rollout.bench.fleet import PRESETS, Fleet, PresetName, measured
from rollout.flags import config_from, flags_of

if TYPE_CHECKING:
    from rich.console import Console


class LoadByDefault(TyperGroup):
    """`rollout bench --url URL` is `rollout bench load --url URL`, and `--simulate` is `simulate`, and so on."""

    flags = ("--profile", "--fidelity", "--simulate")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for flag in self.flags:
            if args and args[0].startswith("-") and flag in args:
                args = [flag.removeprefix("--"), *(arg for arg in args if arg != flag)]
        if args and args[0].startswith("-") and args[0] != "--help":
            args = ["load", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    cls=LoadByDefault,
    help="Measure servers and engines. Without a command's name, options are those of `load`.",
    no_args_is_help=True,
)

UrlOption = Annotated[str, typer.Option(help="The server, with token-in/token-out on.")]
KeyOption = Annotated[str | None, typer.Option(help="Its bearer key, if it wants one.")]
AgainstOption = Annotated[str | None, typer.Option(help="A second server, measured in turn with the first.")]
AgainstKeyOption = Annotated[str | None, typer.Option(help="The second server's bearer key.")]
LoadsOption = Annotated[
    list[str] | None,
    typer.Option("--load", help="grpo, singles, single, group (the default), few, many, json, sse; may be repeated."),
]
LoadOption = Annotated[str, typer.Option(help="One of the loads.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Measured rounds; others warm up first.")]
WarmupOption = Annotated[int, typer.Option(min=0, help="Rounds of each load before the measured ones.")]
StreamOption = Annotated[
    bool | None, typer.Option("--stream/--no-stream", help="How answers come, whatever the load says.")
]
PauseOption = Annotated[
    float, typer.Option(min=0, help="Seconds before each turn of two servers: some spin on after their last answer.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the random prompts.")]
VocabOption = Annotated[
    int | None, typer.Option(min=1, help="Ids of prompts are below this. Default: read from the model's config.json.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write every figure to this file, too.")]
ModelOption = Annotated[Path, typer.Option(help="The transformers folder whose weights are pushed.")]
StreamsOption = Annotated[int, typer.Option(min=1, help="Requests that are open during the push.")]
SamplesOption = Annotated[int, typer.Option("--n", min=1, help="Choices of each of them.")]
PromptOption = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
SecondsOption = Annotated[float, typer.Option(min=0.1, help="How long to measure before the push.")]
ModelArgument = Annotated[Path, typer.Argument(help="A transformers folder.")]
FlagsArgument = Annotated[list[str] | None, typer.Argument(help="Flags of `rollout serve`, after `--`.")]
CommandOption = Annotated[
    str | None,
    typer.Option(help="Start this instead of MODEL: any command line, with {port} where the port goes."),
]
OperatorsOption = Annotated[int, typer.Option(min=0, help="So many of torch's operators in a second table.")]
DtypeOption = Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of weights and products.")]
EnginesOption = Annotated[
    list[int] | None, typer.Option(min=1, help="How many; may be repeated. Default: 8, 16, … 1,024.")
]
PresetOption = Annotated[PresetName, typer.Option(help="Where figures that no other flag gives come from.")]
FromOption = Annotated[
    list[Path] | None,
    typer.Option("--from", help="Take figures from what load, http or push wrote with --json; may be repeated."),
]
DrawsOption = Annotated[int, typer.Option(help="Seed of lengths, checks and failures.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Measured steps of the trainer; others come first.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Default: torch's.")]


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What a server or a value makes impossible ends the command with its message and exit code 1."""
    from trainer_bridge.client import RolloutError

    try:
        yield
    except (RolloutError, ValueError, RuntimeError, OSError) as error:
        typer.echo(f"rollout bench: {error}", err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def progress(console: Console, **totals: int) -> Iterator[list[Callable[[], None]]]:
    """A progress bar for each name, and the functions that advance them. The work is done in this order."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks = [bars.add_task(name, total=total, start=False) for name, total in totals.items()]
        bars.start_task(tasks[0])

        def advance(index: int) -> None:
            bars.advance(tasks[index])
            if bars.tasks[index].finished and index + 1 < len(tasks):
                bars.start_task(tasks[index + 1])

        yield [functools.partial(advance, index) for index in range(len(tasks))]


@bench.command()
def load(  # noqa: PLR0913
    url: UrlOption = "http://127.0.0.1:8000",
    against: AgainstOption = None,
    loads: LoadsOption = None,
    rounds: RoundsOption = 5,
    warmup: WarmupOption = 1,
    stream: StreamOption = None,
    pause: PauseOption = 3.0,
    seed: SeedOption = 0,
    vocab_size: VocabOption = None,
    json_file: JsonOption = None,
    api_key: KeyOption = None,
    against_api_key: AgainstKeyOption = None,
) -> None:
    """Throughput and time to first token under the loads of RL, of one server, or of two in turn and their ratio."""
    from rich.console import Console

    from rollout.bench import report
    from rollout.bench.loads import choose, inspect
    from rollout.bench.measure import compare

    console = Console()
    with refusals():
        chosen = choose(loads, stream)
        servers = [inspect(url, api_key, vocab_size)]
        if against is not None:
            servers.append(inspect(against, against_api_key, vocab_size))
        times = len(servers) * (warmup + rounds)
        with progress(console, **{load.name: load.requests * times for load in chosen}) as advance:
            comparisons = [
                compare(load, servers, rounds=rounds, warmup=warmup, seed=seed, pause=pause, on_answer=on_answer)
                for load, on_answer in zip(chosen, advance, strict=True)
            ]
    console.print(report.loads_table(comparisons))
    report.save(json_file, report.loads_json(comparisons, rounds=rounds, warmup=warmup, seed=seed))


@bench.command()
def start(
    model: ModelArgument,
    flags: FlagsArgument = None,
    rounds: RoundsOption = 3,
    command: CommandOption = None,
    json_file: JsonOption = None,
) -> None:
    """Seconds from exec to /health and to the first token, in fresh processes; the first start warms the disk."""
    from rich.console import Console

    from rollout.bench import report
    from rollout.bench.process import rollout_command, split_command
    from rollout.bench.start import measure, table

    console = Console()
    with refusals():
        parts = split_command(command) if command else rollout_command(model, flags or ())
        with progress(console, starts=1 + rounds) as (advance,):
            starts = measure(parts, rounds, advance)
    console.print(table(starts))
    report.save(json_file, {"command": parts, "starts": starts})


@bench.command()
def http(
    model: ModelArgument,
    flags: FlagsArgument = None,
    rounds: RoundsOption = 3,
    seed: SeedOption = 0,
    command: CommandOption = None,
    vocab_size: VocabOption = None,
    json_file: JsonOption = None,
) -> None:
    """CPU time a token of the server process at 64 streams, beside a bare engine's; and of its routing to several."""
    from rich.console import Console

    from rollout.bench import report, routing
    from rollout.bench.http_cost import LOAD_NAMES, bare_engine, measure, table
    from rollout.bench.loads import LOADS
    from rollout.bench.process import rollout_command, split_command

    console = Console()
    with refusals():
        parts = split_command(command) if command else rollout_command(model, flags or ())
        total = sum(LOADS[name].requests for name in LOAD_NAMES) * (1 + rounds)
        with progress(console, answers=total) as (advance,):
            costs = measure(parts, rounds, seed, vocab_size, advance)
        bare = None if command else bare_engine(model, flags or (), rounds, seed)
        load, size = LOADS["singles"], vocab_size or 32768
        routes = [routing.fleet_cost(load, ranks, seed, size, rounds) for ranks in routing.RANKS]
    console.print(table(costs, bare))
    console.print(routing.table(routes))
    report.save(json_file, {"command": parts, "costs": costs, "bare_engine": bare, "routing": routes})


@bench.command()
def profile(
    model: ModelArgument,
    flags: FlagsArgument = None,
    load: LoadOption = "grpo",
    operators: OperatorsOption = 15,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Where the time of a step goes: phases of the engine and the model, and torch's operators."""
    from rich.console import Console

    from rollout.bench import report
    from rollout.bench.bare import engine_config
    from rollout.bench.loads import choose
    from rollout.bench.profile import as_json, measure, operators_table, table

    console = Console()
    with refusals():
        (chosen,) = choose([load], None)
        with console.status(f"{chosen.name}: {chosen.about}"):
            measured, top = measure(engine_config(model, flags or ()), chosen, seed, operators=operators)
    for kind in measured.phases:
        console.print(table(measured, kind))
    if top:
        console.print(operators_table(top))
    report.save(json_file, {"load": chosen, **as_json(measured, top)})


@bench.command()
def fidelity(
    model: ModelArgument,
    url: UrlOption = "http://127.0.0.1:8000",
    api_key: KeyOption = None,
    requests: Annotated[int, typer.Option(min=1, help="Prompts.")] = 16,
    n: Annotated[int, typer.Option(min=1, help="Samples of each.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each sample.")] = 64,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """The gap between a server's logprobs and transformers' on the tokens it sampled from MODEL at temperature 1."""
    from rich.console import Console

    from rollout.bench import report
    from rollout.bench.fidelity import REFERENCES, measure, table
    from trainer_bridge.client import RolloutClient

    console = Console()
    totals = {"sampled": requests, "scored": requests * n * len(REFERENCES)}
    with refusals(), RolloutClient(url, api_key=api_key) as client, progress(console, **totals) as advance:
        on_answer, on_score = advance
        measured = measure(
            client,
            model,
            requests=requests,
            n=n,
            max_tokens=max_tokens,
            seed=seed,
            on_answer=on_answer,
            on_score=on_score,
        )
    console.print(table(measured))
    report.save(json_file, {"url": url, "fidelity": measured})


@bench.command()
def roofline(
    model: ModelArgument,
    dtype: DtypeOption = "bfloat16",
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """This CPU's memory and arithmetic, and what they allow for the linear layers of a model."""
    import torch
    from rich.console import Console

    from rollout.bench import report
    from rollout.bench.roofline import machine, steps, table

    console = Console()
    if threads is not None:
        torch.set_num_threads(threads)
    with refusals(), console.status("measuring"):
        kind = getattr(torch, dtype)
        measured = machine(kind)
        roofs = steps(measured, model, kind)
    console.print(table(measured, roofs, kind))
    report.save(json_file, {"dtype": dtype, "roofline": measured, "steps": roofs})


@bench.command()
def push(
    model: ModelOption,
    url: UrlOption = "http://127.0.0.1:8000",
    api_key: KeyOption = None,
    streams: StreamsOption = 4,
    n: SamplesOption = 1,
    prompt_len: PromptOption = 64,
    seconds: SecondsOption = 5.0,
    json_file: JsonOption = None,
) -> None:
    """What a push of the weights does to open streams: token gaps and throughput, under either KV policy."""
    from rich.console import Console

    from rollout.bench import report
    from rollout.bench.push import run

    console = Console()
    pushes = run(url, api_key, model, streams=streams, n=n, prompt_len=prompt_len, seconds=seconds, console=console)
    report.save(json_file, {"pushes": pushes})


def with_flags_of(config: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one more flag for each field of a dataclass, in its **values."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        *own, _ = inspect.signature(function).parameters.values()
        hints = get_type_hints(function, include_extras=True)
        parameters = [p.replace(annotation=hints[p.name]) for p in own] + flags_of(config)
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorate


@bench.command()
@with_flags_of(Fleet)
def simulate(
    context: typer.Context,
    engines: EnginesOption = None,
    preset: PresetOption = "smollm2-cpu",
    measurements: FromOption = None,
    steps: StepsOption = 10,
    seed: DrawsOption = 0,
    json_file: JsonOption = None,
    **values: Any,
) -> None:
    """Throughput, push time and staleness of many engines, from the figures of one: a model, nothing is measured."""
    from rich.console import Console

    from rollout.bench import report
    from rollout.bench.simulate import DEFAULT_ENGINES, as_json, remedies, simulate, tables

    console = Console()
    with refusals():
        found = dict(PRESETS[preset])
        for file in measurements or ():
            found |= measured(file)
        sources = {name: context.get_parameter_source(name) for name in found}
        found = {name: found[name] for name, source in sources.items() if source and source.name == "DEFAULT"}
        fleet = config_from(Fleet, values | found)  # flags win
        counts = engines or DEFAULT_ENGINES
        with progress(console, fleets=len(counts)) as (advance,):
            results = []
            for count in counts:
                results.append(simulate(fleet, count, steps=steps, seed=seed))
                advance()
    console.print(*tables(results), *remedies(results), sep="\n")
    report.save(json_file, as_json(fleet, results, preset=preset, steps=steps, seed=seed))
