"""Adapters in an exact forward pass: PEFT's layers compute what a batch-invariant server adds for its adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout.kernels.lora import LoraTables, LoraWeight


def base_model(model: Any) -> Any:
    """The transformers model within PEFT's, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def plain(layer: Any) -> Any:
    """The layer that an adapter wraps, or the layer itself."""
    return getattr(layer, "base_layer", layer)


def install(model: nn.Module) -> None:
    """Replace the forward pass of PEFT's LoRA layers.

    Raises ValueError, naming the layer, for an adapter that a server doesn't serve.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
            continue
        if hasattr(module, "parameter_name"):
            raise ValueError(f"{name} adapts a parameter (target_parameters): no server serves that")
        kind = type(module.base_layer)
        if kind is not nn.Linear and not isinstance(module.base_layer, nn.Embedding):
            raise ValueError(f"{name} adapts a {kind.__name__}: servers adapt linear layers and embeddings")
        module.forward = _adapted(name, module)


def _adapted(name: str, module: Any) -> Callable[..., Tensor]:
    embeds = isinstance(module.base_layer, nn.Embedding)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = module.base_layer(x, *args, **kwargs)
        adapter = _active(name, module)
        if adapter is None:
            return y
        scale = float(module.scaling[adapter])
        if embeds:
            a, b = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
            scale *= float(getattr(module.base_layer, "embed_scale", 1.0))
            x = nn.functional.embedding(x, a.float().T)
            a = torch.eye(b.shape[1], device=b.device)
        else:
            a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        output: Tensor = _Adapted.apply(y, x, a, b, scale)  # type: ignore[no-untyped-call]
        return output

    return forward


def _active(name: str, module: Any) -> str | None:
    """The one adapter in effect. Raises ValueError where there are several, or it is more than A and B."""
    if module.disable_adapters or module.merged:
        if module.merged:
            raise ValueError(f"{name} is merged into its base, which is other arithmetic: call unmerge_adapter()")
        return None
    found = [a for a in module.active_adapters if a in module.lora_A or a in module.lora_embedding_A]
    if len(found) > 1:
        raise ValueError(f"{name} has the active adapters {found}: a server runs a request on one")
    for adapter in found:
        if adapter in getattr(module, "lora_variant", ()) or getattr(module, "lora_bias", {}).get(adapter):
            raise ValueError(f"{name}: adapter {adapter!r} is more than A and B (such as DoRA, lora_bias)")
    return found[0] if found else None


class _Adapted(torch.autograd.Function):
    """y + (B (A x)) · scale by the engine's kernel, and its gradients, in float32."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """y (…, outputs), x (…, inputs), a (rank, inputs), b (outputs, rank) → (…, outputs), y's dtype."""
        ctx.save_for_backward(x, a, b)
        ctx.scale = scale
        bounds = np.array([0, x.numel() // x.shape[-1]], np.int64)
        return LoraTables([[LoraWeight.of(a, b, scale)]]).add(y.clone(), x, 0, bounds, exact=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of y, x, a and b."""
        x, a, b = ctx.saved_tensors
        grad = gradients[0]
        rows, outer = x.reshape(-1, x.shape[-1]).float(), grad.reshape(-1, grad.shape[-1]).float() * ctx.scale
        inner = outer @ b.float()
        grad_x = (inner @ a.float()).view_as(x).to(x.dtype) if ctx.needs_input_grad[1] else None
        grad_a = (inner.T @ rows).to(a.dtype) if ctx.needs_input_grad[2] else None
        grad_b = (outer.T @ (rows @ a.float().T)).to(b.dtype) if ctx.needs_input_grad[3] else None
        return grad, grad_x, grad_a, grad_b, None
