"""The CUDA backends. Without a GPU, Triton's interpreter runs the kernels, and its compiler shows that they compile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.kernels.attention import cuda, splits
from rollout.kernels.attention.base import AttentionParams, LayerShape, RaggedBatch
from tests.kernels.test_attention import Harness, History, dense
from tests.support.triton_launches import (
    Launch,
    LaunchRecorder,
    assert_compiles,
    compile_launch,
    ordered_products,
)

triton = pytest.importorskip("triton")  # has no wheels beyond Linux; the dev extra brings it there

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPLIT = 64
LIMITS = {"max_model_len": 5 * SPLIT, "max_num_seqs": 8, "max_num_batched_tokens": 512}


@pytest.fixture(autouse=True, scope="module")
def _short_splits() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "SPLIT_SIZE", SPLIT)
        yield


class TritonHarness(Harness):
    """test_attention's harness around TritonAttention: every slot, the null block's too, starts as NaN."""

    def __init__(self, shape: LayerShape, groups: int, block_size: int, params: AttentionParams, seed: int) -> None:
        super().__init__(shape, groups, block_size, params, seed)
        num_blocks = self.backend.num_blocks
        self.backend = cuda.TritonAttention([shape], num_blocks, block_size, torch.float32, DEVICE, **LIMITS)
        for cache in (self.backend.keys[0], self.backend.values[0]):
            cache.fill_(torch.nan)

    def normal(self, *size: int) -> Tensor:
        return super().normal(*size).to(DEVICE)

    def past(self, count: int) -> History:
        """A sequence whose first `count` positions are in the cache, by no attention: the interpreter is slow."""
        history, shape = self.new(), self.shape
        history.keys = self.normal(shape.num_kv_heads, count, shape.key_dim)
        history.values = self.normal(shape.num_kv_heads, count, shape.value_dim)
        history.blocks = [self.free.pop() for _ in range(-(-count // self.block_size))]
        if count:
            self.backend.prepare(RaggedBatch([0, count], [count], [history.blocks]))
            self.backend._write(0, history.keys, history.keys, history.values)
        return history


@st.composite
def harnesses(draw: st.DrawFn) -> TritonHarness:
    shape = LayerShape(draw(st.integers(1, 2)), draw(st.sampled_from([8, 24])), draw(st.sampled_from([8, 20])))
    groups = draw(st.sampled_from([1, 3, 4]))
    sinks = torch.linspace(-1, 3, groups * shape.num_kv_heads, device=DEVICE) if draw(st.booleans()) else None
    window = draw(st.none() | st.sampled_from([1, 7, SPLIT - 1, SPLIT, 100]))
    params = AttentionParams(0.4, window, draw(st.sampled_from([None, 2.0])), sinks)
    return TritonHarness(shape, groups, draw(st.sampled_from([4, 16, 128])), params, draw(st.integers(0, 99)))


# (positions in the cache, tokens to compute) of each sequence
lengths_of = st.lists(st.tuples(st.integers(0, 3 * SPLIT), st.sampled_from([1, 1, 2, 9])), min_size=1, max_size=3)
no_shrinking = [Phase.reuse, Phase.generate]  # in the interpreter it would take minutes


@settings(max_examples=6, deadline=None, phases=no_shrinking)
@given(harnesses(), lengths_of)
def test_mixed_chunks_and_decodes_agree_with_dense_attention(
    harness: TritonHarness, lengths: list[tuple[int, int]]
) -> None:
    histories = [harness.past(past) for past, _ in lengths]
    harness.assert_step([(history, tokens) for history, (_, tokens) in zip(histories, lengths, strict=True)])
    harness.assert_step([(histories[-1], 1), (harness.fork(histories[0]), 1)])


@pytest.fixture
def ordered() -> Iterator[None]:
    with ordered_products():
        yield


def run(backend: cuda.TritonAttention, work: list[tuple[History, Tensor]], params: AttentionParams) -> list[Tensor]:
    """Each sequence's last tokens, whose queries are given, in one batch → its rows."""
    start = [0]
    for _, query in work:
        start.append(start[-1] + query.shape[1])
    backend.prepare(RaggedBatch(start, [h.length for h, _ in work], [h.blocks for h, _ in work]))
    keys = torch.cat([h.keys[:, -q.shape[1] :] for h, q in work], 1)
    values = torch.cat([h.values[:, -q.shape[1] :] for h, q in work], 1)
    output = backend.forward(0, torch.cat([q for _, q in work], 1), keys, values, params)
    return list(output.split([q.shape[1] for _, q in work]))


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    window: int | None, monkeypatch: pytest.MonkeyPatch, ordered: None
) -> None:
    from rollout.kernels.attention import triton_paged

    # Alone, a sequence's splits are spread over three programs, in the batch of four over one.
    monkeypatch.setattr(triton_paged, "FULL_GRID", 5)
    harness = TritonHarness(LayerShape(2, 24, 20), 3, 16, AttentionParams(0.4, window), seed=3)
    work = [
        (harness.past(length), harness.normal(harness.heads, tokens, 24))
        for length, tokens in [(280, 1), (33, 1), (120, 12), (1, 1)]
    ]
    together = run(harness.backend, work, harness.params)
    for i in range(4):
        assert torch.equal(run(harness.backend, [work[i]], harness.params)[0], together[i])
    pair = run(harness.backend, [work[2], work[0]], harness.params)
    assert torch.equal(pair[0], together[2])
    assert torch.equal(pair[1], together[0])
    # A chunk's rows are those that its tokens have one at a time; where there is no room, splits are walked through.
    history, query = work[2]
    for i in (0, 5, 11):
        past = History(history.keys[:, : 109 + i], history.values[:, : 109 + i], history.blocks)
        assert torch.equal(run(harness.backend, [(past, query[:, i : i + 1])], harness.params)[0][0], together[2][i])
    harness.backend._num_places = 3
    assert torch.equal(run(harness.backend, [work[0]], harness.params)[0], together[0])


