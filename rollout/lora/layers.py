"""The layers of a model that adapters can adapt, and what a batch's adapters add to their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.kernels.lora import LoraTables, LoraWeight

_numbers = count(1)


@dataclass(frozen=True, eq=False)
class Adapter:
    """One version of an adapter, which never changes. It lives as long as anything refers to it.

    `label` is its name and version, `policy@3`. `parts` has one entry for each of `LoraLayers.names`, None for layers
    that it leaves as they are; `tokens` are the A (vocabulary, rank) of those that are embeddings. `number` orders the
    rows of a batch.
    """

    label: str
    parts: list[LoraWeight | None]
    tokens: dict[int, Tensor]
    number: int

    @classmethod
    def of(cls, label: str, parts: list[LoraWeight | None], tokens: dict[int, Tensor]) -> Adapter:
        return cls(label, parts, tokens, next(_numbers))

    @property
    def nbytes(self) -> int:
        held = sum(part.nbytes for part in self.parts if part is not None)
        return held + sum(tensor.nbytes for tensor in self.tokens.values())


class LoraLayers:
    """The linear layers and embeddings of a model, by their names; from here on their outputs are adapted.

    Make it once everything else that replaces a layer's forward pass has: what a layer computes is then what it did,
    and where `begin` names adapters, what they add for their rows. `exact` as in `LoraTables.add`.
    """

    def __init__(self, model: PreTrainedModel, *, exact: bool) -> None:
        self.device, self._exact = model.device, exact
        self.names: dict[str, int] = {}
        self.weights: list[nn.Parameter] = []
        self.embeddings: set[int] = set()
        self._adapters: tuple[Adapter, ...] = ()
        self._tables: LoraTables | None = None
        self._rows = self._head_rows = np.zeros(1, np.int64)
        head = model.get_output_embeddings()
        self.head = next(name for name, module in model.named_modules() if module is head)
        for name, module in model.named_modules():
            if type(module) is nn.Linear:
                self._enter(name, module, self._linear(module.forward, len(self.names), is_head=module is head))
            elif module is model.get_input_embeddings() and isinstance(module, nn.Embedding):
                self.embeddings.add(len(self.names))
                self._enter(name, module, self._embedding(module.forward, len(self.names)))

    def _enter(self, name: str, module: Any, forward: Callable[[Tensor], Tensor]) -> None:
        self.weights.append(module.weight)
        self.names[name] = len(self.names)
        module.forward = forward

    def embed_scale(self, model: PreTrainedModel) -> float:
        """What the model's embeddings are multiplied by, and so what an adapter adds to them."""
        return float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))

    def begin(self, adapters: Sequence[Adapter], rows: Sequence[int], head_rows: Sequence[int]) -> None:
        """Say what the next batch holds: first so many rows without an adapter, then those of each of `adapters`.

        Both counts have one entry more than there are adapters: of tokens, and of those that go through the head.
        """
        if not adapters:
            self._adapters, self._tables = (), None
            return
        if self._adapters != tuple(adapters):
            self._adapters = tuple(adapters)
            self._tables = LoraTables([adapter.parts for adapter in adapters])
        self._rows, self._head_rows = (np.array([*accumulate(counts)], np.int64) for counts in (rows, head_rows))

    def _linear(self, stock: Callable[[Tensor], Tensor], number: int, *, is_head: bool) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            y = stock(x)
            if self._tables is None:
                return y
            return self._tables.add(y, x, number, self._head_rows if is_head else self._rows, exact=self._exact)

        return forward

    def _embedding(self, stock: Callable[[Tensor], Tensor], number: int) -> Callable[[Tensor], Tensor]:
        def forward(ids: Tensor) -> Tensor:
            y = stock(ids)
            if self._tables is None:
                return y
            for adapter, start, end in zip(self._adapters, self._rows, self._rows[1:], strict=False):
                part = adapter.parts[number]
                if part is not None:
                    inner = adapter.tokens[number][ids[0, start:end]]
                    bounds = np.array([0, end - start], np.int64)
                    LoraTables([[part]]).add(y[0, start:end], inner, 0, bounds, exact=self._exact)
            return y

        return forward


def embedding_part(b: Tensor, scale: float) -> LoraWeight:
    """What an embedding's adapter does with the rows (tokens, rank) of its A: B (outputs, rank) alone."""
    return LoraWeight.of(torch.eye(b.shape[1], device=b.device), b, scale)
