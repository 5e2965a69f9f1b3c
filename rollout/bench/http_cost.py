"""`rollout bench http`: what HTTP costs beside the engine, in CPU time a token, whole answers and streamed ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.table import Table

from rollout.bench import bare, report
from rollout.bench.loads import LOADS, Load, ServerInfo, inspect
from rollout.bench.measure import Spread, run_round
from rollout.bench.report import spread
from rollout.engine.engine import Engine
from rollout.launch import launch

LOAD_NAMES = ("json", "sse")


@dataclass(frozen=True)
class HttpCost:
    """CPU microseconds a sampled token: of the server's process (HTTP and text), and of its children (the engine)."""

    load: str
    server: Spread
    engine: Spread
    tokens_per_second: Spread


def measure(
    command: Sequence[str], rounds: int, seed: int, vocab_size: int | None, on_answer: Callable[[], None]
) -> list[HttpCost]:
    """Start a server, warm it up, and run both loads on it in turn. Raises what `launch` and `run_round` raise."""
    loads = [LOADS[name] for name in LOAD_NAMES]
    costs: list[list[tuple[float, float, float]]] = [[] for _ in loads]
    with launch(command) as launched:
        server, process = inspect(launched.url, None, vocab_size), psutil.Process(launched.pid)
        for number in range(1 + rounds):
            for load, measured in zip(loads, costs, strict=True):
                prompts = load.prompts(seed, number, server.vocab_size)
                cost = _round(load, server, process, prompts, on_answer)
                if number:
                    measured.append(cost)
    return [
        HttpCost(load.name, *(Spread.of(column) for column in zip(*measured, strict=True)))
        for load, measured in zip(loads, costs, strict=True)
    ]


def _round(
    load: Load, server: ServerInfo, process: psutil.Process, prompts: Sequence[list[int]], on_answer: Callable[[], None]
) -> tuple[float, float, float]:
    before = _cpu_seconds(process)
    measured = asyncio.run(run_round(load, server, prompts, on_answer))
    after = _cpu_seconds(process)
    own, children = ((b - a) / measured.output_tokens * 1e6 for a, b in zip(before, after, strict=True))
    return own, children, measured.tokens_per_second


def _cpu_seconds(process: psutil.Process) -> tuple[float, float]:
    """User and system time so far, of the process and of all its descendants that live."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    seconds = [t.user + t.system for t in times]
    return seconds[0], sum(seconds[1:])


def bare_engine(model: Path, flags: Sequence[str], rounds: int, seed: int) -> Spread:
    """CPU microseconds a token of an engine in this process under the same requests, after one round of warm-up."""
    engine, load = Engine(bare.engine_config(model, flags)), LOADS[LOAD_NAMES[0]]
    costs = []
    for number in range(1 + rounds):
        prompts = load.prompts(seed, number, engine.runner.vocab_size)
        began = time.process_time()
        tokens = bare.run(engine, load, prompts)
        if number:
            costs.append((time.process_time() - began) / tokens * 1e6)
    return Spread.of(costs)


def table(costs: Sequence[HttpCost], bare: Spread | None) -> Table:
    """CPU microseconds a token by process and form of answer."""
    rows = [(c.load, spread(c.server), spread(c.engine, digits=0), spread(c.tokens_per_second)) for c in costs]
    if bare is not None:
        rows.append(("bare engine", "–", spread(bare, digits=0), "–"))
    columns = ("", "server process", "engine process", "tokens/s")
    return report.table("CPU µs a token at 64 streams: median (min–max)", columns, rows)
