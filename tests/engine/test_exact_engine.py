"""The batch-invariant mode: a request's bits are the same alone, in any batch, and in the trainer's forward."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.engine import Engine
from rollout.messages import AddRequest
from tests.support import tiny_models
from tests.support.engine_utils import prompt
from tests.support.exact_rollouts import (
    DTYPES,
    counted,
    differing,
    exact_engine,
    request,
    roll_out,
    same_bits,
    threads,
    trainer_logprobs,
    trainers_model,
)

LONG = prompt(140)
"""It reaches a second chunk of keys."""

REQUESTS = [
    request("group", LONG, n=3, temperature=0.9),
    request("greedy", prompt(20), temperature=0),
    request("prefix", LONG[:132] + prompt(7, seed=1), top_p=0.8, temperature=1.2),
    request("one", prompt(1), top_k=20, min_tokens=5),
    request("penalties", prompt(37), repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3, n=2),
    request("biased", prompt(30, seed=2), logit_bias={7: 1.5, 9: -2.0}, min_p=0.05, temperature=0.8, top_k=50),
]
CROWDED = {"num_gpu_blocks_override": 12, "max_model_len": 160, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exact")


@functools.cache
def tiny(name: str, root: Path) -> Path:
    return tiny_models.build(name, root / name)


# Each model in one dtype in every run, in both in the long one.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.long] * (at % 2 != DTYPES.index(dtype)))
        for at, name in enumerate(tiny_models.NAMES)
        for dtype in DTYPES
    ],
)
def test_zero_bits_differ_between_batches_and_between_engine_and_trainer(name: str, dtype: str, root: Path) -> None:
    path = tiny(name, root)
    with threads(1):
        roomy = exact_engine(path, dtype)
        together, rose = counted(roomy, REQUESTS)
        assert rose["forked_sequences"] == 3  # siblings that share the prompt of their group
        assert not rose["partial_chunks"]
        assert not rose["preemptions"]
        for item in (REQUESTS[0], REQUESTS[2]):
            alone, rose = counted(roomy, [item])
            assert rose["prefix_hit_tokens"] >= 128
            assert same_bits(alone, {key: value for key, value in together.items() if key[0] == item.request_id})
        crowded, rose = counted(exact_engine(path, dtype, **CROWDED), REQUESTS[::-1])
        assert rose["preemptions"] > 0
        assert rose["partial_chunks"] > 4
        assert same_bits(crowded, together)
    rollouts = list(together.values())
    with threads(2):
        model = trainers_model(path, dtype)
        padded = trainer_logprobs(model, rollouts)
    packed = trainer_logprobs(model, rollouts, packed=True)
    total = 10 * len(rollouts)
    assert differing(rollouts, padded) == (0, total)
    assert differing(rollouts, packed) == (0, total)


# -- any schedule


@functools.cache
def scheduled_engine(name: str, dtype: str, blocks: int, root: Path) -> Engine:
    return exact_engine(tiny(name, root), dtype, num_gpu_blocks_override=blocks, max_model_len=160)


@functools.cache
def one_by_one(name: str, dtype: str, root: Path) -> Any:
    engine = scheduled_engine(name, dtype, 48, root)
    return {key: value for item in REQUESTS for key, value in roll_out(engine, [item]).items()}


@settings(max_examples=12)
@given(
    model=st.sampled_from([("llama", "float32"), ("qwen3", "bfloat16"), ("gemma2", "float32")]),
    blocks=st.sampled_from([11, 15, 48]),
    tokens=st.sampled_from([16, 17, 40, 300]),
    order=st.permutations(REQUESTS),
    arrivals=st.lists(st.integers(0, 25), min_size=len(REQUESTS), max_size=len(REQUESTS)),
    forget=st.booleans(),
)
def test_any_interleaving_of_the_requests_gives_the_same_bits(
    root: Path,
    model: tuple[str, str],
    blocks: int,
    tokens: int,
    order: list[AddRequest],
    arrivals: list[int],
    forget: bool,
) -> None:
    with threads(1):
        engine = scheduled_engine(*model, blocks, root)
        engine.scheduler.max_num_batched_tokens = tokens
        if forget:
            engine.scheduler.kv.reset_prefixes()
        assert same_bits(roll_out(engine, order, arrivals), one_by_one(*model, root))
