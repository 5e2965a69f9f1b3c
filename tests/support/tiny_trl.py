"""A tiny model with a byte tokenizer, and TRL's configuration for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from trl.experimental.async_grpo import AsyncGRPOConfig

from tests.support import tiny_models

SERVER_FLAGS = [
    *("--tokens-only", "--device", "cpu", "--dtype", "float32", "--num-threads", "1"),
    *("--logprobs-mode", "processed_logprobs", "--kv-policy", "recompute"),
]


def tokenizer() -> PreTrainedTokenizerFast:
    """An id is a byte; that of EOS stands for EOS."""
    chars = bytes_to_unicode()
    bytes_only = Tokenizer(models.BPE(vocab={chars[byte]: byte for byte in range(256)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    eos = chars[tiny_models.EOS_TOKEN_ID]
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=eos, pad_token=eos)


def build(path: Path) -> Path:
    """The tiny llama and its tokenizer as a transformers folder."""
    tokenizer().save_pretrained(path)
    return tiny_models.build("llama", path)


def config(folder: Path, url: str, **changes: Any) -> AsyncGRPOConfig:
    """Groups of 4 answers, training on the CPU in float32."""
    settings: dict[str, Any] = {
        "vllm_server_base_url": url,
        "num_generations": 4,
        "max_completion_length": 24,
        "max_inflight_tasks": 8,
        "per_device_train_batch_size": 16,
        "token_budget": 0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "request_timeout": 240,
        "weight_sync_timeout": 240,
    }
    return AsyncGRPOConfig(str(folder), **settings | changes)
