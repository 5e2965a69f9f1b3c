"""The experts of a mixture-of-experts layer as Triton kernels: a grouped product over rows sorted by expert.

The host reads nothing and every shape follows from the number of rows, so that a CUDA graph captures it. A row's sums
run over its inputs in steps of one size, whatever rows share its tile. Products round where transformers' own do, but
for a bias, which is added before.

Sources: Gale, Narayanan, Young and Zaharia, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022
(groups filled up to tiles, so that no row is dropped); Tillet, Kung and Cox, "Triton: An Intermediate Language and
Compiler for Tiled Neural Network Computations", 2019, and its tutorials (the order of tiles).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

EXPERTS_NAME = "rollout"
"""The name under which transformers knows `experts_forward`."""
CHUNK = 1024
"""Expert ids that a program looks at together."""
NEIGHBOURS = 8
"""Tiles of rows that take the same weights one after another, while they lie in the cache."""


@triton.jit(do_not_specialize=["rows", "tiles"])
def _sort_by_expert(
    order,  # (tiles * TILE,) int32
    owners,  # (tiles,) int32
    experts,  # (rows,) integers
    rows,
    tiles,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One expert's rows into its tiles, in order; the last program marks the tiles that are left. Grid: experts + 1."""
    expert = tl.program_id(0)
    ids = tl.arange(0, WIDTH)
    counts = tl.zeros((WIDTH,), tl.int32)
    for chunk in range(0, rows, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        counts += tl.histogram(tl.load(experts + at, mask=at < rows, other=WIDTH - 1).to(tl.int32), WIDTH)
    used = (counts + TILE - 1) // TILE
    first = tl.sum(tl.where(ids < expert, used, 0))
    if expert == tl.num_programs(0) - 1:
        for chunk in range(first, tiles, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            tl.store(owners + at, -1, mask=at < tiles)
        return
    own = tl.sum(tl.where(ids == expert, used, 0))
    for chunk in range(0, own, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        tl.store(owners + first + at, expert, mask=at < own)
    found = 0
    for chunk in range(0, rows, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        mine = (tl.load(experts + at, mask=at < rows, other=-1) == expert).to(tl.int32)
        tl.store(order + first * TILE + found + tl.cumsum(mine, 0) - 1, at, mask=mine == 1)
        found += tl.sum(mine)
    fill = found + tl.arange(0, TILE)
    tl.store(order + first * TILE + fill, rows, mask=fill < own * TILE)


@triton.jit(do_not_specialize=["rows"])
def _grouped_product(  # noqa: PLR0913
    out,  # (rows, outputs)
    inputs,  # (rows / SHARED, depth), strided
    weights,  # (experts, GATED + 1 times outputs, depth), strided
    biases,  # (experts, outputs) or None
    scales,  # (rows,) or None
    order,
    owners,
    rows,
    outputs,
    depth,
    input_stride,
    expert_stride,
    output_stride,
    depth_stride,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """One tile of rows by one of outputs, in float32. Grid: tiles of rows times tiles of outputs.

    A row is input row // SHARED, since several rows are the same token's. GATED: the second half of the weights'
    outputs are factors of the first half's silu, both rounded as two layers of the inputs' dtype would.
    """
    across = tl.cdiv(outputs, BLOCK_N)
    tiles = tl.num_programs(0) // across
    group = tl.program_id(0) // (NEIGHBOURS * across)
    height = tl.minimum(tiles - group * NEIGHBOURS, NEIGHBOURS)
    within = tl.program_id(0) % (NEIGHBOURS * across)
    tile = group * NEIGHBOURS + within % height
    expert = tl.load(owners + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(order + tile * TILE + tl.arange(0, TILE))
    held = row < rows
    column = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < outputs
    k = tl.arange(0, BLOCK_K)
    x_at = inputs + (row // SHARED).to(tl.int64)[:, None] * input_stride + k[None, :]
    w_at = weights + expert * expert_stride + column.to(tl.int64)[None, :] * output_stride + k[:, None] * depth_stride
    total = tl.zeros((TILE, BLOCK_N), tl.float32)
    factor = tl.zeros((TILE, BLOCK_N), tl.float32)
    for done in range(0, depth, BLOCK_K):
        x = tl.load(x_at, mask=held[:, None] & (k < depth - done)[None, :], other=0.0)
        within_weights = inside[None, :] & (k < depth - done)[:, None]
        total = tl.dot(x, tl.load(w_at, mask=within_weights, other=0.0), total, input_precision="ieee")
        if GATED:
            up = tl.load(w_at + outputs * output_stride, mask=within_weights, other=0.0)
            factor = tl.dot(x, up, factor, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K * depth_stride
    kind = inputs.dtype.element_ty
    if biases is not None:
        total += tl.load(biases + expert * outputs + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = total.to(kind).to(tl.float32)
    if GATED:
        total = (total / (1.0 + tl.exp(-total))).to(kind).to(tl.float32) * factor.to(kind).to(tl.float32)
    if scales is not None:
        total *= tl.load(scales + row, mask=held, other=0.0).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=held[:, None] & inside[None, :])


@dataclass(frozen=True)
class SortedRows:
    """Rows (a token's choice of an expert each) grouped by expert, each group filled up to whole tiles of `tile` rows.

    order (tiles * tile,) int32: numbers of rows, `rows` where a tile is filled up. owners (tiles,) int32: the expert of
    a tile, -1 where it is left over; nothing of its order means anything.
    """

    order: Tensor
    owners: Tensor
    rows: int
    tile: int

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> SortedRows:
        """experts (rows,), any integer dtype, each in [0, num_experts)."""
        rows = len(experts)
        tile = 16 if rows <= 32 * num_experts else 64
        tiles = (rows + min(rows, num_experts) * (tile - 1)) // tile  # most that so many rows can fill
        order = torch.empty(tiles * tile, dtype=torch.int32, device=experts.device)
        owners = torch.empty(tiles, dtype=torch.int32, device=experts.device)
        width = max(32, triton.next_power_of_2(num_experts + 1))
        _sort_by_expert[(num_experts + 1,)](
            order, owners, experts, rows, tiles, TILE=tile, WIDTH=width, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=True
        )
        return cls(order, owners, rows, tile)


def grouped_product(
    inputs: Tensor,
    weights: Tensor,
    chosen: SortedRows,
    *,
    biases: Tensor | None = None,
    scales: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Each row's input times its expert's weights (and bias, and scale): (rows, outputs).

    inputs (rows or a divisor of them, depth), last stride 1: consecutive rows share one; weights (experts, outputs,
    depth), strided; biases (experts, outputs) contiguous; scales (rows,). `gated`: silu of the first half of the
    outputs times the second, without biases. The dtype is inputs', promoted by scales'.
    """
    outputs = weights.shape[1] // (1 + gated)
    dtype = inputs.dtype if scales is None else torch.promote_types(inputs.dtype, scales.dtype)
    out = inputs.new_empty(chosen.rows, outputs, dtype=dtype)
    block_n = 64 if gated or inputs.element_size() > 2 else 128
    grid = (len(chosen.owners) * triton.cdiv(outputs, block_n),)
    _grouped_product[grid](
        out, inputs, weights, biases, scales, chosen.order, chosen.owners, chosen.rows, outputs, inputs.shape[1],
        inputs.stride(0), weights.stride(0), weights.stride(1), weights.stride(2),
        SHARED=chosen.rows // len(inputs), GATED=gated, TILE=chosen.tile, BLOCK_N=block_n,
        BLOCK_K=128 // inputs.element_size(), NEIGHBOURS=NEIGHBOURS, enable_fp_fusion=True,
        num_warps=8 if chosen.tile * inputs.element_size() > 128 else 4, num_stages=3,
    )  # fmt: skip
    return out


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers' `ExpertsInterface` asks for: the experts of `module` over hidden_states (tokens, hidden),
    each token's choices (tokens, top_k) weighted and summed → (tokens, hidden).
    """
    chosen = SortedRows.of(top_k_index.reshape(-1), module.num_experts)
    hidden_states = hidden_states.contiguous()

    def layer(name: str, x: Tensor, **options: Any) -> Tensor:
        weights = getattr(module, name)
        weights = weights.transpose(1, 2) if module.is_transposed else weights
        biases = getattr(module, f"{name}_bias") if module.has_bias else None
        return grouped_product(x, weights, chosen, biases=biases, **options)

    if not module.has_gate:
        inner = module.act_fn(layer("up_proj", hidden_states))
    elif _has_usual_gate(module):
        inner = layer("gate_up_proj", hidden_states, gated=True)
    else:
        inner = module._apply_gate(layer("gate_up_proj", hidden_states))
    scales = top_k_weights.reshape(-1)
    if getattr(module, "has_post_expert_norm", False):
        outputs: Tensor = module.post_expert_norm(layer("down_proj", inner.contiguous())) * scales[:, None]
    else:
        outputs = layer("down_proj", inner.contiguous(), scales=scales)
    return outputs.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


def _has_usual_gate(module: Any) -> bool:
    """Whether it is silu(first half) * second half."""
    usual = module._apply_gate.__func__.__name__ == "_default_apply_gate" and not module.has_bias
    return usual and (isinstance(module.act_fn, nn.SiLU) or type(module.act_fn).__name__ == "SiLUActivation")
