"""Does this model, on this machine, give a token the same bits in every batch? Tried before it is claimed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.kernels.attention.base import AttentionBackend, AttentionParams, RaggedBatch, serving
from rollout.kernels.attention.chunked import CHUNK, fill_up
from rollout.model.load_check import steps

LENGTHS = (CHUNK + 21, CHUNK + 5, 40, 3)
"""The sequences that are tried: two reach a second chunk, one is a few tokens."""
DECODED = 3
"""How many of a sequence's last tokens come one at a time."""
NAMED = 6


class NotInvariantError(ValueError):
    """The model isn't batch-invariant here; the message names the operations whose bits differ."""


@torch.inference_mode()
def prove_batch_invariance(
    model: PreTrainedModel, make_backend: Callable[[int], AttentionBackend], block_size: int
) -> None:
    """Compute sequences alone and whole, then side by side in chunks and single tokens; compare every module's bits.

    `make_backend` gives the attention that will serve, with a cache of so many blocks of `block_size`. Raises
    NotInvariantError, which names the modules that differ, the first ones first.
    """
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    sequences = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    alone = _Bits()
    for index, ids in enumerate(sequences):
        _run(model, make_backend, block_size, [(index, ids)], [[len(ids)]], alone)
    together = _Bits(alone.axes)
    ends = [[n // 2, *range(n - DECODED, n + 1)] for n in LENGTHS]
    ends[-1] = [0, 0, 1, 2, 3]
    _run(model, make_backend, block_size, list(enumerate(sequences)), zip(*ends, strict=True), together)
    differing = [name for name, rows in alone.rows.items() if rows != together.rows[name]]
    if differing:
        kinds = [f"{name} ({alone.kinds[name]})" for name in differing[:NAMED]]
        more = f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
        raise NotInvariantError(
            f"batch_invariant: here, in {model.dtype} with {torch.get_num_threads()} threads, a token's bits "
            f"depend on its batch in {', '.join(kinds)}{more}. Serve without --batch-invariant, or in another dtype"
        )


class _Bits:
    """A checksum of each module's output bits for each token: {module: {(sequence, position): checksum}}.

    `axes` says along which axis of its output a module has the tokens. It is seen from the first call, whose number of
    tokens nothing else in a model is likely to be. `count` is the number of tokens, filled up, of the call under way.
    """

    def __init__(self, axes: dict[str, int] | None = None) -> None:
        self.axes: dict[str, int] = {} if axes is None else axes
        self.rows: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
        self.kinds: dict[str, str] = {}
        self.count = 0

    def add(self, name: str, kind: str, output: Any, tokens: list[tuple[int, int]]) -> None:
        """Note the output of a module: one row, or several adjacent ones, for each of the padded tokens."""
        if not isinstance(output, Tensor) or output.dtype not in _INTEGER:
            return
        count = self.count
        if name not in self.axes:
            self.axes[name] = next((axis for axis, size in enumerate(output.shape[:-1]) if size % count == 0), -1)
        if self.axes[name] < 0:
            return
        rows = output.movedim(self.axes[name], 0).reshape(count, -1)
        bits = rows[: len(tokens)].contiguous().view(_INTEGER[rows.dtype]).long()
        weights = torch.arange(1, bits.shape[1] + 1, device=bits.device) * 2654435761
        self.kinds[name] = kind
        self.rows[name].update(zip(tokens, (bits * weights).sum(-1).tolist(), strict=True))


_INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class _Watched(AttentionBackend):
    """An attention backend, and what it gives each token."""

    def __init__(self, backend: AttentionBackend, bits: _Bits) -> None:
        super().__init__([], backend.num_blocks, backend.block_size, backend.dtype, backend.device)
        self._backend, self.bits = backend, bits
        self.tokens: list[tuple[int, int]] = []

    def prepare(self, batch: RaggedBatch) -> None:
        self._backend.prepare(batch)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        output = self._backend.forward(layer, query, key, value, params)
        self.bits.add(f"attention of layer {layer}", "rollout's attention", output.flatten(1), self.tokens)
        return output


def _run(
    model: PreTrainedModel,
    make_backend: Callable[[int], AttentionBackend],
    block_size: int,
    sequences: list[tuple[int, list[int]]],
    plan: Iterable[Sequence[int]],
    bits: _Bits,
) -> None:
    """Compute the numbered sequences in the steps of `plan` (see `load_check.steps`)."""
    backend = _Watched(make_backend(1 + len(sequences) * -(-max(LENGTHS) // block_size)), bits)
    for parts, batch in steps([len(ids) for _, ids in sequences], plan, block_size):
        row = [token for i, start, end in parts for token in sequences[i][1][start:end]]
        backend.tokens = [(sequences[i][0], position) for i, start, end in parts for position in range(start, end)]
        backend.prepare(batch)
        with serving(backend), _watching(model, backend):
            inputs = fill_up(torch.from_numpy(np.stack([row, batch.positions])), model.dtype).to(model.device)
            bits.count = inputs.shape[1]
            model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False)


@contextmanager
def _watching(model: nn.Module, backend: _Watched) -> Iterator[None]:
    hooks = []
    for name, module in model.named_modules():
        if next(module.children(), None) is None:

            def hook(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                backend.bits.add(name, type(module).__name__, output, backend.tokens)

            hooks.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
