"""Paged attention on CUDA: our Triton kernels, or flash-attn where it is installed and serves the layer.

Both keep keys and values as (num_blocks, block_size, kv_heads, dim), one pair a layer, and read a step's plan (slots,
lengths, block tables) from device buffers that live as long as the backend: a captured CUDA graph replays any later
batch of as many sequences after `prepare` alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.config import AttentionBackendName
from rollout.kernels.attention.base import AttentionBackend, AttentionParams, LayerShape, RaggedBatch
from rollout.kernels.attention.torch_paged import TorchAttention

MAX_SPLITS = 16
MIN_SPLIT_SIZE = 256
FLASH_BLOCK_SIZE = 256
"""flash-attn 2 reads paged caches only in blocks of a multiple of this many tokens."""


class StepBuffers:
    """The plan of a step, int32 but for the slots: filled on the host, brought to the device by one copy.

    slots (max_num_tokens,) int64; query_start, key_start (max_num_seqs + 1,): running sums of the query and context
    lengths, from 0; context_lens (max_num_seqs,); block_tables (max_num_seqs, table_width). Only the first entries, up
    to the batch's sizes, mean anything.
    """

    def __init__(self, max_num_tokens: int, max_num_seqs: int, table_width: int, device: torch.device) -> None:
        self.max_num_tokens, self.max_num_seqs, self.table_width = max_num_tokens, max_num_seqs, table_width
        sizes = [2 * max_num_tokens, max_num_seqs + 1, max_num_seqs + 1, max_num_seqs, max_num_seqs * table_width]
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=on_cuda)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if on_cuda else None
        self._host_views = [view.numpy() for view in self._views(self._host.split(sizes))]
        views = self._views(self._device.split(sizes))
        self.slots, self.query_start, self.key_start, self.context_lens, self.block_tables = views

    def _views(self, parts: tuple[Tensor, ...]) -> list[Tensor]:
        slots, *lens, tables = parts
        return [slots.view(torch.int64), *lens, tables.view(self.max_num_seqs, self.table_width)]

    def fill(self, batch: RaggedBatch, block_size: int) -> None:
        """Bring `batch` to the device, in order with the current stream. Raises ValueError where it doesn't fit."""
        tokens, seqs, width = batch.num_tokens, batch.num_seqs, max(map(len, batch.block_tables))
        room = (self.max_num_tokens, self.max_num_seqs, self.table_width)
        if tokens > room[0] or seqs > room[1] or width > room[2]:
            raise ValueError(
                f"a batch of {tokens} tokens, {seqs} sequences and {width} blocks a sequence exceeds the attention "
                f"buffers, made for {room[0]}, {room[1]} and {room[2]}"
            )
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy may still read the host buffer
        slots, query_start, key_start, context_lens, block_tables = self._host_views
        slots[:tokens] = batch.slots(block_size)
        query_start[: seqs + 1] = batch.query_start
        context_lens[:seqs] = batch.context_lens
        np.cumsum(batch.context_lens, out=key_start[1 : seqs + 1])
        for row, table in zip(block_tables, batch.block_tables, strict=False):
            row[: len(table)] = table
        used = self._host.numel() - (self.max_num_seqs - seqs) * self.table_width
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class TritonAttention(AttentionBackend):
    """Every layer by `rollout.kernels.attention.triton_paged`; a decoding row's bits don't depend on the batch.

    No batch may have more than `max_num_batched_tokens` tokens, `max_num_seqs` sequences, or a context longer than
    `max_model_len`. Raises ImportError where Triton is missing.
    """

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
        super().__init__(layers, num_blocks, block_size, dtype, device)
        # Imported here: the module compiles its kernels for the GPU at hand, and needs Triton.
        self._paged_attention = importlib.import_module("rollout.kernels.attention.triton_paged").paged_attention
        self.step = StepBuffers(max_num_batched_tokens, max_num_seqs, -(-max_model_len // block_size), device)
        # Fixed by the longest context allowed, never by the batch: see triton_paged.
        self._split_size = max(MIN_SPLIT_SIZE, 1 << (-(-max_model_len // MAX_SPLITS) - 1).bit_length())
        self._max_splits = -(-max_model_len // self._split_size)

        def cache(layer: LayerShape, dim: int) -> Tensor:
            return torch.zeros(num_blocks, block_size, layer.num_kv_heads, dim, dtype=dtype, device=device)

        self.keys = [cache(layer, layer.key_dim) for layer in layers]
        self.values = [cache(layer, layer.value_dim) for layer in layers]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            source, target = torch.tensor(pairs, device=self.device).T
            for cache in (*self.keys, *self.values):
                cache[target] = cache[source]

    def prepare(self, batch: RaggedBatch) -> None:
        self.step.fill(batch, self.block_size)
        self._num_seqs = batch.num_seqs
        self._max_query_len = max(batch.query_lens)
        self._max_context = max(batch.context_lens)
        self._has_decodes = min(batch.query_lens) == 1

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        self._write(layer, key, value)
        return self._attend(layer, query if query.stride(-1) == 1 else query.contiguous(), params)

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        slots = self.step.slots[: key.shape[1]]
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key.transpose(0, 1))
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value.transpose(0, 1))

    def _attend(self, layer: int, query: Tensor, params: AttentionParams) -> Tensor:
        output: Tensor = self._paged_attention(
            query,
            self.keys[layer],
            self.values[layer],
            self.step.query_start[: self._num_seqs + 1],
            self.step.context_lens[: self._num_seqs],
            self.step.block_tables[: self._num_seqs],
            params,
            split_size=self._split_size,
            max_splits=self._max_splits,
            has_decodes=self._has_decodes,
            has_chunks=self._max_query_len > 1,
        )
        return output


class FlashAttention(TritonAttention):
    """Layers that flash-attn 2 serves by flash-attn, the others (sinks, float32, odd head widths) by Triton.

    Source: Dao, "FlashAttention-2", 2023; the `flash-attn` package, 2.6 or later. Its decode kernel picks its split of
    the keys by the number of rows, so bits depend on the batch's size. Raises ImportError without flash-attn, and
    ValueError, naming the remedy, for a block size it can't read.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        **limits: int,
    ) -> None:
        if block_size % FLASH_BLOCK_SIZE:
            raise ValueError(
                f"flash-attn reads paged caches in blocks of a multiple of {FLASH_BLOCK_SIZE} tokens, block_size is "
                f"{block_size}: use block_size {FLASH_BLOCK_SIZE} or the triton backend"
            )
        self._flash: Any = importlib.import_module("flash_attn")
        super().__init__(layers, num_blocks, block_size, dtype, device, **limits)

    def _attend(self, layer: int, query: Tensor, params: AttentionParams) -> Tensor:
        shape = self.layers[layer]
        fits = shape.key_dim == shape.value_dim <= 256 and shape.key_dim % 8 == 0
        if params.sinks is not None or not fits or self.dtype not in (torch.float16, torch.bfloat16):
            return super()._attend(layer, query, params)
        query = query.transpose(0, 1)
        common = {
            "softmax_scale": params.scaling,
            "causal": True,
            "window_size": (params.window - 1, 0) if params.window else (-1, -1),
            "softcap": params.softcap or 0.0,
            "block_table": self.step.block_tables[: self._num_seqs],
        }
        keys, values = self.keys[layer], self.values[layer]
        if self._max_query_len == 1:
            context_lens = self.step.context_lens[: self._num_seqs]
            decoded: Tensor = self._flash.flash_attn_with_kvcache(
                query[:, None], keys, values, cache_seqlens=context_lens, **common
            ).squeeze(1)
            return decoded
        output: Tensor = self._flash.flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=self.step.query_start[: self._num_seqs + 1],
            cu_seqlens_k=self.step.key_start[: self._num_seqs + 1],
            max_seqlen_q=self._max_query_len,
            max_seqlen_k=self._max_context,
            **common,
        )
        return output


def choose(
    name: AttentionBackendName,
    layers: list[LayerShape],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> AttentionBackend:
    """Make the backend called `name`; "auto": torch on a CPU, else the first usable of flash_attn, triton and torch.

    Raises ValueError where `name` can't serve this device or block size, ImportError where its package is missing.
    """
    if name == "auto":
        if device.type == "cpu":
            name = "torch"
        elif block_size % FLASH_BLOCK_SIZE == 0 and importlib.util.find_spec("flash_attn"):
            name = "flash_attn"
        else:
            name = "triton" if importlib.util.find_spec("triton") else "torch"
    if name == "torch":
        return TorchAttention(layers, num_blocks, block_size, dtype, device)
    if device.type != "cuda":
        raise ValueError(f"attention_backend {name!r} needs a CUDA device, got {device}: use torch")
    backend = {"flash_attn": FlashAttention, "triton": TritonAttention}[name]
    return backend(
        layers,
        num_blocks,
        block_size,
        dtype,
        device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
