"""Milliseconds of a decode step on a GPU: of this engine, of transformers' continuous batching and, where it is
installed, of vLLM, on the shapes of real models with random weights."""

from __future__ import annotations

import gc
import importlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.models.auto import CONFIG_MAPPING

from rollout.bench import bare
from rollout.bench.gpu_sections import SMALL, Found, Place
from rollout.bench.loads import Load

LARGE: dict[str, Any] = {
    "vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
SHAPES = {  # Qwen3-8B, and Qwen3-30B-A3B with 12 of its 48 layers
    "8B": ("qwen3", {**LARGE, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                     "num_key_value_heads": 8}),
    "30B-A3B / 4": ("qwen3_moe", {**LARGE, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12,
                                  "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
                                  "num_experts_per_tok": 8, "norm_topk_prob": True}),
}  # fmt: skip


def speed(at: Place) -> Found:
    """Milliseconds of a decode step, by shape, number of sequences and engine."""
    sizes, tokens = ((2,), 2) if at.dry else ((1, 64, 256), 32)
    for name, (kind, shape) in SHAPES.items():
        path = at.folder / kind
        CONFIG_MAPPING[kind](**(SMALL if at.dry else shape)).save_pretrained(path)
        for peer in (_ours, _transformers, _vllm):
            try:
                for size, ms in _steps(peer(at, path, max(sizes)), sizes, tokens):
                    yield f"{name}, {size} sequences, {peer.__name__.strip('_')}", f"{ms:.2f} ms a step"
            except ImportError:
                continue
            except Exception as error:  # one that fails is a line, and the others are measured
                yield f"{name}, {peer.__name__.strip('_')}", f"failed: {type(error).__name__}: {error}"
            gc.collect()
            if not at.dry:
                torch.cuda.empty_cache()


Generate = Callable[[list[list[int]], int], object]
"""Sample so many tokens of each prompt, all prompts in company."""


def _steps(generate: Generate, sizes: Iterable[int], tokens: int) -> Iterator[tuple[int, float]]:
    """Milliseconds of a decode step for each number of sequences: what twice as many more steps take longer."""
    for size in sizes:
        asked = [[(number + i) % 500 + 2 for i in range(64)] for number in range(size)]
        generate(asked, 2)
        seconds = []
        for count in (tokens, 3 * tokens):
            began = time.perf_counter()
            generate(asked, count)
            seconds.append(time.perf_counter() - began)
        yield size, (seconds[1] - seconds[0]) / (2 * tokens) * 1e3


def _ours(at: Place, path: Path, most: int) -> Generate:
    served = at.engine(
        path, dtype="auto", load_format="dummy", max_num_seqs=most, enable_prefix_caching=False,
        num_gpu_blocks_override=most * 12, max_num_batched_tokens=2048,
    )  # fmt: skip

    def generate(asked: list[list[int]], tokens: int) -> int:
        return bare.run(served, Load("", "", len(asked), 1, 64, 64, tokens), asked)

    return generate


def _transformers(at: Place, path: Path, most: int) -> Generate:
    config = CONFIG_MAPPING[json.loads((path / "config.json").read_text())["model_type"]].from_pretrained(path)
    with at.device:
        dtype = config.dtype or torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if at.dry else None

    def generate(asked: list[list[int]], tokens: int) -> object:
        options = GenerationConfig(max_new_tokens=tokens, do_sample=True, eos_token_id=-1, pad_token_id=0)
        return model.eval().generate_batch(asked, options, continuous_batching_config=batching, warmup=not at.dry)

    return generate


def _vllm(at: Place, path: Path, most: int) -> Generate:
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        str(path), load_format="dummy", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=most,
        gpu_memory_utilization=0.85, enable_prefix_caching=False,
    )  # fmt: skip

    def generate(asked: list[list[int]], tokens: int) -> object:
        params = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)

    return generate
