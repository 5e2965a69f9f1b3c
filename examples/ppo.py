"""Asynchronous PPO with a value head on rollout's bridge; the loop, the flags and the restarts are those of grpo.py.

python examples/ppo.py path/to/model --output ppo-output [--url http://127.0.0.1:8000] [--exact] [--top-p 0.8]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import arguments, load_policy, run
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer_bridge.loop import metrics
from trainer_bridge.rollouts import RolloutGroup
from trainer_bridge.score import losses
from trainer_bridge.score.groups import score_group

CLIP, RATIO_CAP = 0.2, 4.0
VALUE_CLIP, VALUE_WEIGHT = 0.2, 0.1
GAMMA, LAMBDA = 1.0, 0.95
EPOCHS = 2
MAX_GRAD_NORM = 1.0


@dataclass
class Batch:
    """A group and what its tokens, (T,) each, are trained towards."""

    group: RolloutGroup
    old: Tensor
    weights: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


class PPO:
    """A policy and, on its final hidden states, a linear value head. Only the policy is pushed.

    Every step makes EPOCHS passes over its groups, one optimizer step a group. The ratio's denominator is the server's
    logprob throughout; values and advantages are those of the step's beginning.
    """

    def __init__(self, policy: PreTrainedModel, *, learning_rate: float, max_lag: int, lag_decay: float) -> None:
        self.policy = policy
        self.value_head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self._parameters = [*policy.parameters(), *self.value_head.parameters()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._max_lag, self._lag_decay = max_lag, lag_decay
        self._rng = random.Random(0)

    def step(
        self, groups: Sequence[RolloutGroup], lags: Sequence[Tensor], current_gap: Callable[[], float | None]
    ) -> dict[str, float]:
        """Score the groups, then train on them."""
        batches, tokens = self._batches(groups, lags)
        found = metrics.of_tokens(*tokens, cap=RATIO_CAP, current_gap=current_gap())
        updates = []
        for _ in range(EPOCHS):
            updates += [self._update(batch) for batch in self._rng.sample(batches, len(batches))]
        return found | {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}

    @torch.no_grad()
    def _batches(self, groups: Sequence[RolloutGroup], lags: Sequence[Tensor]) -> tuple[list[Batch], list[Tensor]]:
        """The groups with their advantages, whitened over all tokens; and what metrics ask for."""
        batches, seen = [], []
        for group, lag in zip(groups, lags, strict=True):
            new, values, entropies = self._score(group)
            old = torch.tensor(group.logprobs)
            advantages, returns = [], []
            for reward, estimates in zip(group.rewards, values.split(group.lengths), strict=True):
                rewards = torch.zeros_like(estimates)
                rewards[-1] = reward  # for the whole answer, at its end
                advantage, value = losses.gae(rewards, estimates, gamma=GAMMA, lam=LAMBDA)
                advantages.append(advantage)
                returns.append(value)
            weights = losses.lag_weights(lag, max_lag=self._max_lag, decay=self._lag_decay)
            batches.append(Batch(group, old, weights, values, torch.cat(advantages), torch.cat(returns)))
            seen.append((new, old, entropies, lag))
        everywhere = torch.cat([batch.advantages for batch in batches])
        for batch in batches:
            batch.advantages = (batch.advantages - everywhere.mean()) / (everywhere.std(correction=0) + 1e-4)
        return batches, [torch.cat(column) for column in zip(*seen, strict=True)]

    def _update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on one group."""
        new, values, _ = self._score(batch.group)
        surrogate = losses.clipped_surrogate(new, batch.old, batch.advantages, low=CLIP, high=CLIP, cap=RATIO_CAP)
        policy_loss = (batch.weights * surrogate).mean()
        value_loss = losses.clipped_value_loss(values, batch.values, batch.returns, clip=VALUE_CLIP)
        value_loss = (batch.weights * value_loss).mean()
        (policy_loss + VALUE_WEIGHT * value_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        held = losses.clipped(new.detach(), batch.old, batch.advantages, low=CLIP, high=CLIP).float().mean()
        return {
            "policy/loss": float(policy_loss.detach()),
            "policy/value_loss": float(value_loss.detach()),
            "policy/clipped_share": float(held),
            "policy/grad_norm": float(norm),
        }

    def _score(self, group: RolloutGroup) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs, values and entropies of the group's tokens, (T,) each."""
        scores = score_group(self.policy, group, hidden=True)
        assert scores.hidden is not None
        return scores.logprobs, self.value_head(scores.hidden).squeeze(-1), scores.entropies

    def state_dict(self) -> dict[str, Any]:
        """Policy, value head and optimizer."""
        return {
            "policy": self.policy.state_dict(),
            "value_head": self.value_head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.policy.load_state_dict(state["policy"])
        self.value_head.load_state_dict(state["value_head"])
        self._optimizer.load_state_dict(state["optimizer"])


def main() -> None:
    """Train, from the checkpoint if there is one."""
    args: argparse.Namespace = arguments(__doc__).parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    policy = load_policy(args)
    run("ppo", args, PPO(policy, learning_rate=args.learning_rate, max_lag=args.max_lag, lag_decay=args.lag_decay))


if __name__ == "__main__":
    main()
