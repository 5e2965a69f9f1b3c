"""What the demo leaves behind: summary.json, reward.png, a Weights & Biases run, one rollout coloured by version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainer_bridge.client import Choice
from trainer_bridge.loop.dashboard import STEP, Panel
from trainer_bridge.loop.sampler import SamplerStats
from trainer_bridge.rollouts import RolloutGroup

PANELS = (
    Panel("reward", ("reward/mean",), "mean of the step's answers"),
    Panel("staleness", ("staleness/mean",), "commits behind, mean over tokens"),
    Panel("rollout/trainer gap", ("gap/mean", "gap/current_max"), "|log π_θ - log π_old|"),
)
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")


@dataclass(frozen=True)
class Step:
    """One step: its metrics (`trainer_bridge.loop.metrics`), the lags (T,) of its tokens, and how long it all took."""

    version: str
    metrics: dict[str, float]
    lags: Tensor
    train_seconds: float
    push_seconds: float
    push_bytes: int

    def __getitem__(self, name: str) -> float:
        """A metric of its training."""
        return self.metrics[name]

    def __str__(self) -> str:
        """One line for the terminal."""
        learns = "no signal: all rewards of each group are the same" if self["reward/no_signal"] == 1 else ""
        return (
            f"reward {self['reward/mean']:.2f}  staleness {self['staleness/mean']:.1f}  gap {self['gap/mean']:.3f}  "
            f"push {self.push_seconds:.1f} s  {learns}".rstrip()
        )


def summary(
    steps: Sequence[Step], sampled: SamplerStats, seconds: float, max_staleness: int, too_old: int = 0
) -> dict[str, Any]:
    """The numbers of summary.json. `seconds` is the time from the first request to the end of the last push, `too_old`
    how many of the dropped groups were, and tokens of more than `max_staleness` commits ago weighed nothing."""
    rewards = [step["reward/mean"] for step in steps]
    quarter = max(1, len(steps) // 4)
    return {
        "reward_first": fmean(rewards[:quarter]),
        "reward_last": fmean(rewards[-quarter:]),
        "requests_with_two_versions": sampled.requests_with_two_versions,
        "weight_pushes": len(steps),
        "tokens_per_second": sampled.tokens / seconds,
        "push_seconds": fmean([step.push_seconds for step in steps]),
        "longest_token_gap_seconds": sampled.longest_token_gap_s,
        "logprob_gap": fmean([step["gap/mean"] for step in steps]),
        "current_logprob_gap": max(
            (step["gap/current_max"] for step in steps if "gap/current_max" in step.metrics), default=None
        ),
        "staleness": fmean([step["staleness/mean"] for step in steps]),
        "requests": sampled.requests,
        "dropped_groups": sampled.dropped_groups,
        "dropped_as_too_old": too_old,
        "steps_without_signal": sum(step["reward/no_signal"] == 1 for step in steps),
        "trained_tokens": sum(int((step.lags <= max_staleness).sum()) for step in steps),
        "stale_tokens": sum(int((step.lags > max_staleness).sum()) for step in steps),
        "seconds": seconds,
    }


def history(steps: Sequence[Step]) -> list[dict[str, float]]:
    """The steps as the dashboard wants them."""
    return [
        step.metrics
        | {
            STEP: number,
            "speed/train_s": step.train_seconds,
            "push/seconds": step.push_seconds,
            "push/bytes": step.push_bytes,
        }
        for number, step in enumerate(steps, start=1)
    ]


def conclusion(numbers: dict[str, Any], max_staleness: int, output: Path) -> str:
    """What the summary's numbers say, where the files are, and what to look at first."""
    lines = [
        f"Mean reward went from {numbers['reward_first']:.2f} (first quarter of the steps) to "
        f"{numbers['reward_last']:.2f} (last quarter); {numbers['weight_pushes']} pushes without a pause, crossed by "
        f"{numbers['requests_with_two_versions']} of {numbers['requests']} requests; the longest wait between two "
        f"tokens was {numbers['longest_token_gap_seconds']:.1f} s."
    ]
    if numbers["dropped_groups"]:
        too_old = numbers["dropped_as_too_old"]
        lines.append(
            f"{numbers['dropped_groups']} groups were sampled and not trained on: {too_old} had no token of the last "
            f"{max_staleness} pushes, and {numbers['dropped_groups'] - too_old} were aborted."
        )
    if numbers["stale_tokens"]:
        lines.append(
            f"{numbers['stale_tokens']} of {numbers['trained_tokens'] + numbers['stale_tokens']} tokens were more than "
            f"{max_staleness} pushes old and weighed nothing; the rest of their answers was trained on."
        )
    if numbers["steps_without_signal"]:
        lines.append(
            f"{numbers['steps_without_signal']} of {numbers['weight_pushes']} steps had no signal: all rewards of each "
            "group were the same, so their advantages were 0."
        )
    lines.append(
        f"Look at {output / 'reward.png'} first; {output / 'summary.json'} has these numbers, and `rollout replay "
        f"{output / 'rollouts.jsonl'}` samples what was trained on again. The server's log: {output / 'server.log'}."
    )
    return "\n".join(lines)


def most_versions(groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, Choice]:
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