def test_what_a_group_shares_is_read_once_with_the_same_bits(ordered: None) -> None:
    """Members of a group, and a stranger: the blocks that they share are those of the first one's table alone."""
    harness = TritonHarness(LayerShape(2, 24, 20), 3, 16, AttentionParams(0.4), seed=5)
    backend, prompt = harness.backend, harness.past(2 * SPLIT + 20)
    members = [harness.fork(prompt) for _ in range(3)]
    for member, more in zip(members, (1, 5, SPLIT), strict=True):
        member.keys, member.values = (
            torch.cat([t, harness.normal(2, more, t.shape[-1])], 1) for t in (member.keys, member.values)
        )
        count = -(-member.length // 16)
        member.blocks = member.blocks[: 2 * SPLIT // 16] + [harness.free.pop() for _ in range(count - 2 * SPLIT // 16)]
        start = 2 * SPLIT
        backend.prepare(RaggedBatch([0, member.length - start], [member.length], [member.blocks]))
        backend._write(0, member.keys[:, start:], member.keys[:, start:], member.values[:, start:])
    work = [(member, harness.normal(6, 1, 24)) for member in [*members, harness.past(SPLIT + 3)]]
    alone = [run(backend, [one], harness.params)[0] for one in work]
    for (member, query), row in zip(work, alone, strict=True):
        torch.testing.assert_close(row, dense(query, member.keys, member.values, harness.params), atol=1e-4, rtol=0)
    prepare = backend.prepare

    def prepare_and_poison(batch: RaggedBatch) -> None:
        prepare(batch)
        assert backend.step.members[:4].tolist() == [3, 0, 0, 1]
        assert backend.step.shared[:4].tolist() == [2, 2, 2, 0]
        backend.step.block_tables[1:3, : 2 * SPLIT // 16] = 0  # the null block holds NaN

    backend.prepare = prepare_and_poison  # type: ignore[method-assign]
    for row, expected in zip(run(backend, work, harness.params), alone, strict=True):
        assert torch.equal(row, expected)


def test_decodes_are_cut_into_splits_where_there_is_room() -> None:
    tables = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 7, 8], [9, 10, 11, 12]])
    lens, contexts = np.array([1, 1, 1, 1, 9]), np.array([4, 4, 4, 4, 4]) * SPLIT
    places, shared, members = splits.split_decodes(lens, contexts, tables, SPLIT, 100, 2)
    assert places.tolist() == [0, 4, 8, 12, -1]
    assert (shared.tolist(), members.tolist()) == ([3, 3, 2, 2, 0], [2, 0, 2, 0, 1])
    places, shared, members = splits.split_decodes(lens, contexts, tables, SPLIT, 11, 16)
    assert places.tolist() == [0, 4, -1, -1, -1]
    assert (shared.tolist(), members.tolist()) == ([3, 3, 0, 0, 0], [2, 0, 1, 1, 1])
    short = np.array([SPLIT, 2 * SPLIT - 1, 2 * SPLIT + 1, 1, 9])
    places, shared, members = splits.split_decodes(lens, short, tables, SPLIT, 100, 16)
    assert places.tolist() == [-1, 0, 2, -1, -1]
    assert (shared.tolist(), members.tolist()) == ([0, 1, 1, 0, 0], [1, 2, 0, 1, 1])


