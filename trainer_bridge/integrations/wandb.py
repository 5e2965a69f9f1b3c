"""Weights & Biases: the numbers of each training step, how stale its tokens were, and what was sampled, by version.

Offline unless a key is set (`wandb sync FOLDER` uploads later), and nothing at all where wandb isn't installed.
"""

from __future__ import annotations

import html
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer_bridge.client import Choice
from trainer_bridge.loop.dashboard import LAGS, LAYOUT, SAMPLES, STEP
from trainer_bridge.rollouts import RolloutGroup

COLOURS = ("#cfe8ff", "#fff1b8", "#f3d1f4", "#d3f2d0", "#ffd9c2", "#d9d6ff")
_COLUMNS = ("reward", "tokens", "finish_reason", "versions", "prompt", "answer")


class WandbLogger:
    """A run. `run_id` names it across restarts of the trainer: its parts, offline ones too, sync into one run."""

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any], *, run_id: str | None = None) -> None:
        self._run = None
        if importlib.util.find_spec("wandb") is None:
            return
        import wandb

        # Said outright: wandb reads the variable once a process.
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            dir=folder,
            config=dict(config),
            id=run_id,
            resume=None if run_id is None else "allow",
            mode=mode,
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def log(
        self,
        metrics: Mapping[str, float],
        *,
        lags: Tensor | None = None,
        groups: Sequence[RolloutGroup] = (),
        decode: Callable[[Sequence[int]], str] = str,
        samples: int = 4,
    ) -> None:
        """One step: its numbers (STEP among them), a histogram of its tokens' `lags` (T,), and a table of the first
        `samples` of its answers, coloured by version and made readable by `decode`."""
        if self._run is None:
            return
        import wandb

        row: dict[str, Any] = dict(metrics)
        if lags is not None and len(known := lags[lags.isfinite()]):
            row[LAGS] = wandb.Histogram(known.tolist(), num_bins=int(known.max() - known.min()) + 1)
        if groups:
            row[SAMPLES] = wandb.Html(samples_html(groups, decode, samples), inject=False)
        self._run.log(row)

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        if self._run is not None:
            self._run.summary.update(dict(summary or {}))
            self._run.finish()


def samples_html(groups: Sequence[RolloutGroup], decode: Callable[[Sequence[int]], str], samples: int) -> str:
    """A table of the first `samples` answers."""
    rows = [_row("th", _COLUMNS)]
    for group in groups:
        for choice, reward in zip(group.choices, group.rewards, strict=True):
            versions = ", ".join(dict.fromkeys(span.version for span in choice.spans))
            known = [f"{reward:.3f}", len(choice.token_ids), choice.finish_reason, versions]
            cells = [html.escape(str(cell)) for cell in (*known, decode(group.prompt.token_ids))]
            rows.append(_row("td", [*cells, coloured_html(choice, decode)]))
    style = "font:13px monospace;white-space:pre-wrap;text-align:left"
    return f'<meta charset="utf-8"><table border="1" style="{style}">{"".join(rows[: samples + 1])}</table>'


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def coloured_html(choice: Choice, decode: Callable[[Sequence[int]], str]) -> str:
    """The answer, each stretch in the colour of the weights that sampled it; hovering names them."""
    versions = list(dict.fromkeys(span.version for span in choice.spans))
    pieces = []
    for span in choice.spans:
        colour = COLOURS[versions.index(span.version) % len(COLOURS)]
        title = f"{span.version}, tokens {span.start} to {span.end}, epoch {span.epoch}, cache {span.kv}"
        text = html.escape(decode(choice.token_ids[span.start : span.end]))
        pieces.append(f'<span style="background:{colour}" title="{html.escape(title)}">{text}</span>')
    return "".join(pieces)


def workspace(entity: str, project: str) -> Any:
    """The layout as a saved view of a project, which `.save()` uploads; needs the package wandb-workspaces."""
    import wandb_workspaces.workspaces as workspaces
    from wandb_workspaces.reports.v2.interface import LinePlot, MediaBrowser

    sections = []
    for title, panels in LAYOUT.items():
        plots: list[Any] = [
            LinePlot(title=f"{panel.title} ({panel.unit})", x=STEP, y=list(panel.metrics)) for panel in panels
        ]
        sections.append(workspaces.Section(name=title, is_open=True, panels=plots))
    table = MediaBrowser(media_keys=[SAMPLES])
    sections.append(workspaces.Section(name="Samples", is_open=True, panels=[table]))
    return workspaces.Workspace(entity=entity, project=project, name="rollout", sections=sections)
