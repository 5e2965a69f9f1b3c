"""Attention over aligned chunks of keys: the one definition that the engine and an exact trainer share.

A row of scores is cut into chunks of `CHUNK` positions, aligned to multiples of it. Each chunk gives a maximum, a sum
of exponentials and a weighted sum of values; a row's chunks are merged in order of position. So a row's result depends
on its own positions only: not on the rows beside it, nor on how much of it was computed before.

With `exact`, that holds for every bit: products of few rows in float32, which BLAS computes in another order, are
padded to `ROWS` rows. bfloat16 products need no padding.

Source of the partial softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018
(arXiv:1805.02867). Imports torch only: `trainer_bridge.score.exact` uses it, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 128
ROWS = 16
_LOWEST = torch.finfo(torch.float32).min


def padded_rows(rows: int) -> int:
    """The number of rows, a multiple of ROWS, that products of `rows` rows are computed with."""
    return -(-rows // ROWS) * ROWS


def fill_up(row: Tensor, dtype: torch.dtype) -> Tensor:
    """Fill up the last dimension, tokens or indices, with zeros to a length that `padded_rows` leaves as it is.

    In bfloat16 a row of a product has the same bits for every number of rows: it needs no filling up.
    """
    return pad(row, (0, padded_rows(row.shape[-1]) - row.shape[-1])) if dtype is torch.float32 else row


def matmul(rows: Tensor, other: Tensor, *, exact: bool) -> Tensor:
    """rows (…, m, k) times other (…, k, n) → (…, m, n), each row with the same bits for every m if `exact`."""
    count = rows.shape[-2]
    if not exact or rows.dtype is not torch.float32 or count % ROWS == 0:
        return torch.matmul(rows, other)
    padded = torch.matmul(pad(rows, (0, 0, 0, padded_rows(count) - count)), other)
    return padded[..., :count, :].contiguous()


def attend_to_chunk(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None, softcap: float | None, *, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk's share: its maximum (…, rows), sum of exponentials (…, rows) and output (…, rows, value_dim), float32.

    query (…, rows, dim), scaled; keys (…, chunk, dim); values (…, chunk, value_dim); hidden, where given, is true for
    what a row may not see and broadcasts against (…, rows, chunk). A row that sees nothing has maximum -inf.
    """
    scores = matmul(query, keys.transpose(-1, -2), exact=exact).float()
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    peak = scores.amax(-1)
    weights = scores.sub_(peak.clamp(min=_LOWEST)[..., None]).exp_()
    return peak, weights.sum(-1), matmul(weights.to(values.dtype), values, exact=exact).float()


def merge(top: Tensor, total: Tensor, output: Tensor, peak: Tensor, weight: Tensor, partial: Tensor) -> None:
    """Fold the next chunk (peak, weight, partial) into a row's (top, total, output), in place."""
    new_top = torch.maximum(top, peak).clamp_(min=_LOWEST)
    keep, add = torch.exp(top - new_top), torch.exp(peak - new_top)
    total.mul_(keep).add_(weight * add)
    output.mul_(keep[..., None]).add_(partial * add[..., None])
    top.copy_(new_top)


def finish(top: Tensor, total: Tensor, output: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The merged output divided by its sum, and the log of that sum. A sink is one more logit, without a value."""
    if sinks is not None:
        new_top = torch.maximum(top, sinks)
        keep = torch.exp(top - new_top)
        top, total, output = new_top, total * keep + torch.exp(sinks - new_top), output * keep[..., None]
    return output / total[..., None], top + total.log()


def attend_causally(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    context: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """The last tokens of sequences of `context` positions attend to all of it.

    query (sequences · kv_heads, groups, tokens, dim), scaled; keys and values (sequences · kv_heads, positions, dim),
    filled up to whole chunks with zeros; sinks (sequences · kv_heads, groups), float32. Returns the output (…, groups,
    tokens, value_dim) and the log of each row's sum of exponentials (…, groups, tokens), float32.
    """
    heads, groups, tokens, _ = query.shape
    first = context - tokens
    top = torch.full((heads, groups, tokens), -torch.inf, device=query.device)
    total = torch.zeros_like(top)
    output = torch.zeros(*top.shape, values.shape[-1], device=query.device)
    lowest = max(0, first + 1 - window) // CHUNK if window else 0
    for start in range(lowest * CHUNK, context, CHUNK):
        seen = max(0, start - first)  # queries before the chunk see nothing of it
        shape = (heads, groups, tokens - seen)
        peak, weight, partial = attend_to_chunk(
            query[:, :, seen:].flatten(1, 2),
            keys[:, start : start + CHUNK],
            values[:, start : start + CHUNK],
            hidden_by_order(first + seen, context, start, window, groups, query.device),
            softcap,
            exact=exact,
        )
        merge(
            top[..., seen:],
            total[..., seen:],
            output[..., seen:, :],
            peak.view(shape),
            weight.view(shape),
            partial.view(*shape, -1),
        )
    return finish(top, total, output, None if sinks is None else sinks[..., None])


def hidden_by_order(
    first: int, end: int, start: int, window: int | None, groups: int, device: torch.device
) -> Tensor | None:
    """What queries at positions [first, end) may not see of the chunk at `start`: (groups · (end - first), CHUNK).

    None where they see all of it.
    """
    if start + CHUNK <= first + 1 and not (window and start <= end - 1 - window):
        return None
    position = torch.arange(first, end, device=device)[:, None]
    at = torch.arange(start, start + CHUNK, device=device)
    hidden = at > position
    if window:
        hidden |= at <= position - window
    return hidden.repeat(groups, 1)
