"""Which part of which parameter a name on the wire stands for.

Two styles of names are understood: the model's own (`model.named_parameters()`, `mlp.experts.gate_up_proj`) and the
checkpoint's (what `save_pretrained` writes, `mlp.experts.0.gate_proj.weight`). The second is not tabulated here: it is
read off transformers' own save conversion (`core_model_loading.revert_weight_conversion`), run once on meta tensors
with `contiguous` made a no-op. A checkpoint tensor that comes out as a view of a parameter tells by its size, strides
and offset where in it its elements live, so a receiver can write them there without building the tensor first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rollout.model.parameters import ModelParameters
from rollout.weights.shares import Share

Style = Literal["module", "checkpoint"]


@dataclass(frozen=True)
class Target:
    """The region of one parameter that a wire name fills, in elements of that (contiguous) parameter.

    `style` is None for a name that both styles share. `alias` marks a second name of a tied parameter: it may be
    absent from an update, and must bring the same bits where it is present.
    """

    name: str
    slot: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    style: Style | None
    alias: bool

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region within `tensor`, a contiguous tensor of the parameter's shape."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class NameMap:
    """Every wire name of a model, as regions (`targets`) of its parameters and persistent floating buffers.

    Of a parameter that is sharded, `shares` says how it is cut; the targets are regions of the whole one. What is in
    `optional` an update may leave out.
    """

    def __init__(self, parameters: ModelParameters) -> None:
        first = parameters.first
        self._held = {name: tensor.shape for name, tensor in parameters.slots.items()}
        self.optional = parameters.buffers
        self.shares = {name: Share(name, tensor) for name, tensor in parameters.sharded.items()}
        model = parameters.model
        served, self.unserved = _checkpoint_views(model, {name: self.shape(slot) for name, slot in first.items()})
        sliced = {module_name for module_name, _ in served.values()}
        self.targets: dict[str, Target] = {}
        for name, (module_name, view) in served.items():
            self._add(name, first, module_name, view, None if name in first else "checkpoint")
        for name in first:
            if name not in self.targets:
                whole = torch.empty(self.shape(first[name]), device="meta")
                self._add(name, first, name, whole, "module" if name in sliced else None)

    def shape(self, slot: str) -> torch.Size:
        return self.shares[slot].shape if slot in self.shares else self._held[slot]

    def _add(self, name: str, first: dict[str, str], module_name: str, view: torch.Tensor, style: Style | None) -> None:
        slot = first[module_name]
        self.targets[name] = Target(
            name, slot, tuple(view.shape), view.stride(), int(view.storage_offset()), style, module_name != slot
        )

    def required(self, style: Style) -> list[Target]:
        """The targets that a whole set of weights consists of in this style; they tile every slot."""
        return [t for t in self.targets.values() if t.style in (None, style) and not t.alias]


class _KeepViews(TorchFunctionMode):
    """Makes `Tensor.contiguous` return its argument, so that slices stay recognisable as views."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _checkpoint_views(
    model: PreTrainedModel, shapes: dict[str, torch.Size]
) -> tuple[dict[str, tuple[str, torch.Tensor]], set[str]]:
    """Checkpoint name → (module name, meta view into a tensor of that parameter's shape); and the names that are none.

    A model loaded from a checkpoint in module names remembers no conversion; transformers' table for its type is
    taken then, as for a model built from a configuration.
    """
    if not getattr(model, "_weight_conversions", None):
        model._weight_conversions = None  # type: ignore[assignment]
    probes = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {id(probe): name for name, probe in probes.items()}
    with _KeepViews():
        converted = revert_weight_conversion(model, dict(probes))
    served, covered = {}, dict.fromkeys(shapes, 0)
    for name, tensor in converted.items():
        base = tensor if tensor._base is None else tensor._base
        if id(base) in names:
            served[name] = (names[id(base)], tensor)
            covered[names[id(base)]] += tensor.numel()
    # Slices that leave a hole (its other part goes through arithmetic) would let unfilled memory be committed.
    served = {name: (slot, view) for name, (slot, view) in served.items() if covered[slot] == shapes[slot].numel()}
    return served, converted.keys() - served.keys()
