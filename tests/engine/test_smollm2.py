"""The engine on a real model: the same answers as transformers, and as the recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engine_utils import assert_exact, engine, ids, request, run

pytestmark = pytest.mark.smollm2

CAPITAL_OF_FRANCE = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
RECORDED = [504, 3575, 282, 4649, 314, 7042, 30, 2]
"""Recorded from another server: "The capital of France is Paris.<|im_end|>"."""


def test_greedy_and_sampled_answers_are_those_of_transformers(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager").eval()
    long = list(range(1000, 1300))
    requests = [
        request("greedy", CAPITAL_OF_FRANCE, temperature=0, max_tokens=16),
        request("group", CAPITAL_OF_FRANCE, n=4, max_tokens=16, seed=1, ignore_eos=True),
        request("long", long, n=2, max_tokens=8, seed=2, ignore_eos=True),
        request("hit", [*long, 7], max_tokens=8, seed=3, ignore_eos=True),
    ]
    serving = engine(smollm2, block_size=16, num_gpu_blocks_override=64, max_model_len=512, max_num_batched_tokens=128)
    outputs = run(serving, requests)
    assert ids(outputs["greedy", 0]) == RECORDED
    assert_exact(model, requests, outputs)
    assert serving.stats["partial_chunks"] > 0
    assert serving.stats["forked_sequences"] == 5  # the whole group from "greedy", whose prompt it has
    assert serving.stats["prefix_hit_tokens"] > 0
