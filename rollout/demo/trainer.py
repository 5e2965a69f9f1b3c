"""Asynchronous GRPO on one model: what each step does with a batch of groups.

Group-relative advantages are those of GRPO, the loss is a mean over tokens with a wider upper clip and no KL term
(docs/training.md has the formulas and their sources). π_old is never recomputed: it is what the server says it sampled
from, token by token, whichever weights those were, so the ratio corrects for staleness too; it is truncated, since the
clip alone doesn't bound it for answers that are worse than their group's mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer_bridge.loop import metrics
from trainer_bridge.rollouts import RolloutGroup
from trainer_bridge.score import exact, replay
from trainer_bridge.score.groups import current_gap, score_group
from trainer_bridge.score.losses import clipped_surrogate, token_advantages

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
RATIO_CAP = 4.0
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class TrainStats:
    """One step: its metrics (`trainer_bridge.loop.metrics`), and the lag of each of its tokens, (T,) float32."""

    metrics: dict[str, float]
    lags: Tensor


class Trainer:
    """The policy in float32 on the CPU, with the server's bits in its forward pass, and its optimizer."""

    def __init__(self, model: Path, *, learning_rate: float) -> None:
        self.model: PreTrainedModel = exact.install(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        )
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, groups: Sequence[RolloutGroup], epoch: int, newest: Callable[[], RolloutGroup | None]) -> TrainStats:
        """Train once on `groups`; `epoch` is the weight epoch that the server has of the policy as it is now, `newest`
        gives what the server finished last: the gap of its tokens is measured just before the update."""
        total = sum(group.tokens for group in groups)
        seen: list[tuple[Tensor, ...]] = []
        for group in groups:
            old = torch.tensor(group.logprobs)
            advantages = token_advantages(group.rewards, group.lengths)
            scores = score_group(self.model, group)
            loss = clipped_surrogate(
                scores.logprobs, old, advantages, low=CLIP_LOW, high=CLIP_HIGH, cap=RATIO_CAP
            ).sum()
            (loss / total).backward()
            seen.append((scores.logprobs.detach(), old, scores.entropies, _lags(group, epoch)))
        gap = current_gap(self.model, newest(), functools.partial(_lags, epoch=epoch))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        new, old, entropies, lags = (torch.cat(column) for column in zip(*seen, strict=True))
        found = metrics.of_rollouts(groups) | metrics.of_tokens(
            new, old, entropies, lags, cap=RATIO_CAP, current_gap=gap
        )
        return TrainStats(found | {"policy/grad_norm": float(norm)}, lags)


def _lags(group: RolloutGroup, epoch: int) -> Tensor:
    lags = [lag for c in group.choices for lag in replay.staleness(c.spans, len(c.token_ids), epoch)]
    return torch.tensor(lags, dtype=torch.float32)
