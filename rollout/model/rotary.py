"""Rotary embeddings whose frequencies depend on how long a sequence is.

A whole forward pass of transformers chooses one set of frequencies for all its positions: longrope by the longest
sequence in it, dynamic scaling likewise. A server that computes several sequences at once, in chunks, over keys that it
keeps, can only agree with that within the lengths that have one and the same set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel


def longest_exact(model_config: PretrainedConfig) -> int | None:
    """The number of positions up to which all lengths have the same rotary factors; None where lengths don't matter."""
    config = model_config.get_text_config()
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    borders = [
        parts["original_max_position_embeddings"]
        if parts["rope_type"] == "longrope"
        else config.max_position_embeddings
        for parts in kinds
        if parts.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(borders, default=None)


@torch.inference_mode()
def fix_rotary(model: PreTrainedModel, max_model_len: int) -> None:
    """Have the rotary embeddings keep the frequencies of sequences of up to `max_model_len` positions.

    Raises ValueError where they have other ones for a long sequence than for a short one.
    """
    for module, layer_types in _embeddings(model):
        for layer_type in layer_types:
            beside = _factors(module, [0, 1, 2, max_model_len - 1], layer_type)
            alone = _factors(module, [0, 1, 2], layer_type)  # the last call: what it leaves behind is what stays
            if not all(torch.allclose(a[:, :3], b, atol=1e-5) for a, b in zip(beside, alone, strict=True)):
                raise ValueError(
                    f"{type(model).__name__}: the rotary factors of a position depend on the longest sequence beside "
                    f"it, for sequences of up to {max_model_len} positions: set a smaller --max-model-len"
                )
    keep_frequencies(model)


def keep_frequencies(model: PreTrainedModel) -> None:
    """Have nothing computed anew in a step, which would also keep it from being captured as a CUDA graph."""
    for module, layer_types in _embeddings(model):
        module.rope_type = "default" if layer_types == [None] else dict.fromkeys(layer_types, "default")


def _embeddings(model: PreTrainedModel) -> Iterator[tuple[Any, list[str | None]]]:
    """The rotary embeddings, and the types of layers that each has frequencies for; [None] where it has one set."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str | dict) and type(module).__name__.endswith("RotaryEmbedding"):
            yield module, list(kinds) if isinstance(kinds, dict) else [None]


def _factors(module: torch.nn.Module, positions: list[int], layer_type: str | None) -> list[Tensor]:
    """What a rotary embedding gives for these positions: tensors (1, positions, …)."""
    frequencies = next(module.buffers())
    at = torch.tensor([positions], device=frequencies.device)
    factors = module(frequencies.new_empty(1), at, *([] if layer_type is None else [layer_type]))
    return [factors] if isinstance(factors, Tensor) else list(factors)
