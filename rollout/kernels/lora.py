"""What LoRA adapters add to a layer's output: one definition for the engine and an exact trainer.

y + (B (A x)) · scale, in PEFT's order, for rows that lie side by side by adapter (Hu et al., arXiv 2106.09685; of
several adapters in one batch: Chen et al., arXiv 2310.18547). A and B are float32, whatever they are stored in, as PEFT
makes them by default (`autocast_adapter_dtype`): everything is computed in float32, and rounded once to the dtype of y.
The native kernel computes each row in an order that depends on that row alone. Imports torch only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rollout.kernels.attention.chunked import matmul
from rollout.kernels.native import SUFFIXES, address, library
from rollout.kernels.products import multiply_in_blocks

LANES = 16
"""Floats of the kernel's vectors."""


@dataclass(frozen=True, eq=False)
class LoraWeight:
    """One adapter's part in one layer; `a` and `b` are float32.

    As they are, (rank, inputs) and (outputs, rank), or where `native` as the kernel reads them: the rows of A filled up
    to whole vectors, and B as (outputs / 16, rank, 16).
    """

    a: Tensor
    b: Tensor
    scale: float
    rank: int
    native: bool

    @classmethod
    def of(cls, a: Tensor, b: Tensor, scale: float) -> LoraWeight:
        """From A (rank, inputs) and B (outputs, rank) of any floating dtype, which are copied."""
        rank = a.shape[0]
        native = a.device.type == "cpu" and library() is not None
        a, b = a.detach().to(torch.float32, copy=True), b.detach().to(torch.float32, copy=True)
        if native:
            a = nn.functional.pad(a, (0, -a.shape[1] % LANES))
            b = nn.functional.pad(b, (0, 0, 0, -len(b) % LANES)).view(-1, LANES, rank).transpose(1, 2)
        return cls(a.contiguous(), b.contiguous(), scale, rank, native)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class LoraTables:
    """The parts of several adapters in each of a model's layers, as the kernel looks them up.

    `parts` has one list an adapter, with one entry a layer: None where the adapter leaves it as it is.
    """

    def __init__(self, parts: Sequence[Sequence[LoraWeight | None]]) -> None:
        self.parts = parts
        entries = list(zip(*parts, strict=True))  # one tuple a layer
        self._a = np.array([[0 if p is None else address(p.a) for p in layer] for layer in entries], np.int64)
        self._b = np.array([[0 if p is None else address(p.b) for p in layer] for layer in entries], np.int64)
        self._ranks = np.array([[0 if p is None else p.rank for p in layer] for layer in entries], np.int32)
        self._scales = np.array([[0 if p is None else p.scale for p in layer] for layer in entries], np.float32)
        self._adapts: list[bool] = (self._ranks.max(1, initial=0) > 0).tolist()
        self._native = all(p is None or p.native for layer in entries for p in layer)

    def add(self, y: Tensor, x: Tensor, layer: int, bounds: np.ndarray, *, exact: bool = False) -> Tensor:
        """y (…, rows, outputs) with what the adapters add to it, for x (…, rows, inputs), in place where that can be.

        Adapter i has the rows from bounds[i] up to bounds[i + 1], int64; the others stay as they are. `exact`: a row
        has the same bits for every number of rows, also where the kernel can't serve.
        """
        if not self._adapts[layer]:
            return y
        rows_x, rows_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        serves = x.dtype in SUFFIXES and y.dtype in SUFFIXES and rows_x.stride(1) == 1 == rows_y.stride(1)
        if self._native and serves:
            self._add_native(rows_y, rows_x, layer, bounds)
            return y
        for number, parts in enumerate(self.parts):
            part, rows = parts[layer], slice(int(bounds[number]), int(bounds[number + 1]))
            if part is not None and rows.start < rows.stop:
                rows_y[rows] = _added(rows_y[rows], rows_x[rows], part, exact=exact)
        return y

    def _add_native(self, y: Tensor, x: Tensor, layer: int, bounds: np.ndarray) -> None:
        kernels = library()
        assert kernels is not None
        a, b, ranks, scales = self._a[layer], self._b[layer], self._ranks[layer], self._scales[layer]
        getattr(kernels, f"adapt_{SUFFIXES[x.dtype]}_{SUFFIXES[y.dtype]}")(
            address(x),
            x.stride(0),
            address(y),
            y.stride(0),
            x.shape[1],
            y.shape[1],
            bounds.ctypes.data,
            a.ctypes.data,
            b.ctypes.data,
            ranks.ctypes.data,
            scales.ctypes.data,
            len(a),
        )


def _added(y: Tensor, x: Tensor, part: LoraWeight, *, exact: bool) -> Tensor:
    """y (rows, outputs) + (B (A x)) · scale, by torch's own products."""
    a, b = part.a, part.b
    if part.native:
        a, b = a[:, : x.shape[1]], b.transpose(1, 2).reshape(-1, part.rank)[: y.shape[1]]
    inner = _product(x.float(), a, exact=exact)
    return (y + _product(inner, b, exact=exact) * part.scale).to(y.dtype)


def _product(x: Tensor, weight: Tensor, *, exact: bool) -> Tensor:
    """x (rows, inputs) · weightᵀ (outputs, inputs)."""
    return multiply_in_blocks(x, weight) if exact and x.is_cuda else matmul(x, weight.T, exact=exact)
