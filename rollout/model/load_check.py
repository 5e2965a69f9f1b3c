"""Put our attention in the place of a model's own, and check that nothing was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from rollout.kernels.attention.base import (
    ATTENTION_NAME,
    AttentionBackend,
    AttentionParams,
    LayerShape,
    RaggedBatch,
    attention_forward,
    serving,
)
from rollout.model.layer_check import LayerCheck, Part

AttentionInterface.register(ATTENTION_NAME, attention_forward)

BackendMaker = Callable[[list[LayerShape], int, torch.dtype], AttentionBackend]
"""(shape of each layer, number of blocks, dtype) → attention of the kind that will serve."""
LENGTHS = (39, 21)
"""Tokens of the sequences that are tried, where the model takes as many."""
WINDOW = 8
"""What every sliding window is cut down to meanwhile, so that short sequences cross it."""
LAYER_TOLERANCE = 1e-3
"""Largest difference of a layer's output in float32, relative to what it adds to its input."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.02}
"""Largest mean difference of the logits as they are served, relative to their standard deviation."""


class UnsupportedModelError(ValueError):
    """The model can't be served exactly; the message names the model and the reason."""


@dataclass(frozen=True)
class StockLogits:
    """Short sequences, and the logits (vocab,) of each one's last token by stock attention."""

    sequences: list[Tensor]
    logits: list[Tensor]

    @torch.inference_mode()
    def check(self, model: PreTrainedModel, make_backend: Callable[[int], AttentionBackend], block_size: int) -> None:
        """Compute them as the model serves now, with a cache of so many blocks.

        Whatever is compiled, started or allocated at first use is so afterwards. Raises UnsupportedModelError where the
        logits differ by more than the dtype's roundings.
        """
        with _short_windows(model):
            ours = _in_parts(model, make_backend, block_size, self.sequences)
        for mine, theirs in zip(ours, self.logits, strict=True):
            difference = ((mine - theirs).abs().mean() / theirs.std()).item()
            if not difference < TOLERANCE[model.dtype]:
                raise UnsupportedModelError(
                    f"{type(model).__name__} in {model.dtype}: the logits that would be served differ from "
                    f"transformers' by {difference:.2g} standard deviations (at most {TOLERANCE[model.dtype]})"
                )


@torch.inference_mode()
def plug_in_attention(
    model: PreTrainedModel, make_backend: BackendMaker, block_size: int, max_model_len: int, experts: str | None = None
) -> tuple[list[LayerShape], StockLogits]:
    """Replace the model's attention by ours, and its experts' implementation by the one of this name; return each
    layer's shape, and what the model said before.

    Short sequences, of no more than `max_model_len` tokens, go through stock attention whole, and through ours side by
    side, in chunks and single tokens: every layer must agree in float32. Raises UnsupportedModelError, naming what
    differs, for a model with a layer that doesn't reach our attention, that keeps other state, or that masks in a way
    ours doesn't know.
    """
    name, text_config = type(model).__name__, model.config.get_text_config()
    kinds = set(getattr(text_config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModelError(
            f"{name} has layers of kind {sorted(kinds)}; rollout serves full and sliding attention"
        )
    generator = torch.Generator().manual_seed(0)
    lengths = [max(2, min(length, max_model_len)) for length in LENGTHS]
    sequences = [torch.randint(0, text_config.vocab_size, (n,), generator=generator).to(model.device) for n in lengths]
    layers, stock = LayerCheck(model), []
    with _short_windows(model):
        model.set_attn_implementation("eager")
        with layers.watching():
            for number, ids in enumerate(sequences):
                layers.parts = [(number, 0, len(ids))]
                stock.append(model(input_ids=ids[None], use_cache=False).logits[0, -1].float())
        model.set_attn_implementation(ATTENTION_NAME)
        if experts is not None:
            model.set_experts_implementation(experts)
        shapes = _record_shapes(model, sequences[0][:2], text_config.num_hidden_layers)
        layers.stock = False
        with layers.watching():
            _in_parts(model, lambda blocks: make_backend(shapes, blocks, torch.float32), block_size, sequences, layers)
    differing = {layer: error for layer, error in layers.errors.items() if not error < LAYER_TOLERANCE}
    if differing or not layers.errors:
        layer, error = next(iter(sorted(differing.items())), (-1, torch.inf))
        raise UnsupportedModelError(
            f"{name}: through rollout's attention {len(differing)} of {len(layers.errors)} layers differ from stock "
            f"attention's, the first one ({layer}) by {error:.2g} of what it adds (at most {LAYER_TOLERANCE}); its "
            "attention or state isn't one that rollout serves"
        )
    return shapes, StockLogits(sequences, stock)


class _Recorder(AttentionBackend):
    """Sees each layer's shape; its output is of the right shape and means nothing."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__([], 0, 1, dtype, device)
        self.shapes: dict[int, LayerShape] = {}
        self.calls = 0

    def prepare(self, batch: RaggedBatch) -> None:
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


def steps(
    lengths: Sequence[int], plan: Iterable[Sequence[int]], block_size: int
) -> Iterator[tuple[list[Part], RaggedBatch]]:
    """The parts that each step computes, side by side, and its batch: `plan` says how far each sequence is then.

    The sequences lie one behind the other in a cache, from block 1 on.
    """
    bounds = accumulate((-(-length // block_size) for length in lengths), initial=1)
    tables = [list(range(start, end)) for start, end in pairwise(bounds)]
    done: Sequence[int] = [0] * len(lengths)
    for ends in plan:
        parts = [(i, start, end) for i, (start, end) in enumerate(zip(done, ends, strict=True)) if start < end]
        starts = [0, *accumulate(end - start for _, start, end in parts)]
        yield parts, RaggedBatch(starts, [end for _, _, end in parts], [tables[i] for i, _, _ in parts])
        done = ends


def _in_parts(
    model: PreTrainedModel,
    make_backend: Callable[[int], AttentionBackend],
    block_size: int,
    sequences: list[Tensor],
    layers: LayerCheck | None = None,
) -> list[Tensor]:
    """The last token's logits of each of two sequences, computed side by side; `layers` is told what rows hold.

    First a chunk of both, then one more chunk beside a single token.
    """
    backend = make_backend(1 + sum(-(-len(ids) // block_size) for ids in sequences))
    logits = torch.empty(0)
    long, short = lengths = list(map(len, sequences))
    for parts, batch in steps(lengths, ((long - long // 5 - 1, short - 1), (long, short)), block_size):
        backend.prepare(batch)
        if layers is not None:
            layers.parts = parts
        with serving(backend):
            logits = model(
                input_ids=torch.cat([sequences[i][start:end] for i, start, end in parts])[None],
                position_ids=torch.from_numpy(batch.positions)[None].to(model.device),
                use_cache=False,
                logits_to_keep=torch.tensor(batch.query_start[1:], dtype=torch.long, device=model.device) - 1,
            ).logits[0]
    return list(logits.float())


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Make every sliding window so short that a short check crosses it."""
    holders: list[Any] = [model.config.get_text_config(), *model.modules()]
    saved = [(holder, holder.sliding_window) for holder in holders if getattr(holder, "sliding_window", None)]
    for holder, _ in saved:
        holder.sliding_window = WINDOW
    try:
        yield
    finally:
        for holder, value in saved:
            holder.sliding_window = value
