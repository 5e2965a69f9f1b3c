"""The formulas of the losses, on flat rows of tokens; docs/training.md derives them and names their sources.

A token's `old` logprob is always the server's, of the distribution that it was drawn from, and `new` that of the
trainer's own forward pass (`groups.score_group`): the ratio of the two corrects for stale weights, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer_bridge.score import replay


def group_advantages(rewards: Sequence[float]) -> Tensor:
    """(r - mean) / (std + 1e-4) over a group's rewards, (n,) float32; exactly zero where they are the same.

    Computed in float64. Shao et al. 2024, "DeepSeekMath" (GRPO), arXiv:2402.03300.
    """
    r = torch.tensor(rewards, dtype=torch.float64)
    if not len(r) or r.min() == r.max():
        return torch.zeros(len(r))
    return ((r - r.mean()) / (r.std(correction=0) + 1e-4)).float()


def token_advantages(rewards: Sequence[float], lengths: Sequence[int]) -> Tensor:
    """Each answer's advantage in its group (`group_advantages`), for each of its tokens: (sum of lengths,) float32."""
    return group_advantages(rewards).repeat_interleave(torch.tensor(lengths, dtype=torch.long))


def clipped_surrogate(new: Tensor, old: Tensor, advantages: Tensor, *, low: float, high: float, cap: float) -> Tensor:
    """Loss of each token, (T,): -min(ρA, clip(ρ, 1 - low, 1 + high)·A), with ρ = min(exp(new - old), cap).

    Schulman et al. 2017, "Proximal policy optimization", arXiv:1707.06347; the wider upper clip is that of Yu et al.
    2025, "DAPO", arXiv:2503.14476. The cap (Ionides 2008) bounds what the clip leaves free: tokens of negative
    advantage that have become likelier. Raises ValueError for a cap inside the clip range.
    """
    if cap <= 1 + high:
        raise ValueError(f"cap={cap} must be above the clip range, 1 + high = {1 + high:g}, or it clips first")
    ratio = replay.importance_ratios(new, old, cap=cap)
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def clipped(new: Tensor, old: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """Bool (T,): tokens that the clip of `clipped_surrogate` keeps from moving further."""
    ratio = replay.importance_ratios(new, old)
    return torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - low) & (advantages != 0)


def lag_weights(lags: Tensor, *, max_lag: int, decay: float = 1.0) -> Tensor:
    """A weight for each token, decay ** lag, and 0 for those more than `max_lag` versions behind.

    `lags` (T,) float32: versions between the weights that sampled a token and those that train on it; inf where the
    version is unknown, which weighs nothing. decay = 1 only drops. Raises ValueError for a decay outside (0, 1].
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1], got {decay}")
    return torch.where(lags <= max_lag, decay ** lags.clamp(max=max_lag), 0.0)


def gae(rewards: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (T,) each, of one answer that ends after its T tokens; rewards and values are (T,).

    values[t] is the estimate before token t; after the last one it is 0. Schulman et al. 2015, "High-dimensional
    continuous control using generalized advantage estimation", arXiv:1506.02438.
    """
    following = torch.cat([values[1:], values.new_zeros(1)])
    errors = rewards + gamma * following - values
    advantages = torch.empty_like(values)
    ahead = values.new_zeros(())
    for t in range(len(values) - 1, -1, -1):
        ahead = errors[t] + gamma * lam * ahead
        advantages[t] = ahead
    return advantages, advantages + values


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Loss of each token, (T,): half the larger squared error of `values` and of `values` kept within `clip` of the
    old ones (PPO's reference implementation)."""
    kept = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns) ** 2, (kept - returns) ** 2)


def k1(new: Tensor, old: Tensor) -> Tensor:
    """old - new, (T,): over tokens drawn from `old`, its mean estimates KL(old ‖ new): unbiased, of large variance.

    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    return old - new


def k3(new: Tensor, old: Tensor) -> Tensor:
    """(ρ - 1) - log ρ with ρ = exp(new - old), (T,): unbiased like k1, never negative, and of less variance."""
    return torch.expm1(new - old) - (new - old)


def entropies(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) along the last dimension, (…,) float32; differentiable.

    Tokens of logit -inf add nothing, to it or to the gradient.
    """
    logprobs = logits.float().log_softmax(-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -math.inf, 0.0)).sum(-1)
