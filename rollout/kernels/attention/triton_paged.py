"""Paged attention as Triton kernels: prompt chunks and decodes of one ragged batch, over a paged cache.

A row (one query of one head) attends in a fixed order: tiles of `BLOCK_N` keys by online softmax within a split of
`split_size` keys, then the splits merged in order of position. Tiles and splits are aligned to absolute positions and
their sizes depend on the layer alone, so a row's result depends neither on what else is in the batch nor on whether
it is decoded or part of a chunk. Decodes spread their splits over the grid; prompt chunks, and decodes for whose splits
there is no room, walk through theirs. The query heads that share a key/value head are rows of one tile; so are those
of decodes whose sequences have the same blocks in a split: a group's prompt is read once for all its members.

Sources: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023 (online softmax
over tiles); Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023 (splits of the keys, merged
by log-sum-exp); Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023;
Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023, in gpt-oss's form (a logit, no value).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.attention.base import AttentionParams
from rollout.kernels.attention.splits import PagedPlan

LOG2E = 1.4426950408889634  # the kernels work in powers of two: exp(x) = exp2(x * LOG2E)
FULL_GRID = 2048
"""Programs that fill the largest GPUs; decodes divide their splits among more programs only up to this."""


@dataclass(frozen=True)
class Tiles:
    """The tile shapes of a layer: a function of its head counts, widths and dtype, never of the batch."""

    key_width: int
    value_width: int
    keys: int
    rows: int
    warps: int

    @classmethod
    def of(cls, group: int, key_dim: int, value_dim: int, itemsize: int) -> Tiles:
        """For `group` query heads per key/value head: powers of two, at least 16, that fit 100 KiB of shared memory."""
        key_width, value_width = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
        widest = max(key_width, value_width)
        # Float32 has no tensor cores to feed (TF32 would round): its larger tiles only spill registers.
        rows = 16 if widest > 256 or itemsize == 4 else 32 if widest > 128 else 64
        return cls(
            key_width=key_width,
            value_width=value_width,
            keys=max(16, min(64, 16384 // (widest * itemsize))),
            rows=max(rows, triton.next_power_of_2(group)),
            warps=4 if widest <= 128 else 8,
        )


@triton.jit
def _merge(peak, total, output, next_peak, next_total, next_output):
    """Fold a later split into an earlier one."""
    new_peak = tl.maximum(peak, next_peak)
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    keep = tl.exp2(peak - safe)
    add = tl.exp2(next_peak - safe)
    return new_peak, total * keep + next_total * add, output * keep[:, None] + next_output * add[:, None]


@triton.jit
def _store_output(  # noqa: PLR0913
    out, lse, at, held, peak, total, output, sinks, heads, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr
):
    """Add the sinks to the sums, divide by them and store each row at `at` (rows,) int64."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=held, other=0.0).to(tl.float32) * 1.4426950408889634
        new_peak = tl.maximum(peak, sink)
        keep = tl.exp2(peak - new_peak)
        total = total * keep + tl.exp2(sink - new_peak)
        output = output * keep[:, None]
        peak = new_peak
    output = output / tl.where(total > 0.0, total, 1.0)[:, None]
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    target = out + at[:, None] * VALUE_DIM + column
    tl.store(target, output.to(out.dtype.element_ty), mask=held[:, None] & (column < VALUE_DIM))
    if lse is not None:
        tl.store(lse + at, (peak + tl.log2(total)) / 1.4426950408889634, mask=held)


