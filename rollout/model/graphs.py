"""CUDA graphs for decode: a step in which every sequence computes one token replays as one launch.

A graph bakes in shapes and addresses. Shapes: batches are padded to the next of a few sizes. Addresses: inputs, the
attention plan and the logits live in fixed buffers, and a set of parameters keeps the graphs that read it
(`ParameterSet.graphs`). All are captured before the engine is ready: a capture waits for everything that the device has
under way, which later may be a broadcast that waits for its trainer.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rollout.kernels.attention.base import AttentionBackend, RaggedBatch

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(input_ids (1, T), position_ids (1, T), head_rows (T,)) → logits (T, vocab)."""


class Graph(Protocol):
    """Recorded device work."""

    def replay(self) -> None: ...


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool: a graph's temporaries are void once another one replays."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Graph:
        """Record what `work` launches. It runs twice before: kernels compile and libraries start outside a capture."""
        current = torch.cuda.current_stream(self._device)
        try:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                work()
                work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: a weight receiver may allocate and copy on its own thread meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError:
            self._begin_anew()  # the stream may still be capturing, the pool may be left open
            raise
        finally:
            torch.cuda.set_stream(current)  # where ending a capture fails, torch stays on the capture's stream
        return graph


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes graphs are captured for, ascending: 1, 2, 4, then by 8 to 256 and by 16 on, and the largest."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


def pad_decodes(batch: RaggedBatch, size: int) -> RaggedBatch:
    """Add sequences of one token up to `size`; they write to and read from the null block's first slot."""
    rows = batch.num_seqs
    if rows == size:
        return batch
    context_lens, block_tables = np.ones(size, np.int32), np.zeros((size, batch.block_tables.shape[1]), np.int32)
    context_lens[:rows], block_tables[:rows] = batch.context_lens, batch.block_tables
    return RaggedBatch(np.arange(size + 1), context_lens, block_tables)


class DecodeGraphs:
    """Runs decode-only batches of up to `max_num_seqs` sequences by replaying graphs of `forward`.

    `forward` must reach `backend`. `capture` turns work into a graph: CudaGraphs(device), or a fake.
    """

    def __init__(
        self,
        forward: Forward,
        backend: AttentionBackend,
        max_num_seqs: int,
        capture: Callable[[Callable[[], None]], Graph],
    ) -> None:
        self._forward, self._backend, self._capture = forward, backend, capture
        self.sizes = bucket_sizes(max_num_seqs)
        device = backend.device
        self._input_ids = torch.zeros(1, max_num_seqs, dtype=torch.int64, device=device)
        self._positions = torch.zeros(1, max_num_seqs, dtype=torch.int64, device=device)
        self._head_rows = torch.arange(max_num_seqs, device=device)
        self._logits = torch.empty(0)  # (max_num_seqs, vocab), made by the first forward
        self._filled = self.replays = 0

    def capture_all(self, graphs: dict[int, Graph]) -> None:
        """Capture a graph for each batch size into `graphs`, the largest first: the smaller ones find room in its pool.

        Where memory doesn't suffice for a size, even after what torch keeps was given back, the next larger graph
        serves it, or none. A model that can't be captured is reported once, and has no graphs.
        """
        for size in reversed(self.sizes):
            try:
                try:
                    graphs[size] = self._record(size)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    graphs[size] = self._record(size)
            except torch.OutOfMemoryError as error:
                logger.warning("no memory for a CUDA graph of %d sequences, decoding without it: %s", size, error)
            except RuntimeError as error:
                logger.warning("this model can't be captured as a CUDA graph, decoding without graphs: %s", error)
                return

    def run(self, graphs: dict[int, Graph], input_ids: Tensor, positions: Tensor, batch: RaggedBatch) -> Tensor | None:
        """Logits (rows, vocab) of a decode-only batch, valid until the next call; None: prepare and run it eagerly.

        input_ids, positions (rows,) int64, on any device. `graphs`, by batch size, are those of the parameters in use.
        """
        rows = batch.num_seqs
        if batch.num_tokens != rows:
            return None
        size = next((size for size in self.sizes[bisect_left(self.sizes, rows) :] if size in graphs), None)
        if size is None:
            return None
        # The rows behind keep valid ids of an earlier batch, but no positions: rotary factors may follow the largest.
        self._input_ids[0, :rows].copy_(input_ids, non_blocking=True)
        self._positions[0, :rows].copy_(positions, non_blocking=True)
        if rows < self._filled:
            self._positions[0, rows : self._filled].zero_()
        self._filled = rows
        self._backend.prepare(pad_decodes(batch, size))
        graphs[size].replay()
        self.replays += 1
        return self._logits[:rows]

    def _record(self, size: int) -> Graph:
        def work() -> None:
            logits = self._forward(self._input_ids[:, :size], self._positions[:, :size], self._head_rows[:size])
            if not self._logits.numel():  # one buffer for all graphs, outside their pool: made before any is captured
                self._logits = logits.new_empty(self._head_rows.numel(), logits.shape[-1])
            self._logits[:size].copy_(logits)

        self._backend.prepare(pad_decodes(RaggedBatch([0], [], np.zeros((0, 1), np.int32)), size))
        return self._capture(work)
