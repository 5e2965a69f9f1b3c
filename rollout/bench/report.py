"""What `rollout bench` shows: tables for people, JSON for programs."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from rollout.bench.measure import Comparison, Spread


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
        text = json.dumps({"machine": machine(), **figures}, indent=1, default=vars)
        path.write_text(text + "\n")


def spread(value: Spread | None, scale: float = 1.0, digits: int = 1) -> str:
    """`median (min-max)`, or a dash."""
    if value is None:
        return "–"
    median, low, high = (f"{figure * scale:.{digits}f}" for figure in (value.median, value.min, value.max))
    return f"{median} ({low}–{high})"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], **looks: Any) -> Table:
    """A table of names (the first column) and figures (the others, flush right). `looks` are rich's."""
    made = Table(columns[0], title=title, **looks)
    for column in columns[1:]:
        made.add_column(column, justify="right", no_wrap="/" in column)
    for row in rows:
        made.add_row(*row)
    return made


def loads_table(comparisons: Sequence[Comparison]) -> Table:
    """Tokens/s of each load and server, and the first server's ratio to the second."""
    servers = [result.server for result in comparisons[0].results]
    names = "AB" if len(servers) > 1 else [""]
    legend = [f"{name} {server.url} {server.version}".strip() for name, server in zip(names, servers, strict=True)]
    streamed = any(result.first_token for comparison in comparisons for result in comparison.results)
    columns = ["load", *(f"{name} tokens/s".strip() for name in names)]
    columns += [f"{name} first token, ms".strip() for name in names if streamed]
    columns += ["A / B"] * (len(servers) > 1)
    rows = []
    for comparison in comparisons:
        row = [f"[bold]{comparison.load.name}[/]", *(spread(r.tokens_per_second) for r in comparison.results)]
        row += [spread(result.first_token, 1e3, 0) for result in comparison.results if streamed]
        if comparison.ratio is not None:
            row.append(spread(comparison.ratio, digits=2))
        rows.append(row)
    return table("median (min–max)", columns, rows, caption="\n".join(legend))


def loads_json(comparisons: Sequence[Comparison], **settings: Any) -> dict[str, Any]:
    """The same and every round; times in seconds."""
    loads = []
    for comparison in comparisons:
        servers = [
            {
                "url": result.server.url,
                "model": result.server.model,
                "version": result.server.version,
                "tokens_per_second": result.tokens_per_second,
                "all_tokens_per_second": result.all_tokens_per_second,
                "first_token_seconds": result.first_token,
                "rounds": result.rounds,
            }
            for result in comparison.results
        ]
        loads.append({**asdict(comparison.load), "servers": servers, "ratio": comparison.ratio})
    return {**settings, "loads": loads}
