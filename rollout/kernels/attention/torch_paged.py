"""Paged attention in plain torch: the chunked definition of `chunked.py` over a paged cache.

Rows that hold the same physical blocks in a chunk (the samples of one prompt, or requests that hit the same prefix)
share one read of it. Made for CPUs; it runs on any device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.kernels.attention.base import AttentionBackend, AttentionParams, LayerShape, RaggedBatch
from rollout.kernels.attention.chunked import CHUNK, attend_causally, attend_to_chunk, finish, merge

MAX_GATHER_ELEMENTS = 1 << 21
"""Elements of keys gathered at once for decode rows: bounds the temporary memory (8 MiB in float32)."""


@dataclass(frozen=True)
class SharedChunks:
    """Decode work: `rows` (items, r) attend to the keys in `blocks` (items, blocks per chunk), chunk number `chunks`.

    `valid` (items, r) is how many of the chunk's positions each row may see; a row listed twice fills up an item.
    """

    rows: Tensor
    chunks: Tensor
    blocks: Tensor
    valid: Tensor


class TorchAttention(AttentionBackend):
    """Chunked attention over caches of shape (num_blocks, kv_heads, block_size, dim), one pair a layer.

    `exact` pads products of few rows, so that a row has the same bits in every batch (see `chunked.py`).
    """

    def __init__(
        self,
        layers: list[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool = False,
    ) -> None:
        if CHUNK % block_size:
            raise ValueError(f"block_size must divide {CHUNK}, got {block_size}")
        super().__init__(layers, num_blocks, block_size, dtype, device)
        self.exact = exact

    def new_cache(self, kv_heads: int, dim: int) -> Tensor:
        """(num_blocks, kv_heads, block_size, dim), of which only block 0 is touched: memory comes as it is used."""
        blocks = torch.empty(self.num_blocks, kv_heads, self.block_size, dim, dtype=self.dtype, device=self.device)
        blocks[0] = 0  # the rest is written before it is read
        return blocks

    # -- the plan of a step

    def prepare(self, batch: RaggedBatch) -> None:
        slots = torch.from_numpy(batch.slots(self.block_size)).to(self.device)
        self._num_tokens = batch.num_tokens
        self._slot_blocks, self._slot_offsets = slots // self.block_size, slots % self.block_size
        starts, lens = batch.query_start.tolist(), batch.query_lens.tolist()
        contexts, tables = batch.context_lens.tolist(), batch.block_tables.tolist()
        decodes = [i for i, length in enumerate(lens) if length == 1]
        self._decode_rows = torch.tensor([starts[i] for i in decodes], dtype=torch.long, device=self.device)
        self._decode_contexts = torch.tensor([contexts[i] for i in decodes], device=self.device)
        self._decode_plans: dict[int | None, list[SharedChunks]] = {}
        self._decodes = [(tables[i], contexts[i]) for i in decodes]
        self._num_chunks = max((-(-context // CHUNK) for _, context in self._decodes), default=0)
        self._chunks = [
            (slice(starts[i], starts[i + 1]), context, self._blocks(table, context))
            for i, (context, table) in enumerate(zip(contexts, tables, strict=True))
            if lens[i] > 1
        ]
        begun = batch.begun_blocks(self.block_size)
        self._new_blocks = torch.from_numpy(begun).to(self.device, torch.int64) if len(begun) else None

    def _blocks(self, table: Sequence[int], context: int) -> Tensor:
        """The blocks of the first `context` positions, filled up with block 0 to whole chunks."""
        per_chunk = CHUNK // self.block_size
        used = list(table[: -(-context // self.block_size)])
        return torch.tensor(used + [0] * (-len(used) % per_chunk), device=self.device)

    def _decode_plan(self, window: int | None) -> list[SharedChunks]:
        """Group the decode rows by the physical chunks they read, and the groups by their number of rows."""
        if window not in self._decode_plans:
            shared: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
            per_chunk = CHUNK // self.block_size
            for row, (table, context) in enumerate(self._decodes):
                first = max(0, context - window) // CHUNK if window else 0
                for chunk in range(first, -(-context // CHUNK)):
                    end = min((chunk + 1) * per_chunk, -(-context // self.block_size))
                    blocks = tuple(table[chunk * per_chunk : end])
                    shared[chunk, blocks].append(row)
            by_count: dict[int, list[tuple[int, tuple[int, ...], list[int]]]] = defaultdict(list)
            for (chunk, blocks), rows in shared.items():
                by_count[1 << (len(rows) - 1).bit_length()].append((chunk, blocks, rows))
            self._decode_plans[window] = [self._shared_chunks(count, items) for count, items in by_count.items()]
        return self._decode_plans[window]

    def _shared_chunks(self, count: int, items: list[tuple[int, tuple[int, ...], list[int]]]) -> SharedChunks:
        per_chunk = CHUNK // self.block_size
        rows = torch.tensor([rows + [rows[0]] * (count - len(rows)) for _, _, rows in items], device=self.device)
        chunks = torch.tensor([chunk for chunk, _, _ in items], device=self.device)
        blocks = [[*blocks, *[0] * (per_chunk - len(blocks))] for _, blocks, _ in items]
        valid = (self._decode_contexts[rows] - chunks[:, None] * CHUNK).clamp(max=CHUNK)
        return SharedChunks(rows, chunks, torch.tensor(blocks, device=self.device), valid)

    # -- one layer

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        if self._new_blocks is not None:
            values.index_fill_(0, self._new_blocks, 0)
        keys[self._slot_blocks, :, self._slot_offsets] = key.transpose(0, 1)[: self._num_tokens]
        values[self._slot_blocks, :, self._slot_offsets] = value.transpose(0, 1)[: self._num_tokens]

        heads, tokens, _ = query.shape
        groups = heads // keys.shape[1]
        query = (query * params.scaling).view(keys.shape[1], groups, tokens, -1)
        output = query.new_zeros(tokens, keys.shape[1], groups, values.shape[-1])
        sinks = None if params.sinks is None else params.sinks.float().view(keys.shape[1], groups)
        if self._decodes:
            output[self._decode_rows] = self._decode(keys, values, query[:, :, self._decode_rows], params, sinks)
        for rows, context, blocks in self._chunks:
            attended, _ = attend_causally(
                query[:, :, rows],
                _gather(keys, blocks[None])[0],
                _gather(values, blocks[None])[0],
                context,
                window=params.window,
                softcap=params.softcap,
                sinks=sinks,
                exact=self.exact,
            )
            output[rows] = attended.to(output.dtype).permute(2, 0, 1, 3)
        return output.flatten(1, 2)

    def _decode(
        self, keys: Tensor, values: Tensor, query: Tensor, params: AttentionParams, sinks: Tensor | None
    ) -> Tensor:
        """query (kv_heads, groups, rows, dim), scaled → (rows, kv_heads, groups, value_dim)."""
        kv_heads, groups, rows, _ = query.shape
        query = query.permute(2, 0, 1, 3)
        shape = (self._num_chunks, rows, kv_heads, groups)
        top = torch.full(shape, -torch.inf, device=self.device)
        total = torch.zeros(shape, device=self.device)
        output = torch.zeros(*shape, values.shape[-1], device=self.device)
        step = max(1, MAX_GATHER_ELEMENTS // (CHUNK * kv_heads * keys.shape[-1]))
        for plan in self._decode_plan(params.window):
            for first in range(0, len(plan.rows), step):
                item = slice(first, first + step)
                row, chunk = plan.rows[item], plan.chunks[item]
                items, count = row.shape
                peak, weight, partial = attend_to_chunk(
                    query[row].transpose(1, 2).reshape(items, kv_heads, count * groups, -1),
                    _gather(keys, plan.blocks[item]),
                    _gather(values, plan.blocks[item]),
                    self._hidden(plan, item, params.window, groups),
                    params.softcap,
                    exact=self.exact,
                )
                target = (chunk[:, None].expand_as(row), row)
                top[target] = peak.view(items, kv_heads, count, groups).transpose(1, 2)
                total[target] = weight.view(items, kv_heads, count, groups).transpose(1, 2)
                output[target] = partial.view(items, kv_heads, count, groups, -1).transpose(1, 2)
        for number in range(1, self._num_chunks):
            merge(top[0], total[0], output[0], top[number], total[number], output[number])
        return finish(top[0], total[0], output[0], sinks)[0].to(query.dtype)

    def _hidden(self, plan: SharedChunks, item: slice, window: int | None, groups: int) -> Tensor:
        """What each row may not see of its chunk: (items, 1, rows · groups, CHUNK)."""
        at = torch.arange(CHUNK, device=self.device)
        hidden = at >= plan.valid[item][..., None]
        if window:
            behind = self._decode_contexts[plan.rows[item]] - window - plan.chunks[item][:, None] * CHUNK
            hidden |= at < behind[..., None]
        return hidden.repeat_interleave(groups, 1)[:, None]


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """The positions of `blocks` (items, n) out of one layer's cache → (items, kv_heads, n * block_size, dim)."""
    _, kv_heads, block_size, dim = cache.shape
    items, per_item = blocks.shape
    rows = blocks[:, None] * kv_heads + torch.arange(kv_heads, device=blocks.device)[:, None]
    gathered = cache.view(-1, block_size * dim).index_select(0, rows.flatten())
    return gathered.view(items, kv_heads, per_item * block_size, dim)
