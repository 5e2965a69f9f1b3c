"""How Triton's attention cuts the contexts of a batch: in splits of one size, which decodes may share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

SPLIT_SIZE = 256
"""Keys that are attended to together before they are merged with others: the same for every model and length."""
MAX_PLACES = 8192
"""Splits of decodes that are kept at once; a sequence for which there is no room walks through its own in order."""


@dataclass(frozen=True)
class PagedPlan:
    """The sequences of one step, as the kernels read them, int32 on the device.

    query_start (seqs + 1,), context_lens (seqs,), block_tables (seqs, width). `places`, `shared` and `members` (seqs,)
    say where a decode's splits of `split_size` keys go, and which of them it has in common with others: see `_attend`;
    there are `num_places` in all, none where every sequence walks through its splits. `max_splits` is the number of the
    longest context's. `has_decodes` and `has_chunks`: whether some sequence has one token, or more.
    """

    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    places: Tensor
    shared: Tensor
    members: Tensor
    num_places: int
    split_size: int
    max_splits: int
    has_decodes: bool
    has_chunks: bool


def split_decodes(
    query_lens: np.ndarray, contexts: np.ndarray, tables: np.ndarray, block_size: int, num_places: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How the decodes of a batch are cut into splits: places, shared and members, int32 (seqs,).

    places: where a decode of several splits puts its first one, of `num_places` in all; -1 for the others, and where
    there is no room. shared: how many leading splits, all full, it has in the same blocks as its neighbours. members:
    for the first of at most `most` neighbours how many they are; 0 for the others; 1 where nothing is shared.
    """
    counts = np.where(query_lens == 1, -(-contexts // SPLIT_SIZE), 0)
    counts[counts == 1] = 0
    ends = np.cumsum(counts)
    spread = (counts > 0) & (ends <= num_places)
    places = np.where(spread, ends - counts, -1)
    shared, members = np.zeros_like(places), np.ones_like(places)
    if SPLIT_SIZE % block_size or most < 2 or not spread.any():
        return places, shared, members
    differs = tables[1:] != tables[:-1]
    equal = np.where(differs.any(1), differs.argmax(1), tables.shape[1]) * block_size // SPLIT_SIZE
    equal = np.minimum(equal, np.minimum(contexts[1:], contexts[:-1]) // SPLIT_SIZE)
    equal[~(spread[1:] & spread[:-1])] = 0
    leader = 0
    for i, common in enumerate(equal.tolist() if equal.any() else (), 1):
        together = members[leader]
        if common and together < most and (together == 1 or shared[leader] == common):
            members[leader], members[i] = together + 1, 0
            shared[leader] = shared[i] = common
        else:
            leader = i
    return places, shared, members
