"""The sampler against references written out in float64, one row at a time, with full sorts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.outputs import FinishReason, TokenLogprob, TokenOutput, mask_ids
from rollout.sampling import filters, sampler
from rollout.sampling.filters import filter_logits, is_filtered, top_tokens
from rollout.sampling.params import SamplingParams
from rollout.sampling.rows import RequestFilters, Rows, SamplingRow
from rollout.sampling.sampler import Sampler, draw, philox4x32, uniforms
from tests.support.trace import count_lines

VOCAB = 70  # more than the narrowest look at the likeliest tokens
INF = math.inf


class Row(SamplingRow):
    """A row that remembers what it was made from, for the reference."""

    def __init__(self, filters: RequestFilters, seed: int, prompt: Any, output: Any, bad: Any, eos: Any) -> None:
        super().__init__(filters, seed, 0, output)
        self.params, self.prompt, self.output, self.bad, self.eos = filters.params, prompt, [*output], bad, eos


def make_row(seed: int = 0, *, prompt: Any = (), output: Any = (), bad: Any = (), eos: Any = (), **params: Any) -> Row:
    filters = RequestFilters(SamplingParams(**params), list(prompt), bad, eos, want_mask=True)
    return Row(filters, seed, prompt, output, bad, eos)


def mask_of(sampled: TokenOutput) -> list[int] | None:
    return None if sampled.sampling_mask is None else mask_ids(sampled.sampling_mask).tolist()


def reference_filter(logits: list[float], row: Row) -> dict[int, float]:
    """What is left of a row, by token, in float64."""
    p, output = row.params, row.output
    left = {t: x for t, x in enumerate(logits) if p.allowed_token_ids is None or t in p.allowed_token_ids}
    if len(output) < p.min_tokens:
        left = {t: x for t, x in left.items() if t not in row.eos and t not in p.stop_token_ids}
    for t, bias in (p.logit_bias or {}).items():
        if t in left:
            left[t] += bias
    for *start, end in row.bad:
        if len(start) <= len(output) and output[len(output) - len(start) :] == start:
            left.pop(end, None)
    for t in left:
        if t in output or t in row.prompt:
            left[t] = left[t] / p.repetition_penalty if left[t] > 0 else left[t] * p.repetition_penalty
        left[t] -= p.frequency_penalty * output.count(t) + p.presence_penalty * (t in output)
    ranked = sorted(left, key=lambda t: (-left[t], t))
    if p.temperature == 0:
        return {t: left[t] for t in ranked[:1]}
    left = {t: x / p.temperature for t, x in left.items()}
    best = max(left.values(), default=0.0)
    ranked = [t for t in ranked if left[t] >= best + (math.log(p.min_p) if p.min_p else -INF)]
    if p.top_k > 0:
        ranked = ranked[: p.top_k]
    weights = [math.exp(left[t] - best) for t in ranked]
    kept, before = [], 0.0
    for t, weight in zip(ranked, weights, strict=True):
        if p.top_p == 1 or before < p.top_p * sum(weights):
            kept.append(t)
        before += weight
    return {t: left[t] for t in kept}


# Logits on a coarse grid tie often; the limits are such that no sum of a few equal tokens falls on them.
grid = st.integers(-24, 24).map(lambda i: i / 4)
logit_rows = st.integers(0, 2**32 - 1).map(lambda s: (np.random.default_rng(s).integers(-24, 25, VOCAB) / 4).tolist())
tokens = st.integers(0, VOCAB - 1)
some = st.lists(tokens, max_size=6)


@st.composite
def requests(draw_: st.DrawFn) -> Row:
    def maybe(strategy: st.SearchStrategy[Any], off: Any) -> Any:
        return draw_(st.one_of(st.just(off), strategy))

    params = {
        "temperature": draw_(st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.7])),
        "top_p": maybe(st.sampled_from([1e-9, 0.137, 0.613, 0.90017]), 1.0),
        "top_k": maybe(st.integers(1, VOCAB + 5), 0),
        "min_p": maybe(st.sampled_from([0.013, 0.31, 1.0]), 0.0),
        "presence_penalty": maybe(st.sampled_from([-1.5, 0.75]), 0.0),
        "frequency_penalty": maybe(st.sampled_from([-0.5, 1.25]), 0.0),
        "repetition_penalty": maybe(st.sampled_from([0.5, 2.0]), 1.0),
        "min_tokens": maybe(st.integers(1, 8), 0),
        "stop_token_ids": maybe(some, []),
        "logit_bias": maybe(st.dictionaries(tokens, grid, min_size=1, max_size=4), None),
        "allowed_token_ids": maybe(st.integers(1, 20).map(lambda stride: list(range(0, VOCAB, stride))), None),
        "logprobs": maybe(st.sampled_from([0, 1, 3, -1]), None),
    }
    bad = maybe(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3), [])
    output = draw_(st.lists(st.integers(0, 3), max_size=6)) + draw_(some)
    seed = draw_(st.integers(0, 2**63 - 1))
    return make_row(
        seed, prompt=draw_(some), output=output, bad=bad, eos=draw_(st.sampled_from([(), (5, 900)])), **params
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(logit_rows, requests()), min_size=1, max_size=4))
def test_filters_equal_the_reference(batch: list[tuple[list[float], Row]]) -> None:
    rows = [row for _, row in batch]
    filtered = filter_logits(torch.tensor([x for x, _ in batch]), rows)
    for (logits, row), result in zip(batch, filtered.tolist(), strict=True):
        left = {t: x for t, x in enumerate(result) if x > -INF}
        expected = reference_filter(logits, row)
        assert left.keys() == expected.keys()
        assert left == pytest.approx(expected, abs=1e-4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(logit_rows, requests()), min_size=2, max_size=4), st.sampled_from(["raw", "processed"]))
def test_a_row_does_not_depend_on_its_batch(batch: list[tuple[list[float], Row]], mode: str) -> None:
    engine = Sampler(f"{mode}_logprobs")  # type: ignore[arg-type]
    logits, rows = torch.tensor([x for x, _ in batch]), [row for _, row in batch]
    together = engine.sample(logits, rows)
    alone = [engine.sample(logits[r : r + 1], [row])[0] for r, row in enumerate(rows)]
    assert together == alone  # floats and all


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_wide_row_does_not_depend_on_its_batch_or_on_threads(mode: Any) -> None:
    logits = torch.randn(17, 50_001, generator=torch.Generator().manual_seed(0)) * 3
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.99}, {"temperature": 0.3}, {"temperature": 0.7, "min_p": 0.01}]
    rows = [make_row(r, logprobs=2, **kinds[r % 4]) for r in range(17)]
    engine = Sampler(mode)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(engine.sample(logits, rows))
            results.append([engine.sample(logits[r : r + 1], [row])[0] for r, row in enumerate(rows)])
    finally:
        torch.set_num_threads(threads)
    assert all(result == results[0] for result in results)


@settings(max_examples=100, deadline=None)
@given(logit_rows, st.integers(1, VOCAB), st.sampled_from([0.137, 0.613, 0.90017, 1.0]))
def test_support_is_the_same_however_few_candidates_are_looked_at(logits: list[float], k: int, p: float) -> None:
    rows = [make_row(top_k=k, top_p=p), make_row(top_p=p)]
    supports = []
    for widths in ((), (1, 2, 3), (5, 69)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(filters, "WIDTHS", widths)
            supports.append(filter_logits(torch.tensor([logits, logits]), rows))
    assert all(torch.equal(support, supports[0]) for support in supports)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from([-INF, 0.0, 1.0, 2.5]), min_size=9, max_size=9), min_size=1, max_size=3))
def test_top_tokens_break_ties_by_id(logits: list[list[float]]) -> None:
    for k in range(1, 11):
        values, ids = top_tokens(torch.tensor(logits), k)
        for row, row_values, row_ids in zip(logits, values.tolist(), ids.tolist(), strict=True):
            expected = sorted(range(9), key=lambda t: (-row[t], t))[:k]
            assert row_ids == expected
            assert row_values == [row[t] for t in expected]


def test_min_p_comes_before_top_p() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for top_p, mask in [(0.5, [0]), (0.6, [0, 1])]:  # of the two that min-p leaves, the first holds 4/7
        assert mask_of(Sampler().sample(logits, [make_row(min_p=0.6, top_p=top_p)])[0]) == mask


def test_input_logits_stay_as_they_are() -> None:
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    Sampler().sample(logits, [make_row(top_k=3, logit_bias={1: 2.0}, temperature=t) for t in (0, 1, 0.5)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("params", "mask"),
    [
        ({}, None),
        ({"temperature": 0.3, "repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}, None),
        ({"top_k": 8, "top_p": 1.0}, None),  # all of the vocabulary
        ({"min_tokens": 2, "eos": (3,), "output": [1, 1]}, None),  # no longer at work
        ({"min_tokens": 2}, None),  # nothing to mask
        ({"bad": [[5, 6]], "output": [5, 4]}, None),  # no word is about to end
        ({"temperature": 0.0}, [7]),
        ({"top_k": 3}, [5, 6, 7]),
        ({"top_p": 0.75}, [6, 7]),
        ({"min_p": 0.3}, [6, 7]),
        ({"min_tokens": 2, "eos": (3,), "stop_token_ids": [7], "output": [1]}, [0, 1, 2, 4, 5, 6]),
        ({"bad": [[5, 6], [2]], "output": [4, 5]}, [0, 1, 3, 4, 5, 7]),
        ({"bad": [[5, 6]], "prompt": [5]}, None),  # a word is not matched against the prompt
        ({"allowed_token_ids": [4, 2]}, [2, 4]),
        ({"logit_bias": {2: -3.0}}, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_sampling_mask(params: dict[str, Any], mask: list[int] | None) -> None:
    row = make_row(**params)
    logits = torch.arange(8.0)[None]
    assert is_filtered(row, 8) == (mask is not None)
    sampled = Sampler().sample(logits, [row])[0]
    assert mask_of(sampled) == mask
    assert mask is None or sampled.token_id in mask
    row.filters.want_mask = False
    assert Sampler().sample(logits, [row])[0].sampling_mask is None


def test_masks_are_read_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    filtered = torch.zeros(6, 8).masked_fill_(torch.arange(8) > torch.arange(6)[:, None], -math.inf)
    taken: list[list[int]] = []

    def take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        taken.append(rows)
        return logits[rows]

    monkeypatch.setattr(sampler, "MASK_ENTRIES", 20)
    monkeypatch.setattr(sampler, "_take", take)
    masks = [mask.tolist() for mask in sampler._masks(filtered, [5, 0, 3, 2, 1])]
    assert masks == [[*range(last + 1)] for last in (5, 0, 3, 2, 1)]
    assert taken == [[5, 0], [3, 2], [1]]


@pytest.mark.parametrize(
    ("params", "filtered"),
    [
        ({}, False),
        ({"temperature": 0.5}, False),
        ({"top_k": VOCAB}, False),
        ({"top_k": 3}, True),
        ({"top_k": VOCAB - 1}, True),
        ({"top_p": 0.9}, True),
        ({"presence_penalty": 0.1}, True),
        ({"temperature": 0.0}, True),
    ],
)
def test_a_batch_is_drawn_in_one_pass_where_no_row_asks_for_more_than_a_temperature(
    params: dict[str, Any], filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_drawn_natively", lambda logits: True)
    needed = Sampler()._needed_filtered(torch.zeros(2, VOCAB), Rows([make_row(), make_row(**params)]))
    assert (needed is not None) == filtered


def test_greedy_takes_the_lower_id_after_bias_and_penalties() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 3.0]])
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 1),
        ({"logit_bias": {3: 2.0}}, 3),
        ({"output": [1], "presence_penalty": 0.5}, 2),
        ({"prompt": [1], "repetition_penalty": 1.1, "top_k": 3, "min_p": 0.5}, 2),
    ]
    for params, token in cases:
        sampled = Sampler("processed_logprobs").sample(logits, [make_row(temperature=0.0, logprobs=2, **params)])[0]
        others = [t for t in range(4) if t != token][:1]
        assert sampled.token_id == token
        assert mask_of(sampled) == [token]
        assert sampled.logprobs == [TokenLogprob(token, 0.0, 1), TokenLogprob(others[0], -9999.0, 2)]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("k", [0, 1, 4, -1])
def test_logprobs(mode: Any, k: int) -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = [make_row(r, top_k=9, temperature=0.6, logprobs=k if r % 3 else None) for r in range(40)]
    for row, values, sampled in zip(rows, logits.tolist(), Sampler(mode).sample(logits, rows), strict=True):
        if row.params.logprobs is None:
            assert sampled.logprobs is None
            continue
        left = dict(enumerate(values)) if mode == "raw_logprobs" else reference_filter(values, row)
        total = math.log(sum(math.exp(x) for x in left.values()))
        expected = {t: left[t] - total if t in left else -9999.0 for t in range(VOCAB)}
        ranked = sorted(expected, key=lambda t: (-expected[t], t))[: VOCAB if k == -1 else k]
        entries = sampled.logprobs or []
        assert [e.token_id for e in entries] == [sampled.token_id, *(t for t in ranked if t != sampled.token_id)]
        for e in entries:
            assert e.logprob == pytest.approx(expected[e.token_id], abs=1e-5)
            assert e.rank == 1 + sum(x > expected[e.token_id] + 1e-9 for x in expected.values())


def test_prompt_logprobs_are_raw() -> None:
    logits = torch.randn(sampler.PROMPT_ROWS + 3, 11, generator=torch.Generator().manual_seed(2))
    targets = [i % 11 for i in range(len(logits))]
    expected = torch.log_softmax(logits.double(), -1).tolist()
    result = Sampler("processed_logprobs").prompt_logprobs(logits, targets, 2)
    assert len(result) == len(targets)
    for row, target, entries in zip(expected, targets, result, strict=True):
        assert entries is not None
        ranked = sorted(range(11), key=lambda t: -row[t])
        assert [e.token_id for e in entries] == [target, *(t for t in ranked[:2] if t != target)]
        assert [e.rank for e in entries] == [ranked.index(e.token_id) + 1 for e in entries]
        assert [e.logprob for e in entries] == pytest.approx([row[e.token_id] for e in entries], abs=1e-5)


def test_philox_known_answers() -> None:
    """Vectors published with Random123 (tests/kat_vectors, "philox4x32 10"): counter, key, result."""
    vectors = """
        00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
        ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
        243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1"""
    words = np.array([int(w, 16) for w in vectors.split()], dtype=np.uint64).reshape(3, 10).T
    assert np.array_equal(philox4x32(words[:4], words[4:6]), words[6:])


def test_noise_is_named_by_seed_sample_and_position() -> None:
    def noise(seed: int, sample: int, position: int) -> float:
        return float(uniforms([SamplingRow(RequestFilters(SamplingParams(), [9]), seed, sample, [0] * position)])[0])

    names = [(seed, sample, pos) for seed in (0, 1, 2**32, 2**63 - 1) for sample in (0, 1) for pos in (0, 1, 70)]
    values = {noise(*name) for name in names}
    assert len(values) == len(names)
    assert all(0 <= value < 1 for value in values)
    assert noise(7, 1, 5) == noise(7, 1, 5)


def test_rows_that_stay_together_draw_what_each_would_draw_alone() -> None:
    rows = Rows([SamplingRow(RequestFilters(SamplingParams(), [9]), 2**40 + r, r) for r in range(3)])
    for step in range(50):
        alone = [uniforms([row])[0] for row in rows]
        assert uniforms(rows).tolist() == alone
        for row in rows:
            row.append(1)
        if step == 20:  # one is a token ahead of the others from here on
            rows[1].append(1)


def test_draw_is_the_inverse_cdf() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(500, 1000, generator=generator) * 4
    uniform = torch.rand(500, generator=generator, dtype=torch.float64)
    ends = torch.softmax(logits.double(), -1).cumsum(-1).numpy()
    for row_ends, u, token in zip(ends, uniform.tolist(), draw(logits, uniform).tolist(), strict=True):
        assert np.searchsorted(row_ends, u - 1e-5) <= token <= np.searchsorted(row_ends, u + 1e-5)


@pytest.mark.parametrize("vocab", [1, 15, 255, 256, 257, 50_001])
def test_draws_in_one_pass_are_those_of_filtered_logits_in_torch(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab + 3, generator=generator)[:, :vocab] * 4
    logits[1, vocab // 2], logits[2, 0], logits[3] = INF, math.nan, -INF
    rows = [make_row(r, temperature=(1.0, 0.2, 1e-9, 3.0)[r // 10]) for r in range(40)]
    tokens = [s.token_id for s in Sampler().sample(logits, rows)]
    drawn = draw(filter_logits(logits, rows), torch.from_numpy(uniforms(rows))).tolist()
    assert tokens == [None if r in (1, 2, 3) else token for r, token in enumerate(drawn)]
    monkeypatch.setattr(sampler, "_drawn_natively", lambda logits: False)
    assert tokens == [s.token_id for s in Sampler().sample(logits, rows)]


def test_draws_follow_the_distribution() -> None:
    count, vocab = 20_000, 600
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(4)) * 1.5
    filters = RequestFilters(SamplingParams(temperature=0.8))
    rows = [SamplingRow(filters, seed, 0) for seed in range(count)]
    sampled = [
        s.token_id
        for part in range(0, count, 2000)
        for s in Sampler().sample(logits.expand(2000, -1), rows[part : part + 2000])
    ]
    expected = torch.softmax(logits.double() / 0.8, -1).numpy() * count
    observed = np.bincount(sampled, minlength=vocab)
    often = expected >= 5
    expected, observed = (np.append(x[often], x[~often].sum()) for x in (expected, observed))
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)  # chi-square: mean f, variance 2f


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 301), (1 - 2.0**-53, 611)])
@pytest.mark.parametrize("nothing", [-INF, -1e4])
def test_the_ends_of_the_uniform_pick_a_possible_token(uniform: float, token: int, nothing: float) -> None:
    logits = torch.full((2, 1000), nothing)
    logits[:, 301:612:10] = torch.tensor([[1.0], [-3.0]])
    assert sampler.draw(logits, torch.full((2,), uniform, dtype=torch.float64)).tolist() == [token, token]


def test_unusable_logits_harm_no_other_row() -> None:
    good = torch.randn(300, generator=torch.Generator().manual_seed(5))
    nan, spike, low = torch.full((300,), math.nan), good.clone(), torch.full((300,), -INF)
    spike[7], spike[8] = INF, math.nan
    for params in ({}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}, {"temperature": 1e-30}):
        rows = [make_row(3, logprobs=1, **params) for _ in range(4)]
        for mode in ("raw_logprobs", "processed_logprobs"):
            result = Sampler(mode).sample(torch.stack([nan, good, spike, low]), rows)  # type: ignore[arg-type]
            assert result[1] == Sampler(mode).sample(good[None], rows[:1])[0]  # type: ignore[arg-type]
            for broken in (result[0], result[2], result[3]):
                assert broken == TokenOutput("", 0, finish_reason=FinishReason.ERROR, stop_reason=sampler.NOT_FINITE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_answered_where_the_filters_leave_none(temperature: float) -> None:
    rows = [
        make_row(allowed_token_ids=[2, 3], bad=[[4, 2], [4, 3]], output=output, logprobs=1, temperature=temperature)
        for output in ([4], [5])
    ]
    for mode in ("raw_logprobs", "processed_logprobs"):
        nothing, fine = Sampler(mode).sample(torch.zeros(2, 8), rows)  # type: ignore[arg-type]
        assert nothing == TokenOutput("", 0, finish_reason=FinishReason.ERROR, stop_reason=sampler.NO_TOKEN_LEFT)
        assert fine.token_id in (2, 3)
        assert fine.finish_reason is None


def test_top_p_counts_what_top_k_has_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for top_p, mask in [(0.5, [0]), (0.6, [0, 1])]:  # of the two that top-k leaves, the first holds 4/7
        assert mask_of(Sampler().sample(logits, [make_row(top_k=2, top_p=top_p)])[0]) == mask


def test_a_step_costs_the_same_after_any_number_of_tokens() -> None:
    logits = torch.zeros(1, 20_000)
    params: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "stop_token_ids": [*range(9000, 12_000)],
        "min_tokens": 20_000,
        "allowed_token_ids": [*range(15_000)],
    }
    bad = [[token, 7, 8] for token in range(2000)]
    costs = []
    for length in (100, 9000):
        row = make_row(prompt=range(length), output=range(length), bad=bad, eos=(1,), **params)
        Sampler().sample(logits, [row])

        def step(row: Row = row) -> None:
            row.append(Sampler().sample(logits, [row])[0].token_id or 0)

        costs.append(count_lines(step))
    assert abs(costs[0] - costs[1]) < 20, costs


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=6))
def test_bad_words_are_matched_token_by_token(output: list[int], words: list[list[int]]) -> None:
    row = make_row(bad=words)
    for length in range(len(output) + 1):
        fits = [w for w in words if 0 < len(w) <= length + 1 and output[length - len(w) + 1 : length] == w[:-1]]
        expected = {word[-1] for word in fits}
        assert {int(token) for ids in row.banned for token in ids} == expected
        if length < len(output):
            row.append(output[length])


def test_extreme_parameters_leave_a_distribution() -> None:
    extremes: list[dict[str, Any]] = [
        {"repetition_penalty": 1e-300, "output": [2]},
        {"repetition_penalty": 1e300, "output": [0, 1, 2, 3]},
        {"logit_bias": {2: 1e300}},
        {"logit_bias": {0: -1e300, 1: -1e300, 3: -1e300}, "temperature": 1e-9},
        {"top_p": 1e-300},
        {"min_p": 5e-324},
    ]
    logits = torch.tensor([[0.0, 1.0, 5.0, -1.0]]).expand(len(extremes), -1)
    filtered = filter_logits(logits, [make_row(**e) for e in extremes])
    assert torch.isfinite(filtered.softmax(-1)).all()
    assert filtered.argmax(-1).tolist() == [2, filtered[1].argmax().item(), 2, 2, 2, 2]


def test_empty_and_mismatched_batches() -> None:
    assert Sampler().sample(torch.empty(0, 5), []) == []
    with pytest.raises(ValueError, match="2 rows can't be sampled for 1 requests"):
        Sampler().sample(torch.zeros(2, 5), [make_row()])


def test_a_seeded_choice_is_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(64, 512, generator=generator)

    def run(company: int) -> list[TokenOutput]:
        output: list[int] = []
        result = []
        for step in range(20):
            rows = [make_row(99, output=output, logprobs=0), *(make_row(i, top_p=0.8) for i in range(company))]
            batch = torch.cat([logits[step : step + 1], torch.randn(company, 512, generator=generator)])
            result.append(Sampler().sample(batch, rows)[0])
            output.append(result[-1].token_id)
        return result

    assert run(0) == run(5) == run(23)
