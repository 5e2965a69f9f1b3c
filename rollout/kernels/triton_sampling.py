"""A token, its logprob and its rank from a row of logits: one launch for the whole batch, two where it is narrowed.

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
def _key(x):
    """Float32 as int32 in the same order, both zeros as one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scaled(at, token, vocab, temperature):
    return tl.div_rn(_numbers(at, token, vocab), temperature)


@triton.jit
def _masses(x, top, floor, total):
    """Their probabilities as integers, of 2^50 for 1: sums are exact, whatever their order. 0 below the floor."""
    shares = tl.where(x < floor, 0.0, tl.exp(x - top) / total)
    return ((shares.to(tl.float64) * 1125899906842624.0 + 4503599627370496.0) - 4503599627370496.0).to(tl.int64)


@triton.jit
def _above(at, limit, top, floor, total, vocab, temperature, TILE: tl.constexpr):
    """How many tokens have a key above `limit`, and their mass; how many have it, and the mass of one of them."""
    within = tl.arange(0, TILE)[:, None] * 256 + tl.arange(0, 256)[None, :]
    counts = tl.zeros((TILE, 256), tl.int32)
    ties = tl.zeros((TILE, 256), tl.int32)
    masses = tl.zeros((TILE, 256), tl.int64)
    own = tl.zeros((TILE, 256), tl.int64)
    for start in range(0, vocab, TILE * 256):
        x = _scaled(at, start + within, vocab, temperature)
        mass, key = _masses(x, top, floor, total), _key(x).to(tl.int64)
        real = start + within < vocab
        counts += (real & (key > limit)).to(tl.int32)
        ties += (real & (key == limit)).to(tl.int32)
        masses += tl.where(key > limit, mass, 0)
        own = tl.maximum(own, tl.where(real & (key == limit), mass, 0))
    return (
        tl.sum(tl.sum(counts, 1), 0),
        tl.sum(tl.sum(masses, 1), 0).to(tl.float64),
        tl.sum(tl.sum(ties, 1), 0),
        tl.max(tl.max(own, 1), 0).to(tl.float64),
    )


@triton.jit
def _lowest(at, least, most, needed, top, floor, total, vocab, temperature, TILE: tl.constexpr):
    """The smallest key, up to that of the likeliest token, above which are fewer than `most` tokens and less mass than
    `needed`; not below `least`."""
    high = _key(top).to(tl.int64)
    low = tl.minimum(least, high)
    while low < high:
        middle = low + (high - low) // 2
        count, mass, _, _ = _above(at, middle, top, floor, total, vocab, temperature, TILE)
        fits = (count < most) & (mass < needed)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return high


@triton.jit
def _limit(
    output,  # (rows, 2) float64
    logits,  # (rows, vocab), strided
    asked,  # (5, rows) float64
    vocab,
    stride,
    TILE: tl.constexpr,
):
    """Grid: (rows,). Where a row's support ends: see `limits`."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    temperature = tl.load(asked + row).to(tl.float32)
    temperature = tl.where(temperature == 0, 1.0, temperature)
    log_min_p = tl.load(asked + 2 * rows + row).to(tl.float32)
    most = tl.load(asked + 3 * rows + row)
    top_p = tl.load(asked + 4 * rows + row)
    at = logits + row.to(tl.int64) * stride
    within = tl.arange(0, TILE)[:, None] * 256 + tl.arange(0, 256)[None, :]

    tops = tl.full((TILE, 256), float("-inf"), tl.float32)
    for start in range(0, vocab, TILE * 256):
        tops = tl.maximum(tops, _scaled(at, start + within, vocab, temperature))
    top = tl.max(tl.max(tops, 1), 0)
    floor = top + log_min_p
    totals = tl.zeros((TILE, 256), tl.float32)
    for start in range(0, vocab, TILE * 256):
        x = _scaled(at, start + within, vocab, temperature)
        totals += tl.where(x < floor, 0.0, tl.exp(x - top))
    total = tl.sum(tl.sum(totals, 1), 0)

    key = tl.full((), -2147483648, tl.int64)
    mass_of_all = tl.full((), 1125899906842624.0, tl.float64)
    if most < vocab:
        key = _lowest(at, key, most, float("inf"), top, floor, total, vocab, temperature, TILE)
        count, mass, _, own = _above(at, key, top, floor, total, vocab, temperature, TILE)
        mass_of_all = mass + (most - count) * own
    needed = tl.where(top_p < 1, top_p * mass_of_all, float("inf"))
    if top_p < 1:
        key = _lowest(at, key, most, needed, top, floor, total, vocab, temperature, TILE)
    last = vocab.to(tl.int64)
    if (most < vocab) | (top_p < 1):
        count, mass, ties, own = _above(at, key, top, floor, total, vocab, temperature, TILE)
        taken = tl.minimum(most - count, ties.to(tl.float64))
        if own > 0:
            some = tl.floor((needed - mass) / own)
            some = tl.where(mass + some * own < needed, some + 1, some)
            taken = tl.minimum(taken, tl.where(top_p < 1, some, taken))
        before = tl.zeros((), tl.int32)
        for start in range(0, vocab, TILE * 256):
            x = _scaled(at, start + within, vocab, temperature)
            tied = tl.reshape(((_key(x) == key) & (start + within < vocab)).to(tl.int32), (TILE * 256,))
            here = (before + tl.cumsum(tied, 0) == taken) & (tied == 1)
            last = tl.minimum(last, tl.min(tl.where(here, start + tl.arange(0, TILE * 256), vocab), 0))
            before += tl.sum(tied, 0)
    lowest = _key(floor).to(tl.int64)
    last = tl.where(lowest > key, vocab, last)
    tl.store(output + row * 2, tl.maximum(key, lowest).to(tl.float64))
    tl.store(output + row * 2 + 1, last.to(tl.float64))


@triton.jit
def _supported(x, token, key, last, LIMITED: tl.constexpr):
    """Whether these tokens, of scaled logits x, are in the row's support."""
    kept = token >= 0
    if LIMITED:
        kept = (_key(x) > key) | ((_key(x) == key) & (token <= last))
    return kept


