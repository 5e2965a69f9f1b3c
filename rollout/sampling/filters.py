"""What a request does to its logits before a token is drawn: one function a filter, applied in place, in one order.

Every filter takes float32 logits (rows, vocab) and `Rows`, one a row of them, works on all rows at once, and returns at
once where no row asks for it. A row's arithmetic runs along its own vocabulary only, in an order that depends on
nothing else, so that its bits are the same alone and in any batch.

Semantics are vLLM's (`vllm/v1/sample`), except for ties: tokens of equal logit rank by id, lower first, and exactly
k tokens survive top-k where vLLM keeps all that tie with the k-th.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rollout.sampling.grammar import next_tokens
from rollout.sampling.params import SamplingParams
from rollout.sampling.rows import Rows, SamplingRow

LARGEST = 1e30  # stands for +inf: leaves room for the division by a temperature
MASS = 2.0**50  # probability 1 as an integer: sums of such integers are exact in float64, whatever their order
WIDTHS = (64, 1024, 8192)  # how many of the likeliest tokens are looked at before a whole row is sorted


def filter_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Float32 copy (rows, vocab) of `logits` (rows, vocab; any float dtype) that tokens are drawn from.

    Its softmax is the sampled distribution, its entries above -inf are the support. A row is all -inf only where its
    filters leave no token, or where its logits hold no number.
    """
    if not isinstance(rows, Rows):
        rows = Rows(rows)
    filtered = without_nan(logits)
    keep_structure(filtered, rows)
    keep_allowed_ids(filtered, rows)
    add_logit_bias(filtered, rows)
    ban_tokens(filtered, rows)
    apply_penalties(filtered, rows)
    divide_by_temperature(filtered, rows)
    drop_below_min_p(filtered, rows)
    keep_top_k_top_p(filtered, rows)
    return filtered


def is_filtered(row: SamplingRow, vocab_size: int) -> bool:
    """True where this step's support is stated: greedy, or a filter that names or drops tokens is at work.

    Penalties and temperature leave the support whole and don't count.
    """
    params = row.filters.params
    return bool(
        row.filters.greedy
        or row.constrained
        or params.allowed_token_ids is not None
        or params.logit_bias
        or params.min_p > 0
        or _top_limits(row, vocab_size) != (vocab_size, 1.0)
        or row.banned
    )


def only_scales(row: SamplingRow, vocab_size: int) -> bool:
    """True where the filters do nothing to this step's logits but divide them by `temperature`, which isn't 0."""
    return not row.filters.penalizes and not is_filtered(row, vocab_size)


def without_nan(logits: Tensor) -> Tensor:
    """Float32 copy of `logits` with NaN as -inf and +inf as a large number: any such row can still be drawn from."""
    return torch.nan_to_num(logits.float(), nan=-math.inf, posinf=LARGEST, neginf=-math.inf)


def keep_structure(logits: Tensor, rows: Rows) -> None:
    """Drop all tokens that the grammar of `structured_outputs` doesn't have next; at its end it has only EOS. While the
    reasoning before it lasts, nothing is dropped."""
    places = [r for r in rows.structured if rows[r].constrained]
    states = [state for r in places if (state := rows[r].grammar) is not None]
    if states:
        vocab_size = logits.shape[-1]
        packed = torch.from_numpy(next_tokens(states, vocab_size)).to(logits.device)
        bits = packed[..., None].bitwise_and(torch.tensor([1 << i for i in range(8)], device=logits.device).byte())
        forbidden = bits.flatten(-2)[:, :vocab_size] == 0
        if len(states) == len(logits):
            logits.masked_fill_(forbidden, -math.inf)
        else:
            logits[places] = logits[places].masked_fill_(forbidden, -math.inf)


def keep_allowed_ids(logits: Tensor, rows: Rows) -> None:
    """Drop all tokens but `allowed_token_ids`."""
    if limited := rows.limited:
        forbidden = torch.stack([rows[r].filters.forbidden(logits) for r in limited])
        if len(limited) == len(logits):
            logits.masked_fill_(forbidden, -math.inf)
        else:
            logits[limited] = logits[limited].masked_fill_(forbidden, -math.inf)


