"""Tiny random transformers models, one for each kind of attention and MLP the engine must run.

The weights are drawn wide enough that logits spread over several nats, attention is far from uniform, every norm and
bias matters, and Gemma's soft caps bend what they touch: an engine that ignores any of them is off by much more than
1e-4. Grouped-query attention throughout; float32; the same name and seed always give the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

EOS_TOKEN_ID = 1
"""Its logit is always 0, far below the largest: greedy text never ends, sampled text after some 700 tokens."""

SLIDING_WINDOW = 12
"""Positions (itself included) that a sliding layer of mistral, gemma2 or gemma3_text attends to."""

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}

_GEMMA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": SLIDING_WINDOW,
    "tie_word_embeddings": False,  # tied, Gemma's scaled embeddings make random weights repeat the last token
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}

_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 16, "sliding_window": SLIDING_WINDOW},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0},
    "gemma3_text": _GEMMA,
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}

NAMES = tuple(_SPECIFIC)


def config(name: str) -> PreTrainedConfig:
    """The configuration of the tiny model `name`, one of NAMES."""
    return CONFIG_MAPPING[name](**{**_COMMON, **_SPECIFIC[name]})


@torch.no_grad()
def model(name: str, seed: int = 0) -> PreTrainedModel:
    """The tiny model `name`, in float32 and eval mode; another seed gives unrelated weights (a far push)."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config(name), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():  # each tensor once: parameters() skips the tied head
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:  # norms stay around their initial one (or zero), biases around zero
            parameter.add_(0.2 * noise)
        else:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    model.get_output_embeddings().weight[EOS_TOKEN_ID] = 0
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=EOS_TOKEN_ID)
    return model


def build(name: str, path: Path, seed: int = 0) -> Path:
    """Save the tiny model `name` as a transformers folder at `path` and return it."""
    model(name, seed).save_pretrained(path)
    return path
