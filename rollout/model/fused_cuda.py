"""Fewer launches for a model's own modules on a GPU. The forward pass stays transformers' code.

Products with one input are one; a sum and the norm after it, a gate and its product, and what lies between the
products and the attention (norms of heads, rotary embeddings, the write to the cache) are one kernel each. Each
replacement is tried against what it replaces when the model is loaded, and only taken where both agree but for the
roundings of the model's dtype.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.kernels.attention.base import AttentionBackend, AttentionParams, RaggedBatch, current_backend, serving
from rollout.kernels.norms import Deferred, HeadNorm, NormKind, close, deferred_heads, norm_kinds
from rollout.kernels.products import multiply_in_blocks
from rollout.model.fused import GATED, TRIED_TOKENS, Stub, fuse_gates, random_like, with_parts
from rollout.model.joined import JoinedWeights
from rollout.model.parameters import ModelParameters

logger = logging.getLogger(__name__)

PRE_NORM = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
"""The parts of a decoder layer that adds what its attention and its MLP give to what it was given."""
GELU = {"SiLU": False, "SiLUActivation": False, "GELUTanh": True}
"""The activations that the gate's kernel knows."""


def kernels() -> Any:
    """Imported where they are used: the module needs Triton."""
    return importlib.import_module("rollout.kernels.triton_layers")


@torch.no_grad()
def fuse(parameters: ModelParameters) -> JoinedWeights:
    """Replace what can be replaced in `parameters.model`."""
    model = parameters.model
    joined = JoinedWeights(parameters)
    norms = fuse_norms(model)
    counts = {
        "joined products": len(joined.groups),
        "norms": len(norms),
        "sums": fuse_sums(model, norms),
        "gates": fuse_gates(model, _gate_of, close),
        "attention layers": fuse_heads(model, norms),
    }
    logger.info("fused for the GPU: %s", ", ".join(f"{count} {name}" for name, count in counts.items()))
    joined.fused = counts
    return joined


@torch.no_grad()
def make_invariant(parameters: ModelParameters) -> JoinedWeights:
    """Linear layers in products of one shape, and norms in one order: all else keeps transformers' operations, which
    an exact trainer's model has, too. Nothing is joined."""
    fuse_norms(parameters.model)
    for module in parameters.model.modules():
        if type(module) is nn.Linear:
            module.forward = _in_blocks(module)  # type: ignore[method-assign, assignment]
    return JoinedWeights(parameters, names=())


