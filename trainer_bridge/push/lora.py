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

from rollout.rendezvous import TensorInfo
from trainer_bridge.push.sources import full, named_tensors, plain_name, without_ddp

Adapter = tuple[torch.Tensor, torch.Tensor, float]
"""A (r, in), B (out, r), scaling."""

_PEFT_ROOT = "base_model.model."


@dataclass(frozen=True)
class _Product:
    """What an adapter adds to a weight (out, in): scaling · B A; its transpose where the weight is stored as (in, out).

    Of a weight of several `experts`, (experts, out, in), A has their rows one after the other, (experts · r, in), and B
    their columns in turn, (out, r · experts), as PEFT's `ParamWrapper` keeps them.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    transposed: bool = False
    experts: int | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of the weights that it fits; None where A and B are no matrices."""
        if self.a.dim() != 2 or self.b.dim() != 2 or self.a.shape[0] != self.b.shape[1]:
            return None
        one = (self.a.shape[1], self.b.shape[0]) if self.transposed else (self.b.shape[0], self.a.shape[1])
        return one if self.experts is None else (self.experts, *one)

    def value(self, dtype: torch.dtype) -> torch.Tensor:
        """What is added; DTensors are gathered by all ranks."""
        a, b = full(self.a).to(dtype), full(self.b).to(dtype)
        if self.experts is not None:
            a = a.reshape(self.experts, -1, a.shape[1])
            b = b.reshape(b.shape[0], -1, self.experts).permute(2, 0, 1)
        product = (b @ a) * self.scaling
        return product.mT if self.transposed else product


@dataclass
class _Layer:
    """A base weight, and what is added to it."""

    weight: torch.Tensor
    adapters: list[_Product] = field(default_factory=list)


class LoraSource:
    """The base model's tensors under their own names, with adapters merged in as they are when they are sent.

    `base` is a module or state dict with `adapters` {name of a weight, with or without ".weight": (A, B, scaling)}; or,
    without `adapters`, a model that PEFT has wrapped: its active adapters are merged, those of linear layers,
    embeddings and parameters (`target_parameters`). The sum is made in float32 (or the weight's own dtype, if wider)
    and rounded once. Raises ValueError, with its name, on all else that an active adapter has (DoRA and other variants,
    biases, convolutions, modules_to_save, trainable_token_indices, other methods than LoRA), on an adapter that fits no
    weight, and on an adapted weight that is quantized or tied to another one.
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
                self._layers[weight].adapters.append(_Product(*adapter))
        self._drop_ties()
        for name, layer in self._layers.items():
            for added in layer.adapters:
                if added.shape != tuple(layer.weight.shape):
                    raise ValueError(
                        f"{name}: B {list(added.b.shape)} times A {list(added.a.shape)} does not fit its shape "
                        f"{list(layer.weight.shape)}"
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
        parts = [t for layer in layers for added in layer.adapters for t in (added.a, added.b)]
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
                for added in layer.adapters:
                    merged = merged + added.value(exact).to(merged.device)
                weight = merged.to(weight.dtype).contiguous()
            yield weight


def _peft_layers(model: nn.Module) -> dict[str, _Layer]:
    """The base tensors under their own names, with what the active adapters add to them.

    A PEFT layer has its `base_layer` and, per adapter name, tensors called `<what it is>.<adapter>...`. Each tensor of
    an active adapter is either merged or refused.
    """
    model = without_ddp(model)
    modules = {plain_name(name): module for name, module in model.named_modules()}
    wrapped = {name: module for name, module in modules.items() if hasattr(module, "base_layer")}
    if not wrapped:
        raise ValueError("no module of the model has a base_layer: not a PEFT model; give its adapters")
    for name, module in modules.items():
        if hasattr(module, "original_module"):
            kind = "trained whole (modules_to_save)" if hasattr(module, "modules_to_save") else "trained in parts"
            raise ValueError(f"{name} is {kind}, by a {type(module).__name__}: that can't be merged")
    added = {name: _active_adapters(name, module) for name, module in wrapped.items()}
    layers: dict[str, _Layer] = {}
    for name, tensor in named_tensors(model).items():
        wrapper, inner = _split(name, wrapped)
        if wrapper is not None and not inner.startswith("base_layer."):
            _check_merged(wrapper, inner, wrapped[wrapper], added[wrapper])
        elif tensor.is_floating_point():
            layers[_base_name(name)] = _Layer(tensor)
        elif isinstance(tensor, nn.Parameter):
            raise ValueError(f"{name} is quantized ({tensor.dtype}): the base model must have its weights themselves")
    for name, products in added.items():
        weight = _base_name(f"{name}.{getattr(wrapped[name], 'parameter_name', 'weight')}")
        if not products:
            continue
        if weight not in layers or _is_quantized(layers[weight].weight):
            raise ValueError(f"{name}: its base weight is quantized or isn't called {weight}: nothing can be merged in")
        layers[weight].adapters.extend(products.values())
    return layers


def _split(name: str, wrapped: Mapping[str, nn.Module]) -> tuple[str | None, str]:
    """The innermost PEFT layer that a tensor is in, if any, and the tensor's name within it."""
    parts = name.split(".")
    for length in range(len(parts) - 1, -1, -1):
        if (wrapper := ".".join(parts[:length])) in wrapped:
            return wrapper, ".".join(parts[length:])
    return None, name


