"""Paged attention in plain torch: batched products over aligned chunks of keys, merged in order of position.

Every row attends chunk by chunk (`CHUNK` positions, aligned to multiples of it). A chunk yields a maximum, a sum and an
output; a row's chunks are merged by log-sum-exp in order of position. Rows that hold the same physical blocks in a
chunk (the samples of one prompt, or requests that hit the same prefix) share one read of it. Made for CPUs; it runs on
any device.

Source of the partial softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.model.attention.base import AttentionBackend, AttentionParams, LayerShape, RaggedBatch

CHUNK = 128
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


@dataclass(frozen=True)
class PrefillSegment:
    """Tokens [start, end) of the row are the last ones of one sequence of `context` positions in `blocks`."""

    start: int
    end: int
    context: int
    blocks: Tensor


class TorchAttention(AttentionBackend):
    """Chunked attention over caches of shape (num_blocks, kv_heads, block_size, dim), one pair a layer."""

    def __init__(
        self, layers: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers, num_blocks, block_size, dtype, device)
        self.chunk = max(CHUNK, block_size)
        if self.chunk % block_size:
            raise ValueError(f"block_size must divide {CHUNK} or be at least {CHUNK}, got {block_size}")

        def cache(layer: LayerShape, dim: int) -> Tensor:
            blocks = torch.empty(num_blocks, layer.num_kv_heads, block_size, dim, dtype=dtype, device=device)
            blocks[0] = 0  # the rest is written before it is read: memory is touched only as it is used
            return blocks

        self.keys = [cache(layer, layer.key_dim) for layer in layers]
        self.values = [cache(layer, layer.value_dim) for layer in layers]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(pairs, device=self.device).T
        for cache in (*self.keys, *self.values):
            cache[target] = cache[source]

    # -- the plan of a step

    def prepare(self, batch: RaggedBatch) -> None:
        slots = torch.tensor(batch.slots(self.block_size), device=self.device)
        self._slot_blocks, self._slot_offsets = slots // self.block_size, slots % self.block_size
        starts = batch.query_start
        lens = batch.query_lens
        decodes = [i for i, length in enumerate(lens) if length == 1]
        self._decode_rows = torch.tensor([starts[i] for i in decodes], dtype=torch.long, device=self.device)
        self._decode_contexts = torch.tensor([batch.context_lens[i] for i in decodes], device=self.device)
        self._decode_plans: dict[int | None, list[SharedChunks]] = {}
        self._decodes = [(batch.block_tables[i], batch.context_lens[i]) for i in decodes]
        self._num_chunks = max((-(-context // self.chunk) for _, context in self._decodes), default=0)
        self._segments = [
            PrefillSegment(
                starts[i],
                starts[i + 1],
                batch.context_lens[i],
                self._blocks(batch.block_tables[i], 0, batch.context_lens[i]),
            )
            for i, length in enumerate(lens)
            if length > 1
        ]
        self._new_blocks = self._partial_new_blocks(batch)

    def _blocks(self, table: Sequence[int], start: int, end: int) -> Tensor:
        """The blocks of positions [start, end), filled up with block 0 to whole chunks."""
        per_chunk = self.chunk // self.block_size
        used = list(table[start // self.block_size : -(-end // self.block_size)])
        return torch.tensor(used + [0] * (-len(used) % per_chunk), device=self.device)

    def _partial_new_blocks(self, batch: RaggedBatch) -> Tensor | None:
        """Blocks whose first slot is written now and whose last is not: what lies behind must not be an old NaN."""
        fresh = []
        for length, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
            last = (context - 1) // self.block_size
            if context % self.block_size and context - length <= last * self.block_size:
                fresh.append(table[last])
        return torch.tensor(fresh, device=self.device) if fresh else None

    def _decode_plan(self, window: int | None) -> list[SharedChunks]:
        """Group the decode rows by the physical chunks they read, and the groups by their number of rows."""
        if window not in self._decode_plans:
            shared: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
            per_chunk = self.chunk // self.block_size
            for row, (table, context) in enumerate(self._decodes):
                first = max(0, context - window) // self.chunk if window else 0
                for chunk in range(first, -(-context // self.chunk)):
                    end = min((chunk + 1) * per_chunk, -(-context // self.block_size))
                    blocks = tuple(table[chunk * per_chunk : end])
                    shared[chunk, blocks].append(row)
            by_count: dict[int, list[tuple[int, tuple[int, ...], list[int]]]] = defaultdict(list)
            for (chunk, blocks), rows in shared.items():
                by_count[1 << (len(rows) - 1).bit_length()].append((chunk, blocks, rows))
            self._decode_plans[window] = [self._shared_chunks(count, items) for count, items in by_count.items()]
        return self._decode_plans[window]

    def _shared_chunks(self, count: int, items: list[tuple[int, tuple[int, ...], list[int]]]) -> SharedChunks:
        per_chunk = self.chunk // self.block_size
        rows = torch.tensor([rows + [rows[0]] * (count - len(rows)) for _, _, rows in items], device=self.device)
        chunks = torch.tensor([chunk for chunk, _, _ in items], device=self.device)
        blocks = [[*blocks, *[0] * (per_chunk - len(blocks))] for _, blocks, _ in items]
        valid = (self._decode_contexts[rows] - chunks[:, None] * self.chunk).clamp(max=self.chunk)
        return SharedChunks(rows, chunks, torch.tensor(blocks, device=self.device), valid)

    # -- one layer

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        if self._new_blocks is not None:
            values.index_fill_(0, self._new_blocks, 0)
        keys[self._slot_blocks, :, self._slot_offsets] = key.transpose(0, 1)
        values[self._slot_blocks, :, self._slot_offsets] = value.transpose(0, 1)

        heads, tokens, _ = query.shape
        groups = heads // keys.shape[1]
        query = (query * params.scaling).view(keys.shape[1], groups, tokens, -1)
        output = query.new_empty(tokens, keys.shape[1], groups, values.shape[-1])
        sinks = None if params.sinks is None else params.sinks.float().view(keys.shape[1], groups)
        if self._decodes:
            output[self._decode_rows] = self._decode(keys, values, query[:, :, self._decode_rows], params, sinks)
        for segment in self._segments:
            output[segment.start : segment.end] = self._prefill(keys, values, query, segment, params, sinks)
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
        at = torch.arange(self.chunk, device=self.device)
        for plan in self._decode_plan(params.window):
            step = max(1, MAX_GATHER_ELEMENTS // (self.chunk * kv_heads * keys.shape[-1]))
            for first in range(0, len(plan.rows), step):
                item = slice(first, first + step)
                row, chunk, valid = plan.rows[item], plan.chunks[item], plan.valid[item]
                items, count = row.shape
                k, v = _gather(keys, plan.blocks[item]), _gather(values, plan.blocks[item])
                q = query[row].transpose(1, 2).reshape(items, kv_heads, count * groups, -1)
                scores = self._scores(q, k, params.softcap).view(items, kv_heads, count, groups, self.chunk)
                hidden = at >= valid[..., None]
                if params.window:
                    behind = self._decode_contexts[row] - params.window - chunk[:, None] * self.chunk
                    hidden = hidden | (at < behind[..., None])
                scores.masked_fill_(hidden[:, None, :, None], -torch.inf)
                peak = scores.amax(-1)
                weights = (scores - peak.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp_()
                partial = torch.matmul(weights.to(v.dtype).flatten(2, 3), v)
                target = (chunk[:, None].expand_as(row), row)
                top[target] = peak.transpose(1, 2)
                total[target] = weights.sum(-1).transpose(1, 2)
                output[target] = partial.view(items, kv_heads, count, groups, -1).transpose(1, 2).float()
        return merge(top, total, output, sinks).to(query.dtype)

    def _prefill(
        self,
        keys: Tensor,
        values: Tensor,
        query: Tensor,
        segment: PrefillSegment,
        params: AttentionParams,
        sinks: Tensor | None,
    ) -> Tensor:
        """One sequence's queries against its whole context → (tokens, kv_heads, groups, value_dim)."""
        kv_heads, groups = query.shape[:2]
        q = query[:, :, segment.start : segment.end]
        tokens = q.shape[2]
        first_position = segment.context - tokens
        k, v = _gather(keys, segment.blocks[None])[0], _gather(values, segment.blocks[None])[0]
        top = torch.full((kv_heads, groups, tokens), -torch.inf, device=self.device)
        total = torch.zeros_like(top)
        output = torch.zeros(*top.shape, values.shape[-1], device=self.device)
        lowest = max(0, first_position + 1 - params.window) // self.chunk if params.window else 0
        for start in range(lowest * self.chunk, segment.context, self.chunk):
            seen = max(0, start - first_position)  # queries before the chunk see nothing of it
            scores = self._scores(q[:, :, seen:].flatten(1, 2), k[:, start : start + self.chunk], params.softcap).view(
                kv_heads, groups, tokens - seen, self.chunk
            )
            position = torch.arange(first_position + seen, segment.context, device=self.device)[:, None]
            at = torch.arange(start, start + self.chunk, device=self.device)
            if start + self.chunk > first_position + seen:
                scores.masked_fill_(at > position, -torch.inf)
            if params.window:
                scores.masked_fill_(at <= position - params.window, -torch.inf)
            peak = scores.amax(-1)
            weights = scores.sub_(peak.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp_()
            partial = torch.matmul(weights.to(v.dtype).flatten(1, 2), v[:, start : start + self.chunk])
            _merge_into(
                top[..., seen:],
                total[..., seen:],
                output[..., seen:, :],
                peak,
                weights.sum(-1),
                partial.view(*peak.shape, -1).float(),
            )
        return (
            _finish(top, total, output, None if sinks is None else sinks[..., None]).to(query.dtype).permute(2, 0, 1, 3)
        )

    def _scores(self, query: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
        """query (…, rows, dim), keys (…, chunk, dim) → float32 scores (…, rows, chunk)."""
        scores = torch.matmul(query, keys.transpose(-1, -2)).float()
        return torch.tanh(scores / softcap) * softcap if softcap else scores


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """The positions of `blocks` (items, n) out of one layer's cache → (items, kv_heads, n * block_size, dim)."""
    _, kv_heads, block_size, dim = cache.shape
    items, per_item = blocks.shape
    rows = blocks[:, None] * kv_heads + torch.arange(kv_heads, device=blocks.device)[:, None]
    gathered = cache.view(-1, block_size * dim).index_select(0, rows.flatten())
    return gathered.view(items, kv_heads, per_item * block_size, dim)


def merge(top: Tensor, total: Tensor, output: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge partial softmaxes in order of position.

    top, total (chunks, …) and output (chunks, …, dim): each chunk's maximum score, sum of exponentials and weighted
    sum of values, float32; -inf and zeros where a row saw nothing of a chunk. sinks broadcasts against `…`. Returns
    (…, dim).
    """
    running_top, running_total, running_output = top[0], total[0], output[0]
    for chunk in range(1, len(top)):
        _merge_into(running_top, running_total, running_output, top[chunk], total[chunk], output[chunk])
    return _finish(running_top, running_total, running_output, sinks)


def _merge_into(top: Tensor, total: Tensor, output: Tensor, peak: Tensor, weight: Tensor, partial: Tensor) -> None:
    """Fold a chunk (peak, weight, partial) into the running (top, total, output), in place."""
    new_top = torch.maximum(top, peak).clamp(min=torch.finfo(torch.float32).min)
    keep, add = torch.exp(top - new_top), torch.exp(peak - new_top)
    total.mul_(keep).add_(weight * add)
    output.mul_(keep[..., None]).add_(partial * add[..., None])
    top.copy_(new_top)


def _finish(top: Tensor, total: Tensor, output: Tensor, sinks: Tensor | None) -> Tensor:
    """Divide by the sum; a sink is one more logit in it, without a value."""
    if sinks is not None:
        new_top = torch.maximum(top, sinks)
        keep = torch.exp(top - new_top)
        total = total * keep + torch.exp(sinks - new_top)
        output = output * keep[..., None]
    return output / total[..., None]
