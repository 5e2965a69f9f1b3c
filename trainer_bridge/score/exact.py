"""The engine's batch-invariant arithmetic for a trainer's model: logprobs equal to the server's in every bit.

`install(model)` plugs the attention definition of a server started with `--batch-invariant` into a transformers model,
differentiable, and pads what the model is given so that every product has the row counts that the engine uses. The
forward pass stays transformers' own code. What a full forward of prompt + answer then gives for the answer's tokens is
what the server reported, bit for bit, as long as both run the same weights in the same dtype on the same kind of
device: the importance ratio of an unchanged policy is exactly 1.

A bfloat16 policy means a bfloat16 module (with float32 masters in the optimizer): autocast is another arithmetic and is
refused.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from rollout.kernels.attention import cuda
from rollout.kernels.attention import native_paged as native
from rollout.kernels.attention.base import AttentionParams
from rollout.kernels.attention.chunked import CHUNK, attend_causally, hidden_by_order, padded_rows
from rollout.kernels.products import PackedWeight, multiply_in_blocks, serves_linear
from trainer_bridge.score import exact_cuda, exact_lora

ATTENTION_NAME = "rollout_exact"


def install(wrapped: PreTrainedModel) -> PreTrainedModel:
    """Make the model's forward pass compute what a batch-invariant server computes; returns the same model.

    Also that of a model which PEFT has wrapped: its active adapter is what a server with `--enable-lora` runs.

    Afterwards `model(input_ids (batch, length), attention_mask=…, position_ids=…, logits_to_keep=…)` accepts
    right-padded batches (an attention_mask whose rows are ones, then zeros) and packed rows (position_ids that restart
    at 0 for each sequence; batch of one). Where they restart at a later position p, what follows continues the first p
    tokens of the last sequence that began at 0: the answers of a group after their one prompt (`groups.group_row`).
    Only full causal passes: no cache.

    Raises ValueError, at once or at the forward pass, for what can't be exact: a model that was cast to its dtype
    instead of loaded in it (`check_precision`), autocast, left padding, dropout in training mode, inputs_embeds, a
    cache, a model that doesn't reach the attention interface.
    """
    model = exact_lora.base_model(wrapped)
    check_precision(model)
    model.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ValueError(f"{type(model).__name__} doesn't take its attention from transformers' AttentionInterface")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    on_gpu = exact_cuda.serves(model.device)
    if on_gpu:
        exact_cuda.install_norms(model)
    exact_lora.install(model)
    head = exact_lora.plain(model.get_output_embeddings())
    for module in model.modules():
        if type(module) is nn.Linear and (on_gpu or serves_linear(module)):
            multiply = _in_blocks(module) if on_gpu else _packed(module, module is head)
            module.forward = _product(module, multiply)  # type: ignore[method-assign, assignment]
    original, dtypes = model.forward, _dtypes(model)

    @functools.wraps(original)
    def forward(
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ValueError("an exact forward pass takes input_ids, not inputs_embeds")
        for name in ("past_key_values", "cache", "labels"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"an exact forward pass is a full causal pass: it takes no {name}")
        batch, length = input_ids.shape
        extra = padded_rows(length) - length
        positions = torch.arange(length, device=input_ids.device).expand(batch, -1)
        if position_ids is not None:
            positions = position_ids.expand(batch, -1)
        _check_inputs(model, input_ids, attention_mask, positions)
        if (now := _dtypes(model)) != dtypes:
            name = next(name for name in dtypes if now.get(name) != dtypes[name])
            raise ValueError(f"{name} was {dtypes[name]} at exact.install and is {now.get(name)}: install after a cast")
        keep = _kept(logits_to_keep, length, input_ids.device)
        head = pad(keep, (0, padded_rows(len(keep)) - len(keep)))
        kwargs["use_cache"] = False
        output = original(
            input_ids=pad(input_ids, (0, extra)),
            position_ids=torch.cat([positions, positions[:, -1:] + 1 + torch.arange(extra, device=keep.device)], 1),
            logits_to_keep=head,
            **kwargs,
        )
        output.logits = output.logits[:, : len(keep)]
        return output

    model.forward = forward
    return wrapped


def check_precision(model: PreTrainedModel) -> None:
    """Raise ValueError, naming it, for a tensor that has lost the precision which `from_pretrained` gives it.

    `model.to(torch.bfloat16)` rounds what a server computes in float32: the rotary embeddings' frequencies and other
    buffers that no checkpoint holds, which are compared with what the model's configuration gives; and the parameters
    that the model keeps in float32 (a router's weights or bias).
    """
    remedy = f"load the model by from_pretrained(…, dtype={model.dtype}) instead of casting it"
    kept = model._get_dtype_plan(model.dtype)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.dtype.is_floating_point and tensor.dtype != torch.float32 and any(part in name for part in kept):
            raise ValueError(f"{name} is {tensor.dtype}, and float32 in a server: {remedy}")
    with torch.device("meta"):
        fresh = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype, attn_implementation="eager")
    for name, buffer in list(fresh.named_non_persistent_buffers()):
        parent, _, leaf = name.rpartition(".")
        setattr(fresh.get_submodule(parent), leaf, torch.empty_like(buffer, device="cpu"))
    fresh.initialize_weights()
    held = dict(model.named_buffers())
    for name, buffer in fresh.named_non_persistent_buffers():
        if name in held and not _same_values(held[name], buffer):
            raise ValueError(
                f"{name} ({held[name].dtype}) isn't what the model's configuration gives ({buffer.dtype}), as after "
                f"model.to({model.dtype}): {remedy}"
            )


def _same_values(held: Tensor, fresh: Tensor) -> bool:
    """Up to the last bits, which differ between devices; rounding to 16 bits differs by more."""
    if held.dtype != fresh.dtype or held.shape != fresh.shape:
        return False
    return torch.allclose(held.cpu(), fresh, rtol=1e-6, atol=0) if fresh.is_floating_point() else True


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in itertools.chain(model.named_parameters(), model.named_buffers())}


def _check_inputs(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, positions: Tensor) -> None:
    if torch.is_autocast_enabled(input_ids.device.type):
        raise ValueError(
            "autocast computes with other bits than the server: use a module in the server's dtype, with float32 "
            "master weights in the optimizer"
        )
    if model.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules()):
        raise ValueError("the model would drop out activations: call model.eval(), gradients flow all the same")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must be (batch, length) like input_ids {tuple(input_ids.shape)}, "
            f"got {tuple(mask.shape)}; masks of another form can't be exact"
        )
    mask = mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("left-padded (or holey) rows can't be exact: pad on the right, or pack with position_ids")
    if len(mask) > 1 and bool((mask[:, 1:] & (positions[:, 1:] != positions[:, :-1] + 1)).any()):
        raise ValueError("positions restart within a row of a batch: sequences are packed into a batch of one row")


def _kept(logits_to_keep: int | Tensor, length: int, device: torch.device) -> Tensor:
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.ndim != 1 or logits_to_keep.dtype == torch.bool:
            raise ValueError("logits_to_keep must be a number of last positions, or a 1-D tensor of positions")
        return logits_to_keep
    return torch.arange(length - logits_to_keep if logits_to_keep else 0, length, device=device)


def attention_forward(  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (batch, heads, length, dim) → ((batch, length, heads, value_dim), None).

    Every row is one causal sequence; a batch of one is cut where its positions restart.
    """
    if dropout:
        raise ValueError(f"attention dropout ({dropout}) can't be exact: call model.eval()")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    params = AttentionParams(scaling, sliding_window or None, softcap or None, s_aux)
    if query.shape[0] > 1:
        return _attend(query, key, value, params), None
    if position_ids is None:
        raise ValueError(f"{type(module).__name__} doesn't tell its attention the positions: use a batch of rows")
    pieces = []
    for start, end, shared in _sequences(position_ids[0]):
        q, k, v = (torch.cat([t[:, :, shared], t[:, :, start:end]], 2) for t in (query, key, value))
        pieces.append(_attend(q, k, v, params)[:, shared.stop - shared.start :])
    return torch.cat(pieces, 1), None


def _sequences(positions: Tensor) -> list[tuple[int, int, slice]]:
    """The pieces [start, end) of a packed row (length,), each with where the tokens are that it continues."""
    starts = (positions[1:] != positions[:-1] + 1).nonzero().flatten() + 1
    bounds = [0, *starts.tolist(), len(positions)]
    offsets = positions[bounds[:-1]].tolist()
    found, first, first_end = [], 0, 0
    for (start, end), offset in zip(itertools.pairwise(bounds), offsets, strict=True):
        if offset == 0 or start == 0:
            first, first_end, offset = start, end, 0
        if offset > first_end - first:
            raise ValueError(
                f"a packed sequence restarts at position {offset}, but the last one that began at 0 has only "
                f"{first_end - first} tokens to continue"
            )
        found.append((start, end, slice(first, first + offset)))
    return found


AttentionInterface.register(ATTENTION_NAME, attention_forward)


def _attend(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
    """Sequences of one length: query (batch, heads, length, dim) → (batch, length, heads, value_dim)."""
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    output: Tensor = _ChunkedAttention.apply(  # type: ignore[no-untyped-call]
        query.reshape(batch * kv_heads, heads // kv_heads, length, dim),
        key.flatten(0, 1),
        value.flatten(0, 1),
        params.sinks,
        params,
    )
    return output.reshape(batch, heads, length, -1).transpose(1, 2)


def _in_blocks(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: multiply_in_blocks(x, layer.weight, layer.bias)


def _packed(layer: nn.Linear, is_head: bool) -> Callable[[Tensor], Tensor]:
    """It packs each time: nothing tells when a weight changes."""
    biases = [] if layer.bias is None else [layer.bias]
    dtype = torch.float32 if is_head else layer.weight.dtype
    return lambda x: PackedWeight.of([layer.weight], biases).multiply(x, dtype)


def _product(layer: nn.Linear, multiply: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """The layer's forward pass by the engine's product, `multiply`."""
    return lambda x: _Product.apply(x, layer.weight, layer.bias, multiply)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """The engine's product, and the gradients of a linear layer, in the weight's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """x (…, inputs), weight (outputs, inputs), bias (outputs,) → (…, outputs)."""
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return multiply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        grad = gradients[0].to(weight.dtype).flatten(0, -2)
        grad_x = (grad @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        grad_weight = grad.T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(0) if ctx.has_bias else None, None


class _ChunkedAttention(torch.autograd.Function):
    """The engine's forward pass, and the gradient of softmax attention, chunk by chunk.

    The backward pass recomputes each chunk's weights from the saved log-sum-exp (Dao et al. 2022, FlashAttention,
    arXiv:2205.14135, appendix B), in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, params: AttentionParams
    ) -> Tensor:
        """query (rows, groups, length, dim), key and value (rows, length, dim), sinks (heads,), those of `params`."""
        length = query.shape[2]
        if exact_cuda.serves(query.device):
            output, lse = cuda.attend_causally(query, key, value, params)
        elif native.serves_attention(key.shape[-1], query.dtype, query.device):
            output, lse = native.attend_causally(query, key, value, params)
        else:
            fill = (0, 0, 0, -length % CHUNK)
            output, lse = attend_causally(
                query * params.scaling,
                pad(key, fill),
                pad(value, fill),
                length,
                window=params.window,
                softcap=params.softcap,
                sinks=None if sinks is None else _per_row(sinks, query),
                exact=True,
            )
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.params = params
        return output.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and sinks, in their dtypes."""
        query, key, value, sinks, output, lse = ctx.saved_tensors
        scaling, window, softcap = ctx.params.scaling, ctx.params.window, ctx.params.softcap
        grad, output = gradients[0].float(), output.float()
        q, k, v = query.float(), key.float(), value.float()
        length, groups = q.shape[2], q.shape[1]
        share = (grad * output).sum(-1)  # (rows, groups, length)
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            rows = slice(start, length)  # no earlier query sees the chunk
            raw = torch.einsum("hgqd,hkd->hgqk", q[:, :, rows], k[:, start:end]) * scaling
            scores = torch.tanh(raw / softcap) * softcap if softcap else raw
            hidden = hidden_by_order(start, length, start, window, groups, q.device)
            if hidden is not None:
                hidden = hidden.view(groups, length - start, CHUNK)[..., : end - start]
                scores = scores.masked_fill(hidden, -torch.inf)
            weights = torch.exp(scores - lse[:, :, rows, None])
            grad_v[:, start:end] += torch.einsum("hgqk,hgqd->hkd", weights, grad[:, :, rows])
            grad_weights = torch.einsum("hgqd,hkd->hgqk", grad[:, :, rows], v[:, start:end])
            grad_scores = weights * (grad_weights - share[:, :, rows, None])
            if softcap:
                grad_scores = grad_scores * (1 - (raw / softcap).tanh() ** 2)
            grad_scores = grad_scores * scaling
            grad_q[:, :, rows] += torch.einsum("hgqk,hkd->hgqd", grad_scores, k[:, start:end])
            grad_k[:, start:end] += torch.einsum("hgqk,hgqd->hkd", grad_scores, q[:, :, rows])
        grad_sinks = None
        if sinks is not None:
            taken = torch.exp(_per_row(sinks, query)[..., None] - lse) * share
            grad_sinks = -taken.sum(-1).view(-1, sinks.numel()).sum(0).to(sinks.dtype)
        return grad_q.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype), grad_sinks, None


def _per_row(sinks: Tensor, query: Tensor) -> Tensor:
    """Sink logits (heads,) for rows of `query` (batch · kv_heads, groups, …): (batch · kv_heads, groups), float32."""
    rows, groups = query.shape[:2]
    return sinks.float().view(-1, groups).repeat(rows * groups // sinks.numel(), 1)
