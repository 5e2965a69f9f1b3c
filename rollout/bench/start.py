"""`rollout bench start`: from exec to the first token, in a fresh process, the files being in the page cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from rollout.bench import report
from rollout.bench.measure import Spread
from rollout.launch import START_TIMEOUT_S, launch
from trainer_bridge.client import RolloutClient


@dataclass(frozen=True)
class Start:
    """Seconds since exec: until /health answered 200, until an answer of one token had come."""

    healthy: float
    first_token: float


def measure(command: Sequence[str], runs: int, on_run: Callable[[], None] = lambda: None) -> list[Start]:
    """Start and stop the server once to warm the disk, then `runs` times. Raises RuntimeError as `launch` does."""
    starts = []
    for _ in range(1 + runs):
        with launch(command) as server, RolloutClient(server.url, timeout_s=START_TIMEOUT_S) as client:
            healthy = time.perf_counter()
            client.generate([1], {"max_tokens": 1})
            starts.append(Start(healthy - server.began, time.perf_counter() - server.began))
        on_run()
    return starts[1:]


def table(starts: Sequence[Start]) -> Table:
    """Median and extremes of both times."""
    times = {"/health": [start.healthy for start in starts], "the first token": [start.first_token for start in starts]}
    rows = [(name, report.spread(Spread.of(seconds), digits=2)) for name, seconds in times.items()]
    return report.table(f"{len(starts)} starts", ("seconds from exec to", "median (min–max)"), rows)
