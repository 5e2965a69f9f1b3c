"""Logprobs and ranks of tokens, off the logits that they were sampled from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollout.outputs import TokenLogprob
from rollout.sampling.filters import top_tokens

NO_LOGPROB = -9999.0  # what the protocol sends for -inf and NaN


def logprob_table(logits: Tensor, tokens: Tensor, k: int) -> list[Tensor]:
    """Logprob and rank of `tokens` (rows,), and values and ids of the top k, of log_softmax(logits) (rows, vocab)."""
    logprobs = torch.nan_to_num_(logits.float().log_softmax(-1), nan=NO_LOGPROB, neginf=NO_LOGPROB)
    chosen = logprobs.gather(-1, tokens[:, None])
    rank = (logprobs > chosen).sum(-1, dtype=torch.int32) + 1
    if k == 0:
        nothing = chosen[:, :0]
        return [chosen.squeeze(-1), rank, nothing, nothing]
    return [chosen.squeeze(-1), rank, *top_tokens(logprobs, logprobs.shape[-1] if k == -1 else k)]


def logprobs_of(logits: Tensor, token_ids: Sequence[int] | None, sampled: Tensor) -> list[TokenLogprob]:
    """The logprobs and ranks of `sampled` () and these tokens, each once, under log_softmax(logits) (vocab,)."""
    token_ids = [int(sampled), *(token_ids or ())]
    logprobs = torch.nan_to_num_(logits.float().log_softmax(-1), nan=NO_LOGPROB, neginf=NO_LOGPROB)
    unique = list(dict.fromkeys(token_ids))
    values = logprobs[unique]
    ranks = len(logprobs) + 1 - torch.searchsorted(logprobs.sort().values, values, right=True)
    pairs = zip(values.tolist(), ranks.tolist(), strict=True)
    return [TokenLogprob(token, value, rank) for token, (value, rank) in zip(unique, pairs, strict=True)]


def as_entries(
    tokens: Sequence[int], chosen: np.ndarray, rank: np.ndarray, values: np.ndarray, ids: np.ndarray
) -> list[list[TokenLogprob]]:
    """The rows of a table as TokenLogprobs: the token first, then the others of the top k. Ties share a rank."""
    result = []
    for token, logprob, its_rank, row_values, row_ids in zip(
        tokens, chosen.tolist(), rank.tolist(), values.tolist(), ids.tolist(), strict=True
    ):
        entries = [TokenLogprob(token, logprob, int(its_rank))]
        place, previous = 0, math.nan
        for i, (value, token_id) in enumerate(zip(row_values, row_ids, strict=True), 1):
            if value != previous:
                place, previous = i, value
            if token_id != token:
                entries.append(TokenLogprob(int(token_id), value, place))
        result.append(entries)
    return result