def add_logit_bias(logits: Tensor, rows: Rows) -> None:
    """Add `logit_bias` to the tokens it names."""
    biased = [(r, *bias) for r in rows.biased if (bias := rows[r].filters.logit_bias) is not None]
    if biased:
        index = _index(logits, [(r, ids) for r, ids, _ in biased])
        added = torch.from_numpy(np.concatenate([values for *_, values in biased]).clip(-LARGEST, LARGEST))
        logits[index] = (logits[index] + added.to(logits.device)).float()


def ban_tokens(logits: Tensor, rows: Rows) -> None:
    """Drop EOS and stop tokens while fewer than `min_tokens` outputs exist, and the last token of each bad word whose
    other tokens are the latest output tokens."""
    banned = [(r, ids) for r in rows.banning for ids in rows[r].banned]
    if banned:
        vocab_size = logits.shape[-1]  # an EOS id may lie beyond it
        logits[_index(logits, [(r, ids[ids < vocab_size]) for r, ids in banned])] = -math.inf


def apply_penalties(logits: Tensor, rows: Rows) -> None:
    """Repetition penalty of the tokens of prompt and output (Keskar et al. 2019, arXiv:1909.05858: a positive logit is
    divided by it, another multiplied), then frequency and presence penalties of the output's (OpenAI's definition)."""
    seen = [(r, rows[r].counts, rows[r].filters.params) for r in rows.penalizing]
    if not seen:
        return
    index = _index(logits, [(r, counts.ids) for r, counts, _ in seen])
    factors = np.concatenate([_factors(counts.counts, params) for _, counts, params in seen], axis=1)
    repetition, frequency, presence = torch.from_numpy(factors).to(logits.device)
    values = logits[index]
    values = torch.where(values > 0, values / repetition, values * repetition) - frequency - presence
    logits[index] = values.clamp(max=LARGEST)


