"""Paged attention on a CPU by the native kernels: the chunked definition, row by row over the paged cache.

Rows that hold the same physical blocks in a chunk (the samples of one prompt, or requests that hit the same prefix)
read it together. A row's arithmetic is its own: its bits don't depend on what else is computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollout.kernels.attention.base import AttentionBackend, AttentionParams, LayerShape, RaggedBatch, ranges
from rollout.kernels.attention.chunked import CHUNK
from rollout.kernels.native import SUFFIXES, address, in_huge_pages, library

LANES = 16
VECTORS = 24
"""Query vectors (rows times heads of one kv head) that go through the cache together."""


def serves_attention(key_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels attend to keys of this width and dtype here."""
    return device.type == "cpu" and dtype in SUFFIXES and key_dim % 2 == 0 and library() is not None


def _fits(block_size: int) -> bool:
    return block_size % LANES == 0 and CHUNK % block_size == 0


def serves(
    layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether `NativeAttention` is the way to serve these layers with this block size."""
    return _fits(block_size) and all(serves_attention(shape.key_dim, dtype, device) for shape in layers)


class NativeAttention(AttentionBackend):
    """Chunked attention over caches in the kernels' own layout, one pair a layer.

    Raises ValueError for shapes, dtypes and devices that the kernels don't know.
    """

    VALUE_MULTIPLE = LANES

    def __init__(
        self, layers: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if not _fits(block_size) or not all(serves_attention(shape.key_dim, dtype, device) for shape in layers):
            raise ValueError(f"the native kernels don't serve blocks of {block_size} in {dtype} on {device}")
        super().__init__(layers, num_blocks, block_size, dtype, device)
        self._attend = getattr(library(), f"attend_{SUFFIXES[dtype]}")

    def new_cache(self, kv_heads: int, dim: int) -> Tensor:
        """(num_blocks, kv_heads · block_size · dim), untouched."""
        return in_huge_pages(torch.empty(self.num_blocks, kv_heads * self.block_size * dim, dtype=self.dtype))

    def prepare(self, batch: RaggedBatch) -> None:
        """Lay out the step as the kernels read it: a row a token, tiles of rows that are likely to share blocks."""
        keys = zip((batch.query_lens > 1).tolist(), map(bytes, batch.block_tables.astype(">i4")), strict=True)
        order = np.array([i for _, i in sorted(zip(keys, range(batch.num_seqs), strict=True))])
        lens = batch.query_lens[order]
        self._num_tokens = batch.num_tokens
        self._slots = batch.slots(self.block_size).astype(np.int32)
        self._fresh = batch.begun_blocks(self.block_size)
        self._tables = np.ascontiguousarray(batch.block_tables)
        self._row_token = ranges(batch.query_start[:-1][order], lens).astype(np.int32)
        self._row_seen = ranges(batch.context_lens[order] - lens + 1, lens).astype(np.int32)
        self._row_table = np.repeat(order * self._tables.shape[1], lens)
        self._writes = _at(self._slots), self._num_tokens, _at(self._fresh), len(self._fresh)
        self._reads = _at(self._row_token), _at(self._row_seen), _at(self._row_table), _at(self._tables)
        self._num_decodes = int((lens == 1).sum())
        self._prompt_lens = lens[self._num_decodes :].tolist()
        self._tiles: dict[int, tuple[np.ndarray, int, int]] = {}

    def _tiles_of(self, groups: int) -> tuple[int, int]:
        """Where the bounds of the tiles are, and how many there are: one holds decoding rows, or rows of one prompt."""
        if groups not in self._tiles:
            size = max(1, VECTORS // groups)
            bounds, start = [0], 0
            for length in (self._num_decodes, *self._prompt_lens):
                bounds += [*range(start + size, start + length, size), start + length] if length else []
                start += length
            tiles = np.array(bounds, np.int32)
            self._tiles[groups] = tiles, _at(tiles), len(tiles) - 1
        return self._tiles[groups][1:]

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        return self.attend(layer, query, key, value, params, None)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, lse: Tensor | None
    ) -> Tensor:
        """`forward`; fills `lse` (heads, tokens) float32, if given, with the log of each row's sum of exponentials."""
        shape = self.layers[layer]
        heads, tokens, _ = query.shape
        query, key, value = _rows(query), _rows(key), _rows(value)
        output = torch.empty(tokens, heads, shape.value_dim, dtype=self.dtype)
        if tokens > self._num_tokens:
            output[self._num_tokens :] = 0
        strides = (ctypes.c_int64 * 6)(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        self._attend(
            address(query),
            address(key),
            address(value),
            strides,
            address(self.keys[layer]),
            address(self.values[layer]),
            shape.num_kv_heads,
            self.block_size,
            shape.key_dim,
            shape.value_dim,
            heads,
            *self._writes,
            *self._reads,
            *self._tiles_of(heads // shape.num_kv_heads),
            params.scaling,
            params.window or 0,
            params.softcap or 0.0,
            None if sinks is None else address(sinks),
            address(output),
            None if lse is None else address(lse),
            tokens,
        )
        return output


def attend_causally(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Whole sequences of one length attend to themselves, with the bits that `NativeAttention` gives their tokens.

    query (sequences · kv_heads, groups, length, dim); key and value (sequences · kv_heads, length, dim); sinks, where
    there are any, (kv_heads · groups,). Returns the output (…, groups, length, value_dim) in the query's dtype, and
    each row's log of its sum of exponentials (…, groups, length), float32.
    """
    rows, groups, length, _ = query.shape
    kv_heads = 1 if params.sinks is None else params.sinks.numel() // groups  # else every row is as good as a sequence
    sequences = rows // kv_heads
    shape = LayerShape(kv_heads, key.shape[-1], value.shape[-1])
    per_sequence = -(-length // LANES)
    backend = NativeAttention([shape], 1 + sequences * per_sequence, LANES, query.dtype, query.device)
    starts = range(1, 1 + sequences * per_sequence, per_sequence)
    tables = [list(range(start, start + per_sequence)) for start in starts]
    backend.prepare(RaggedBatch(list(range(0, sequences * length + 1, length)), [length] * sequences, tables))
    lse = torch.empty(kv_heads * groups, sequences * length)
    flat_query = query.view(sequences, kv_heads, groups, length, -1).permute(1, 2, 0, 3, 4)
    output = backend.attend(
        0,
        flat_query.reshape(kv_heads * groups, sequences * length, -1),
        key.view(sequences, kv_heads, length, -1).transpose(0, 1).reshape(kv_heads, sequences * length, -1),
        value.view(sequences, kv_heads, length, -1).transpose(0, 1).reshape(kv_heads, sequences * length, -1),
        params,
        lse,
    )
    output = output.view(sequences, length, kv_heads, groups, -1).permute(0, 2, 3, 1, 4)
    lse = lse.view(kv_heads, groups, sequences, length).permute(2, 0, 1, 3)
    return output.reshape(rows, groups, length, -1), lse.reshape(rows, groups, length)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _at(array: np.ndarray) -> int:
    return array.ctypes.data
