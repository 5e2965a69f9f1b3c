"""`rollout bench gpu`: what works on the CUDA device at hand, and how fast, in ten minutes at most.

Each section is a process of its own, so that one that fails, hangs or loses its CUDA context takes no other along.
Dry, all of them run on a CPU, in this process, with tiny shapes: this shows that the command works, no more.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from rollout.bench import gpu_sections, report
from rollout.bench.gpu_sections import Found, Place
from rollout.bench.gpu_speed import speed

BUDGET_S = 570.0
SECTION_S = {"speed": 330.0}
"""Most seconds of a section, if not OTHER_S."""
OTHER_S = 90.0
SECTIONS: dict[str, Callable[[Place], Found]] = {
    "versions": gpu_sections.versions,
    "kernels": gpu_sections.kernels,
    "engine": gpu_sections.engine,
    "commits": gpu_sections.commits,
    "capture": gpu_sections.capture,
    "pushes": gpu_sections.pushes,
    "sleep": gpu_sections.sleep,
    "exact": gpu_sections.exact,
    "speed": speed,
}


@dataclass
class Row:
    """A line of the table. `seconds` are those since the one before it in its section."""

    section: str
    what: str
    found: str
    seconds: float
    failed: bool = False


def run(names: Iterable[str], dry: bool) -> Iterator[Row]:
    """The rows of these sections, in this process."""
    if dry:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    with tempfile.TemporaryDirectory(prefix="rollout-gpu-") as folder, contextlib.ExitStack() as stack:
        at = Place(dry, Path(folder), stack)
        for name in names:
            began = time.perf_counter()
            try:
                for what, found in SECTIONS[name](at):
                    now = time.perf_counter()
                    yield Row(name, what, _short(found), now - began)
                    began = now
            except Exception as error:  # whatever it is: the other sections are still of interest
                found = _short(f"{type(error).__name__}: {error}")
                yield Row(name, "failed", found, time.perf_counter() - began, failed=True)


def measure(names: Sequence[str], *, dry: bool) -> list[Row]:
    """The rows of these sections, or of all, each in a process of its own; after ten minutes no other is begun.

    Raises ValueError for a section that there isn't, and RuntimeError without a CUDA device, if it isn't `dry`.
    """
    if unknown := set(names) - SECTIONS.keys():
        raise ValueError(f"there is no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    if not dry and not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device; --dry runs everything on a CPU, with tiny shapes")
    if dry:
        return list(run(names or SECTIONS, dry=True))
    rows: list[Row] = []
    deadline = time.monotonic() + BUDGET_S
    for name in names or SECTIONS:
        limit = min(SECTION_S.get(name, OTHER_S), deadline - time.monotonic())
        rows += apart(name, limit) if limit > 0 else [Row(name, "failed", "no time was left", 0.0, failed=True)]
    return rows


def apart(name: str, limit: float) -> list[Row]:
    """The rows of a section in a process of its own, which has so many seconds."""
    command = [sys.executable, "-m", "rollout.bench.gpu", name]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        try:
            code = subprocess.run(command, stdout=out, stderr=log, timeout=limit).returncode
            ended = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"not done after {limit:.0f} s"
        out.seek(0)
        log.seek(0)
        rows = [Row(**json.loads(line)) for line in out if line.startswith('{"section"')]
        if ended and not any(row.failed for row in rows):
            why = _short(f"{ended}: {log.read().strip().rpartition(chr(10))[2]}")
            rows.append(Row(name, "failed", why, time.perf_counter() - began, failed=True))
        return rows


def _short(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]} …"


def table(rows: Sequence[Row], dry: bool) -> Table:
    """A line for each row."""
    title = "on a CPU, with tiny shapes: no figure of a GPU" if dry else torch.cuda.get_device_name()
    lines = [(row.section, row.what, row.found, f"{row.seconds:.1f}") for row in rows]
    return report.table(title, ("section", "what", "found", "s"), lines)


if __name__ == "__main__":
    for line in run(sys.argv[1:], dry=False):
        print(json.dumps(line.__dict__), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of peers may not end
