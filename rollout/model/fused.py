"""Faster ways to compute what a model's own modules compute on a CPU. The forward pass stays transformers' code.

Norms, rotary embeddings and gates are replaced bit for bit: each replacement is tried against what it replaces when the
model is loaded, and only taken where all bits are equal. Linear layers are computed as `products.py` defines, which
`trainer_bridge.score.exact` does likewise.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollout.kernels.attention.base import current_backend
from rollout.kernels.attention.native_paged import NativeAttention
from rollout.kernels.native import SUFFIXES, address, library
from rollout.kernels.products import PackedWeight, serves_linear
from rollout.model.parameters import ModelParameters, ParameterSet

TRIED = (1, 5, 64)
"""Numbers of rows that a replacement is tried on."""
TRIED_TOKENS = 5
"""Rows that a whole layer is tried on."""
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that transformers' code applies to the same input, one after another."""
GATED = ("gate_proj", "up_proj", "down_proj")


class PackedWeights:
    """The packed weights of a model's linear layers; each set of parameters has its own (`ParameterSet.packed`).

    Layers with one input are one product, and a product finds its weight in the set that is live: a commit needs no
    work here, as long as the set that it brings went through `pack` before.
    """

    def __init__(self, parameters: ModelParameters) -> None:
        model = parameters.model
        self._parameters = parameters
        self._products: list[list[nn.Linear]] = []
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}  # a tied one's first name
        head = model.get_output_embeddings()
        taken: set[Any] = {head}
        if serves_linear(head):
            packed = self._add([head])
            head.forward = lambda x: packed().multiply(x, torch.float32)
        for module in model.modules():
            groups: list[list[Any]] = [[getattr(module, name, None) for name in names] for names in JOINED]
            for layers in [*groups, [module]]:
                if all(serves_linear(layer) for layer in layers) and taken.isdisjoint(layers):
                    taken.update(layers)
                    self._join(layers)
        self.pack(parameters.live)

    def pack(self, parameters: ParameterSet) -> None:
        """Pack a whole set of parameters, on any thread, while the model computes with another."""
        packed = []
        for layers in self._products:
            tensors = [parameters.tensors[self._names[layer.weight]] for layer in layers]
            biases = [parameters.tensors[self._names[layer.bias]] for layer in layers if layer.bias is not None]
            packed.append(PackedWeight.of(tensors, biases))
        parameters.packed = packed

    def _add(self, layers: list[nn.Linear]) -> Callable[[], PackedWeight]:
        """Enter a product; returns what finds its weight."""
        number = len(self._products)
        self._products.append(layers)
        return lambda: self._parameters.live.packed[number]

    def _join(self, layers: list[nn.Linear]) -> None:
        packed, widths = self._add(layers), [layer.out_features for layer in layers]
        if len(layers) == 1:
            layers[0].forward = lambda x: packed().multiply(x)  # type: ignore[method-assign, assignment]
        else:
            compute_together(layers, lambda x: torch.split_with_sizes(packed().multiply(x), widths, -1))


def compute_together(layers: Sequence[nn.Linear], product: Callable[[Tensor], Sequence[Tensor]]) -> None:
    """Compute all layers by one product when the first one is called; the others hand out their share."""
    shares: dict[int, Tensor] = {}  # until they are handed out: nothing of a step may outlive its layer

    def first(x: Tensor) -> Tensor:
        shares.update(enumerate(product(x)))
        return shares.pop(0)

    def other(number: int) -> Callable[[Tensor], Tensor]:
        return lambda x: shares.pop(number)

    for number, layer in enumerate(layers):
        layer.forward = other(number) if number else first  # type: ignore[method-assign, assignment]


