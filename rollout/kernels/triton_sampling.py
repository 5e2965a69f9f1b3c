"""A token, its logprob and its rank from a row of logits, in one launch for the whole batch.

The draw is the one of `rollout.sampling.sampler.draw`: inverse CDF over blocks of 256 tokens, then inside the block,
each over weights that were rounded to integers, so that no sum depends on an order. Only how exp is rounded is a
device's own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16
"""Blocks of 256 tokens that a program looks at together."""


@triton.jit
def _shares(weights):
    """Weights (n,) float32 as integers in float64, the largest 2^42: their sums are exact."""
    share = weights.to(tl.float64) / tl.max(weights, 0).to(tl.float64) * 4398046511104.0
    return (share + 4503599627370496.0) - 4503599627370496.0  # to the nearest, ties to even


@triton.jit
def _pick(weights, uniform, COUNT: tl.constexpr):
    """An index by inverse CDF over `weights` (COUNT,), and where `uniform` fell inside the pick."""
    share = _shares(weights)
    ends = tl.cumsum(share, 0)
    target = tl.floor(uniform * tl.sum(share, 0))
    index = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), COUNT - 1)
    here = tl.arange(0, COUNT) == index
    size = tl.sum(tl.where(here, share, 0.0), 0)
    begin = tl.sum(tl.where(here, ends, 0.0), 0) - size
    return index, (target - begin) / size


@triton.jit
def _halves(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """x (ROWS, 2 · HALF): its first half plus its second, element by element."""
    first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    return first + second


@triton.jit
def _block_sums(x, ROWS: tl.constexpr):
    """Sums (ROWS,) over x (ROWS, 256), in the one order of the draw's definition."""
    x = _halves(x, ROWS, 128)
    x = _halves(x, ROWS, 64)
    x = _halves(x, ROWS, 32)
    x = _halves(x, ROWS, 16)
    x = _halves(x, ROWS, 8)
    x = _halves(x, ROWS, 4)
    x = _halves(x, ROWS, 2)
    first, second = tl.split(x)
    return first + second


@triton.jit
def _numbers(at, token, vocab):
    """The row's logits of these tokens in float32, with NaN as -inf."""
    x = tl.load(at + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(x != x, float("-inf"), x)


@triton.jit
def _sample(
    output,  # (rows, 4) float64
    logits,  # (rows, vocab), strided
    asked,  # (2, rows) float64: temperatures, uniforms
    rows,
    vocab,
    stride,
    PROCESSED: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (rows,). BLOCKS is a power of two, at least TILE and the number of blocks of the vocabulary."""
    row = tl.program_id(0)
    temperature = tl.load(asked + row).to(tl.float32)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)
    uniform = tl.load(asked + rows + row)
    at = logits + row.to(tl.int64) * stride
    within = tl.arange(0, TILE)[:, None] * 256 + tl.arange(0, 256)[None, :]

    tops = tl.full((TILE, 256), float("-inf"), tl.float32)
    firsts = tl.zeros((TILE, 256), tl.int32)
    broken = tl.zeros((TILE, 256), tl.int32)
    for start in range(0, vocab, TILE * 256):
        x = tl.load(at + start + within, mask=start + within < vocab, other=float("-inf")).to(tl.float32)
        bad = ((x != x) | (tl.abs(x) == float("inf"))) & (start + within < vocab)
        firsts = tl.where(x > tops, start + within, firsts)
        tops = tl.where(x > tops, x, tops)
        broken = broken | bad.to(tl.int32)
    raw_top = tl.max(tl.max(tops, 1), 0)
    likeliest = tl.min(tl.min(tl.where(tops == raw_top, firsts, vocab - 1), 1), 0)
    finite = tl.max(tl.max(broken, 1), 0) == 0
    raw_top = tl.where(finite, raw_top, 0.0)
    top = tl.div_rn(raw_top, temperature)

    sums = tl.zeros((BLOCKS // TILE, TILE), tl.float32)
    totals = tl.zeros((TILE, 256), tl.float32)
    tile_number = tl.arange(0, BLOCKS // TILE)
    for tile in range(tl.cdiv(vocab, TILE * 256)):
        x = _numbers(at, tile * (TILE * 256) + within, vocab)
        weights = tl.exp(tl.div_rn(x, temperature) - top)
        sums = tl.where((tile_number == tile)[:, None], _block_sums(weights, TILE)[None, :], sums)
        totals += weights if PROCESSED else tl.exp(x - raw_top)
    block, rest = _pick(tl.reshape(sums, (BLOCKS,)), uniform, BLOCKS)
    block = tl.minimum(block, (vocab - 1) // 256)
    inside = _numbers(at, block * 256 + tl.arange(0, 256), vocab)
    inside = tl.div_rn(inside, temperature)
    chosen, rest = _pick(tl.exp(inside - top), rest, 256)
    token = tl.where(greedy, likeliest, tl.minimum(block * 256 + chosen, vocab - 1))
    value = _numbers(at, token, vocab)

    ahead = tl.zeros((TILE, 256), tl.int32)
    for start in range(0, vocab, TILE * 256):
        x = _numbers(at, start + within, vocab)
        ahead += (tl.div_rn(x, temperature) > tl.div_rn(value, temperature) if PROCESSED else x > value).to(tl.int32)
    gap = tl.div_rn(value, temperature) - top if PROCESSED else value - raw_top
    logprob = gap - tl.log(tl.sum(tl.sum(totals, 1), 0))
    if PROCESSED:
        logprob = tl.where(greedy, 0.0, logprob)
    tl.store(output + row * 4, token.to(tl.float64))
    tl.store(output + row * 4 + 1, logprob.to(tl.float64))
    tl.store(output + row * 4 + 2, (tl.sum(tl.sum(ahead, 1), 0) + 1).to(tl.float64))
    tl.store(output + row * 4 + 3, finite.to(tl.float64))


def sample(logits: Tensor, asked: Tensor, *, processed: bool) -> Tensor:
    """One token of softmax(logits / temperature) a row, with its logprob and rank.

    logits (rows, vocab) in any float dtype, last stride 1; `asked` (2, rows) float64: temperatures, and
    uniform numbers in [0, 1), rows of `rollout.sampling.sampler.uniforms`. Returns (rows, 4) float64: the token's id,
    its logprob under log_softmax of `logits` (`processed`: of `logits` over their temperature), its rank among those,
    from 1, and whether the row is sound: 0 where it holds NaN or an infinity, and the rest means nothing.

    A temperature of 0 asks for the likeliest token, of several the first, whose logprob is 0 if `processed`.
    """
    rows, vocab = logits.shape
    output = torch.empty(rows, 4, dtype=torch.float64, device=logits.device)
    blocks = max(TILE, triton.next_power_of_2(-(-vocab // 256)))
    _sample[rows,](
        output, logits, asked, rows, vocab, logits.stride(0),
        PROCESSED=processed, BLOCKS=blocks, TILE=TILE, num_warps=8, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    return output
