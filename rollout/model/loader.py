"""Load a model as transformers has it, with our attention in place of its own, and check that nothing was lost."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from rollout.config import EngineConfig
from rollout.kernels.attention.base import (
    ATTENTION_NAME,
    AttentionBackend,
    AttentionParams,
    LayerShape,
    RaggedBatch,
    attention_forward,
    serving,
)
from rollout.kernels.attention.torch_paged import TorchAttention

logger = logging.getLogger(__name__)
AttentionInterface.register(ATTENTION_NAME, attention_forward)

CHECKED_BYTES = 4 << 30
"""A model whose parameters take at most this in float32 is checked in float32, where no rounding hides a mistake."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.02}
"""Largest mean difference from stock attention, relative to the logits' standard deviation, at load."""


class UnsupportedModelError(ValueError):
    """The model can't be served exactly; the message names the model and the reason."""


def resolve_device(config: EngineConfig) -> torch.device:
    """The device that `config.device` means here. Raises ValueError for cuda without a GPU."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def cpu_multiplies_bf16() -> bool:
    """True where matrix products in bfloat16 are at least as fast as in float32 on this CPU."""
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
        model = AutoModelForCausalLM.from_pretrained(
            path, config=model_config, dtype=dtype, attn_implementation="eager", **kwargs
        )
    if config.batch_invariant and model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # a product a token: no expert sees its batch
    model.eval().requires_grad_(False).to(device)
    return model


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


@torch.inference_mode()
def plug_in_attention(model: PreTrainedModel) -> list[LayerShape]:
    """Replace the model's attention by ours; return each layer's shape.

    Two short sequences go through stock attention whole, and through ours side by side in chunks and single tokens:
    their logits must agree. Raises UnsupportedModelError, naming what differs, for a model with a layer that doesn't
    reach our attention, that keeps other state, or that masks in a way ours doesn't know.
    """
    name, text_config = type(model).__name__, model.config.get_text_config()
    kinds = set(getattr(text_config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModelError(
            f"{name} has layers of kind {sorted(kinds)}; rollout serves full and sliding attention"
        )
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, text_config.vocab_size, (n,), generator=generator).to(model.device) for n in (24, 13)]
    with _short_windows(model, 8), _in_float32(model):
        model.set_attn_implementation("eager")
        stock = [model(input_ids=ids[None], use_cache=False).logits[0, -1].float() for ids in sequences]
        model.set_attn_implementation(ATTENTION_NAME)
        shapes = _record_shapes(model, sequences[0], text_config.num_hidden_layers)
        dtype = model.dtype
        ours = _in_chunks(model, TorchAttention(shapes, 16, 4, dtype, model.device), sequences)
    for mine, theirs in zip(ours, stock, strict=True):
        difference = ((mine - theirs).abs().mean() / theirs.std()).item()
        if not difference < TOLERANCE[dtype]:
            raise UnsupportedModelError(
                f"{name} in {dtype}: logits through rollout's attention differ from stock attention's by "
                f"{difference:.2g} standard deviations (at most {TOLERANCE[dtype]}); its attention or state "
                "isn't one that rollout serves"
            )
    return shapes


class _Recorder(AttentionBackend):
    """Sees each layer's shape; its output is of the right shape and means nothing."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__([], 0, 1, dtype, device)
        self.shapes: dict[int, LayerShape] = {}
        self.calls = 0

    def prepare(self, batch: RaggedBatch) -> None:
        pass

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        pass

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        self.shapes[layer] = LayerShape(key.shape[0], key.shape[-1], value.shape[-1])
        self.calls += 1
        return value.new_zeros(query.shape[1], query.shape[0], value.shape[-1])


def _record_shapes(model: PreTrainedModel, ids: Tensor, num_layers: int) -> list[LayerShape]:
    recorder = _Recorder(model.dtype, model.device)
    with serving(recorder):
        model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
    if sorted(recorder.shapes) != list(range(num_layers)) or recorder.calls != num_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__}: {len(recorder.shapes)} of {num_layers} layers reach rollout's attention "
            f"(in {recorder.calls} calls); each must, with keys and values of its own"
        )
    return [recorder.shapes[layer] for layer in range(num_layers)]


def _in_chunks(model: PreTrainedModel, backend: AttentionBackend, sequences: list[Tensor]) -> list[Tensor]:
    """The last token's logits of two sequences of at most 28 tokens, computed in three steps of both."""
    tables = [list(range(1, 8)), list(range(8, 16))]
    done, logits = [0, 0], torch.empty(0)
    for left in (8, 1, 0):
        ends = [len(ids) - left for ids in sequences]
        chunks = [ids[start:end] for ids, start, end in zip(sequences, done, ends, strict=True)]
        query_start = [0, len(chunks[0]), len(chunks[0]) + len(chunks[1])]
        batch = RaggedBatch(query_start, ends, tables)
        backend.prepare(batch)
        with serving(backend):
            logits = model(
                input_ids=torch.cat(chunks)[None],
                position_ids=torch.tensor([batch.positions()], device=model.device),
                use_cache=False,
                logits_to_keep=torch.tensor(query_start[1:], device=model.device) - 1,
            ).logits[0]
        done = ends
    return list(logits.float())


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Compute with float32 copies of the parameters, if they aren't too large."""
    holders = [(m._parameters, name) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    saved = [held[name] for held, name in holders]
    if 4 * sum(parameter.numel() for parameter in model.parameters()) <= CHECKED_BYTES:
        for held, name in holders:
            held[name] = torch.nn.Parameter(held[name].float(), requires_grad=False)  # type: ignore[union-attr]
    try:
        yield
    finally:
        for (held, name), parameter in zip(holders, saved, strict=True):
            held[name] = parameter


@contextmanager
def _short_windows(model: PreTrainedModel, window: int) -> Iterator[None]:
    """Make every sliding window so short that a short check crosses it."""
    holders: list[Any] = [model.config.get_text_config(), *model.modules()]
    saved = [(holder, holder.sliding_window) for holder in holders if getattr(holder, "sliding_window", None)]
    for holder, _ in saved:
        holder.sliding_window = window
    try:
        yield
    finally:
        for holder, value in saved:
            holder.sliding_window = value
