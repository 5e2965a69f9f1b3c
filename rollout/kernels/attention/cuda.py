"""Paged attention on CUDA, by our Triton kernels.

A step's plan (slots, lengths, block tables) lies in device buffers that live as long as the backend: a captured CUDA
graph replays any later batch of as many sequences after `prepare` alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.kernels.attention import splits
from rollout.kernels.attention.base import AttentionBackend, AttentionParams, LayerShape, RaggedBatch
from rollout.kernels.norms import Deferred, deferred_heads


@functools.cache
def has_triton() -> bool:
    """Whether Triton, which has no wheels beyond Linux, is installed."""
    return importlib.util.find_spec("triton") is not None


BLOCK_SIZE = 16
"""Positions a block of a cache that is made for one call; the bits don't depend on it."""


class StepBuffers:
    """The plan of a step, int32 but for the slots: filled on the host, brought to the device by one copy.

    slots (max_num_tokens,) int64; query_start (max_num_seqs + 1,): running sums of the query lengths, from 0;
    context_lens (max_num_seqs,); places, shared and members (max_num_seqs,): see `splits.split_decodes`; block_tables
    (max_num_seqs, table_width). Only the first entries, up to the batch's sizes, mean anything.
    """

    def __init__(self, max_num_tokens: int, max_num_seqs: int, table_width: int, device: torch.device) -> None:
        self.max_num_tokens, self.max_num_seqs, self.table_width = max_num_tokens, max_num_seqs, table_width
        sizes = [2 * max_num_tokens, max_num_seqs + 1, *[max_num_seqs] * 4, max_num_seqs * table_width]
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=on_cuda)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if on_cuda else None
        self._filled = 0
        self._host_views = [view.numpy() for view in self._views(self._host.split(sizes))]
        views = self._views(self._device.split(sizes))
        self.slots, self.query_start, self.context_lens, *cut, self.block_tables = views
        self.places, self.shared, self.members = cut

    def _views(self, parts: tuple[Tensor, ...]) -> list[Tensor]:
        slots, *lens, tables = parts
        return [slots.view(torch.int64), *lens, tables.view(self.max_num_seqs, self.table_width)]

    def fill(self, batch: RaggedBatch, block_size: int, num_places: int = 0, most: int = 1) -> None:
        """Bring `batch` to the device, in order with the current stream. Raises ValueError where it doesn't fit.

        `num_places` and `most` are those of `splits.split_decodes`.
        """
        tokens, seqs, width = batch.num_tokens, batch.num_seqs, batch.block_tables.shape[1]
        room = (self.max_num_tokens, self.max_num_seqs, self.table_width)
        if tokens > room[0] or seqs > room[1] or width > room[2]:
            raise ValueError(
                f"a batch of {tokens} tokens, {seqs} sequences and {width} blocks a sequence exceeds the attention "
                f"buffers, made for {room[0]}, {room[1]} and {room[2]}"
            )
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy may still read the host buffer
        slots, query_start, context_lens, *cut, block_tables = self._host_views
        slots[:tokens] = batch.slots(block_size)
        slots[tokens : self._filled] = 0  # padding is written to the null block
        self._filled = tokens
        query_start[: seqs + 1] = batch.query_start
        context_lens[:seqs] = batch.context_lens
        block_tables[:seqs, :width] = batch.block_tables
        used_tables = block_tables[:seqs, : -(-int(context_lens[:seqs].max()) // block_size)]
        lens, contexts = batch.query_lens, context_lens[:seqs]
        found = splits.split_decodes(lens, contexts, used_tables, block_size, num_places, most)
        for view, numbers in zip(cut, found, strict=True):
            view[:seqs] = numbers
        used = self._host.numel() - (self.max_num_seqs - seqs) * self.table_width
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class TritonAttention(AttentionBackend):
    """Attention by `rollout.kernels.attention.triton_paged`; a row's bits don't depend on the batch it is in.

    Caches are (num_blocks, block_size, kv_heads, dim). No batch may have more than `max_num_batched_tokens` tokens,
    `max_num_seqs` sequences, or a context longer than `max_model_len`. Raises ImportError where Triton is missing.
    """

    takes_heads = True

    def __init__(
        self,
        layers: list[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        # Imported here: the modules compile their kernels for the GPU at hand, and need Triton.
        self._kernels = importlib.import_module("rollout.kernels.attention.triton_paged")
        self._layers = importlib.import_module("rollout.kernels.triton_layers")
        super().__init__(layers, num_blocks, block_size, dtype, device)
        self.step = StepBuffers(max_num_batched_tokens, max_num_seqs, -(-max_model_len // block_size), device)
        self._max_splits = -(-max_model_len // splits.SPLIT_SIZE)
        self._num_places = min(max_num_seqs * self._max_splits, splits.MAX_PLACES) if self._max_splits > 1 else 0
        self._fitting: dict[int, int] = {}  # layer → how many decodes' rows fit into one of its tiles, once it was seen

    def new_cache(self, kv_heads: int, dim: int) -> Tensor:
        """(num_blocks, block_size, kv_heads, dim), zeros."""
        return torch.zeros(self.num_blocks, self.block_size, kv_heads, dim, dtype=self.dtype, device=self.device)

    def prepare(self, batch: RaggedBatch) -> None:
        step, seqs = self.step, batch.num_seqs
        step.fill(batch, self.block_size, self._num_places, min(self._fitting.values(), default=1))
        self._plan = splits.PagedPlan(
            query_start=step.query_start[: seqs + 1],
            context_lens=step.context_lens[:seqs],
            block_tables=step.block_tables[:seqs],
            places=step.places[:seqs],
            shared=step.shared[:seqs],
            members=step.members[:seqs],
            num_places=self._num_places,
            split_size=splits.SPLIT_SIZE,
            max_splits=self._max_splits,
            has_decodes=bool(batch.query_lens.min() == 1),
            has_chunks=bool(batch.query_lens.max() > 1),
        )

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        return self._attend(layer, self._write(layer, query, key, value), params)

    def _write(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write to the cache; returns the queries as the layer meant them, the rest of their work done."""
        turned: Tensor = self._layers.write_heads(
            query,
            key,
            value,
            self.keys[layer],
            self.values[layer],
            self.step.slots[: key.shape[1]],
            deferred_heads.get() or Deferred(),
        )
        return turned

    def _attend(self, layer: int, query: Tensor, params: AttentionParams) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        if layer not in self._fitting:
            group = len(query) // values.shape[2]
            tiles = self._kernels.Tiles.of(group, query.shape[-1], values.shape[-1], query.element_size())
            self._fitting[layer] = tiles.rows // group
        output: Tensor = self._kernels.paged_attention(query, keys, values, self._plan, params)
        return output


def attend_causally(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Whole sequences of one length attend to themselves, with the bits that `TritonAttention` gives their tokens.

    query (sequences · kv_heads, groups, length, dim); key and value (sequences · kv_heads, length, dim); sinks, where
    there are any, (kv_heads · groups,). Returns the output (…, groups, length, value_dim) in the query's dtype, and
    each row's log of its sum of exponentials (…, groups, length), float32.
    """
    kernels = importlib.import_module("rollout.kernels.attention.triton_paged")
    rows, groups, length, _ = query.shape
    kv_heads = 1 if params.sinks is None else params.sinks.numel() // groups  # else every row is as good as a sequence
    sequences, per_sequence = rows // kv_heads, -(-length // BLOCK_SIZE)

    def paged(tensor: Tensor) -> Tensor:
        filled = pad(tensor, (0, 0, 0, per_sequence * BLOCK_SIZE - length))
        by_token = filled.view(sequences, kv_heads, per_sequence * BLOCK_SIZE, -1).transpose(1, 2)
        return by_token.reshape(sequences * per_sequence, BLOCK_SIZE, kv_heads, -1)

    def ints(*range_of: int) -> Tensor:
        return torch.arange(*range_of, dtype=torch.int32, device=query.device)

    contexts = torch.full((sequences,), length, dtype=torch.int32, device=query.device)
    plan = splits.PagedPlan(
        query_start=ints(0, sequences * length + 1, length),
        context_lens=contexts,
        block_tables=ints(sequences * per_sequence).view(sequences, per_sequence),
        places=contexts,
        shared=contexts,
        members=contexts,
        num_places=0,
        split_size=splits.SPLIT_SIZE,
        max_splits=-(-length // splits.SPLIT_SIZE),
        has_decodes=length == 1,
        has_chunks=length > 1,
    )
    flat = query.view(sequences, kv_heads, groups, length, -1).permute(1, 2, 0, 3, 4)
    flat = flat.reshape(kv_heads * groups, sequences * length, -1)
    lse = torch.empty(sequences * length, kv_heads * groups, dtype=torch.float32, device=query.device)
    output = kernels.paged_attention(flat, paged(key), paged(value), plan, params, lse)
    by_row = output.view(sequences, length, kv_heads, groups, -1).permute(0, 2, 3, 1, 4)
    lse = lse.view(sequences, length, kv_heads, groups).permute(0, 2, 3, 1)
    return by_row.reshape(rows, groups, length, -1), lse.reshape(rows, groups, length)
