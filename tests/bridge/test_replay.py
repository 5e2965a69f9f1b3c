"""The trainer's side of sampling: what the engine reported, recomputed from logits."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import pytest
import torch

from rollout.outputs import mask_ids
from rollout.sampling.params import SamplingParams
from rollout.sampling.rows import RequestFilters, SamplingRow
from rollout.sampling.sampler import Sampler
from trainer_bridge.client import Span
from trainer_bridge.score import replay

VOCAB, STEPS = 40, 12
PROMPT = [3, 1, 4, 1, 5]


def sample(params: SamplingParams) -> tuple[torch.Tensor, list[int], list[float], list[list[int] | None]]:
    """Logits, tokens, processed logprobs and masks of one choice of `STEPS` tokens."""
    logits = torch.randn(STEPS, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    params.logprobs = 0
    engine = Sampler("processed_logprobs")
    tokens: list[int] = []
    values: list[float] = []
    masks: list[list[int] | None] = []
    for step in logits:
        filters = RequestFilters(params, PROMPT, [[tokens[-1], 7]] if tokens else [], (2,), want_mask=True)
        row = SamplingRow(filters, 11, 0, tokens)
        sampled = engine.sample(step[None], [row])[0]
        tokens.append(sampled.token_id or 0)
        values.append((sampled.logprobs or [])[0].logprob)
        masks.append(None if sampled.sampling_mask is None else mask_ids(sampled.sampling_mask).tolist())
    return logits, tokens, values, masks


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0.0},
        {"top_k": 5, "min_p": 0.05, "logit_bias": {"3": 1.5, "9": -2.0}},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.6, "temperature": 1.4},
        {"min_tokens": 6, "allowed_token_ids": list(range(0, 40, 2)), "top_p": 0.9},
    ],
)
def test_logprobs_are_the_servers_in_every_bit(params: dict[str, Any]) -> None:
    as_sampled = dict(params)
    if "logit_bias" in params:
        as_sampled["logit_bias"] = {int(t): b for t, b in params["logit_bias"].items()}
    logits, tokens, values, masks = sample(SamplingParams(**as_sampled))
    sent = {**params, "seed": None}
    result = replay.logprobs(logits, tokens, sampling_params=sent, sampling_mask=masks, prompt_token_ids=PROMPT)
    assert result.tolist() == values


def test_the_mask_is_kept_where_new_weights_would_choose_another() -> None:
    logits, tokens, _, masks = sample(SamplingParams(top_k=3))
    moved = logits.flip(-1)  # under these, the recorded tokens are outside the top 3
    result = replay.logprobs(moved, tokens, sampling_params={"top_k": 3}, sampling_mask=masks)
    for t, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
        assert mask is not None
        total = math.log(sum(math.exp(moved[t, i].item()) for i in mask))
        assert result[t].item() == pytest.approx(moved[t, token].item() - total, abs=1e-5)


def test_gradient_is_that_of_a_softmax_over_the_mask() -> None:
    logits, tokens, _, masks = sample(SamplingParams(temperature=0.5, top_p=0.7))
    logits.requires_grad_()
    result = replay.logprobs(logits, tokens, sampling_params={"temperature": 0.5, "top_p": 0.7}, sampling_mask=masks)
    result.sum().backward()
    expected = torch.zeros(STEPS, VOCAB)
    for t, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
        kept = logits[t, mask].detach().clone().requires_grad_()
        (kept / 0.5).log_softmax(-1)[(mask or []).index(token)].backward()
        assert kept.grad is not None
        expected[t, mask] = kept.grad
    assert logits.grad is not None
    assert torch.allclose(logits.grad, expected, atol=1e-6)


def test_gradient_passes_through_bias_and_penalties() -> None:
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {3: 1.0}}
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = [2, 3, 2]

    def summed(x: torch.Tensor) -> torch.Tensor:
        return replay.logprobs(x, ids, sampling_params=params, prompt_token_ids=[1]).sum()

    summed(logits).backward()
    assert logits.grad is not None
    step = 1e-2
    for t, token in [(0, 1), (1, 2), (2, 3), (2, 5)]:
        nudge = torch.zeros_like(logits)
        nudge[t, token] = step
        slope = (summed(logits + nudge) - summed(logits - nudge)) / (2 * step)
        assert logits.grad[t, token].item() == pytest.approx(slope.item(), abs=2e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": [1]}, "2 rows of logits need as many token_ids"),
        ({"sampling_mask": [None]}, "and 1 masks"),
        ({"sampling_params": {"top_p": 0.9, "min_tokens": 1}}, "min_tokens, top_p dropped tokens"),
        ({"sampling_params": {"repetition_penalty": 2}}, "pass prompt_token_ids"),
        ({"sampling_mask": [[1, 2], [0, 3]]}, "token 2 at step 1 is outside its sampling_mask of 2"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay.logprobs(torch.zeros(2, 5), **{"token_ids": [1, 2], **arguments})


def test_a_misspelt_parameter_was_ignored() -> None:
    with pytest.raises(ValueError, match="'temprature' is no sampling parameter: did you mean temperature"):
        replay.logprobs(torch.zeros(2, 5), [1, 2], sampling_params={"temprature": 0.5})


@pytest.mark.parametrize("params", [{}, {"frequency_penalty": 0.1}])
def test_memory_grew_with_the_square_of_the_length(params: dict[str, float]) -> None:
    """A row for each token used to hold all ids before it: 256 MB for these 8,000."""

    def peak(length: int) -> int:
        logits, ids = torch.zeros(length, 4), [t % 4 for t in range(length)]
        tracemalloc.start()
        replay.logprobs(logits, ids, sampling_params=params)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(10)  # imports and caches
    assert peak(8000) < min(32e6, 3 * peak(4000))


def test_blocks_of_rows_are_one_answer() -> None:
    """Values and gradients across the border of a block, whose rows see all tokens before them."""
    length = replay._BLOCK_ROWS + 3
    logits = torch.randn(length, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ids, params = [t % 5 for t in range(length)], {"presence_penalty": 0.5, "temperature": 0.8}
    got = replay.logprobs(logits, ids, sampling_params=params)
    moved = torch.stack(
        [row - 0.5 * torch.tensor([float(i in ids[:t]) for i in range(6)]) for t, row in enumerate(logits)]
    )
    expected = (moved / 0.8).log_softmax(-1)[range(length), ids]
    torch.testing.assert_close(got, expected)
    weights = torch.arange(length) / length
    grads = [torch.autograd.grad((weights * values).sum(), logits)[0] for values in (got, expected)]
    torch.testing.assert_close(*grads)
    with pytest.raises(ValueError, match=f"token {ids[-1]} at step {length - 1} is outside"):
        replay.logprobs(logits, ids, sampling_mask=[*[None] * (length - 1), [5]])
    assert replay.logprobs(torch.zeros(0, 6), []).shape == (0,)


def test_a_list_of_none_says_that_no_step_was_filtered() -> None:
    result = replay.logprobs(torch.zeros(2, 5), [1, 2], sampling_params={"min_tokens": 1}, sampling_mask=[None, None])
    assert result.tolist() == pytest.approx([-math.log(5)] * 2)


def test_a_greedy_step_has_logprob_0_without_a_mask() -> None:
    assert replay.logprobs(torch.randn(2, 5), [1, 2], sampling_params={"temperature": 0, "top_p": 0.5}).tolist() == [
        0,
        0,
    ]


def test_token_logprobs_and_ratios() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]], dtype=torch.bfloat16).float().requires_grad_()
    new = replay.token_logprobs(logits, [0, 1])
    assert new.exp().tolist() == pytest.approx([0.25, 0.5], abs=2e-3)
    old = (new - torch.tensor([math.log(4.0), math.log(0.5)])).detach().requires_grad_()
    ratios = replay.importance_ratios(new, old)
    assert ratios.tolist() == pytest.approx([4.0, 0.5])
    ratios.sum().backward()
    assert old.grad is None
    assert logits.grad is not None
    assert replay.importance_ratios(new, old, cap=2.0).tolist() == pytest.approx([2.0, 0.5])


SPANS = [
    {"version": "v7", "start": 0, "end": 2, "epoch": 4, "kv": "current"},
    {"version": "v7", "start": 2, "end": 3, "epoch": 5, "kv": "mixed"},
    {"version": "v8", "start": 3, "end": 6, "epoch": 7, "kv": "mixed"},
]


def test_spans_per_token() -> None:
    assert replay.versions_per_token(SPANS, 6) == ["v7", "v7", "v7", "v8", "v8", "v8"]
    assert replay.epochs_per_token(SPANS, 6) == [4, 4, 5, 7, 7, 7]
    assert replay.staleness(SPANS, 6, 8) == [4, 4, 3, 1, 1, 1]
    assert replay.versions_per_token([], 0) == []


@pytest.mark.parametrize(
    ("spans", "length"),
    [(SPANS, 5), (SPANS, 7), (SPANS[1:], 6), (SPANS[::2], 6), (SPANS[::-1], 6), ([], 1), ([{**SPANS[0], "end": 0}], 0)],
)
def test_spans_that_do_not_tile_are_refused(spans: list[dict[str, Any]], length: int) -> None:
    with pytest.raises(ValueError, match="must tile"):
        replay.versions_per_token(spans, length)


def test_a_server_without_epochs_is_named_as_the_cause() -> None:
    with pytest.raises(ValueError, match="no 'epoch'"):
        replay.epochs_per_token([{"version": "v", "start": 0, "end": 1}], 1)


def test_the_clients_spans_are_as_good_as_the_answers() -> None:
    spans = [Span("a", 0, 2, 3), Span("b", 2, 3, 4)]
    assert replay.versions_per_token(spans, 3) == ["a", "a", "b"]
    assert replay.staleness(spans, 3, 5) == [2, 2, 1]
    with pytest.raises(ValueError, match="no 'epoch'"):
        replay.epochs_per_token([Span("a", 0, 2)], 2)  # of a server that doesn't report it
