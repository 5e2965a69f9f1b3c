"""What an attention backend is: a paged cache of keys and values, and attention over it for one ragged batch a step.

The engine plugs a backend into transformers' own modelling code by its `AttentionInterface`: every attention layer of
the model calls `attention_forward`, which hands the layer's queries, keys and values to the backend that serves the
forward pass under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

ATTENTION_NAME = "rollout"


class RaggedBatch:
    """The sequences of one step, side by side in one flat row of tokens.

    Sequence i computes the tokens `[query_start[i], query_start[i + 1])` of the row, at least one; they are the last
    ones of its `context_lens[i]` positions, whose keys and values lie in the cache blocks `block_tables[i]`. All three
    are int32 arrays, (sequences + 1,), (sequences,) and (sequences, width): tables are filled up with 0, the null
    block. They may be given as lists.
    """

    def __init__(
        self,
        query_start: np.ndarray | Sequence[int],
        context_lens: np.ndarray | Sequence[int],
        block_tables: np.ndarray | Sequence[Sequence[int]],
    ) -> None:
        self.query_start = np.asarray(query_start, np.int32)
        self.context_lens = np.asarray(context_lens, np.int32)
        if not isinstance(block_tables, np.ndarray):
            width = max(map(len, block_tables), default=0)
            rows = [[*table, *[0] * (width - len(table))] for table in block_tables]
            block_tables = np.array(rows, np.int32).reshape(len(rows), width)
        self.block_tables = block_tables
        self.num_seqs, self.num_tokens = len(self.context_lens), int(self.query_start[-1])
        assert len(self.query_start) - 1 == self.num_seqs == len(block_tables)

    @cached_property
    def query_lens(self) -> np.ndarray:
        """How many tokens each sequence computes, (sequences,)."""
        return np.diff(self.query_start)

    @cached_property
    def _rows(self) -> np.ndarray:
        """The sequence of each token, (tokens,)."""
        rows = np.arange(self.num_seqs)
        return rows if self.num_tokens == self.num_seqs else np.repeat(rows, self.query_lens)

    @cached_property
    def positions(self) -> np.ndarray:
        """The position of each token of the row in its own sequence, (tokens,) int64."""
        if self.num_tokens == self.num_seqs:
            return self.context_lens - np.int64(1)
        return ranges(self.context_lens - self.query_lens, self.query_lens)

    def slots(self, block_size: int) -> np.ndarray:
        """Where each token of the row keeps its key and value: block * block_size + offset, (tokens,) int64."""
        block, offset = np.divmod(self.positions, block_size)
        slots: np.ndarray = self.block_tables[self._rows, block].astype(np.int64) * block_size + offset
        return slots

    def begun_blocks(self, block_size: int) -> np.ndarray:
        """Blocks whose first slot is written in this step and whose last is not: behind it may lie an old NaN."""
        last, filled = np.divmod(self.context_lens, block_size)
        (begun,) = np.nonzero((filled > 0) & (self.context_lens - self.query_lens <= last * block_size))
        blocks: np.ndarray = self.block_tables[begun, last[begun]]
        return blocks


def ranges(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """`lens[i]` numbers from `starts[i]` on for each i, one after the other, (sum of lens,) int64."""
    numbers: np.ndarray = np.arange(lens.sum()) + np.repeat(starts - np.cumsum(lens) + lens, lens)
    return numbers


@dataclass(frozen=True)
class LayerShape:
    """One layer's cache entry per token: how many key/value heads, and the widths of a key and of a value head."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True)
class AttentionParams:
    """How one layer attends: the scores' scale, the last `window` positions only, tanh cap, sink logits (heads,)."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionBackend(ABC):
    """Paged attention on one device. Block 0 is never handed to a sequence: backends may pad with it.

    `keys` and `values` are one cache a layer, in the backend's own layout, blocks first. A value head's width is filled
    up to a multiple of VALUE_MULTIPLE. `takes_heads`: `forward` does for queries and keys what their layer has deferred
    (`rollout.kernels.norms.deferred_heads`).
    """

    VALUE_MULTIPLE: ClassVar[int] = 1
    takes_heads: bool = False

    def __init__(
        self, layers: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers, self.num_blocks, self.block_size = layers, num_blocks, block_size
        self.dtype, self.device = dtype, device
        self.allocate()

    def allocate(self) -> None:
        """Make the caches, with nothing in them: at first, and after `free`."""
        layers = self.layers
        filled = [-(-layer.value_dim // self.VALUE_MULTIPLE) * self.VALUE_MULTIPLE for layer in layers]
        self.keys = [self.new_cache(layer.num_kv_heads, layer.key_dim) for layer in layers]
        self.values = [self.new_cache(layer.num_kv_heads, dim) for layer, dim in zip(layers, filled, strict=True)]

    def free(self) -> None:
        """Give the caches' memory back: no forward pass may come before `allocate`."""
        self.keys, self.values = [], []

    def new_cache(self, kv_heads: int, dim: int) -> Tensor:
        """Memory for the keys or the values of one layer, (num_blocks, …) in `dtype` on `device`."""
        raise NotImplementedError

    @abstractmethod
    def prepare(self, batch: RaggedBatch) -> None:
        """Plan the step's attention, once for all layers."""

    @abstractmethod
    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write the step's keys and values into the cache, then attend over each sequence's context, causally.

        Tokens beyond the batch's own are padding: they are not written, and their output is any finite number.

        query (heads, tokens, key_dim), key (kv_heads, tokens, key_dim), value (kv_heads, tokens, value_dim), in
        `dtype`; heads is a multiple of kv_heads. Returns (tokens, heads, value_dim).
        """

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer, between two steps."""
        if pairs:
            source, target = torch.tensor(pairs, device=self.device).T
            for cache in (*self.keys, *self.values):
                cache[target] = cache[source]


_serving: ContextVar[AttentionBackend] = ContextVar("attention backend of the forward pass under way")


@contextmanager
def serving(backend: AttentionBackend) -> Iterator[None]:
    """Let the model's attention layers reach `backend` within the block."""
    token = _serving.set(backend)
    try:
        yield
    finally:
        _serving.reset(token)


def current_backend() -> AttentionBackend | None:
    """The backend that serves the forward pass under way; None outside of one."""
    return _serving.get(None)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (1, heads, tokens, dim) → ((1, tokens, heads, value_dim), no weights).

    Raises NotImplementedError, naming what was asked for, on an argument that would change the arithmetic.
    """
    asked = sorted(name for name, value in other.items() if value is not None and name not in _HARMLESS)
    dropout, is_causal = other.get("dropout"), other.get("is_causal")
    if asked or dropout or is_causal is False or attention_mask is not None:
        odd = asked or [f"dropout={dropout}, is_causal={is_causal}, an attention mask={attention_mask is not None}"]
        raise NotImplementedError(f"{type(module).__name__} asks its attention for {odd}, which rollout doesn't serve")
    params = AttentionParams(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or None,
        softcap=softcap or None,
        sinks=s_aux,
    )
    output = _serving.get().forward(module.layer_idx, query[0], key[0], value[0], params)  # type: ignore[arg-type]
    return output.unsqueeze(0), None


# What decoder layers pass along without meaning anything to one causal pass over explicit positions; and two arguments
# that are harmless with some values.
_HARMLESS = frozenset(
    {"dropout", "is_causal", "position_ids", "output_attentions", "output_hidden_states", "output_router_logits",
     "use_cache", "cache", "cache_position", "position_embeddings", "return_dict", "num_items_in_batch"}
)  # fmt: skip
