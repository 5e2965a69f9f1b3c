"""The sampler over logits on a CUDA device, traced without one: no device is mixed, nothing is read before the end.

Its kernel is run by Triton's interpreter, and compiled.

Several logprobs and masks of top_k or top_p choose rows by a mask, which waits for the device: they can't be traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.config import LogprobsMode
from rollout.kernels import triton_sampling
from rollout.outputs import TokenOutput
from rollout.sampling import sampler
from rollout.sampling.filters import filter_logits
from rollout.sampling.params import SamplingParams
from rollout.sampling.rows import RequestFilters, Rows, SamplingRow
from tests.support.fake_cuda import Launches, fake_cuda
from tests.support.triton_launches import LaunchRecorder, assert_compiles, compile_launch

ROWS, VOCAB = 6, 4096
MODES: tuple[LogprobsMode, ...] = ("raw_logprobs", "processed_logprobs")
CASES: dict[str, dict[str, Any]] = {
    "plain": {"logprobs": 0},
    "temperature": {"logprobs": 0, "temperature": 0.7},
    "no logprobs": {},
    "min_p": {"logprobs": 0, "min_p": 0.1},
    "penalties": {"logprobs": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "allowed, biased, not yet": {"allowed_token_ids": [3, 4, 5], "logit_bias": {3: 1.0}, "min_tokens": 5},
    "bad words": {"logprobs": 0, "bad_words": ["x"]},
    "greedy": {"logprobs": 0, "temperature": 0.0},
    "the likeliest": {"logprobs": 1, "top_k": 1, "top_p": 0.5},
    "narrowed": {"logprobs": 0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_every_filter_and_draw_stays_on_the_device(
    case: str, mode: LogprobsMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one read at the end is answered with zeros: a fake tensor has no values."""
    read: list[int] = []

    def to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
        assert {tensor.device.type for tensor in tensors} == {"cuda"}
        read.append(len(tensors))
        return [np.zeros(tuple(tensor.shape)) for tensor in tensors]

    monkeypatch.setattr(sampler, "_send", lambda tensors: partial(to_host, tensors))
    words = [[4, 5, 7], [9]] if case == "bad words" else []
    filters = RequestFilters(SamplingParams(**{"temperature": 1.0, **CASES[case]}), [1, 2, 3], words, [0])
    rows = [SamplingRow(filters, seed, 0, [4, 5]) for seed in range(ROWS)]
    with fake_cuda(), torch.no_grad():
        logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device="cuda")
        with Launches() as launches:
            launches.replace_kernels(monkeypatch, triton_sampling)
            sampled = sampler.Sampler(mode).sample(logits, rows)
    assert len(sampled) == ROWS
    assert len(read) == 1
    assert launches.counts["_sample"] == 1
    if case in ("plain", "temperature", "no logprobs", "greedy"):
        assert launches.counts == {"to": 1, "_sample": 1}  # and the one read
    if case in ("min_p", "narrowed"):
        assert launches.counts == {"to": 1, "_limit": 1, "_sample": 1}


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's logits take the way of a GPU's."""
    monkeypatch.setattr(sampler, "_drawn_natively", lambda logits: False)
    monkeypatch.setattr(sampler, "_drawn_by_triton", lambda logits: True)


@pytest.mark.parametrize(
    ("mode", "exact"), [("raw_logprobs", False), ("processed_logprobs", False), ("raw_logprobs", True)]
)
@pytest.mark.usefixtures("by_triton")
def test_the_kernel_gives_the_tokens_logprobs_and_ranks_of_the_definition(mode: LogprobsMode, exact: bool) -> None:
    vocab = 4096 + 300  # a second tile, whose last block is cut off
    logits = (3 * torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(2))).bfloat16()
    temperatures = [1.0, 0.7, 1.3] * (ROWS // 3)
    rows = [
        SamplingRow(RequestFilters(SamplingParams(temperature=t, logprobs=0)), seed, seed % 2)
        for seed, t in enumerate(temperatures)
    ]
    scaled = logits.float() / torch.tensor(temperatures)[:, None]
    tokens = sampler._draw_in_torch(scaled, torch.from_numpy(sampler.uniforms(rows))).tolist()
    logprobs = (logits.float() if mode == "raw_logprobs" else scaled).log_softmax(-1)
    for r, sampled in enumerate(sampler.Sampler(mode, exact=exact).sample(logits, rows)):
        assert sampled.token_id == tokens[r]
        (entry,) = sampled.logprobs or []
        expected = logprobs[r, tokens[r]]
        assert entry.logprob == pytest.approx(expected.item(), abs=0 if exact else 3e-6)
        assert entry.rank == 1 + (logprobs[r] > expected).sum().item()


@pytest.mark.usefixtures("by_triton")
def test_the_kernel_draws_from_what_filters_have_left() -> None:
    """Far from 0, where exp overflows or vanishes unless the largest is taken away from all."""
    logits = 3 * torch.randn(ROWS, 700, generator=torch.Generator().manual_seed(3))
    logits[:, ::3] = -torch.inf
    logits += torch.tensor([300.0, -300.0, 0.0] * (ROWS // 3))[:, None]
    numbers = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1 - 2.0**-53], dtype=torch.float64)
    assert sampler.draw(logits, numbers).tolist() == sampler._draw_in_torch(logits, numbers).tolist()


NARROWED: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.7},
    {"min_p": 0.05},
    {"min_p": 0.02, "top_p": 0.95, "top_k": 30, "temperature": 1.7},
    {"temperature": 0.5, "top_p": 0.3},
    {"top_p": 0.99999},
    {"temperature": 0.0},
    {},
]


@pytest.mark.usefixtures("by_triton")
def test_narrowed_rows_are_drawn_as_their_filters_say_without_a_look_at_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits of bfloat16 tie often, also where a support ends. Compared with the filters in torch."""
    vocab = 700
    logits = (3 * torch.randn(len(NARROWED), vocab, generator=torch.Generator().manual_seed(1))).bfloat16()
    rows = Rows(
        SamplingRow(RequestFilters(SamplingParams(**asked, logprobs=0)), seed, 0) for seed, asked in enumerate(NARROWED)
    )
    filtered = filter_logits(logits, rows)
    limits = triton_sampling.limits(logits, sampler._asked(logits, rows, *rows.asked))
    scaled = logits.float() / torch.tensor([row.filters.temperature for row in rows])[:, None]
    bits = torch.where(scaled == 0, 0.0, scaled).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).double()
    kept = (keys > limits[:, :1]) | ((keys == limits[:, :1]) & (torch.arange(vocab) <= limits[:, 1:]))
    support = filtered > -torch.inf
    support[NARROWED.index({"temperature": 0.0})] = True  # greedy rows need no limit
    assert torch.equal(kept, support)

    asked: list[Tensor] = []
    monkeypatch.setattr(triton_sampling, "limits", lambda logits, table: asked.append(table) or limits)
    for mode in MODES:
        logprobs = (filtered if mode == "processed_logprobs" else logits.float()).log_softmax(-1)
        for number in (0.0, 0.37, 0.99, 1 - 2.0**-53):
            monkeypatch.setattr(sampler, "uniforms", lambda rows, number=number: np.full(len(rows), number))
            outputs = sampler.Sampler(mode).sample(logits, rows)
            assert [output.token_id for output in outputs] == sampler._choose(filtered, rows).tolist()
            for row, output in zip(logprobs, outputs, strict=True):
                (entry,) = output.logprobs or []
                assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=3e-6)
                assert entry.rank == 1 + (row > row[entry.token_id]).sum().item()
    assert [len(table) for table in asked] == [5] * 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("by_triton")
