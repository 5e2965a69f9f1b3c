"""Compare a model's decoder layers with themselves in float32: stock attention over whole sequences, against another
attention that computes the same sequences in parts.

Only one layer at a time has float32 parameters. Each is given the same inputs in both passes, so that a difference is
of this layer's making, and neither roundings nor a router's near tie pile up from layer to layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

Part = tuple[int, int, int]
"""(sequence, start, end): the tokens [start, end) of a sequence."""


@dataclass(frozen=True)
class _Stock:
    """What a layer was given and gave for one whole sequence; the tokens lie along `axis` of both."""

    given: Tensor
    gave: Tensor
    axis: int

    def rows(self, tensor: Tensor, part: Part) -> Tensor:
        return tensor.narrow(self.axis, part[1], part[2] - part[1])


class LayerCheck:
    """Hooks on the decoder layers of `model`, within `watching`.

    Set `parts` to what a row of tokens holds before it is computed: first one whole sequence at a time, by stock
    attention, with `stock` set; then any parts of them, otherwise. `errors` has for each layer, by its index, the
    largest difference between both, relative to what the layer adds to its input. Of several tokens of one part the
    worst tenth, at least one, doesn't count: a mixture-of-experts router may decide a near tie either way.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        count = model.config.get_text_config().num_hidden_layers
        lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
        outermost = [m for name, m in lists.items() if not any(name.startswith(other + ".") for other in lists)]
        self._layers = [layer for layers in outermost for layer in enumerate(layers)]
        self._stock: dict[tuple[int, int], _Stock] = {}
        self.errors: dict[int, float] = {}
        self.stock = True
        self.parts: list[Part] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the layers compute in float32 and be compared."""
        handles = []
        for index, layer in self._layers:
            computing = _Computing(self, index, layer)
            handles.append(layer.register_forward_pre_hook(computing.begin, with_kwargs=True))
            handles.append(layer.register_forward_hook(computing.end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def given(self, index: int, hidden: Tensor) -> Tensor:
        """What layer `index` computes with: what it was given when stock attention served."""
        if self.stock:
            return hidden
        seen = [self._stock[index, part[0]] for part in self.parts]
        rows = [stock.rows(stock.given, part) for stock, part in zip(seen, self.parts, strict=True)]
        return torch.cat(rows, seen[0].axis).to(hidden.dtype)

    def compare(self, index: int, given: Tensor, gave: Tensor) -> None:
        """Keep what layer `index` gave for a whole sequence, or compare what it gave for the parts."""
        if self.stock:
            sequence, _, length = self.parts[0]
            self._stock[index, sequence] = _Stock(given, gave, axis=given.shape.index(length))
            return
        start = 0
        for part in self.parts:
            stock = self._stock[index, part[0]]
            length = part[2] - part[1]
            mine = _by_token(gave.narrow(stock.axis, start, length), stock.axis)
            theirs = _by_token(stock.rows(stock.gave, part), stock.axis)
            added = theirs - _by_token(stock.rows(stock.given, part), stock.axis).to(theirs.dtype)
            error = ((mine - theirs).norm(dim=1) / added.norm(dim=1).clamp(min=1e-30)).sort().values  # NaN last
            counted = error[0] if length == 1 else error[: length - max(1, length // 10)].amax()
            self.errors[index] = max(counted.nan_to_num(torch.inf).item(), self.errors.get(index, 0.0))
            start += length


class _Computing:
    """One layer's computation in float32: parameters, buffers and inputs are exchanged for copies until it ends."""

    def __init__(self, check: LayerCheck, index: int, layer: nn.Module) -> None:
        self._check, self._index = check, index
        modules = list(layer.modules())
        self._held: list[tuple[dict[str, Any], str]] = [
            (m._parameters, name) for m in modules for name, p in m._parameters.items() if p is not None
        ]
        self._held += [(m._buffers, n) for m in modules for n, b in m._buffers.items() if b is not None]
        self._saved: list[Any] = []

    def begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self._saved = [held[name] for held, name in self._held]
        for (held, name), tensor in zip(self._held, self._saved, strict=True):
            copy = _in_float32(tensor)
            held[name] = nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
        hidden = args[0] if args else kwargs["hidden_states"]
        self._dtype = hidden.dtype
        hidden = self._check.given(self._index, hidden)
        self._given = hidden.float()
        args, kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
        if args:
            return (self._given, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._given}

    def end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        for (held, name), tensor in zip(self._held, self._saved, strict=True):
            held[name] = tensor
        if output is None:  # the layer raised
            return None
        self._check.compare(self._index, self._given, output[0] if isinstance(output, tuple) else output)
        return tree_map_only(Tensor, lambda t: t.to(self._dtype) if t.is_floating_point() else t, output)


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _by_token(tensor: Tensor, axis: int) -> Tensor:
    """(tokens, whatever each has)."""
    return tensor.movedim(axis, 0).flatten(1)
