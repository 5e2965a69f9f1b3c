"""The formulas of the losses against definitions spelled out token by token, and against closed forms."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from trainer_bridge.score import losses, replay

REALS = st.floats(-3, 3)


def test_advantages_rank_a_group_and_ignore_one_without_a_difference() -> None:
    assert losses.group_advantages([1.0, 0.0, 0.5, 0.5]).tolist() == pytest.approx([2**0.5, -(2**0.5), 0, 0], abs=1e-3)
    assert losses.group_advantages([0.7] * 4).tolist() == pytest.approx([0] * 4, abs=1e-3)


@pytest.mark.parametrize("rewards", [[0.1] * 7, [10000.1] * 6, [-1e-9] * 3, [0.0], []])
def test_equal_rewards_gave_advantages_out_of_rounding(rewards: list[float]) -> None:
    assert losses.group_advantages(rewards).tolist() == [0.0] * len(rewards)
    assert losses.token_advantages(rewards, [2] * len(rewards)).tolist() == [0.0] * 2 * len(rewards)


@given(rewards=st.lists(st.floats(-1e5, 1e5), min_size=2, max_size=9))
def test_advantages_of_large_rewards_are_those_of_exact_arithmetic(rewards: list[float]) -> None:
    exact = [Fraction(r) for r in rewards]
    mean = sum(exact) / len(exact)
    spread = math.sqrt(sum((r - mean) ** 2 for r in exact) / len(exact)) + 1e-4
    expected = [float(r - mean) / spread for r in exact]
    assert losses.group_advantages(rewards).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_token_has_the_advantage_of_its_answer() -> None:
    spread = 2**0.5 / (1 + 1e-4 * 2 * 2**0.5)
    assert losses.token_advantages([1.0, 0.0, 0.5, 0.5], [1, 3, 0, 2]).tolist() == pytest.approx(
        [spread, -spread, -spread, -spread, 0, 0]
    )


@given(old=st.floats(-8, 0), move=REALS, advantage=st.floats(-2, 2).filter(lambda a: abs(a) > 1e-3))
def test_the_loss_is_the_clipped_surrogate_and_its_gradient_stops_at_the_clip(
    old: float, move: float, advantage: float
) -> None:
    new = torch.tensor([old + move], dtype=torch.float64, requires_grad=True)
    ratio = math.exp(new.item() - old)
    assume(all(abs(ratio - border) > 1e-3 for border in (0.8, 1.28, 4.0)))
    before, gain = torch.tensor([old], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    loss = losses.clipped_surrogate(new, before, gain, low=0.2, high=0.28, cap=4.0)
    loss.sum().backward()
    if advantage > 0:  # an improvement is worth something until the ratio leaves the trust region above
        value, moves = min(ratio, 1.28) * advantage, ratio < 1.28
    else:  # a worse token is pushed down until it leaves it below, with a weight of at most 4
        value, moves = min(max(ratio, 0.8), 4.0) * advantage, 0.8 < ratio < 4.0
    assert loss.item() == pytest.approx(-value)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(-ratio * advantage if moves else 0.0)
    held = losses.clipped(new.detach(), before, gain, low=0.2, high=0.28)
    assert held.item() == (not moves and ratio < 4.0 if advantage < 0 else not moves)


def test_a_cap_inside_the_clip_range_is_refused() -> None:
    row = torch.zeros(1)
    with pytest.raises(ValueError, match=r"cap=1\.2 must be above the clip range, 1 \+ high = 1\.28"):
        losses.clipped_surrogate(row, row, row, low=0.2, high=0.28, cap=1.2)


def test_tokens_weigh_less_with_every_version_and_nothing_beyond_the_limit() -> None:
    lags = torch.tensor([0.0, 1.0, 2.0, 3.0, math.inf])
    assert losses.lag_weights(lags, max_lag=2).tolist() == [1, 1, 1, 0, 0]
    assert losses.lag_weights(lags, max_lag=2, decay=0.5).tolist() == [1, 0.5, 0.25, 0, 0]
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\], got 0"):
        losses.lag_weights(lags, max_lag=2, decay=0)


@given(steps=st.lists(st.tuples(REALS, REALS), min_size=1, max_size=8), gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
def test_advantages_are_the_weighted_mean_of_all_bootstrapped_returns(
    steps: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    """The definition: (1 - λ) Σ λ^(n-1) (n-step return - value), the rest of the weight on the whole return."""
    rewards, values = (torch.tensor(column, dtype=torch.float64) for column in zip(*steps, strict=True))
    got, returns = losses.gae(rewards, values, gamma=gamma, lam=lam)
    for t in range(len(steps)):
        left = len(steps) - t
        expected = 0.0
        for n in range(1, left + 1):
            value_after = values[t + n].item() if n < left else 0.0
            n_step = sum(gamma**i * rewards[t + i].item() for i in range(n)) + gamma**n * value_after
            weight = lam ** (n - 1) * (1 - lam) if n < left else lam ** (n - 1)
            expected += weight * (n_step - values[t].item())
        assert got[t].item() == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(returns, got + values)


def test_a_value_that_has_moved_far_gets_no_gradient_towards_where_it_went() -> None:
    old, returns = torch.zeros(3), torch.ones(3)
    values = torch.tensor([0.1, 0.5, -0.5], requires_grad=True)
    loss = losses.clipped_value_loss(values, old, returns, clip=0.2)
    assert loss.tolist() == pytest.approx([0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 1.5**2])
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, -1.5])


def test_k1_and_k3_average_to_the_kl_divergence() -> None:
    """Exactly: the mean over tokens drawn from π_old is a sum over the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    expected = torch.nn.functional.kl_div(new, old, log_target=True, reduction="sum")
    for estimate in (losses.k1(new, old), losses.k3(new, old)):
        assert (old.exp() * estimate).sum().item() == pytest.approx(expected.item())
    assert (losses.k3(new, old) >= 0).all()
    assert (losses.k1(new, old) < 0).any()


def test_entropy_is_that_of_torch_also_where_tokens_are_excluded() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(losses.entropies(logits), expected)
    logits[:, 5:] = -math.inf
    torch.testing.assert_close(
        losses.entropies(logits), torch.distributions.Categorical(logits=logits[:, :5]).entropy()
    )


def test_entropies_had_no_gradient_where_a_token_is_excluded() -> None:
    kept = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.distributions.Categorical(logits=kept).entropy().sum().backward()
    assert kept.grad is not None
    logits = torch.full((3, 20), -math.inf)
    logits[:, :5] = kept.detach()
    logits.requires_grad_()
    losses.entropies(logits).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[:, :5], kept.grad)
    assert (logits.grad[:, 5:] == 0).all()


def test_every_loss_has_a_gradient_where_tokens_are_excluded() -> None:
    """The same as of the tokens that are left alone, for all that is computed from logits of -inf."""
    kept = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    logits = torch.cat([kept, torch.full((4, 3), -math.inf)], 1)
    old, ones, ids = torch.full((4,), -1.5), torch.ones(4), [0, 1, 2, 4]
    for table in (logits, kept):
        new = replay.token_logprobs(table, ids)
        replayed = replay.logprobs(table, ids, sampling_params={"temperature": 0.7, "frequency_penalty": 0.3})
        terms = [losses.k1(new, old), losses.k3(replayed, old), losses.entropies(table)]
        terms += [losses.clipped_surrogate(new, old, ones, low=0.2, high=0.28, cap=4)]
        (grad,) = torch.autograd.grad(torch.stack(terms).sum(), kept)
        if table is logits:
            expected = grad
    assert torch.isfinite(grad).all()
    torch.testing.assert_close(grad, expected)
