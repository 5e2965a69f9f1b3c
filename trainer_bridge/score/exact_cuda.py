"""The norms of `exact` on a GPU: in one order, as an exact server's."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from rollout.kernels.attention import cuda
from rollout.kernels.norms import Normalize, NormKind, norm_kinds


def install_norms(model: nn.Module) -> None:
    """Replace the forward passes of root-mean-square norms; gradients stay those of the formula."""
    for module, kind in norm_kinds(model, _normalize()):
        module.forward = _norm(module, kind)


def serves(device: torch.device) -> bool:
    """Whether a server computes on this device with Triton's kernels."""
    return device.type == "cuda" and cuda.has_triton()


def _normalize() -> Normalize:
    kernel: Normalize = importlib.import_module("rollout.kernels.triton_layers").normalize  # it needs Triton
    return kernel


def _norm(module: Any, kind: NormKind) -> Any:
    stock = module.forward

    def forward(x: Tensor) -> Any:
        if x.dtype != module.weight.dtype:
            return stock(x)
        return _Norm.apply(x, module.weight, kind)  # type: ignore[no-untyped-call]

    return forward


class _Norm(torch.autograd.Function):
    """A root-mean-square norm by the server's kernel, and its gradients in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
        """x (…, dim), weight (dim,) → (…, dim)."""
        ctx.save_for_backward(x, weight)
        ctx.kind = kind
        return _normalize()(x, weight, kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = gradients[0].float()
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + ctx.kind.epsilon)
        normal = x.float() * scale
        scaled = grad * (weight.float() + ctx.kind.offset)
        grad_x = scale * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), (grad * normal).flatten(0, -2).sum(0).to(weight.dtype), None
