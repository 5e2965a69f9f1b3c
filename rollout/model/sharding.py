"""A rank's share of a model, by transformers' own tensor-parallel plan.

Sharded parameters are DTensors: their shape is the whole parameter's, `_local_tensor` is what this rank holds. The
process group must exist before anything is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

from rollout.config import EngineConfig
from rollout.model.model_config import read_config


def check_plan(config: EngineConfig) -> None:
    """Raise ValueError, naming the model, where transformers can't deal it out to as many ranks."""
    size = config.tensor_parallel_size
    _, model_config, gguf = read_config(config)
    if gguf:
        raise ValueError(
            f"tensor_parallel_size {size}: {config.model} is a .gguf file, which every rank would hold whole"
        )
    text_config = model_config.get_text_config()
    name = (model_config.architectures or [model_config.model_type])[0]
    plan = getattr(text_config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"tensor_parallel_size {size}: transformers has no tensor-parallel plan for {name}")
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    if get_kv_heads_per_rank(plan, heads, size) is None:
        raise ValueError(f"tensor_parallel_size {size} does not divide the {heads} key/value heads of {name}")


def load_share(config: EngineConfig, path: str, model_config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """This rank's share, on its device; each reads only its slices of the checkpoint. All ranks call it together."""
    options: dict[str, Any] = {
        "config": model_config,
        "dtype": dtype,
        "attn_implementation": "eager",
        "distributed_config": DistributedConfig(tp_size=config.tensor_parallel_size),
    }
    if config.load_format != "dummy":
        return AutoModelForCausalLM.from_pretrained(path, **options)
    torch.manual_seed(config.seed or 0)
    whole = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    share: PreTrainedModel = type(whole).from_pretrained(None, state_dict=whole.state_dict(), **options)
    return share


def least(number: int, device: torch.device) -> int:
    """The smallest of all ranks' numbers. All ranks call it together."""
    agreed = torch.tensor(number, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return int(agreed)
