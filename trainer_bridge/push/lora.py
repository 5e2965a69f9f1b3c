"""LoRA adapters, merged into the weights they adapt on the way to the server (Hu et al., arXiv 2106.09685).

The server then samples from W + scaling · B A, and needs to know nothing of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_bridge.push.sources import StateDictSource, full, named_tensors, plain_name, without_ddp

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


class LoraSource(StateDictSource):
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
            weights, added = _peft_layers(base)
        else:
            tensors = named_tensors(base) if isinstance(base, nn.Module) else dict(base)
            weights, added = {n: t for n, t in tensors.items() if t.is_floating_point()}, {}
            for name, adapter in adapters.items():
                weight = name if name in weights else f"{name}.weight"
                if weight not in weights:
                    raise ValueError(f"the adapter {name!r} fits no weight of the base model")
                added.setdefault(weight, []).append(_Product(*adapter))
        _drop_ties(weights, added)
        for name, products in added.items():
            for product in products:
                if product.shape != tuple(weights[name].shape):
                    raise ValueError(
                        f"{name}: B {list(product.b.shape)} times A {list(product.a.shape)} does not fit its shape "
                        f"{list(weights[name].shape)}"
                    )
        super().__init__(weights)
        self._added = added

    @property
    def distributed(self) -> bool:
        factors = [t for products in self._added.values() for product in products for t in (product.a, product.b)]
        return super().distributed or any(isinstance(t, DTensor) for t in factors)

    def tensors(self) -> Iterator[torch.Tensor]:
        """One merged tensor at a time; DTensors are gathered by all ranks."""
        for (name, base), weight in zip(self._tensors.items(), super().tensors(), strict=True):
            merged = weight
            if name in self._added:
                exact = torch.promote_types(base.dtype, torch.float32)
                merged = weight.to(exact)
                for product in self._added[name]:
                    merged = merged + product.value(exact).to(merged.device)
            yield merged.to(base.dtype).contiguous()


def _drop_ties(weights: dict[str, torch.Tensor], added: Mapping[str, list[_Product]]) -> None:
    """Send a tied weight once, under its first name."""
    first: dict[int, str] = {}
    for name, weight in list(weights.items()):
        original = first.setdefault(id(weight), name)
        if original == name:
            continue
        if name in added or original in added:
            raise ValueError(f"{name} and {original} are one tied weight: merging an adapter would change both")
        del weights[name]


def _peft_layers(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, list[_Product]]]:
    """The base tensors under their own names, and what the active adapters add to them.

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
    active = {name: _active_adapters(name, module) for name, module in wrapped.items()}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(model).items():
        wrapper, inner = _split(name, wrapped)
        if wrapper is not None and not inner.startswith("base_layer."):
            _check_merged(wrapper, inner, wrapped[wrapper], active[wrapper])
        elif tensor.is_floating_point():
            weights[_base_name(name)] = tensor
        elif isinstance(tensor, nn.Parameter):
            raise ValueError(f"{name} is quantized ({tensor.dtype}): the base model must have its weights themselves")
    added: dict[str, list[_Product]] = {}
    for name, products in active.items():
        weight = _base_name(f"{name}.{getattr(wrapped[name], 'parameter_name', 'weight')}")
        if not products:
            continue
        if weight not in weights or _is_quantized(weights[weight]):
            raise ValueError(f"{name}: its base weight is quantized or isn't called {weight}: nothing can be merged in")
        added.setdefault(weight, []).extend(products.values())
    return weights, added


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
