"""`rollout bench start`: from exec to the first token, in a fresh process, the files being in the page cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from rollout.bench.measure import Spread
from rollout.bench.process import launch
from rollout.bench.report import spread
from trainer_bridge.client import RolloutClient

START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Start:
    """Seconds since exec: until /health answered 200, until an answer of one token had come."""

    healthy: float
    first_token: float


def measure(command: Sequence[str], runs: int, on_run: Callable[[], None] = lambda: None) -> list[Start]:
    """Start and stop the server once to warm the disk, then `runs` times.

    Raises RuntimeError, with what it printed, where it doesn't start.
    """
    starts = []
    for number in range(1 + runs):
        with (
            launch(command, timeout_s=START_TIMEOUT_S) as server,
            RolloutClient(server.url, timeout_s=START_TIMEOUT_S) as client,
        ):
            healthy = time.perf_counter()
            client.generate([1], {"max_tokens": 1})
            first_token = time.perf_counter()
            if number:
                starts.append(Start(healthy - server.began, first_token - server.began))
        on_run()
    return starts


def table(starts: Sequence[Start]) -> Table:
    """Median and extremes of both times."""
    table = Table("seconds from exec to", title=f"{len(starts)} starts")
    table.add_column("median (min–max)", justify="right")
    table.add_row("/health", spread(Spread.of([start.healthy for start in starts]), digits=2))
    table.add_row("the first token", spread(Spread.of([start.first_token for start in starts]), digits=2))
    return table
