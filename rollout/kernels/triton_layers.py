"""What lies between a layer's products and its attention, as Triton kernels: one launch for each run of small steps.

Every intermediate result is rounded to the model's dtype where transformers' code rounds it; sums of squares are taken
in float32 by one program a row, in an order that depends on the row's width alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.norms import Deferred, HeadNorm, NormKind

GATE_BLOCK = 1024
"""Elements of a gate that one program computes."""


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _scaled(normal, weight, dtype: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """A norm's last step, `normal` (float32) times its weight, rounded as the model's code rounds it."""
    if ROUND_FIRST:
        normal = _rounded(normal, dtype)
    if OFFSET != 0.0:
        weight = weight + OFFSET
    return _rounded(normal * weight, dtype)


@triton.jit
def _normalize(
    output,  # (rows, DIM)
    total,  # (rows, DIM) or None: x + added
    x,  # (rows, DIM)
    added,  # (rows, DIM) or None
    weight,  # (DIM,)
    epsilon,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """Grid: (rows,). All rows are contiguous."""
    dtype: tl.constexpr = output.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * DIM
    column = tl.arange(0, WIDTH)
    held = column < DIM
    values = tl.load(x + start + column, mask=held, other=0.0).to(tl.float32)
    if added is not None:
        values = _rounded(values + tl.load(added + start + column, mask=held, other=0.0).to(tl.float32), dtype)
        tl.store(total + start + column, values.to(dtype), mask=held)
    scale = tl.rsqrt(tl.sum(values * values, 0) / DIM + epsilon)
    factor = tl.load(weight + column, mask=held, other=0.0).to(tl.float32)
    result = _scaled(values * scale, factor, dtype, OFFSET, ROUND_FIRST)
    tl.store(output + start + column, result.to(dtype), mask=held)


def normalize(x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """The root-mean-square norm of x (…, dim), in its dtype, with `weight` (dim,)."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_normalize(output, None, x.contiguous(), None, weight, kind)
    return output


def add_and_normalize(x: Tensor, added: Tensor, weight: Tensor, kind: NormKind) -> tuple[Tensor, Tensor]:
    """x + added, both (…, dim) of one dtype, and its root-mean-square norm."""
    total, output = torch.empty_like(x), torch.empty_like(x)
    _launch_normalize(output, total, x, added.contiguous(), weight, kind)
    return total, output


