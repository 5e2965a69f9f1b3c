"""Linear layers with one input as one product, over weights that lie one behind the other in the live parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollout.model.fused import JOINED, compute_together
from rollout.model.parameters import ModelParameters, ParameterSet


class JoinedWeights:
    """Linear layers with one input as one product: their weights lie one behind the other in memory.

    `names` are those that layers of one input have in their module. A commit on CUDA copies into the live buffers,
    which stay where they are. `groups` are the layers, `fused` says how much of what `fuse` has replaced.
    """

    def __init__(self, parameters: ModelParameters, names: Sequence[Sequence[str]] = JOINED) -> None:
        self._parameters = parameters
        self.fused: dict[str, int] = {}
        self.groups: list[list[nn.Linear]] = []
        for module in parameters.model.modules():
            for group in names:
                layers = [getattr(module, name, None) for name in group]
                if _joinable(layers):
                    self.groups.append(layers)  # type: ignore[arg-type]
                    compute_together(layers, _product(layers))  # type: ignore[arg-type]
        self._names = {id(slot): name for name, slot in parameters.slots.items()}
        self.pack(parameters.live)

    def pack(self, parameters: ParameterSet) -> None:
        """Lay the weights of the live set together, wherever its buffers are new; other sets are only copied from."""
        if parameters is not self._parameters.live:
            return
        for layers in self.groups:
            for tensors in _tensors(layers):
                if _together(tensors) is None:
                    laid = torch.cat([tensor.data for tensor in tensors])
                    for tensor, part in zip(tensors, laid.split([len(t) for t in tensors]), strict=True):
                        tensor.data = part
                        parameters.tensors[self._names[id(tensor)]] = tensor.data


def _joinable(layers: list[Any]) -> bool:
    if not all(type(layer) is nn.Linear and isinstance(layer.weight, nn.Parameter) for layer in layers):
        return False
    return len({(layer.weight.dtype, layer.in_features, layer.bias is None) for layer in layers}) == 1


def _tensors(layers: list[nn.Linear]) -> list[list[Tensor]]:
    weights = [layer.weight for layer in layers]
    return [weights] if layers[0].bias is None else [weights, [layer.bias for layer in layers]]


def _together(tensors: list[Tensor]) -> Tensor | None:
    """One tensor over all of these, if they lie one behind the other."""
    first = tensors[0]
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage()._cdata != storage or tensor.storage_offset() != end:
            return None
        end += tensor.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _product(layers: list[nn.Linear]) -> Callable[[Tensor], Sequence[Tensor]]:
    widths = [layer.out_features for layer in layers]

    def product(x: Tensor) -> Sequence[Tensor]:
        weight, *bias = map(_together, _tensors(layers))
        if weight is None or any(b is None for b in bias):
            return [nn.functional.linear(x, layer.weight, layer.bias) for layer in layers]
        return torch.split_with_sizes(nn.functional.linear(x, weight, *bias), widths, -1)

    return product
