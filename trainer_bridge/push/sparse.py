"""What changed since the last push.

A step of reinforcement learning at usual rates leaves almost all bf16 weights bit-identical (some 99 %: PULSE,
arXiv 2602.03839), so that indices and values of the changed elements are a small part of the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from rollout.rendezvous import TensorInfo

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Baseline:
    """A copy, in CPU memory, of the weights that the servers were last sent: as many bytes as a whole push.

    `epochs`: the weight epoch that each server gave them; None while the copy stands for no commit.
    """

    def __init__(self) -> None:
        self.epochs: list[int] | None = None
        self._copy: dict[str, torch.Tensor] = {}

    def changes(
        self, infos: list[TensorInfo], tensors: Iterable[torch.Tensor]
    ) -> tuple[list[TensorInfo], list[torch.Tensor]] | None:
        """Bring the copy up to date. The changes, as announced (`count`) and as sent (uint8): the flat indices, int32
        where they fit and else int64, then the values, whose bits differ.

        None where a tensor is new to the copy, or where the changes take over half the bytes of the whole.
        """
        self.epochs = None
        budget = sum(info.nbytes for info in infos) // 2
        kept = {info.name: self._copy[info.name] for info in infos if self._fits(info)}
        dense = len(kept) < len(infos)
        announced: list[TensorInfo] = []
        payloads: list[torch.Tensor] = []
        for info, tensor in zip(infos, tensors, strict=True):
            new = tensor.detach().cpu().view(-1)
            if info.name not in kept:
                kept[info.name] = new.clone().view(info.shape)
                continue
            old = kept[info.name].view(-1)
            if not dense:
                differs = _bits(new) != _bits(old)
                changed = replace(info, count=int(differs.sum()))
                budget -= changed.nbytes
                dense = budget < 0
                if not dense:
                    indices = differs.nonzero().view(-1)
                    announced.append(changed)
                    payloads.append(torch.cat([_bytes(indices.to(changed.index_dtype)), _bytes(new[indices])]))
            old.copy_(new)
        self._copy = kept
        return None if dense else (announced, payloads)

    def _fits(self, info: TensorInfo) -> bool:
        copy = self._copy.get(info.name)
        return copy is not None and copy.dtype == info.dtype and tuple(copy.shape) == info.shape

    def tensors(self, infos: list[TensorInfo]) -> Iterator[torch.Tensor]:
        return (self._copy[info.name] for info in infos)


def digested(infos: list[TensorInfo], tensors: Iterable[torch.Tensor], sums: dict[str, str]) -> Iterator[torch.Tensor]:
    """The same tensors; `sums` is filled with the sha256 (hex) of each one's bytes as they pass."""
    for info, tensor in zip(infos, tensors, strict=True):
        sums[info.name] = hashlib.sha256(_bytes(tensor.detach().cpu()).numpy()).hexdigest()  # type: ignore[arg-type]
        yield tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: NaN equals itself there, and -0.0 is not 0.0."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
