"""What `rollout bench` shows: a table for people, JSON for programs."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from rollout.bench.measure import Comparison, Result, Spread


def machine() -> dict[str, Any]:
    """What the figures were measured on. `load_average`: runnable processes over the last minute, others included."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    return {"cpu": cpu, "cores": psutil.cpu_count(), "load_average": psutil.getloadavg()[0]}


def save(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures as JSON, with the machine; dataclasses as their fields. Nothing for a path of None."""
    if path is not None:
        text = json.dumps({"machine": machine(), **figures}, indent=1, default=_fields)
        path.write_text(text + "\n")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def spread(value: Spread | None, scale: float = 1.0, digits: int = 1) -> str:
    """`median (min-max)`, or a dash."""
    if value is None:
        return "–"
    median, low, high = (f"{figure * scale:.{digits}f}" for figure in (value.median, value.min, value.max))
    return f"{median} ({low}–{high})"


def loads_table(comparisons: Sequence[Comparison]) -> Table:
    """Tokens/s of each load and server, and the first server's ratio to the second."""
    servers = [result.server for result in comparisons[0].results]
    names = "AB"[: len(servers)] if len(servers) > 1 else [""]
    legend = [f"{name} {server.url} {server.version}".strip() for name, server in zip(names, servers, strict=True)]
    table = Table("load", title="median (min–max)", caption="\n".join(legend))
    for name in names:
        table.add_column(f"{name} tokens/s".strip(), justify="right", no_wrap=True)
    streamed = any(result.first_token for comparison in comparisons for result in comparison.results)
    for name in names if streamed else ():
        table.add_column(f"{name} first token, ms".strip(), justify="right")
    if len(servers) > 1:
        table.add_column("A / B", justify="right", no_wrap=True)
    for comparison in comparisons:
        results = comparison.results
        row = [f"[bold]{comparison.load.name}[/]"]
        row += [spread(result.tokens_per_second) for result in results]
        if streamed:
            row += [spread(result.first_token, 1e3, 0) for result in results]
        if comparison.ratio is not None:
            row.append(spread(comparison.ratio, digits=2))
        table.add_row(*row)
    return table


def loads_json(comparisons: Sequence[Comparison], **settings: Any) -> dict[str, Any]:
    """The same and every round; times in seconds."""
    return {
        **settings,
        "loads": [
            {
                **asdict(comparison.load),
                "servers": [_result_json(result) for result in comparison.results],
                "ratio": None if comparison.ratio is None else asdict(comparison.ratio),
            }
            for comparison in comparisons
        ],
    }


def _result_json(result: Result) -> dict[str, Any]:
    first_token = result.first_token
    return {
        **result.server.record,
        "tokens_per_second": asdict(result.tokens_per_second),
        "all_tokens_per_second": asdict(result.all_tokens_per_second),
        "first_token_seconds": None if first_token is None else asdict(first_token),
        "rounds": [asdict(round) for round in result.rounds],
    }