def _factors(counts: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What the tokens with these `counts` (n,) are divided by and what is taken from them: (3, n) float32."""
    repetition = np.full(len(counts), min(max(params.repetition_penalty, 1 / LARGEST), LARGEST))
    return np.stack([repetition, params.frequency_penalty * counts, params.presence_penalty * (counts > 0)]).astype(
        np.float32
    )


def divide_by_temperature(logits: Tensor, rows: Rows) -> None:
    """Divide by `temperature`; a greedy row stays as it is."""
    if (rows.temperatures != 1).any():
        logits.div_(torch.from_numpy(rows.temperatures).float().to(logits.device)[:, None])


def drop_below_min_p(logits: Tensor, rows: Rows) -> None:
    """Drop tokens less likely than `min_p` times the likeliest (Nguyen et al. 2024, arXiv:2407.01082)."""
    if rows.min_ps.any():
        logs = [math.log(p) if p > 0 else -math.inf for p in rows.min_ps]
        limits = logits.amax(-1, keepdim=True) + torch.tensor(logs, dtype=torch.float32, device=logits.device)[:, None]
        logits.masked_fill_(logits < limits, -math.inf)


def keep_top_k_top_p(logits: Tensor, rows: Rows) -> None:
    """Keep the `top_k` likeliest tokens, then the fewest of them that hold `top_p` of what is left of the probability
    (Holtzman et al. 2019, arXiv:1904.09751). A greedy row keeps the likeliest one.

    A token stays where the tokens ranked before it hold less than `top_p`: always at least one. Probabilities are
    the float32 softmax in units of 2^-50, whose sums are exact; so the survivors are those of a full sort, however
    few candidates are looked at.
    """
    vocab_size = logits.shape[-1]
    limits = {r: _top_limits(rows[r], vocab_size) for r in rows.narrowing}
    pending = [r for r, limit in limits.items() if limit != (vocab_size, 1.0)]
    if likeliest := [r for r in pending if limits[r][0] == 1]:
        done = _keep_top(logits, likeliest, [(1, 1.0)] * len(likeliest), 1)
        pending = [r for r in pending if r not in done]
    for width in (*(w for w in WIDTHS if w < vocab_size), vocab_size):
        tried = [r for r in pending if limits[r][0] <= width or limits[r][0] == vocab_size]
        if tried:
            done = _keep_top(logits, tried, [limits[r] for r in tried], width)
            pending = [r for r in pending if r not in done]


def _keep_top(logits: Tensor, rows: list[int], limits: list[tuple[int, float]], width: int) -> set[int]:
    """Narrow those of `rows` whose survivors are all among their `width` likeliest tokens, and return them."""
    vocab_size, device = logits.shape[-1], logits.device
    index = torch.tensor(rows, device=device)
    part = logits if len(rows) == len(logits) else logits[index]
    top_k = torch.tensor([k for k, _ in limits], device=device)[:, None]
    values, ids = top_tokens(part, width)
    keep = torch.arange(width, device=device) < top_k
    done = None  # all
    if any(p < 1 for _, p in limits):
        top_p = torch.tensor([p if p < 1 else math.inf for _, p in limits], dtype=torch.float64, device=device)[:, None]
        mass = (part.softmax(-1).gather(-1, ids).double() * MASS).round() * keep
        found = mass.cumsum(-1)
        needed = top_p * torch.where(top_k < vocab_size, found[:, -1:], MASS)
        keep &= found - mass < needed
        if width < vocab_size:
            done = ((found[:, -1:] >= needed) | (top_k <= width)).squeeze(-1)
    if done is not None and not done.all():
        index, ids, values, keep = index[done], ids[done], values[done], keep[done]
        rows = index.tolist()
    logits.index_fill_(0, index, -math.inf)
    logits[index[:, None], ids] = values.masked_fill(~keep, -math.inf)
    return set(rows)


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids (rows, k) of the k largest entries of `logits` (rows, vocab), largest first, lower id on ties."""
    vocab_size = logits.shape[-1]
    if k >= vocab_size:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    if k == 1:
        values = logits.amax(-1, keepdim=True)
        ids = torch.arange(vocab_size, dtype=torch.int32, device=logits.device)
        return values, torch.where(logits == values, ids, vocab_size).amin(-1, keepdim=True).long()
    values, ids = logits.topk(k + 1)  # which of several equal values it takes, and in which order, is not specified
    last = values[:, k - 1 : k]
    torn = (values[:, k:] == last).squeeze(-1).nonzero().squeeze(-1)  # rows where a tie goes beyond the k-th
    values, ids = values[:, :k], ids[:, :k]
    if len(torn):
        descending = torch.arange(vocab_size, 0, -1, dtype=torch.int32, device=logits.device)
        tied = torch.where(logits[torn] == last[torn], descending, 0).topk(k).values
        tied = vocab_size - tied.long()  # the lowest ids of the tie, ascending
        place = torch.arange(k, device=logits.device) - (values[torn] > last[torn]).sum(-1, keepdim=True)
        ids[torn] = torch.where(place < 0, ids[torn], tied.gather(-1, place.clamp(min=0)))
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def _top_limits(row: SamplingRow, vocab_size: int) -> tuple[int, float]:
    """(k, p) of a row: (vocab_size, 1.0) where it keeps all."""
    if row.filters.greedy:
        return 1, 1.0
    params = row.filters.params
    return (params.top_k if 0 < params.top_k < vocab_size else vocab_size), params.top_p


def _index(logits: Tensor, ids_of: Iterable[tuple[int, np.ndarray]]) -> tuple[Tensor, Tensor]:
    """Index of the entries (row, id) of `logits`, each row with its ids (n,) int64."""
    rows, ids = zip(*ids_of, strict=True)
    flat = np.stack([np.repeat(np.array(rows), [len(part) for part in ids]), np.concatenate(ids)])
    row, token = torch.from_numpy(flat).to(logits.device)
    return row, token