@triton.jit
def _attend_split(  # noqa: PLR0913
    query,
    positions,
    keys,
    values,
    table,
    begin,
    end,
    lowest,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    ROW_STRIDE_K: tl.constexpr,
    ROW_STRIDE_V: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows at `positions` over the keys [begin, end), those below `lowest` left out → (peak, total, output)."""
    key_column = tl.arange(0, KEY_WIDTH)
    value_column = tl.arange(0, VALUE_WIDTH)
    peak, total, output = _nothing_yet(BLOCK_M, VALUE_WIDTH)
    for tile in range(begin, end, BLOCK_N):
        at = tile + tl.arange(0, BLOCK_N)
        # What lies outside was never written, or belongs to someone else by now: 0 * NaN would be NaN.
        held = (at >= lowest) & (at < end)
        block = tl.load(table + at // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + at % BLOCK_SIZE
        key = tl.load(
            keys + slot[None, :] * ROW_STRIDE_K + key_column[:, None],
            mask=held[None, :] & (key_column < KEY_DIM)[:, None],
            other=0.0,
        )
        value = tl.load(
            values + slot[:, None] * ROW_STRIDE_V + value_column[None, :],
            mask=held[:, None] & (value_column < VALUE_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale
        if softcap is not None:
            scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * softcap  # tanh(scores)
        seen = held[None, :] & (at[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen = seen & (at[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        keep = tl.exp2(peak - safe)
        weights = tl.exp2(scores - safe[:, None])
        total = total * keep + tl.sum(weights, 1)
        output = tl.dot(weights.to(value.dtype), value, output * keep[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, output


@triton.jit
def _sequence_of_tile(item, query_start, num_seqs, TOKENS: tl.constexpr):
    """Sequence s owns the tiles from query_start[s] // TOKENS + s on: room enough for every length. Bisect."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= item:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _nothing_yet(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What rows have before they attend to anything: (peak, total, output)."""
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    return peak, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def _load_queries(query, heads, token, held, head_stride, token_stride, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The queries of rows, of their heads and tokens (rows,): (rows, WIDTH)."""
    column = tl.arange(0, WIDTH)[None, :]
    at = heads.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    return tl.load(query + at[:, None] + column, mask=held[:, None] & (column < DIM), other=0.0)


@triton.jit
def _store_partial(partials, stats, at, held, peak, total, output, WIDTH: tl.constexpr):
    """Keep one split's share of each row at `at` (rows,) int64."""
    column = tl.arange(0, WIDTH)
    tl.store(partials + at[:, None] * WIDTH + column[None, :], output, mask=held[:, None])
    tl.store(stats + at * 2, peak, mask=held)
    tl.store(stats + at * 2 + 1, total, mask=held)


@triton.jit(do_not_specialize=["num_seqs"])
def _attend(  # noqa: PLR0913
    out,  # (tokens, heads, value_dim)
    lse,  # (tokens, heads) float32, or None: the log of each row's sum of exponentials
    partials,  # (places, heads, VALUE_WIDTH) float32, or None: a split's output, undivided
    stats,  # (places, heads, 2) float32: peaks and totals
    query,  # (heads, tokens, key_dim), strided
    keys,  # (blocks, BLOCK_SIZE, kv_heads, key_dim)
    values,  # (blocks, BLOCK_SIZE, kv_heads, value_dim)
    sinks,  # (heads,) or None
    query_start,  # (seqs + 1,) int32
    context_lens,  # (seqs,) int32
    places,  # (seqs,) int32: the place of a decode's first split; -1 where it walks through them
    shared,  # (seqs,) int32: how many splits a decode shares with those beside it
    members,  # (seqs,) int32: how many decodes, from here on, share them; 0 where an earlier one speaks for this
    tables,  # (seqs, table_stride) int32
    num_seqs,
    scale,
    softcap,
    head_stride,
    token_stride,
    table_stride,
    DECODE: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One tile of queries of one sequence and key/value head. Grid: (tiles, kv_heads, programs sharing the splits)."""
    TOKENS: tl.constexpr = 1 if DECODE else BLOCK_M // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    item = tl.program_id(0)
    head = tl.program_id(1)
    if DECODE:
        seq = item
        first = 0
    else:
        seq = _sequence_of_tile(item, query_start, num_seqs, TOKENS)
        first = (item - tl.load(query_start + seq) // TOKENS - seq) * TOKENS
    start = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - start
    if DECODE:
        if query_len != 1:
            return
    elif (query_len == 1) | (first >= query_len):
        return
    context = tl.load(context_lens + seq)

    row = tl.arange(0, BLOCK_M)
    heads = head * GROUP + row % GROUP
    key_at = keys + head * KEY_DIM
    value_at = values + head * VALUE_DIM
    table = tables + seq.to(tl.int64) * table_stride
    last = tl.minimum(context, context - query_len + first + TOKENS)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(0, context - query_len + first + 1 - WINDOW)

    begin = lowest // SPLIT
    step = 1
    if partials is not None:
        place = tl.load(places + seq)
        if (place < 0) & (tl.program_id(2) > 0):
            return
        if WINDOW == 0:
            # The splits that are shared: all members' rows, by the program of the first one.
            begin = tl.load(shared + seq)
            count = tl.load(members + seq)
            other = seq + row // GROUP
            held = row < count * GROUP
            own = tl.load(query_start + other, mask=held, other=0)
            q = _load_queries(query, heads, own, held, head_stride, token_stride, KEY_DIM, KEY_WIDTH)
            positions = tl.load(context_lens + other, mask=held, other=1) - 1
            other_place = tl.load(places + other, mask=held, other=0)
            for split in range(tl.program_id(2), tl.where(count > 0, begin, 0), tl.num_programs(2)):
                peak, total, output = _attend_split(
                    q, positions, key_at, value_at, table, split * SPLIT, split * SPLIT + SPLIT, 0, scale, softcap,
                    WINDOW, KV_HEADS * KEY_DIM, KV_HEADS * VALUE_DIM, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH,
                    BLOCK_SIZE, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                at = (other_place + split).to(tl.int64) * HEADS + heads
                _store_partial(partials, stats, at, held, peak, total, output, VALUE_WIDTH)
        if place >= 0:
            begin += tl.program_id(2)
            step = tl.num_programs(2)

    token = first + row // GROUP
    held = (row < TOKENS * GROUP) & (token < query_len)
    q = _load_queries(query, heads, start + token, held, head_stride, token_stride, KEY_DIM, KEY_WIDTH)
    positions = context - query_len + token
    peak, total, output = _nothing_yet(BLOCK_M, VALUE_WIDTH)
    for split in range(begin, tl.cdiv(last, SPLIT), step):
        split_peak, split_total, split_output = _attend_split(
            q, positions, key_at, value_at, table,
            tl.maximum(split * SPLIT, lowest // BLOCK_N * BLOCK_N), tl.minimum(split * SPLIT + SPLIT, last), lowest,
            scale, softcap,
            WINDOW, KV_HEADS * KEY_DIM, KV_HEADS * VALUE_DIM, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH,
            BLOCK_SIZE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        peak, total, output = _merge(peak, total, output, split_peak, split_total, split_output)
        if partials is not None:
            at = tl.where(place + row * 0 < 0, -1, (place + split).to(tl.int64) * HEADS + heads)
            kept = held & (at >= 0)
            _store_partial(partials, stats, at, kept, split_peak, split_total, split_output, VALUE_WIDTH)
    if partials is not None:
        held = held & (place + row * 0 < 0)
    at = (start + token).to(tl.int64) * HEADS + heads
    _store_output(out, lse, at, held, peak, total, output, sinks, heads, VALUE_DIM, VALUE_WIDTH)


@triton.jit
def _merge_splits(  # noqa: PLR0913
    out,
    partials,
    stats,
    sinks,
    query_start,
    context_lens,
    places,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The splits of one decoding sequence and key/value head, in order. Grid: (seqs, kv_heads)."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    seq = tl.program_id(0)
    start = tl.load(query_start + seq)
    place = tl.load(places + seq)
    if (place < 0) | (tl.load(query_start + seq + 1) - start != 1):
        return
    context = tl.load(context_lens + seq)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(0, context - WINDOW)
    row = tl.arange(0, BLOCK_M)
    held = row < GROUP
    heads = tl.program_id(1) * GROUP + row
    column = tl.arange(0, VALUE_WIDTH)
    peak, total, output = _nothing_yet(BLOCK_M, VALUE_WIDTH)
    for split in range(lowest // SPLIT, tl.cdiv(context, SPLIT)):
        at = (place + split).to(tl.int64) * HEADS + heads
        split_peak = tl.load(stats + at * 2, mask=held, other=0.0)
        split_total = tl.load(stats + at * 2 + 1, mask=held, other=0.0)
        split_output = tl.load(partials + at[:, None] * VALUE_WIDTH + column[None, :], mask=held[:, None], other=0.0)
        peak, total, output = _merge(peak, total, output, split_peak, split_total, split_output)
    at = start.to(tl.int64) * HEADS + heads
    _store_output(out, None, at, held, peak, total, output, sinks, heads, VALUE_DIM, VALUE_WIDTH)


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, params: AttentionParams, lse: Tensor | None = None
) -> Tensor:
    """Causal attention of each sequence's last tokens over its context.

    query (heads, tokens, key_dim), last stride 1; keys (blocks, block_size, kv_heads, key_dim) and values (blocks,
    block_size, kv_heads, value_dim) contiguous, the step's own tokens written. Returns (tokens, heads, value_dim) in
    query's dtype. `lse` (tokens, heads) float32, if given, gets the log of each row's sum of exponentials; the plan has
    no places then.
    """
    heads, tokens, key_dim = query.shape
    _, block_size, kv_heads, value_dim = values.shape
    num_seqs, group, softcap = len(plan.context_lens), heads // kv_heads, params.softcap
    tables = plan.block_tables
    tiles = Tiles.of(group, key_dim, value_dim, query.element_size())
    out = query.new_empty(tokens, heads, value_dim)
    # Without fused multiply-adds where the compiler pleases, a kernel's variants round alike.
    common = {
        "WINDOW": params.window or 0, "KV_HEADS": kv_heads, "GROUP": group, "VALUE_DIM": value_dim,
        "VALUE_WIDTH": tiles.value_width, "SPLIT": plan.split_size, "BLOCK_M": tiles.rows, "num_warps": tiles.warps,
        "num_stages": 2, "enable_fp_fusion": False,
    }  # fmt: skip

    def attend(tile_count: int, sharing: int, partials: Tensor | None, stats: Tensor | None, *, decode: bool) -> None:
        _attend[tile_count, kv_heads, sharing](
            out, lse, partials, stats, query, keys, values, params.sinks, plan.query_start, plan.context_lens,
            plan.places, plan.shared, plan.members, tables, num_seqs,
            params.scaling / softcap if softcap else params.scaling * LOG2E,
            softcap * LOG2E if softcap else None,
            query.stride(0), query.stride(1), tables.stride(0),
            DECODE=decode, KEY_DIM=key_dim, KEY_WIDTH=tiles.key_width, BLOCK_SIZE=block_size, BLOCK_N=tiles.keys,
            **common,
        )  # fmt: skip

    if plan.has_chunks:
        attend(tokens // (tiles.rows // group) + num_seqs, 1, None, None, decode=False)
    if plan.has_decodes:
        if not plan.num_places:
            attend(num_seqs, 1, None, None, decode=True)
            return out
        partials, stats = (
            torch.empty(plan.num_places, heads, width, dtype=torch.float32, device=out.device)
            for width in (tiles.value_width, 2)
        )
        sharing = min(plan.max_splits, triton.cdiv(FULL_GRID, num_seqs * kv_heads))
        attend(num_seqs, sharing, partials, stats, decode=True)
        _merge_splits[num_seqs, kv_heads](
            out, partials, stats, params.sinks, plan.query_start, plan.context_lens, plan.places, **common
        )
    return out
