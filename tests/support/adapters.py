"""Adapters that PEFT itself has made, wide enough that they matter, and its own models of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from rollout.engine.engine import Engine
from tests.support import tiny_models

KINDS: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": "all-linear"},
    {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["down_proj", "gate_proj", "lm_head"],
        "rank_pattern": {"down_proj": 5},
        "alpha_pattern": {"layers.1.mlp.down_proj": 1},
    },
    {"r": 16, "lora_alpha": 16, "target_modules": r".*\.(k_proj|up_proj)"},
    {"r": 2, "lora_alpha": 4, "target_modules": ["embed_tokens", "o_proj"]},
)
"""Unlike ranks, scales and layers, in every way to name them."""


def model(base: str, kind: int, seed: int = 0) -> Any:
    """PEFT's model of the tiny model `base` with a random adapter of KINDS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(tiny_models.model(base), LoraConfig(**KINDS[kind])).eval()
    generator = torch.Generator().manual_seed(100 * kind + seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return wrapped


def save(wrapped: nn.Module, path: Path) -> Path:
    """Save the adapter as PEFT does, and return its folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.save_pretrained(path)  # type: ignore[operator]
    return path


def load(engine: Engine, label: str, path: Path) -> None:
    """Load a folder into an engine, as a fleet does it."""
    assert engine.adapters is not None
    engine.adapters.call("load_adapter", {"label": label, "path": str(path)}).result(60)
    engine.adapters.call("commit_adapter", {"label": label}).result(60)