def test_greedy_rows_are_in_the_one_launch_with_the_tokens_and_masks_of_the_filters(mode: LogprobsMode) -> None:
    """What it is compared with goes through the filters, in torch: `logprobs` of several tokens ask for them."""
    vocab = 4096 + 300
    logits = (3 * torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(4))).bfloat16()
    logits[:, 4200] = logits[:, 300] = logits[:, 70] = logits.amax(-1)  # the first of those that tie
    params = [{"temperature": 0.0, "top_p": 0.5, "min_p": 0.1}, {"temperature": 0.8}, {"temperature": 0.0, "top_k": 9}]

    def sampled(logprobs: int | None) -> list[TokenOutput]:
        rows = [
            SamplingRow(RequestFilters(SamplingParams(**asked, logprobs=logprobs), want_mask=True), seed, 0)
            for seed, asked in enumerate(params * (ROWS // len(params)))
        ]
        return sampler.Sampler(mode).sample(logits, rows)

    for got, expected in zip(sampled(0), sampled(1), strict=True):
        assert (got.token_id, got.sampling_mask) == (expected.token_id, expected.sampling_mask)
        assert got.logprobs is not None
        assert expected.logprobs is not None
        assert got.logprobs[0].rank == expected.logprobs[0].rank
        assert got.logprobs[0].logprob == pytest.approx(expected.logprobs[0].logprob, abs=3e-6)
    assert {output.token_id for output in sampled(None)[::3]} == {70}


@pytest.mark.usefixtures("by_triton")
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_a_row_that_holds_no_number_ends_and_the_others_do_not() -> None:
    logits = torch.zeros(5, 300)
    logits[0, 7], logits[1, 8], logits[2], logits[3, 9] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[4, :299] = -1e30
    rows = [SamplingRow(RequestFilters(SamplingParams()), seed, 0) for seed in range(5)]
    sampled = sampler.Sampler().sample(logits, rows)
    assert [output.stop_reason for output in sampled] == [sampler.NOT_FINITE] * 4 + [None]
    assert sampled[4].token_id == 299


@pytest.mark.parametrize("capability", [90, *(pytest.param(sm, marks=pytest.mark.long) for sm in (80, 100))])
def test_the_kernel_compiles_for_gpus(capability: int, tmp_path: Path) -> None:
    assert_compiles(__name__, capability, tmp_path)


def compile_kernels(capability: int) -> None:
    """For a vocabulary of Qwen3's size."""
    kept: list[Any] = []
    triton_sampling._sample = LaunchRecorder(triton_sampling._sample, kept)  # type: ignore[assignment]
    triton_sampling._limit = LaunchRecorder(triton_sampling._limit, kept)  # type: ignore[assignment]
    logits = torch.zeros(2, 151936, dtype=torch.bfloat16)
    for processed in (False, True):
        triton_sampling.sample(logits, torch.zeros(2, 2, dtype=torch.float64), processed=processed)
    asked = torch.zeros(5, 2, dtype=torch.float64)
    triton_sampling.sample(logits, asked, processed=True, limits=triton_sampling.limits(logits, asked))
    for launch in kept:
        compiled = compile_launch(*launch, capability)
        assert compiled.metadata.shared <= 99 * 1024