def _base_name(name: str) -> str:
    while name.startswith(_PEFT_ROOT):
        name = name.removeprefix(_PEFT_ROOT)
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _is_quantized(weight: torch.Tensor) -> bool:
    plain = isinstance(weight, DTensor) or type(weight) in (torch.Tensor, nn.Parameter)
    return not plain or weight.dtype.itemsize == 1


def _in_effect(module: Any) -> list[str]:
    """The adapters that the layer computes beside its base weight."""
    if getattr(module, "merged", False) or getattr(module, "disable_adapters", False):
        return []
    return list(module.active_adapters)


def _active_adapters(name: str, module: Any) -> dict[str, _Product]:
    """What each adapter in effect adds to the layer's weight."""
    found: dict[str, _Product] = {}
    for adapter in _in_effect(module):
        if adapter in getattr(module, "lora_magnitude_vector", ()) or adapter in getattr(module, "lora_variant", ()):
            raise ValueError(f"{name}: adapter {adapter!r} is a variant of LoRA (such as DoRA) that is not merged")
        if adapter in getattr(module, "lora_A", ()):
            a, b = module.lora_A[adapter], module.lora_B[adapter]
            if isinstance(b, torch.Tensor):
                raise ValueError(f"{name}: adapter {adapter!r} is more than a product of two matrices (AdaLoRA)")
            if b.bias is not None:
                raise ValueError(f"{name}: adapter {adapter!r} has a bias (lora_bias), which is not merged")
            experts, transposed = None, bool(getattr(module, "fan_in_fan_out", False))
            if hasattr(module, "parameter_name") and module.get_param().dim() == 3:
                experts, transposed = module.num_experts, not getattr(module, "_did_swap_in_out_features", False)
            found[adapter] = _Product(a.weight, b.weight, float(module.scaling[adapter]), transposed, experts)
        elif adapter in getattr(module, "lora_embedding_A", ()):
            a, b = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
            found[adapter] = _Product(a, b, float(module.scaling[adapter]), transposed=True)
    return found


def _check_merged(name: str, inner: str, module: Any, products: Mapping[str, _Product]) -> None:
    """Raise ValueError where this tensor of the PEFT layer `name` is in effect and no part of `products`."""
    what, _, rest = inner.partition(".")
    adapter = rest.removesuffix(".weight")
    kinds = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
    in_effect = _in_effect(module)
    active = not rest or any(rest == a or rest.startswith(f"{a}.") for a in in_effect)
    if active and in_effect and not (what in kinds and adapter in products):
        raise ValueError(f"{name}: the adapter's {inner} is not merged; only LoRA's A and B are")
