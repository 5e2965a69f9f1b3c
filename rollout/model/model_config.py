"""Which model a configuration means, on which device and in which dtype."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from rollout.config import EngineConfig
from rollout.kernels.products import multiplies


def resolve_device(config: EngineConfig) -> torch.device:
    """The device that `config.device` means here. Raises ValueError for cuda without a GPU."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def cpu_multiplies_bf16() -> bool:
    """True where products in bfloat16, ours or torch's, are at least as fast as in float32 on this CPU."""
    if multiplies(torch.bfloat16):
        return True
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def resolve_dtype(config: EngineConfig, model_config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype of the parameters: the one asked for, or the checkpoint's where the device is fast in it."""
    if config.dtype != "auto":
        asked: torch.dtype = getattr(torch, config.dtype)
        return asked
    dtype = getattr(model_config.get_text_config(), "dtype", None) or torch.float32
    if device.type == "cpu" and dtype is not torch.float32:
        return torch.bfloat16 if cpu_multiplies_bf16() else torch.float32
    return dtype


def read_config(config: EngineConfig) -> tuple[str, PretrainedConfig, dict[str, Any]]:
    """The path to load from, the model's configuration, and what loading a .gguf file takes beside them.

    Raises ValueError where the path holds no model, and what transformers raises for a model that it doesn't know.
    """
    path, kwargs = config.model, dict[str, Any]()
    if path.endswith(".gguf"):
        from transformers import GgufConfig

        path, kwargs = str(Path(path).parent), {"gguf_file": Path(path).name}
        model_config = AutoConfig.from_pretrained(path, **kwargs)
        kwargs["quantization_config"] = GgufConfig(dequantize=True)
    else:
        if Path(path).exists() and not (Path(path) / "config.json").exists():
            raise ValueError(f"{path} holds no config.json: MODEL is a transformers folder, a .gguf file or a hub id")
        model_config = AutoConfig.from_pretrained(path)
    return path, model_config, kwargs
