"""The sampler over logits on a CUDA device, traced without one: no device is mixed, nothing is read before the end.

Greedy rows, top_k, top_p and several logprobs choose their rows by a mask, which waits for the device: they
can't be traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.config import LogprobsMode
from rollout.sampling import sampler
from rollout.sampling.params import SamplingParams
from rollout.sampling.rows import RequestFilters, SamplingRow
from tests.support.fake_cuda import Launches, fake_cuda

ROWS, VOCAB = 6, 4096
CASES: dict[str, dict[str, Any]] = {
    "plain": {"logprobs": 0},
    "temperature": {"logprobs": 0, "temperature": 0.7},
    "no logprobs": {},
    "min_p": {"logprobs": 0, "min_p": 0.1},
    "penalties": {"logprobs": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "allowed, biased, not yet": {"allowed_token_ids": [3, 4, 5], "logit_bias": {3: 1.0}, "min_tokens": 5},
    "bad words": {"logprobs": 0, "bad_words": ["x"]},
}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
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

    monkeypatch.setattr(sampler, "_to_host", to_host)
    words = [[4, 5, 7], [9]] if case == "bad words" else []
    filters = RequestFilters(SamplingParams(**{"temperature": 1.0, **CASES[case]}), [1, 2, 3], words, [0])
    rows = [SamplingRow(filters, seed, 0, [4, 5]) for seed in range(ROWS)]
    with fake_cuda(), torch.no_grad():
        logits = torch.empty(ROWS, VOCAB, dtype=torch.bfloat16, device="cuda")
        with Launches() as launches:
            sampled = sampler.Sampler(mode).sample(logits, rows)
    assert len(sampled) == ROWS
    assert len(read) == 1
    assert sum(launches.counts.values()) > 0