def _in_blocks(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: multiply_in_blocks(x, layer.weight, layer.bias)


# -- norms, and the sums before them


class FusedNorm:
    """The forward pass of a norm; also of the sum that it is taken of, where `after` computes both."""

    def __init__(self, module: Any, kind: NormKind) -> None:
        self.module, self.kind = module, kind
        self._stock: Callable[[Tensor], Tensor] = module.forward
        self._ahead: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is x:
            return ahead[1]
        if x.dtype != self.module.weight.dtype:
            return self._stock(x)
        normal: Tensor = kernels().normalize(x, self.module.weight, self.kind)
        return normal

    def after(self, x: Tensor, added: Tensor) -> Tensor:
        """x + added; the norm of just this tensor is computed along with it, and handed out when it is asked for."""
        if x.dtype != self.module.weight.dtype or added.dtype != x.dtype or added.shape != x.shape:
            return x + added
        self._ahead = kernels().add_and_normalize(x.contiguous(), added, self.module.weight, self.kind)
        return self._ahead[0]


def fuse_norms(model: nn.Module) -> dict[Any, FusedNorm]:
    """Root-mean-square norms in one launch; returns those that were replaced."""
    fused: dict[Any, FusedNorm] = {}
    for module, kind in norm_kinds(model, kernels().normalize):
        module.forward = fused[module] = FusedNorm(module, kind)
    return fused


def fuse_sums(model: nn.Module, norms: dict[Any, FusedNorm]) -> int:
    """Have decoder layers compute each sum along with the norm that comes next, also the next layer's; how many do."""
    count = 0
    accepted: dict[type, bool] = {}
    for parent in model.modules():
        for layers in [child for child in parent.children() if isinstance(child, nn.ModuleList)]:
            following = [*(getattr(layer, "input_layernorm", None) for layer in layers), getattr(parent, "norm", None)]
            for layer, then in zip(layers, following[1:], strict=True):
                if {name for name, _ in layer.named_children()} != PRE_NORM or layer.input_layernorm not in norms:
                    continue
                post = norms.get(layer.post_attention_layernorm)
                if post is None:
                    continue
                if type(layer) not in accepted:
                    accepted[type(layer)] = _same_sums(layer, post)
                if accepted[type(layer)]:
                    layer.forward = _summing(layer, post, norms.get(then))
                    count += 1
    return count


def _summing(layer: Any, post: FusedNorm, following: FusedNorm | None) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        hidden_states = post.after(hidden_states, attended)
        output = layer.mlp(layer.post_attention_layernorm(hidden_states))
        return hidden_states + output if following is None else following.after(hidden_states, output)

    return forward


def _same_sums(layer: Any, post: FusedNorm) -> bool:
    attended = Stub(lambda x: (x.roll(1, -1) / 2, None))
    tried = with_parts(layer, self_attn=attended, mlp=Stub(lambda x: x.flip(-1)))
    weight = layer.input_layernorm.weight
    x = random_like(weight, len(weight))
    return close(_summing(tried, post, None)(x), type(layer).forward(tried, x))


# -- gates


class FusedGate(nn.Module):
    """act(gate) · up in one launch; act alone where there is no `up`."""

    def __init__(self, stock: Any, *, gelu: bool) -> None:
        super().__init__()
        self._stock, self._gelu = stock, gelu

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        output: Tensor
        if up is None:
            output = self._stock(gate)
        elif gate.shape != up.shape or gate.numel() != gate.shape[-2] * gate.shape[-1] or gate.stride(-1) != 1:
            output = self._stock(gate) * up
        else:
            output = kernels().gate(gate, up, gelu=self._gelu)
        return output


def _gate_of(module: Any) -> nn.Module | None:
    if not all(isinstance(getattr(module, name, None), nn.Linear) for name in GATED):
        return None
    act = getattr(module, "act_fn", None)
    gelu = GELU.get(type(act).__name__)
    return None if gelu is None else FusedGate(act, gelu=gelu)


# -- norms of heads, rotary embeddings and the write to the cache


def fuse_heads(model: PreTrainedModel, norms: dict[Any, FusedNorm]) -> int:
    """Leave norms of heads and rotations to the attention where it takes them (`takes_heads`); how many layers do.

    All layers are tried: the whole model runs twice on a few tokens, with attention that gives each layer the same.
    """
    candidates: dict[int, Any] = {}
    for module in model.modules():
        source = sys.modules[type(module).__module__]
        stock = getattr(source, "apply_rotary_pos_emb", None)
        if stock is not None and hasattr(module, "layer_idx") and hasattr(module, "head_dim"):
            candidates[module.layer_idx] = module  # type: ignore[index]
            if not getattr(stock, "deferring", False):
                source.apply_rotary_pos_emb = _deferring_rotary(stock)  # type: ignore[attr-defined]
    theirs, mine = _Heads(model, taking=False), _Heads(model, taking=True)
    _run(model, theirs)
    for module in candidates.values():
        _defer_norms(module, norms)
        module.forward = _deferring(module)
    _run(model, mine)
    count = 0
    for layer, module in candidates.items():
        if all(close(mine.seen[layer][i], theirs.seen[layer][i]) for i in range(3)):
            count += 1
        else:
            del module.forward
    return count


def _run(model: PreTrainedModel, backend: AttentionBackend) -> None:
    ids = torch.arange(TRIED_TOKENS, device=model.device)[None]
    with serving(backend):
        model(input_ids=ids, position_ids=7 * ids + 3, use_cache=False, logits_to_keep=1)


class _Heads(AttentionBackend):
    """Sees the queries, keys and values of each layer, and gives it what it gives it in every run."""

    def __init__(self, model: PreTrainedModel, *, taking: bool) -> None:
        super().__init__([], 0, 1, model.dtype, model.device)
        self.takes_heads = taking
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def prepare(self, batch: RaggedBatch) -> None:
        pass

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        deferred = deferred_heads.get()
        if self.takes_heads and deferred is not None:
            keys, values = (torch.zeros_like(t.transpose(0, 1)).contiguous()[:, None] for t in (key, value))
            slots = torch.arange(key.shape[1], device=key.device)
            query = kernels().write_heads(query, key, value, keys, values, slots, deferred)
            key, value = keys[:, 0].transpose(0, 1), values[:, 0].transpose(0, 1)
        self.seen[layer] = query.clone(), key.clone(), value.clone()
        output = random_like(value, query.shape[0] * value.shape[-1])[0, : query.shape[1]]
        return output.view(query.shape[1], query.shape[0], -1)


def _defer_norms(attention: Any, norms: dict[Any, FusedNorm]) -> None:
    """Where queries and keys have norms of one kind, let them be deferred."""
    fused = [norms.get(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
    query, key = fused
    if query is None or key is None or query.kind != key.kind or len(query.module.weight) != attention.head_dim:
        return

    def deferring(norm: FusedNorm, name: str) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            deferred = deferred_heads.get()
            if deferred is None:
                return norm(x)
            setattr(deferred, name, HeadNorm(norm.module, norm.kind))
            return x

        return forward

    query.module.forward, key.module.forward = deferring(query, "query_norm"), deferring(key, "key_norm")


def _deferring(attention: Any) -> Callable[..., Any]:
    stock = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        backend = current_backend()
        if backend is None or not backend.takes_heads:
            return stock(*args, **kwargs)
        token = deferred_heads.set(Deferred())
        try:
            return stock(*args, **kwargs)
        finally:
            deferred_heads.reset(token)

    return forward


def _deferring_rotary(stock: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function belongs to all models of the kind in this process: where nothing is deferred it stays stock."""

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        deferred = deferred_heads.get()
        usual = deferred is not None and not args and not kwargs and len(q) == len(k) == 1
        usual = usual and cos.shape == sin.shape == (1, q.shape[2], cos.shape[-1]) and cos.shape[-1] <= q.shape[-1]
        if not usual or not cos.is_contiguous() or not sin.is_contiguous() or {cos.dtype, sin.dtype} != {q.dtype}:
            return stock(q, k, cos, sin, *args, **kwargs)
        deferred.cosine, deferred.sine = cos[0], sin[0]  # type: ignore[union-attr]
        return q, k

    apply_rotary_pos_emb.deferring = True  # type: ignore[attr-defined]
    return apply_rotary_pos_emb
