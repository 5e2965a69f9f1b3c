"""Load a model as transformers has it."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from rollout.config import EngineConfig
from rollout.model.model_config import read_config, resolve_device, resolve_dtype

logger = logging.getLogger(__name__)


def load_model(config: EngineConfig) -> PreTrainedModel:
    """The model in evaluation mode, on its device, without gradients; `plug_in_attention` replaces its attention.

    Raises as `read_config` does.
    """
    device = resolve_device(config)
    path, model_config, kwargs = read_config(config)
    dtype = resolve_dtype(config, model_config, device)
    if config.tensor_parallel_size > 1:
        from rollout.model.sharding import load_share

        share = load_share(config, path, model_config, dtype)
        share.eval().requires_grad_(False)
        return share
    if config.load_format == "dummy":
        torch.manual_seed(config.seed or 0)
        with torch.device(device):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                model_config, dtype=dtype, attn_implementation="eager"
            )
    else:
        if device.type == "cuda" and not kwargs and importlib.util.find_spec("accelerate"):
            kwargs = {"device_map": device}  # tensor by tensor to the device, with no whole copy in RAM
        model = AutoModelForCausalLM.from_pretrained(
            path, config=model_config, dtype=dtype, attn_implementation="eager", **kwargs
        )
    model.eval().requires_grad_(False).to(device)
    return model


def experts_implementation(model: PreTrainedModel, config: EngineConfig) -> str | None:
    """transformers' name of what computes a model's experts; None where its own choice stands, torch's grouped product.

    That one runs on the device alone for bfloat16 and capabilities 9 and 10 only (`_grouped_mm_cuda` in ATen's
    GroupedBlas.cpp). Elsewhere on CUDA it loops over the experts on the host, which no graph captures, and ours serves.
    """
    if not model._can_set_experts_implementation():
        return None
    if config.batch_invariant:
        return "batched_mm"  # a product a token: no expert sees its batch
    device = resolve_device(config)
    if device.type != "cuda" or not importlib.util.find_spec("triton"):
        return None
    if model.dtype is torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10):
        return None
    from rollout.kernels.triton_experts import EXPERTS_NAME, experts_forward

    ExpertsInterface.register(EXPERTS_NAME, experts_forward)
    return EXPERTS_NAME


def eos_token_ids(config: EngineConfig, model: PreTrainedModel) -> list[int]:
    """The ids that end a sequence, [] for none: the tokenizer's first, then the generation config's.

    Source: vLLM's `SamplingParams.update_from_generation_config`, which stops at both, and gives the stop reason None
    for the tokenizer's. Where they differ, that is logged.
    """
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    if configured is None:
        configured = model.config.get_text_config().eos_token_id
    ids = [] if configured is None else [int(i) for i in (configured if isinstance(configured, list) else [configured])]
    own = _tokenizer_eos(config.model)
    if own is None:
        return ids
    if own not in ids:
        logger.warning("a choice ends at %d, the tokenizer's EOS, and at %s, the generation config's", own, ids)
    return list(dict.fromkeys([own, *ids]))


def _tokenizer_eos(path: str) -> int | None:
    """The tokenizer's EOS; None where there is none. (A .gguf file's is what its generation config comes from.)"""
    if path.endswith(".gguf") or (Path(path).exists() and not (Path(path) / "tokenizer_config.json").exists()):
        return None
    try:
        eos = AutoTokenizer.from_pretrained(path).eos_token_id
    except Exception as error:  # whatever a tokenizer's code raises: ids are served without one
        logger.warning("the tokenizer of %s can't be loaded, so its EOS isn't known: %s", path, error)
        return None
    return eos if isinstance(eos, int) else None