def fuse_norms(model: nn.Module) -> None:
    """Root-mean-square norms in one operation instead of eight."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            fused = _norm(module)
            if fused is not None and _same_norm(module, fused):
                module.forward = fused


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    width, suffix = _vector_width(), SUFFIXES.get(module.weight.dtype)  # type: ignore[arg-type]
    if width is None or suffix is None or module.weight.device.type != "cpu":
        return None
    stock: Callable[[Tensor], Tensor] = module.forward
    epsilon = module.variance_epsilon

    def forward(x: Tensor) -> Tensor:
        weight: Tensor = module.weight  # type: ignore[assignment]
        if x.dtype != weight.dtype or not x.is_contiguous():
            return stock(x)
        return _normalize(x, weight, epsilon, width)  # type: ignore[arg-type]

    return forward


def _normalize(x: Tensor, weight: Tensor, epsilon: float, vector_width: int) -> Tensor:
    """x (…, dim) over the root of its mean square, times weight (dim,)."""
    y = torch.empty_like(x)
    dim = x.shape[-1]
    normalize = getattr(library(), f"normalize_{SUFFIXES[x.dtype]}")
    rows = x.numel() // dim
    normalize(address(x), address(weight), epsilon, address(y), rows, dim, vector_width)
    return y


@functools.cache
@torch.inference_mode()
def _vector_width() -> int | None:
    """How many floats ATen's sum over a row takes at once, which decides its order; None where neither guess is right.

    Found in float32, where an order can't hide behind a rounding.
    """
    if library() is None:
        return None
    for width in (8, 16):
        rows = [torch.randn(64, dim) for dim in (576, 1000, 5000)]
        ones = [torch.ones(x.shape[-1]) for x in rows]
        if all(
            torch.equal(_normalize(x, one, 1e-5, width), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
            for x, one in zip(rows, ones, strict=True)
        ):
            return width
    return None


def _same_norm(module: Any, fused: Callable[[Tensor], Tensor]) -> bool:
    """Tried with other weights than the model's: where those are ones, every order of operations looks the same."""
    weight = module.weight.data
    module.weight.data = torch.randn(weight.shape).to(weight.dtype)
    try:
        return _same(module.forward, fused, len(weight), weight.dtype)
    finally:
        module.weight.data = weight


