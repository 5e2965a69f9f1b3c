"""The products of a model's linear layers: one definition for the engine and an exact trainer.

On a CPU each output is the float32 sum over its row and its weight's row, in order of position, rounded once to the
dtype of both: it depends on nothing else, neither on the other rows nor on how they are tiled. The head's logits aren't
rounded at all, since at 20 a bfloat16 step is 1/8. Where the native kernels aren't the faster way (float32 with
AVX-512, bfloat16 on an AVX-512 processor that doesn't multiply it) or can't be built, both sides keep torch's own. On a
GPU the order is its library's, which chooses by shape: there all products
have one shape (`multiply_in_blocks`). Imports torch only: `trainer_bridge.score.exact` uses it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollout.kernels.native import SUFFIXES, address, in_huge_pages, library

PANEL = 64
"""Outputs that are computed together: packed weights are filled up to a multiple of it."""
BLOCK_ROWS = 256
"""Rows of every product of `multiply_in_blocks`: about as many as a GPU computes while it reads a weight."""


def multiply_in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (…, inputs) · weightᵀ (outputs, inputs) + bias → (…, outputs), in products of BLOCK_ROWS rows, also the last.

    A library that chooses its kernel by shape has one for all numbers of rows. Whether a row's bits depend on its place
    in a block is for a proof to find out.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows = len(flat)
    filled = nn.functional.pad(flat, (0, 0, 0, -rows % BLOCK_ROWS)).contiguous()
    blocks = [nn.functional.linear(block, weight, bias) for block in filled.split(BLOCK_ROWS)]
    output = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return output[:rows].view(*x.shape[:-1], -1)


def serves_linear(layer: object) -> bool:
    """Whether `PackedWeight` can stand for this module."""
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or layer.weight.device.type != "cpu":
        return False
    even = layer.in_features % 2 == 0 or layer.weight.dtype is torch.float32
    return even and multiplies(layer.weight.dtype)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether products of this dtype are ours on this machine's CPU."""
    kernels = library()
    return kernels is not None and dtype in SUFFIXES and bool(getattr(kernels, f"multiplies_{SUFFIXES[dtype]}")())


@dataclass(frozen=True)
class PackedWeight:
    """The weights of layers with one input, as `multiply` reads them. `outputs` is their number of rows."""

    panels: Tensor
    bias: Tensor | None
    outputs: int

    @classmethod
    def of(cls, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> PackedWeight:
        """Pack copies of `weights` (outputs, inputs), bfloat16 or float32, and as many biases (outputs,), or none."""
        kernels = library()
        assert kernels is not None
        weight = torch.cat(list(weights)).contiguous() if len(weights) > 1 else weights[0].contiguous()
        outputs, inputs = weight.shape
        filled = -(-outputs // PANEL) * PANEL
        panels = in_huge_pages(weight.new_empty(filled, inputs))
        pack = getattr(kernels, f"pack_{SUFFIXES[weight.dtype]}")
        pack(address(weight), outputs, inputs, address(panels))
        bias = None
        if biases:
            bias = torch.zeros(filled)
            bias[:outputs] = torch.cat(list(biases))
        return cls(panels, bias, outputs)

    def multiply(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x (…, inputs), of the weight's dtype, · weightᵀ + bias → (…, outputs) in the same, or float32 by `dtype`."""
        kernels = library()
        assert kernels is not None
        x = x.contiguous()
        inputs = x.shape[-1]
        y = torch.empty(*x.shape[:-1], self.outputs, dtype=dtype or x.dtype)
        if x.dtype is not self.panels.dtype or y.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{x.dtype} times a weight in {self.panels.dtype} can't give {y.dtype}")
        getattr(kernels, f"multiply_{SUFFIXES[self.panels.dtype]}")(
            address(x),
            address(self.panels),
            None if self.bias is None else address(self.bias),
            x.numel() // inputs,
            self.outputs,
            inputs,
            address(y),
            int(y.dtype is torch.bfloat16),
        )
        return y
