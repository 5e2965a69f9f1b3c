"""`rollout bench --simulate`: the figures of a simulated fleet, and the tables that show them."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from rollout.bench.fleet_model import FleetModel
from rollout.bench.simulation import Loop, Totals

DEFAULT_ENGINES = (8, 16, 32, 64, 128, 256, 512, 1024)
WALLS = ("engines", "lag", "ingress", "trainer", "broadcast")


@dataclass(frozen=True)
class Result:
    """A fleet's figures over the measured steps. Rates in tokens/s, shares of 1, times in seconds, lags in steps.

    `generated` is sampled by the engines, `trained` reaches the trainer; what lies between was too old (`dropped`, a
    share of the tokens of finished groups), lost with an engine, or is still open. `engines_busy` is `generated` over
    what full engines do. `walls`: what each part would allow by itself; `wall`: the lowest, `wall_tokens_per_second`.
    """

    engines: int
    generated: float
    trained: float
    trainer_busy: float
    engines_busy: float
    push_seconds: float
    receiving: float
    lag_mean: float
    lag_p99: int
    dropped: float
    failure_loss: float
    wall: str
    wall_tokens_per_second: float
    walls: dict[str, float]
    totals: Totals


def simulate(fleet: FleetModel, engines: int, *, steps: int, seed: int) -> Result:
    """Run to a steady state (as many pushes as the lag allows, and three), then measure `steps` steps.

    Raises ValueError for fewer than one engine or step, and where engines fail too often for a push to get through.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}, but there must be at least 1")
    if fleet.mtbf_hours is not None and fleet.push_seconds(engines) * engines > 3 * fleet.mtbf_hours * 3600:
        raise ValueError(
            f"mtbf_hours is {fleet.mtbf_hours:g}: one of {engines} engines fails every "
            f"{fleet.mtbf_hours * 3600 / engines:.3g} s, but a push takes {fleet.push_seconds(engines):.3g} s, so "
            "hardly any would get through"
        )
    loop, warmup = Loop(fleet, engines, seed), (fleet.max_lag + 3) * fleet.push_every
    loop.run(warmup)
    t = loop.totals = Totals()
    loop.run(warmup + steps)
    wall, wall_tokens_per_second = fleet.wall(engines)
    return Result(
        engines=engines,
        generated=t.generated / t.seconds,
        trained=t.trained / t.seconds,
        trainer_busy=t.training / t.seconds,
        engines_busy=t.generated / t.seconds / fleet.tokens_per_second(engines, engines * fleet.streams),
        push_seconds=t.receiving / t.pushes,
        receiving=t.receiving / t.seconds,
        lag_mean=sum(lag * tokens for lag, tokens in t.lags.items()) / t.trained,
        lag_p99=quantile(t.lags, 0.99),
        dropped=t.dropped / (t.dropped + t.trained),
        failure_loss=fleet.failure_loss(engines),
        wall=wall,
        wall_tokens_per_second=wall_tokens_per_second,
        walls=fleet.walls(engines),
        totals=t,
    )


def quantile(counts: Mapping[int, float], share: float) -> int:
    """The smallest value that at least this share of the counts does not exceed."""
    values = sorted(counts)
    reached = list(itertools.accumulate(counts[value] for value in values))
    return values[bisect.bisect_left(reached, share * reached[-1])]


def _wall(name: str, result: Result) -> str:
    figure = result.walls[name]
    return "–" if math.isinf(figure) else f"{figure:,.0f}"


COLUMNS: dict[str, Callable[[Result], str]] = {
    "engines": lambda r: str(r.engines),
    "sampled": lambda r: f"{r.generated:,.0f}",
    "trained": lambda r: f"{r.trained:,.0f}",
    "busy": lambda r: f"{r.engines_busy:.0%}",
    "trainer": lambda r: f"{r.trainer_busy:.0%}",
    "push": lambda r: f"{r.push_seconds:.1f}",
    "receive": lambda r: f"{r.receiving:.0%}",
    "lag": lambda r: f"{r.lag_mean:.1f}",
    "p99": lambda r: str(r.lag_p99),
    "dropped": lambda r: f"{r.dropped:.0%}",
    "wall": lambda r: r.wall,
}
CAPTION = (
    "sampled, trained: tokens/s. busy: of what full engines sample. trainer: its time in steps. push: seconds. "
    "receive: share of the time in which engines do. lag: mean and 99th percentile over trained tokens, in steps of "
    "the trainer. dropped: share of finished tokens that were too old. wall: the lowest of the second table's."
)


WALL_COLUMNS: dict[str, Callable[[Result], str]] = {"engines": lambda r: str(r.engines)} | {
    f"{name} wall": functools.partial(_wall, name) for name in WALLS
}


REMEDIES = {
    "engines": "more engines",
    "lag": "larger batches (--prompts-per-step) or a larger --max-lag; more engines would only hold fewer answers each",
    "ingress": "more server processes (--servers); whole answers rather than events; --tokens-only",
    "trainer": "a faster trainer (--train-us-per-token); more engines add nothing but old answers",
    "broadcast": "--topology chain or relays, sparse pushes (--pushed-share), --overlap-push, --push-every",
}
"""What moves each wall. docs/scaling.md says what each costs."""


def remedies(results: Sequence[Result]) -> list[str]:
    """A line for each wall that binds somewhere, in the order of the fleets."""
    return [f"{wall}: {REMEDIES[wall]}" for wall in dict.fromkeys(result.wall for result in results)]


def as_json(fleet: FleetModel, results: Sequence[Result], **settings: Any) -> dict[str, Any]:
    """Every assumption and every figure; a wall that there is not is null."""
    figures = [asdict(result) for result in results]
    for row in figures:
        row["walls"] = {name: None if math.isinf(figure) else figure for name, figure in row["walls"].items()}
        row["totals"]["lags"] = {str(lag): tokens for lag, tokens in sorted(row["totals"]["lags"].items())}
    return {**settings, "fleet": asdict(fleet), "results": figures}


def tables(results: Sequence[Result]) -> list[Table]:
    """What the fleet does, and where its walls stand."""
    looks: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "padding": 0}
    first = Table(title="A simulated fleet in steady state", caption=CAPTION, caption_justify="left", **looks)
    second = Table(title="Walls: tokens/s that each part would allow by itself", **looks)
    for table, columns in ((first, COLUMNS), (second, WALL_COLUMNS)):
        for name in columns:
            table.add_column(name, justify="left" if name == "wall" else "right", no_wrap=True)
        for result in results:
            table.add_row(*(cell(result) for cell in columns.values()))
    return [first, second]