def _launch_normalize(
    output: Tensor, total: Tensor | None, x: Tensor, added: Tensor | None, weight: Tensor, kind: NormKind
) -> None:
    dim = x.shape[-1]
    width = triton.next_power_of_2(dim)
    _normalize[x.numel() // dim,](
        output, total, x, added, weight, kind.epsilon,
        DIM=dim, WIDTH=width, OFFSET=kind.offset, ROUND_FIRST=kind.round_first,
        num_warps=min(8, max(1, width // 512)), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _gate(
    output,  # (rows, width), contiguous
    gate,  # (rows, width), strided
    up,
    width,
    gate_stride,
    up_stride,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (rows, blocks)."""
    dtype: tl.constexpr = output.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    x = tl.load(gate + row * gate_stride + column, mask=held, other=0.0).to(tl.float32)
    # silu(x) = x sigmoid(x), and 0.5 (1 + tanh(y)) = sigmoid(2 y)
    slope = 1.5957691216057308 * (x + 0.044715 * x * x * x) if GELU else x
    active = tl.div_rn(x, 1.0 + tl.exp(-slope))
    result = _rounded(active, dtype) * tl.load(up + row * up_stride + column, mask=held, other=0.0).to(tl.float32)
    tl.store(output + row * width + column, result.to(dtype), mask=held)


def gate(x: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
    """silu(x) · up, or gelu(x) · up by tanh: x and up (1, rows, width) of one dtype, last stride 1."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    _gate[x.shape[-2], triton.cdiv(width, GATE_BLOCK)](
        output, x, up, width, x.stride(-2), up.stride(-2),
        GELU=gelu, BLOCK=GATE_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return output


@triton.jit
def _turned(  # noqa: PLR0913
    x,
    held,
    cosine,
    sine,
    weight,
    epsilon,
    dtype: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """Heads at `x` (ROWS, 1), where `held` (ROWS, 1): normalized, if there is a weight, and turned: (ROWS, WIDTH)."""
    column = tl.arange(0, WIDTH)[None, :]
    first = column < ROTARY // 2
    other = tl.where(first, column + ROTARY // 2, column - ROTARY // 2)
    turning = column < ROTARY
    values = tl.load(x + column, mask=held & (column < DIM), other=0.0).to(tl.float32)
    partner = tl.load(x + other, mask=held & turning, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(values * values, 1) / DIM + epsilon)[:, None]
        factor = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
        other_factor = tl.load(weight + other, mask=turning, other=0.0).to(tl.float32)
        values = _scaled(values * scale, factor, dtype, OFFSET, ROUND_FIRST)
        partner = _scaled(partner * scale, other_factor, dtype, OFFSET, ROUND_FIRST)
    c = tl.load(cosine + column, mask=turning, other=0.0).to(tl.float32)
    s = tl.load(sine + column, mask=turning, other=0.0).to(tl.float32)
    turned = _rounded(values * c, dtype) + _rounded(tl.where(first, -partner, partner) * s, dtype)
    return tl.where(turning, _rounded(turned, dtype), values)


@triton.jit
def _write_heads(  # noqa: PLR0913
    output,  # (tokens, kv_heads · GROUP, KEY_DIM), contiguous; None where nothing is turned
    query,  # (kv_heads · GROUP, tokens, KEY_DIM), strided
    key,  # (kv_heads, tokens, KEY_DIM), strided
    value,  # (kv_heads, tokens, VALUE_DIM), strided
    keys,  # (slots, kv_heads, KEY_DIM), contiguous: the cache
    values,  # (slots, kv_heads, VALUE_DIM), contiguous
    slots,  # (tokens,) int64
    cosine,  # (tokens, ROTARY), contiguous, or None
    sine,
    query_weight,  # (KEY_DIM,) or None
    key_weight,
    query_epsilon,
    key_epsilon,
    query_head_stride,
    query_stride,
    key_head_stride,
    key_stride,
    value_head_stride,
    value_stride,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """One token's key, value and queries of one key/value head. Grid: (tokens, kv_heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    slot = tl.load(slots + token)
    key_column = tl.arange(0, KEY_WIDTH)[None, :]
    value_column = tl.arange(0, VALUE_WIDTH)
    one = tl.arange(0, 1)[:, None]
    key_at = key + head.to(tl.int64) * key_head_stride + token * key_stride + one
    if cosine is None:
        turned = tl.load(key_at + key_column, mask=key_column < KEY_DIM, other=0.0)
    else:
        at = token * ROTARY
        turned = _turned(
            key_at, one == 0, cosine + at, sine + at, key_weight, key_epsilon, key.dtype.element_ty,
            KEY_DIM, KEY_WIDTH, ROTARY, OFFSET, ROUND_FIRST,
        )  # fmt: skip
        row = tl.arange(0, GROUP_ROWS)[:, None]
        heads = (head * GROUP + row).to(tl.int64)
        held = row < GROUP
        queries = _turned(
            query + heads * query_head_stride + token * query_stride, held, cosine + at, sine + at,
            query_weight, query_epsilon, query.dtype.element_ty,
            KEY_DIM, KEY_WIDTH, ROTARY, OFFSET, ROUND_FIRST,
        )  # fmt: skip
        target = output + (token * kv_heads * GROUP + heads) * KEY_DIM + key_column
        tl.store(target, queries.to(output.dtype.element_ty), mask=held & (key_column < KEY_DIM))
    place = slot * kv_heads + head
    tl.store(keys + place * KEY_DIM + one + key_column, turned.to(keys.dtype.element_ty), mask=key_column < KEY_DIM)
    held_value = value_column < VALUE_DIM
    row_of_values = value + head.to(tl.int64) * value_head_stride + token * value_stride + value_column
    tl.store(
        values + place * VALUE_DIM + value_column,
        tl.load(row_of_values, mask=held_value, other=0.0).to(values.dtype.element_ty),
        mask=held_value,
    )


def write_heads(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, deferred: Deferred
) -> Tensor:
    """Write a step's keys and values into the cache, after their norms and rotation where these were deferred.

    query (heads, tokens, key_dim), key (kv_heads, tokens, key_dim) and value (kv_heads, tokens, value_dim), last stride
    1; keys (blocks, block_size, kv_heads, key_dim) and values (blocks, block_size, kv_heads, value_dim), contiguous;
    slots (tokens,) int64. Returns the queries (heads, tokens, key_dim), normalized and turned, or as they came.
    """
    (heads, tokens, key_dim), kv_heads, value_dim = query.shape, key.shape[0], value.shape[-1]
    group, rotary = heads // kv_heads, 0
    cosine, sine, turned = deferred.cosine, deferred.sine, None
    if cosine is not None:
        turned, rotary = query.new_empty(tokens, heads, key_dim), cosine.shape[-1]
    query_norm, key_norm = deferred.query_norm, deferred.key_norm
    kind = NormKind(0.0, 0.0, True) if query_norm is None else query_norm.kind
    _write_heads[tokens, kv_heads](
        turned, query, key, value, keys, values, slots, cosine, sine, _weight(query_norm), _weight(key_norm),
        kind.epsilon, kind.epsilon if key_norm is None else key_norm.kind.epsilon,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        GROUP=group, GROUP_ROWS=triton.next_power_of_2(group),
        KEY_DIM=key_dim, KEY_WIDTH=triton.next_power_of_2(key_dim),
        VALUE_DIM=value_dim, VALUE_WIDTH=triton.next_power_of_2(value_dim),
        ROTARY=rotary, OFFSET=kind.offset, ROUND_FIRST=kind.round_first,
        num_warps=max(1, min(4, group * key_dim // 512)), enable_fp_fusion=False,
    )  # fmt: skip
    return query if turned is None else turned.transpose(0, 1)


def _weight(norm: HeadNorm | None) -> Tensor | None:
    return None if norm is None else norm.module.weight  # type: ignore[return-value]
