"""Asynchronous GRPO on one model: what each step does with a batch of groups. docs/training.md has the formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer_bridge.loop import metrics
from trainer_bridge.rollouts import RolloutGroup
from trainer_bridge.score import losses
from trainer_bridge.score.groups import score_group

CLIP_LOW, CLIP_HIGH, RATIO_CAP = 0.2, 0.28, 4.0
MAX_GRAD_NORM = 1.0


class GRPO:
    """RolloutGroup-relative advantages, the clipped surrogate as a mean over tokens, no KL term.

    π_old is what the server says it sampled from, token by token, whichever weights those were; a token's loss counts
    lag_decay ** lag, and nothing beyond max_lag. The ratio is truncated, since the clip alone doesn't bound it for
    answers that are worse than their group's mean.
    """

    def __init__(
        self, policy: PreTrainedModel, optimizer: torch.optim.Optimizer, *, max_lag: int, lag_decay: float
    ) -> None:
        self.policy = policy
        self._optimizer = optimizer
        self._max_lag, self._lag_decay = max_lag, lag_decay

    def step(
        self, groups: Sequence[RolloutGroup], lags: Sequence[Tensor], current_gap: Callable[[], float | None]
    ) -> dict[str, float]:
        """One optimizer step; a forward and a backward pass for each group. Returns its metrics.

        `lags` (T,) say of each group's tokens how many commits they are behind; `current_gap` is called just before the
        update, and gives a metric of the weights as they were published.
        """
        total = sum(group.tokens for group in groups)
        seen: list[tuple[Tensor, ...]] = []
        loss_sum = held = 0.0
        for group, lag in zip(groups, lags, strict=True):
            scores = score_group(self.policy, group)
            old = torch.tensor(group.logprobs)
            advantages = losses.token_advantages(group.rewards, group.lengths)
            weights = losses.lag_weights(lag, max_lag=self._max_lag, decay=self._lag_decay)
            surrogate = losses.clipped_surrogate(
                scores.logprobs, old, advantages, low=CLIP_LOW, high=CLIP_HIGH, cap=RATIO_CAP
            )
            loss = (weights * surrogate).sum() / total
            loss.backward()
            new = scores.logprobs.detach()
            seen.append((new, old, scores.entropies, lag))
            loss_sum += float(loss.detach())
            held += float(losses.clipped(new, old, advantages, low=CLIP_LOW, high=CLIP_HIGH).sum())
        gap = current_gap()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        tokens = [torch.cat(column) for column in zip(*seen, strict=True)]
        return metrics.of_tokens(*tokens, cap=RATIO_CAP, current_gap=gap) | {
            "policy/loss": loss_sum,
            "policy/grad_norm": float(norm),
            "policy/clipped_share": held / total,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.policy.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
