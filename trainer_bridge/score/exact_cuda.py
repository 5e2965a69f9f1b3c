"""What `exact` computes on a GPU as an exact server does there: products in blocks of rows, norms in one order."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from rollout.kernels.attention import cuda
from rollout.kernels.norms import NormKind, norm_kind
from rollout.kernels.products import multiply_in_blocks


def install(model: nn.Module) -> None:
    """Replace the forward passes of linear layers and root-mean-square norms; gradients stay those of the formulas."""
    kinds: dict[tuple[Any, ...], NormKind | None] = {}
    module: Any
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = _product(module)  # type: ignore[method-assign]
        elif isinstance(getattr(module, "weight", None), nn.Parameter):
            alike = (type(module), module.weight.shape, module.weight.dtype, module.extra_repr())
            if alike not in kinds:
                kinds[alike] = norm_kind(module)
            kind = kinds[alike]
            if kind is not None:
                module.forward = _norm(module, kind)


def serves(device: torch.device) -> bool:
    """Whether a server computes on this device as `install` does."""
    return device.type == "cuda" and cuda.has_triton()


def _product(layer: nn.Linear) -> Any:
    def forward(x: Tensor) -> Any:
        return _Product.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]

    return forward


def _norm(module: Any, kind: NormKind) -> Any:
    stock = module.forward

    def forward(x: Tensor) -> Any:
        if x.dtype != module.weight.dtype:
            return stock(x)
        return _Norm.apply(x, module.weight, kind)  # type: ignore[no-untyped-call]

    return forward


class _Product(torch.autograd.Function):
    """A linear layer in blocks of rows, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (…, inputs), weight (outputs, inputs), bias (outputs,) → (…, outputs)."""
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return multiply_in_blocks(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        grad = gradients[0].flatten(0, -2)
        grad_x = (grad @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = grad.T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(0) if ctx.has_bias else None


class _Norm(torch.autograd.Function):
    """A root-mean-square norm by the server's kernel, and its gradients in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
        """x (…, dim), weight (dim,) → (…, dim)."""
        ctx.save_for_backward(x, weight)
        ctx.kind = kind
        normal: Tensor = importlib.import_module("rollout.kernels.triton_layers").normalize(x, weight, kind)
        return normal

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and weight."""
        x, weight = ctx.saved_tensors
        grad = gradients[0].float()
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + ctx.kind.epsilon)
        normal = x.float() * scale
        scaled = grad * (weight.float() + ctx.kind.offset)
        grad_x = scale * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), (grad * normal).flatten(0, -2).sum(0).to(weight.dtype), None