@pytest.mark.parametrize(("max_model_len", "context"), [(SPLIT, SPLIT - 4), (2 * SPLIT, SPLIT + 30)])
def test_half_precision_with_and_without_splits(max_model_len: int, context: int) -> None:
    harness = Harness(LayerShape(2, 16, 16), 2, 16, AttentionParams(0.25), seed=4)
    limits = {**LIMITS, "max_model_len": max_model_len}
    backend = cuda.TritonAttention([harness.shape], 64, 16, torch.float16, DEVICE, **limits)
    work, expected = half_precision_work(harness, [(context, context), (9, 9)], 16)
    for got, want in zip(run(backend, work, harness.params), expected, strict=True):
        torch.testing.assert_close(got.float(), want, atol=3e-3, rtol=0)
    decodes = [(history, query[:, -1:]) for history, query in work]
    for got, want in zip(run(backend, decodes, harness.params), expected, strict=True):
        torch.testing.assert_close(got.float(), want[-1:], atol=3e-3, rtol=0)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "kv_heads", "group", "block_size", "params"),
    [
        (64, 64, 2, 8, 16, AttentionParams(0.125, window=33)),
        (80, 80, 1, 3, 16, AttentionParams(0.11, sinks=torch.linspace(-1, 3, 3, device=DEVICE))),
        (96, 96, 2, 1, 256, AttentionParams(0.1)),
        (128, 128, 1, 24, 16, AttentionParams(0.09, softcap=2.0)),
        (192, 128, 2, 1, 16, AttentionParams(0.07)),  # keys wider than values
        (256, 256, 1, 5, 256, AttentionParams(0.06, window=SPLIT, softcap=5.0)),
    ],
)
def test_half_precision_heads_of_every_width_and_group(
    key_dim: int, value_dim: int, kv_heads: int, group: int, block_size: int, params: AttentionParams
) -> None:
    """Chunks and decodes of float16 caches (the interpreter multiplies no bfloat16) against dense float32 attention."""
    random, shape = torch.Generator().manual_seed(key_dim), LayerShape(kv_heads, key_dim, value_dim)
    backend = cuda.TritonAttention([shape], 16, block_size, torch.float16, DEVICE, **LIMITS)
    for cache in (backend.keys[0], backend.values[0]):
        cache.fill_(torch.nan)
    free = list(range(1, 16))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random).half().to(DEVICE)

    work, expected = [], []
    for context, tokens in [(SPLIT + 9, 1), (20, 3), (1, 1)]:
        keys, values = normal(kv_heads, context, key_dim), normal(kv_heads, context, value_dim)
        history = History(keys, values, [free.pop() for _ in range(-(-context // block_size))])
        if context > tokens:
            backend.prepare(RaggedBatch([0, context - tokens], [context - tokens], [history.blocks]))
            past = keys[:, : context - tokens]
            backend._write(0, past, past, values[:, : context - tokens])
        query = normal(kv_heads * group, tokens, key_dim)
        work.append((history, query))
        expected.append(dense(query.float(), keys.float(), values.float(), params))
    for got, want in zip(run(backend, work, params), expected, strict=True):
        torch.testing.assert_close(got.float(), want, atol=4e-3, rtol=2e-3)


def test_offsets_beyond_two_to_the_31st_reach_their_block() -> None:
    from rollout.kernels.attention import triton_paged

    shape, blocks = (16, 1, 64), (1 << 21) + 3  # more than 2**31 elements, of which two blocks are ever touched
    keys, values = (torch.empty(blocks, *shape, dtype=torch.float16, device=DEVICE) for _ in range(2))
    assert keys.numel() > 1 << 31
    random = torch.Generator().manual_seed(0)
    for cache in (keys, values):
        cache[blocks - 1] = torch.randn(shape, generator=random).half()
        cache[0] = cache[1] = torch.nan
    lens = torch.tensor([0, 1, 16], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device=DEVICE)
    plan = splits.PagedPlan(lens[:2], lens[2:], table, *[lens[:1]] * 3, 0, SPLIT, 1, has_decodes=True, has_chunks=False)
    query = torch.randn(2, 1, 64, generator=random).half().to(DEVICE)
    got = triton_paged.paged_attention(query, keys, values, plan, AttentionParams(0.125))
    last = [cache[blocks - 1].transpose(0, 1).float() for cache in (keys, values)]
    torch.testing.assert_close(got.float(), dense(query.float(), *last, AttentionParams(0.125)), atol=3e-3, rtol=0)


def half_precision_work(
    harness: Harness, lengths: list[tuple[int, int]], block_size: int
) -> tuple[list[tuple[History, Tensor]], list[Tensor]]:
    """Random float16 sequences of (context, query) lengths, and what dense float32 attention makes of them."""
    work, expected, free = [], [], list(range(1, 64))
    for context, tokens in lengths:
        kv_heads, dim = harness.shape.num_kv_heads, harness.shape.key_dim
        keys, values = (harness.normal(kv_heads, context, dim).half() for _ in range(2))
        query = harness.normal(harness.heads, tokens, dim).half()
        history = History(keys.to(DEVICE), values.to(DEVICE), [free.pop() for _ in range(-(-context // block_size))])
        work.append((history, query.to(DEVICE)))
        expected.append(dense(query.float(), keys.float(), values.float(), harness.params).to(DEVICE))
    return work, expected


def test_a_batch_that_exceeds_the_buffers_is_refused() -> None:
    buffers = cuda.StepBuffers(max_num_tokens=8, max_num_seqs=2, table_width=3, device=DEVICE)
    buffers.fill(RaggedBatch([0, 7, 8], [7, 12], [[1, 2], [3, 4, 5]]), 4)
    for batch in (
        RaggedBatch([0, 9], [9], [[1, 2, 3]]),
        RaggedBatch([0, 1, 2, 3], [1, 1, 1], [[1], [2], [3]]),
        RaggedBatch([0, 1], [13], [[1, 2, 3, 4]]),
    ):
        with pytest.raises(ValueError, match="made for 8, 2 and 3"):
            buffers.fill(batch, 4)


# -- Triton's compiler, which needs no GPU, on the very launches that paged_attention makes


@pytest.mark.parametrize("capability", [90, *(pytest.param(sm, marks=pytest.mark.long) for sm in (80, 100))])
def test_the_kernels_compile_for_gpus(capability: int, tmp_path: Path) -> None:
    assert_compiles("tests.kernels.test_cuda_attention", capability, tmp_path)


def compile_kernels(capability: int) -> None:
    """Compile a mixed batch's launches; tensor cores must be used, and shared memory must fit a consumer's GPU."""
    from rollout.kernels.attention import triton_paged

    launches: list[Launch] = []
    for name in ("_attend", "_merge_splits"):
        setattr(triton_paged, name, LaunchRecorder(getattr(triton_paged, name), launches))
    query, keys, values = (
        torch.zeros(size, dtype=torch.bfloat16) for size in ((8, 20, 64), (9, 16, 2, 64), (9, 16, 2, 40))
    )
    lens = torch.zeros(3, dtype=torch.int32)
    params = AttentionParams(0.1, window=100, softcap=2.0, sinks=torch.zeros(8, dtype=torch.bfloat16))
    plan = splits.PagedPlan(
        lens, lens[1:], torch.zeros(2, 5, dtype=torch.int32), *[lens[1:]] * 3,
        num_places=8, split_size=256, max_splits=4, has_decodes=True, has_chunks=True,
    )  # fmt: skip
    triton_paged.paged_attention(query, keys, values, plan, params)
    chunk, decode, merge = (compile_launch(*launch, capability) for launch in launches)
    for compiled in (chunk, decode):
        assert any(name in compiled.asm["ptx"] for name in ("mma.sync", "wgmma", "tcgen05.mma"))
        assert compiled.metadata.shared <= 99 * 1024
    assert merge.asm["cubin"]
