"""What the demo leaves behind: summary.json, reward.png, a Weights & Biases run, one rollout coloured by version."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from rollout.demo.sampler import Group, SamplerStats
from rollout.demo.trainer import TrainStats
from trainer_bridge.client import Choice

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")


@dataclass(frozen=True)
class Step:
    """One step of the demo: what training said, and how long the push of its weights took."""

    version: str
    train: TrainStats
    train_seconds: float
    push_seconds: float


def summary(steps: Sequence[Step], sampled: SamplerStats, seconds: float) -> dict[str, Any]:
    """The numbers of summary.json. `seconds` is the time from the first request to the end of the last push."""
    rewards = [step.train.reward for step in steps]
    quarter = max(1, len(steps) // 4)
    return {
        "reward_first": _mean(rewards[:quarter]),
        "reward_last": _mean(rewards[-quarter:]),
        "requests_with_two_versions": sampled.requests_with_two_versions,
        "weight_pushes": len(steps),
        "tokens_per_second": sampled.tokens / seconds,
        "push_seconds": _mean([step.push_seconds for step in steps]),
        "longest_token_gap_seconds": sampled.longest_token_gap_s,
        "logprob_gap": _mean([step.train.logprob_gap for step in steps]),
        "staleness": _mean([step.train.staleness for step in steps]),
        "requests": sampled.requests,
        "dropped_groups": sampled.dropped_groups,
        "trained_tokens": sum(step.train.tokens for step in steps),
        "seconds": seconds,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def plot(steps: Sequence[Step], path: Path) -> None:
    """Reward, staleness and logprob gap over steps, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = (
        ("reward", "tab:green", "mean of the step's answers", [step.train.reward for step in steps]),
        ("staleness", "tab:orange", "commits behind, mean over tokens", [step.train.staleness for step in steps]),
        (
            "rollout/trainer logprob gap",
            "tab:blue",
            "mean |log π_θ - log π_old|",
            [step.train.logprob_gap for step in steps],
        ),
    )
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (title, colour, label, values) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.plot(range(1, len(steps) + 1), values, color=colour, marker="o", markersize=3)
        axes.set(title=title, xlabel="step", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(str(path))


class WandbRun:
    """A Weights & Biases run: offline unless a key is set, nothing at all where wandb isn't installed."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self._run = None
        if importlib.util.find_spec("wandb") is None:
            return
        import wandb

        decided = "WANDB_MODE" in os.environ or wandb.login(prompt=False)
        settings = wandb.Settings(silent=True)
        self._run = wandb.init(
            project="rollout-demo", dir=folder, config=config, mode=None if decided else "offline", settings=settings
        )

    def log(self, step: Step) -> None:
        """One step's numbers."""
        if self._run is not None:
            numbers = {**asdict(step.train), "train_seconds": step.train_seconds, "push_seconds": step.push_seconds}
            self._run.log(numbers)

    def finish(self, numbers: dict[str, Any]) -> None:
        """Close the run, with summary.json as its summary."""
        if self._run is not None:
            self._run.summary.update(numbers)
            self._run.finish()


def most_versions(groups: Sequence[Group]) -> tuple[Group, Choice]:
    """The answer that the most versions had a hand in, the latest and best of these."""
    answers = [
        (group, choice, reward) for group in groups for choice, reward in zip(group.choices, group.rewards, strict=True)
    ]
    group, choice, _ = max(reversed(answers), key=lambda a: (len({s.version for s in a[1].spans}), a[2]))
    return group, choice


def coloured(tokenizer: PreTrainedTokenizerBase, choice: Choice) -> Text:
    """The answer, each token in the colour of the weights that sampled it, and which colour is which version."""
    versions = list(dict.fromkeys(span.version for span in choice.spans))
    colours = {version: COLOURS[i % len(COLOURS)] for i, version in enumerate(versions)}
    text, legend = Text(), Text()
    for span in choice.spans:
        piece = tokenizer.decode(choice.token_ids[span.start : span.end])
        text.append(str(piece), style=f"bold {colours[span.version]}")
        legend.append(f"  [{span.start}, {span.end}) {span.version}", style=colours[span.version])
    return text + Text("\n") + legend