@torch.inference_mode()
def _same(stock: Callable[[Tensor], Tensor], fused: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> bool:
    for rows in TRIED:
        x = (3 * torch.randn(1, rows, width)).to(dtype)
        if not torch.equal(stock(x), fused(x)):
            return False
    return True


class SiLUGate(nn.SiLU):
    """silu(gate) * up in one pass."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        if up is None:
            return super().forward(gate)
        usual = gate.dtype is torch.bfloat16 and gate.shape == up.shape and gate.stride() == up.stride()
        if not usual or gate.stride(-1) != 1 or gate.numel() != gate.shape[-2] * gate.shape[-1]:
            return super().forward(gate) * up
        y = torch.empty(gate.shape, dtype=gate.dtype)
        rows, stride = gate.shape[-2], gate.stride(-2)
        library().gate_bf16(address(gate), address(up), stride, address(y), rows, gate.shape[-1])  # type: ignore[union-attr]
        return y


def fuse_gates(
    model: nn.Module, gate_of: Callable[[Any], nn.Module | None], same: Callable[[Tensor, Tensor], bool]
) -> int:
    """The usual gated layers, `down_proj(act_fn(gate_proj(x)) * up_proj(x))`, with a gate of one pass.

    `gate_of` gives the gate of a layer, None for others; it is taken where `same` of both outputs. Returns how many.
    """
    accepted: dict[tuple[type, type], bool] = {}
    count = 0
    module: Any
    for module in list(model.modules()):
        gate = gate_of(module)
        if gate is None:
            continue
        kind = type(module), type(module.act_fn)
        if kind not in accepted:
            accepted[kind] = _same_gate(module, gate, same)
        if accepted[kind]:
            module.act_fn, module.forward = gate, gated(module)
            count += 1
    return count


def native_gate(module: Any) -> nn.Module | None:
    """The native gate, for layers in bfloat16 whose products are native as well."""
    layers: list[Any] = [getattr(module, name, None) for name in GATED]
    if not all(serves_linear(layer) and layer.weight.dtype is torch.bfloat16 for layer in layers) or not _same_silu():
        return None
    return SiLUGate() if type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation") else None


def _same_gate(module: Any, gate: nn.Module, same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Tried without the products, whose outputs may be too small to reach a limit that the layer has."""
    products: list[Callable[[Tensor], Tensor]] = [lambda x: 4 * x, lambda x: 4 * x.flip(-1), lambda x: x]
    stock = with_parts(module, **{name: Stub(product) for name, product in zip(GATED, products, strict=True)})
    x = random_like(module.down_proj.weight, module.down_proj.in_features)
    return same(gated(with_parts(stock, act_fn=gate))(x), type(module).forward(stock, x))


class Stub(nn.Module):
    """Stands in for a part of a module that is tried."""

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return self._compute(hidden_states)


def with_parts(module: Any, **parts: nn.Module) -> Any:
    """The module with other parts."""
    other = copy.copy(module)
    other._modules = {**module._modules, **parts}
    return other


def random_like(weight: Tensor, width: int) -> Tensor:
    """Rows (1, TRIED_TOKENS, width) like `weight`."""
    generator = torch.Generator().manual_seed(1)
    return (3 * torch.randn(1, TRIED_TOKENS, width, generator=generator)).to(weight)


def gated(module: Any) -> Callable[[Tensor], Tensor]:
    """A gated layer's forward, whose gate is the module's `act_fn` of both projections."""

    def forward(x: Tensor) -> Tensor:
        gate = module.gate_proj(x)
        output: Tensor = module.down_proj(module.act_fn(gate, module.up_proj(x)))
        return output

    return forward


@functools.cache
@torch.inference_mode()
def _same_silu() -> bool:
    """Whether the gate has torch's bits for every number that there is in bfloat16."""
    x = torch.arange(-(1 << 15), 1 << 15).short().view(torch.bfloat16)[None]
    stock, fused = nn.functional.silu(x), SiLUGate()(x, torch.ones_like(x))
    return torch.equal(stock.isnan(), fused.isnan()) and torch.equal(stock.nan_to_num(), fused.nan_to_num())


def fuse_rotary(model: nn.Module) -> None:
    """Rotary embeddings in two operations instead of ten, for the models whose module has the usual function.

    The function belongs to all models of the kind in this process: outside of an engine's forward pass it stays stock.
    """
    for module in model.modules():
        source = sys.modules[type(module).__module__]
        stock = getattr(source, "apply_rotary_pos_emb", None)
        if stock is None or getattr(stock, "fused", False) or not hasattr(module, "head_dim") or library() is None:
            continue
        if _same_rotation(stock, module.head_dim):  # type: ignore[arg-type]
            source.apply_rotary_pos_emb = _fused_rotary(stock)  # type: ignore[attr-defined]


def _fused_rotary(stock: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, **other: Any
    ) -> tuple[Tensor, Tensor]:
        usual = not other and unsqueeze_dim == 1 and isinstance(current_backend(), NativeAttention) and len(q) == 1
        usual = usual and cos.shape == (1, q.shape[2], q.shape[3]) and cos.is_contiguous() and sin.is_contiguous()
        if not usual or any(t.dtype != q.dtype or t.stride(-1) != 1 for t in (q, k, cos, sin)):
            return stock(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **other)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    apply_rotary_pos_emb.fused = True  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x (1, heads, tokens, dim) turned by the angles of cosine and sine (1, tokens, dim)."""
    _, heads, tokens, dim = x.shape
    y = torch.empty(1, tokens, heads, dim, dtype=x.dtype)
    strides = x.stride(1), x.stride(2)
    rotate = getattr(library(), f"rotate_{SUFFIXES[x.dtype]}")
    rotate(address(x), *strides, address(cosine), address(sine), address(y), heads, tokens, dim)
    return y.transpose(1, 2)


@torch.inference_mode()
def _same_rotation(stock: Callable[..., tuple[Tensor, Tensor]], dim: int) -> bool:
    for dtype in SUFFIXES:
        for tokens in TRIED:
            q, k = (torch.randn(1, tokens, heads, dim).to(dtype).transpose(1, 2) for heads in (3, 2))
            angle = torch.randn(1, tokens, dim)
            cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)
            try:
                expected = stock(q, k, cosine, sine)
            except (RuntimeError, TypeError):  # another function of this name
                return False
            turned = _rotate(q, cosine, sine), _rotate(k, cosine, sine)
            if not all(torch.equal(a, b) for a, b in zip(expected, turned, strict=True)):
                return False
    return True
