"""A model whose attention is ours, without an engine around it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rollout.kernels.attention.base import AttentionBackend, LayerShape
from rollout.kernels.attention.torch_paged import TorchAttention
from rollout.model.load_check import plug_in_attention

BLOCK_SIZE = 4


def plug_in(model: PreTrainedModel, kind: type[TorchAttention] = TorchAttention) -> list[LayerShape]:
    """Put our attention in place, checked on a backend of this kind; the shapes of the layers."""

    def make(shapes: list[LayerShape], num_blocks: int, dtype: torch.dtype) -> AttentionBackend:
        return kind(shapes, num_blocks, BLOCK_SIZE, dtype, model.device)

    return plug_in_attention(model, make, BLOCK_SIZE, max_model_len=64)[0]