@triton.jit
def _sample(
    output,  # (rows, 4) float64
    logits,  # (rows, vocab), strided
    asked,  # (2 or more, rows) float64: temperatures, uniforms
    limits,  # (rows, 2) float64
    vocab,
    stride,
    PROCESSED: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (rows,). BLOCKS is a power of two, at least TILE and the number of blocks of the vocabulary."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    temperature = tl.load(asked + row).to(tl.float32)
    greedy = temperature == 0
    temperature = tl.where(greedy, 1.0, temperature)
    uniform = tl.load(asked + rows + row)
    key, last = 0.0, 0.0
    if LIMITED:
        key = tl.load(limits + row * 2)
        last = tl.load(limits + row * 2 + 1)
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
    raw_top = tl.where((raw_top > float("-inf")) & (raw_top < float("inf")), raw_top, 0.0)
    top = tl.div_rn(raw_top, temperature)

    sums = tl.zeros((BLOCKS // TILE, TILE), tl.float32)
    totals = tl.zeros((TILE, 256), tl.float32)
    tile_number = tl.arange(0, BLOCKS // TILE)
    for tile in range(tl.cdiv(vocab, TILE * 256)):
        x = _numbers(at, tile * (TILE * 256) + within, vocab)
        scaled = tl.div_rn(x, temperature)
        kept = _supported(scaled, tile * (TILE * 256) + within, key, last, LIMITED)
        weights = tl.where(kept, tl.exp(scaled - top), 0.0)
        sums = tl.where((tile_number == tile)[:, None], _block_sums(weights, TILE)[None, :], sums)
        totals += weights if PROCESSED else tl.exp(x - raw_top)
    block, rest = _pick(tl.reshape(sums, (BLOCKS,)), uniform, BLOCKS)
    block = tl.minimum(block, (vocab - 1) // 256)
    inside = _scaled(at, block * 256 + tl.arange(0, 256), vocab, temperature)
    kept = _supported(inside, block * 256 + tl.arange(0, 256), key, last, LIMITED)
    chosen, rest = _pick(tl.where(kept, tl.exp(inside - top), 0.0), rest, 256)
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


def limits(logits: Tensor, asked: Tensor) -> Tensor:
    """Where the support of each row ends: (rows, 2) float64, for `sample`.

    `asked` (5, rows) float64: temperatures, uniform numbers, logarithms of `min_p` (-inf for 0), `top_k` (the
    vocabulary's size for all) and `top_p`. Tokens stay by the rule of `rollout.sampling.filters.keep_top_k_top_p`,
    which is found by bisection over the logits' values: nothing is sorted, and nothing waits for the device.
    """
    rows, vocab = logits.shape
    output = torch.empty(rows, 2, dtype=torch.float64, device=logits.device)
    _limit[rows,](
        output, logits, asked, vocab, logits.stride(0), TILE=TILE, num_warps=8, enable_fp_fusion=False
    )  # fmt: skip
    return output


def sample(logits: Tensor, asked: Tensor, *, processed: bool, limits: Tensor | None = None) -> Tensor:
    """One token of softmax(logits / temperature) a row, with its logprob and rank.

    logits (rows, vocab) in any float dtype, last stride 1; `asked` (2, rows) float64: temperatures, and
    uniform numbers in [0, 1), rows of `rollout.sampling.sampler.uniforms`. Returns (rows, 4) float64: the token's id,
    its logprob under log_softmax of `logits` (`processed`: of `logits` over their temperature), its rank among those,
    from 1, and whether the row is sound: 0 where it holds NaN or an infinity, and the rest means nothing.

    A temperature of 0 asks for the likeliest token, of several the first, whose logprob is 0 if `processed`. With
    `limits` the token is one of the row's support, and `processed` ones are told of that alone.
    """
    rows, vocab = logits.shape
    output = torch.empty(rows, 4, dtype=torch.float64, device=logits.device)
    blocks = max(TILE, triton.next_power_of_2(-(-vocab // 256)))
    _sample[rows,](
        output, logits, asked, output if limits is None else limits, vocab, logits.stride(0),
        PROCESSED=processed, LIMITED=limits is not None, BLOCKS=blocks, TILE=TILE, num_warps=8, num_stages=2,
        enable_fp_fusion=False,
    )  # fmt: skip
    return output
