"""LoRA adapters, merged into the weights they adapt on the way to the server (Hu et al., arXiv 2106.09685).

The server then samples from W + scaling · B A, and needs to know nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_bridge.push.sources import TensorInfo, full, named_tensors

Adapter = tuple[torch.Tensor, torch.Tensor, float]
"""A (r, in), B (out, r), scaling."""


@dataclass
class _Layer:
    """A base weight, and what is added to it: adapters, and whether their product is transposed."""

    weight: torch.Tensor
    adapters: list[Adapter] = field(default_factory=list)
    transposed: bool = False


class LoraSource:
    """The base model's tensors under their own names, with adapters merged in as they are when they are sent.

    `base` is a module or state dict with `adapters` {name of a weight, with or without ".weight": (A, B, scaling)}; or,
    without `adapters`, a model that PEFT has wrapped: its active adapters are merged. The sum is made in float32 (or
    the weight's own dtype, if wider) and rounded once. Raises ValueError on an adapter that fits no weight or is more
    than a product (DoRA, convolutions, modules_to_save), and on an adapted weight that is tied to another one.
    """

    def __init__(
        self, base: nn.Module | Mapping[str, torch.Tensor], adapters: Mapping[str, Adapter] | None = None
    ) -> None:
        if adapters is None:
            if not isinstance(base, nn.Module):
                raise ValueError("a state dict as base needs adapters: {weight name: (A, B, scaling)}")
            self._layers = _peft_layers(base)
        else:
            tensors = named_tensors(base) if isinstance(base, nn.Module) else dict(base)
            self._layers = {n: _Layer(t) for n, t in tensors.items() if t.is_floating_point()}
            for name, adapter in adapters.items():
                weight = name if name in self._layers else f"{name}.weight"
                if weight not in self._layers:
                    raise ValueError(f"the adapter {name!r} fits no weight of the base model")
                self._layers[weight].adapters.append(adapter)
        self._drop_ties()
        for name, layer in self._layers.items():
            for a, b, _ in layer.adapters:
                shape = (b.shape[0], a.shape[-1])
                expected = tuple(layer.weight.shape)
                if a.dim() != 2 or b.dim() != 2 or (shape[::-1] if layer.transposed else shape) != expected:
                    raise ValueError(
                        f"{name}: B {list(b.shape)} times A {list(a.shape)} does not fit its shape {list(expected)}"
                    )

    def _drop_ties(self) -> None:
        """Send a tied weight once, under its first name."""
        first: dict[int, str] = {}
        for name, layer in list(self._layers.items()):
            original = first.setdefault(id(layer.weight), name)
            if original == name:
                continue
            if layer.adapters or self._layers[original].adapters:
                raise ValueError(f"{name} and {original} are one tied weight: merging an adapter would change both")
            del self._layers[name]

    @property
    def distributed(self) -> bool:
        """True where a tensor is a DTensor."""
        layers = self._layers.values()
        parts = [t for layer in layers for a, b, _ in layer.adapters for t in (a, b)]
        return any(isinstance(t, DTensor) for t in [*parts, *(layer.weight for layer in layers)])

    @property
    def device(self) -> torch.device:
        """The first tensor's device."""
        return next(iter(self._layers.values())).weight.device

    def infos(self) -> list[TensorInfo]:
        """Names, dtypes and full shapes of the base weights."""
        return [TensorInfo(n, layer.weight.dtype, tuple(layer.weight.shape)) for n, layer in self._layers.items()]

    def tensors(self) -> Iterator[torch.Tensor]:
        """One merged tensor at a time; DTensors are gathered by all ranks."""
        for layer in self._layers.values():
            weight = full(layer.weight)
            if layer.adapters:
                exact = torch.promote_types(weight.dtype, torch.float32)
                merged = weight.to(exact)
                for a, b, scaling in layer.adapters:
                    delta = (full(b).to(exact) @ full(a).to(exact)) * scaling
                    merged = merged + (delta.T if layer.transposed else delta).to(merged.device)
                weight = merged.to(weight.dtype).contiguous()
            yield weight


def _peft_layers(model: nn.Module) -> dict[str, _Layer]:
    """What PEFT's wrappers hold, by attribute: `base_layer`, and per adapter name `lora_A`, `lora_B`, `scaling`."""
    wrapped = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    if not wrapped:
        raise ValueError("no module of the model has a base_layer: not a PEFT model; give its adapters")
    layers = {}
    for name, tensor in named_tensors(model).items():
        if ".modules_to_save." in name or ".original_module." in name:
            raise ValueError(f"{name}: a module that is trained whole (modules_to_save) can't be merged")
        if ".lora_" not in name and tensor.is_floating_point():
            layers[_base_name(name)] = _Layer(tensor)
    for name, module in wrapped.items():
        weight = _base_name(f"{name}.base_layer.weight")
        if weight in layers and not getattr(module, "merged", False) and not getattr(module, "disable_adapters", False):
            layers[weight].adapters, layers[weight].transposed = _adapters(name, module)
    return layers


def _base_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _adapters(name: str, module: Any) -> tuple[list[Adapter], bool]:
    """The active adapters of one wrapped layer, and whether their product is transposed in its weight."""
    found: list[Adapter] = []
    embedding = False
    for adapter in module.active_adapters:
        if adapter in getattr(module, "lora_magnitude_vector", ()) or adapter in getattr(module, "lora_variant", ()):
            raise ValueError(f"{name}: adapter {adapter!r} is a variant of LoRA (such as DoRA) that is not merged")
        if adapter in module.lora_A:
            a, b = module.lora_A[adapter], module.lora_B[adapter]
            if b.bias is not None:
                raise ValueError(f"{name}: adapter {adapter!r} has a bias (lora_bias), which is not merged")
            found.append((a.weight, b.weight, float(module.scaling[adapter])))
        elif adapter in getattr(module, "lora_embedding_A", ()):
            embedding = True
            pair = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
            found.append((*pair, float(module.scaling[adapter])))
    return found, embedding or bool(getattr(module, "fan_in_fan_out", False))
