"""What to look at first, and in which order: one layout for the picture on disk and for Weights & Biases."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = "trainer/step"
SAMPLES = "samples/rollouts"
LAGS = "staleness/lags"
COLUMNS = 5


@dataclass(frozen=True)
class Panel:
    """One plot over the trainer's steps: metrics by name (`metrics`), and what their values are."""

    title: str
    metrics: tuple[str, ...]
    unit: str


LAYOUT: dict[str, tuple[Panel, ...]] = {
    "Is it learning?": (
        Panel("reward", ("reward/mean", "reward/std"), "over the step's answers"),
        Panel("length", ("length/mean", "length/max"), "tokens"),
        Panel("entropy", ("policy/entropy",), "nats a token"),
        Panel("wasted answers", ("reward/no_signal", "length/cut_off"), "share"),
        Panel("update", ("policy/loss", "policy/grad_norm"), "before clipping"),
    ),
    "Is the sampled policy the trained one?": (
        Panel("rollout/trainer gap", ("gap/mean", "gap/p99"), "|log π_θ - log π_old|, nats"),
        Panel("gap of current tokens", ("gap/current_max",), "largest, nats; exact mode: 0"),
        Panel("KL(π_old ‖ π_θ)", ("gap/k1", "gap/k3"), "nats a token"),
        Panel("importance ratio", ("ratio/min", "ratio/mean", "ratio/max"), "π_θ / π_old"),
        Panel("after truncation", ("ratio/truncated_mean", "ratio/truncated_max"), "π_θ / π_old"),
    ),
    "How stale?": (
        Panel("staleness", ("staleness/mean", "staleness/max"), "versions behind"),
        Panel("staleness of tokens", (LAGS,), "histogram over tokens, versions behind"),
        Panel("unusable", ("staleness/unknown_share", "ratio/truncated_share", "policy/clipped_share"), "of tokens"),
        Panel("dropped groups", ("rollout/dropped_groups",), "in all"),
    ),
    "How fast?": (
        Panel("tokens/s", ("speed/rollout_tokens_per_s", "speed/trainer_tokens_per_s"), "tokens/s"),
        Panel("seconds of a step", ("speed/wait_s", "speed/train_s", "push/seconds"), "s"),
        Panel("push", ("push/bytes",), "bytes"),
    ),
    "Server": (
        Panel("requests", ("server/num_requests_running", "server/num_requests_waiting"), "sequences"),
        Panel("cache", ("server/kv_cache_usage_perc", "server/prefix_hit_share"), "share"),
    ),
}


class History:
    """The numbers of each step in a file, a JSON object a line; a trainer that resumes goes on after its last one."""

    def __init__(self, path: Path, *, resume_at: int = 0) -> None:
        self.steps: list[dict[str, Any]] = []
        self._path = path
        if path.exists():
            self.steps = [step for step in _whole_lines(path) if step[STEP] <= resume_at]
        path.write_text("".join(json.dumps(step) + "\n" for step in self.steps))

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add a step; STEP must be among its metrics."""
        self.steps.append(dict(metrics))
        with open(self._path, "a") as file:
            file.write(json.dumps(self.steps[-1]) + "\n")


def _whole_lines(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the process was killed while it wrote this one
            return


def plot(steps: Sequence[Mapping[str, Any]], path: Path, panels: Sequence[Panel] = sum(LAYOUT.values(), ())) -> None:
    """The panels as one PNG; a metric that a step lacks leaves a hole in its line. Panels without any are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    known = {name for step in steps for name in step}  # histograms and tables are not among the numbers
    shown = [panel for panel in panels if known & set(panel.metrics)]
    rows, columns = max(1, math.ceil(len(shown) / COLUMNS)), min(COLUMNS, len(shown) or 1)
    figure = Figure(figsize=(4 * columns, 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid, shown, strict=False):
        for name in panel.metrics:
            if name in known:
                x = [step[STEP] for step in steps]
                axes.plot(x, [step.get(name, math.nan) for step in steps], marker="o", markersize=3, label=name)
        axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    FigureCanvasAgg(figure).print_png(str(path))
