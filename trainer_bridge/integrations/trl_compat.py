"""All that is used of TRL, after a look at its version; and, in plain torch, what AsyncGRPOTrainer takes from CUDA."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
import trl
from packaging.version import Version
from torch import Tensor


def check_version(version: str) -> None:
    """Raise ImportError for a TRL other than 1.16, whose experimental interface this was written against."""
    if Version(version).release[:2] != (1, 16):
        raise ImportError(
            f"trainer_bridge.integrations.trl is written for trl 1.16, found {version}: pip install 'trl==1.16.*'"
        )


check_version(trl.__version__)  # before names are imported that another version may not have

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: E402
from trl.trainer.utils import get_callable_name, is_async_callable  # noqa: E402

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "RolloutSample", "get_callable_name", "is_async_callable"]


def replace_cuda_functions() -> None:
    """Put CPU versions in the place of `async_grpo_trainer.get_peak_flops_per_device` and `packing._flash_attn`.

    The first looks up what the GPU could do at most (unknown for a CPU: TRL then logs no MFU), the second loads the
    kernel of FlashAttention 3.
    """
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)  # type: ignore[assignment]


def varlen_attention(  # noqa: PLR0913
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """FlashAttention's flash_attn_varlen_func: (queries, heads, head_dim) of the inputs' dtype; differentiable.

    `query` (queries, heads, head_dim), `key` and `value` (keys, kv_heads, head_dim) are cut into segments at
    `cu_seqlens_q` and `cu_seqlens_k` (segments + 1,). A segment's queries are at the last positions of its keys.
    `window_size`: how many keys before and after its own position a query sees, -1 for all.
    """
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (key, value))
    bounds = zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True)
    outputs = []
    for (q0, q1), (k0, k1) in bounds:
        scores = (query[q0:q1].transpose(0, 1) @ key[:, k0:k1].mT).float() * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        keys = torch.arange(k1 - k0)
        distance = keys[-(q1 - q0) :, None] - keys
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance > left
        if right >= 0:
            hidden |= distance < -right
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(value.dtype)
        outputs.append((weights @ value[:, k0:k1]).transpose(0, 1))
    return torch.cat(outputs)
