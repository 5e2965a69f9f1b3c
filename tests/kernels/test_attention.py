"""The CPU backends against dense float32 attention, over ragged batches that hypothesis chooses."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.kernels import native
from rollout.kernels.attention.base import AttentionParams, LayerShape, RaggedBatch
from rollout.kernels.attention.native_paged import NativeAttention
from rollout.kernels.attention.torch_paged import CHUNK, TorchAttention

NUM_BLOCKS = 400
TOLERANCE = 2e-5
KEY_DIM = 8


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """The compiler's seconds are not those of an example."""
    native.library()


def dense(query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """The last `tokens` positions of one sequence attend to all of it, by one float32 softmax.

    query (heads, tokens, dim), keys and values (kv_heads, context, …) → (tokens, heads, value_dim).
    """
    heads, tokens, _ = query.shape
    context = keys.shape[1]
    keys = keys.repeat_interleave(heads // len(keys), 0)
    values = values.repeat_interleave(heads // len(values), 0)
    scores = query @ keys.transpose(1, 2) * params.scaling
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    distance = torch.arange(context - tokens, context)[:, None] - torch.arange(context)
    hidden = (distance < 0) | (distance >= (params.window or context + 1))
    scores = scores.masked_fill(hidden, -torch.inf)
    if params.sinks is not None:
        scores = torch.cat([scores, params.sinks[:, None, None].expand(-1, tokens, 1)], -1)
    return (scores.softmax(-1)[..., :context] @ values).transpose(0, 1)


@dataclass
class History:
    """One sequence: the keys and values of every position so far, and the blocks that hold them."""

    keys: Tensor
    values: Tensor
    blocks: list[int]

    @property
    def length(self) -> int:
        return self.keys.shape[1]


class Harness:
    """A backend whose unwritten slots are NaN, as a freed block's may be, and the sequences it serves."""

    def __init__(
        self,
        shape: LayerShape,
        groups: int,
        block_size: int,
        params: AttentionParams,
        seed: int,
        kind: type[TorchAttention] | type[NativeAttention] = TorchAttention,
    ) -> None:
        self.shape, self.heads, self.params = shape, groups * shape.num_kv_heads, params
        self.block_size = block_size
        self.backend = kind([shape], NUM_BLOCKS, block_size, torch.float32, torch.device("cpu"))
        for cache in (self.backend.keys[0], self.backend.values[0]):
            cache[1:] = torch.nan
        self.random = torch.Generator().manual_seed(seed)
        self.free = (1 + torch.randperm(NUM_BLOCKS - 1, generator=self.random)).tolist()

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.random)

    def new(self) -> History:
        kv_heads, shape = self.shape.num_kv_heads, self.shape
        return History(torch.empty(kv_heads, 0, shape.key_dim), torch.empty(kv_heads, 0, shape.value_dim), [])

    def fork(self, parent: History) -> History:
        """A sequence that shares the parent's full blocks and owns a copy of its last, partial one."""
        full = parent.length // self.block_size
        own = [self.free.pop() for _ in parent.blocks[full:]]
        if own:
            self.backend.copy_blocks(list(zip(parent.blocks[full:], own, strict=True)))
        return History(parent.keys, parent.values, parent.blocks[:full] + own)

    def assert_step(self, work: list[tuple[History, int]]) -> None:
        """Compute `count` more tokens of each sequence in one ragged batch, and compare each row."""
        kv_heads, key_dim, value_dim = self.shape.num_kv_heads, self.shape.key_dim, self.shape.value_dim
        start, queries = [0], []
        for history, count in work:
            history.keys = torch.cat([history.keys, self.normal(kv_heads, count, key_dim)], 1)
            history.values = torch.cat([history.values, self.normal(kv_heads, count, value_dim)], 1)
            while len(history.blocks) * self.block_size < history.length:
                history.blocks.append(self.free.pop())
            queries.append(self.normal(self.heads, count, key_dim))
            start.append(start[-1] + count)
        batch = RaggedBatch(start, [h.length for h, _ in work], [h.blocks for h, _ in work])
        self.backend.prepare(batch)
        keys = torch.cat([h.keys[:, -count:] for h, count in work], 1)
        values = torch.cat([h.values[:, -count:] for h, count in work], 1)
        output = self.backend.forward(0, torch.cat(queries, 1), keys, values, self.params)
        for i, (history, _) in enumerate(work):
            expected = dense(queries[i], history.keys, history.values, self.params)
            torch.testing.assert_close(output[start[i] : start[i + 1]], expected, atol=TOLERANCE, rtol=0)


counts = st.sampled_from([1, 1, 1, 2, 5, 17, 60, CHUNK, CHUNK + 1, 200])
windows = st.none() | st.sampled_from([1, 7, 16, CHUNK - 1, CHUNK, CHUNK + 1, 150])


@st.composite
def harnesses(draw: st.DrawFn) -> Harness:
    shape = LayerShape(draw(st.integers(1, 3)), KEY_DIM, draw(st.sampled_from([KEY_DIM, 12, 4])))
    groups = draw(st.integers(1, 3))
    sinks = torch.linspace(-1, 3, groups * shape.num_kv_heads) if draw(st.booleans()) else None
    params = AttentionParams(0.4, draw(windows), draw(st.sampled_from([None, 2.0])), sinks)
    kind = draw(st.sampled_from([TorchAttention, NativeAttention]))
    block_size = draw(st.sampled_from([16, 128] if kind is NativeAttention else [4, 16, 128]))
    return Harness(shape, groups, block_size, params, draw(st.integers(0, 99)), kind)


@settings(max_examples=80, deadline=None)
@given(harnesses(), st.data())
def test_mixed_chunks_and_decodes_of_sequences_that_share_blocks(harness: Harness, data: st.DataObject) -> None:
    histories = [harness.new() for _ in range(data.draw(st.integers(1, 3)))]
    for _ in range(data.draw(st.integers(1, 4))):
        work = [(history, data.draw(counts)) for history in histories if data.draw(st.integers(0, 3))]
        if work:
            harness.assert_step(work)
        if len(histories) < 6 and data.draw(st.booleans()):
            histories.append(harness.fork(data.draw(st.sampled_from(histories))))
    harness.assert_step([(history, 1) for history in histories])


@pytest.mark.parametrize("window", [None, 150])
def test_a_group_reads_its_shared_chunks_once(window: int | None) -> None:
    harness = Harness(LayerShape(2, KEY_DIM, KEY_DIM), 2, 16, AttentionParams(0.4, window), seed=1)
    leader = harness.new()
    harness.assert_step([(leader, 2 * CHUNK + 20)])
    group = [leader, *(harness.fork(leader) for _ in range(6))]
    for _ in range(20):
        harness.assert_step([(history, 1) for history in group])
    chunks = [chunk for plan in harness.backend._decode_plan(window) for chunk in plan.chunks.tolist()]
    shared = [0, 1] if window is None else [1]  # a window of 150 has left the first chunk behind
    assert sorted(chunks) == [*shared, *[2] * len(group)]


def test_the_padding_block_stays_zero() -> None:
    harness = Harness(LayerShape(1, KEY_DIM, KEY_DIM), 1, 4, AttentionParams(1.0), seed=2)
    a, b = harness.new(), harness.new()
    harness.assert_step([(a, 9), (b, 1)])
    harness.assert_step([(a, 1), (b, 150)])
    assert not harness.backend.keys[0][0].any()
    assert not harness.backend.values[0][0].any()


@pytest.mark.parametrize("block_size", [3, 48, 256])
def test_a_block_size_that_does_not_fit_the_chunks_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size must divide 128, got {block_size}"):
        TorchAttention([], 2, block_size, torch.float32, torch.device("cpu"))
