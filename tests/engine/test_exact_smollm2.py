"""The acceptance test of the exact mode on a real model: not one differing bit over ten thousand sampled tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rollout.engine.engine import Engine
from rollout.messages import AddRequest
from tests.support.exact_rollouts import (
    DTYPES,
    Rollout,
    Rollouts,
    differing,
    exact_engine,
    request,
    take_step,
    threads,
    trainers_model,
)
from trainer_bridge.score import replay

VOCABULARY = 49_152
CONFIG = {
    "block_size": 16,
    "num_gpu_blocks_override": 330,  # 5,280 tokens: 64 sequences and two long ones don't fit
    "max_model_len": 2000,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
}
ROW_TOKENS = 2048


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(17, VOCABULARY), k=length)


def wave(name: str, groups: int, n: int, max_tokens: int) -> list[AddRequest]:
    """Groups of n, every second prompt a continuation of the one before it."""
    prompts = [prompt(32 + 11 * (i % 7), seed=i // 2) + prompt(9 * (i % 2), seed=i) for i in range(groups)]
    return [
        request(f"{name}{i}", ids, n=n, max_tokens=max_tokens, temperature=1 - 0.02 * i)
        for i, ids in enumerate(prompts)
    ]


def plan(scale: float) -> list[tuple[int, list[AddRequest]]]:
    """Requests by the step they arrive at: one alone, then up to 64 at once, long ones among them."""

    def tokens(count: int) -> int:
        return max(4, int(count * scale))

    alone = request("alone", prompt(40, seed=99), max_tokens=tokens(150))
    lengthy = [
        request(f"long{i}", prompt(length, seed=50 + i), max_tokens=2000 - length)
        for i, length in enumerate([2000 - tokens(600), 2000 - tokens(300)])
    ]
    filtered = request("filtered", prompt(30, seed=7), n=8, max_tokens=tokens(64), top_p=0.9, top_k=200)
    first = tokens(140)
    return [
        (0, [alone]),
        (first, [*wave("a", 16, 4, tokens(100)), *lengthy]),
        (first + tokens(120), [*wave("b", 8, 4, tokens(80)), filtered]),
    ]


def run(engine: Engine, arrivals: Sequence[tuple[int, list[AddRequest]]], push_at: int, folder: Path) -> Rollouts:
    """The rollouts; the weights of `folder` are pushed before step `push_at`."""
    rollouts, pending, number = Rollouts(), list(arrivals), 0
    while pending or engine.has_work:
        while pending and pending[0][0] <= number:
            for item in pending.pop(0)[1]:
                engine.add_request(item)
                rollouts |= {(item.request_id, index): Rollout(item) for index in range(item.sampling_params.n)}
        if number == push_at:
            push(engine, folder)
        take_step(engine, rollouts)
        number += 1
    assert engine.store.epoch == 1
    return rollouts


def push(engine: Engine, folder: Path) -> None:
    """Receive the folder's weights; the next step commits them, under the mode's own policy for running requests."""

    def call(method: str, **params: object) -> None:
        engine.weights.call(method, dict(params)).result(120)

    call("init_weight_transfer_engine", init_info={"backend": "disk"})
    call("start_weight_update")
    call("update_weights", update_info={"path": str(folder)})
    finishing = engine.weights.call("finish_weight_update", {"weight_version": "pushed"})
    while engine.weights.call("weight_info", {}).result(20)["state"] != "ready":
        assert not finishing.done()


@torch.no_grad()
def rescore(model: PreTrainedModel, rollouts: Sequence[Rollout], epoch: int) -> tuple[int, int]:
    """(differing, tokens) of the tokens that the epoch's weights sampled, over right-padded batches of ROW_TOKENS."""
    mine = sorted((r for r in rollouts if epoch in r.epochs), key=lambda r: len(r.sequence))
    wrong = total = 0
    while mine:
        batch = [mine.pop()]
        longest = len(batch[0].sequence)
        while mine and (len(batch) + 1) * longest <= ROW_TOKENS:
            batch.append(mine.pop())
        rows = [torch.tensor(r.sequence) for r in batch]
        mask = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
        first = min(len(r.request.prompt_token_ids) for r in batch) - 1
        logits = model(
            input_ids=pad_sequence(rows, batch_first=True), attention_mask=mask, logits_to_keep=longest - first
        ).logits
        for rollout, table in zip(batch, logits, strict=True):
            start = len(rollout.request.prompt_token_ids) - 1 - first
            new = replay.logprobs(
                table[start : start + len(rollout.token_ids)],
                rollout.token_ids,
                sampling_params=rollout.request.sampling_params,
                sampling_mask=rollout.masks,
            )
            sampled = torch.tensor(rollout.epochs) == epoch
            part = Rollout(rollout.request, logprobs=torch.tensor(rollout.logprobs)[sampled].tolist())
            differ, tokens = differing([part], [new[sampled]])
            wrong, total = wrong + differ, total + tokens
    return wrong, total


@pytest.mark.smollm2
@pytest.mark.long
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_thousand_tokens_without_a_differing_bit(smollm2: Path, tmp_path: Path, dtype: str) -> None:
    pushed = trainers_model(smollm2, dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in pushed.parameters():
            parameter.add_(parameter.std() * 0.02 * torch.randn(parameter.shape, generator=generator))
    pushed.save_pretrained(tmp_path / "pushed")
    arrivals = plan(1.0)
    with threads(1):
        engine = exact_engine(smollm2, dtype, **CONFIG)
        rollouts = run(engine, arrivals, arrivals[-1][0] + 5, tmp_path / "pushed")
    stats = engine.stats
    happened = ("preemptions", "partial_chunks", "prefix_hit_tokens", "forked_sequences", "recomputed_sequences")
    assert min(stats[name] for name in happened) > 0
    assert max(len(r.sequence) for r in rollouts.values()) == 2000
    with threads(2):
        old = rescore(trainers_model(smollm2, dtype), list(rollouts.values()), 0)
        new = rescore(pushed, list(rollouts.values()), 1)
    print(f"{dtype}: differing and sampled tokens before the push {old}, after it {new}; {dict(stats)}")
    assert (old[0], new[0]) == (0, 0)
    assert min(old[1], new[1]) > 1000
    assert old[1] + new[1] == stats["sampled_tokens"] >= 10_000
