"""Root-mean-square norms as transformers' models write them, and what a layer may leave to its attention's kernel.

Which arithmetic a module has is found by trying: the engine and an exact trainer ask here. Zhang and Sennrich, "Root
Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TRIED_ROWS = 16
TOLERANCE = 1e-5
"""Largest difference in float32, relative to the largest value: another order of a sum gives about 1e-6."""
OTHER_BITS = 0.05
"""Most of the outputs in a 16-bit dtype that may be rounded otherwise; another place of rounding changes a quarter."""


@dataclass(frozen=True)
class NormKind:
    """x / √(mean(x²) + `epsilon`) in float32, times weight + `offset`; `round_first`: rounded to x's dtype before."""

    epsilon: float
    offset: float
    round_first: bool


@dataclass(frozen=True)
class HeadNorm:
    """A norm of heads: its module, which has the weight (head_dim,), and its arithmetic."""

    module: nn.Module
    kind: NormKind


@dataclass
class Deferred:
    """What a layer's queries and keys still lack when they reach the attention: their norms, then their rotation.

    `cosine` and `sine` (tokens, rotary_dim), contiguous; None: nothing is lacking.
    """

    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    cosine: Tensor | None = None
    sine: Tensor | None = None


deferred_heads: ContextVar[Deferred | None] = ContextVar("what the attention layer under way defers", default=None)
"""Set while an attention module whose attention takes over norms and rotation runs; None otherwise."""


Normalize = Callable[[Tensor, Tensor, NormKind], Tensor]
"""Triton's kernel for a norm: `triton_layers.normalize`."""


def norm_kinds(model: nn.Module, normalize: Normalize) -> Iterator[tuple[Any, NormKind]]:
    """The norms that `normalize` can stand for, each with its arithmetic; of those that are alike one is tried."""
    kinds: dict[tuple[Any, ...], NormKind | None] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            own = tuple(value for value in vars(module).values() if isinstance(value, int | float))
            alike = (type(module), weight.shape, weight.dtype, *own)
            if alike not in kinds:
                kinds[alike] = norm_kind(module, normalize)
            if (kind := kinds[alike]) is not None:
                yield module, kind


@torch.inference_mode()
def norm_kind(module: Any, normalize: Normalize) -> NormKind | None:
    """The arithmetic of a root-mean-square norm that `normalize` can stand for; None where it can't.

    Tried with other weights than the model's: where those are ones, every order of operations looks the same.
    """
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None
    epsilon = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    if epsilon is None or module.weight.ndim != 1:
        return None
    weight = module.weight.data
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(TRIED_ROWS, len(weight), generator=generator)
    other = torch.randn(len(weight), generator=generator)
    try:
        for kind in (NormKind(epsilon, 0.0, True), NormKind(epsilon, 0.0, False), NormKind(epsilon, 1.0, False)):
            weights = [other.to(weight.device, dtype) for dtype in {torch.float32, weight.dtype}]
            if all(_agrees(module, rows.to(w), w, normalize(rows.to(w), w, kind)) for w in weights):
                return kind
    finally:
        module.weight.data = weight
    return None


def _agrees(module: Any, x: Tensor, weight: Tensor, mine: Tensor) -> bool:
    module.weight.data = weight
    theirs = module(x)
    if not close(mine, theirs):
        return False
    return mine.dtype is torch.float32 or bool((mine != theirs).float().mean() <= OTHER_BITS)


def close(mine: Any, theirs: Any) -> bool:
    """Whether two tensors of one dtype differ by roundings only: by one rounding more, or another order of a sum."""
    if not isinstance(theirs, Tensor) or mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    share = TOLERANCE if theirs.dtype is torch.float32 else 2 * torch.finfo(theirs.dtype).eps
    return bool((mine.float() - theirs.float()).abs().max() <= share * theirs.float().abs().max())
