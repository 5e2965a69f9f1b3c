"""Which experts each computed token was routed to, layer by layer: read off the model's routers, kept beside the cache.

A token's row lies in the slot that holds its keys and values. So it goes wherever the block goes: a cached prefix, a
fork's shared blocks and its copied one bring theirs along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.kernels.attention.base import RaggedBatch
from rollout.outputs import RoutingShape


def find_routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The router of each layer that has experts, by the layer's index; transformers' own registry names their class.

    Raises ValueError, naming the model, for one without routers.
    """
    recorder = (model._can_record_outputs or {}).get("router_logits")
    kind = getattr(recorder, "target_class", recorder)
    names = {name: module for name, module in model.named_modules() if kind is not None and isinstance(module, kind)}
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no experts whose routing could be returned: "
            "leave out --enable-return-routed-experts"
        )
    return {next(int(part) for part in name.split(".") if part.isdigit()): module for name, module in names.items()}


class RoutedExperts:
    """The routing of every token in the cache: an array (slots, layers, experts per token) on the host.

    `probe` runs the model on any one token, after which the hooks know the routers' width. A dense layer of a model
    that has both kinds says 0 for each of its experts. `max_tokens` bounds the rows of one forward pass.
    """

    def __init__(
        self, model: PreTrainedModel, num_blocks: int, block_size: int, max_tokens: int, probe: Callable[[], Any]
    ) -> None:
        self._model_name = type(model).__name__
        self._block_size = block_size
        self._rows: Tensor | None = None  # (max_tokens, layers, k), on the device: a CUDA graph writes to fixed memory
        self._seen: dict[int, tuple[int, int]] = {}  # layer: (experts, k)
        for layer, router in find_routers(model).items():
            router.register_forward_hook(self._hook(layer))
        probe()
        widths, num_experts = {k for _, k in self._seen.values()}, max(n for n, _ in self._seen.values())
        if len(widths) > 1:
            raise ValueError(f"{self._model_name} has layers of {sorted(widths)} experts a token: they fit no array")
        self.shape = RoutingShape(
            num_layers=model.config.get_text_config().num_hidden_layers,
            num_experts_per_tok=widths.pop(),
            dtype="uint8" if num_experts <= 256 else "uint16",
        )
        row = (self.shape.num_layers, self.shape.num_experts_per_tok)
        # torch is short of uint16 kernels: int16 holds the same bits for fewer than 32,768 experts.
        kind = torch.uint8 if self.shape.dtype == "uint8" else torch.int16
        self._rows = torch.zeros(max_tokens, *row, dtype=kind, device=model.device)
        self._slots = np.zeros((num_blocks * block_size, *row), dtype=self.shape.dtype)

    def _hook(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(router: nn.Module, inputs: Any, outputs: Any) -> None:
            tensors = [t for t in outputs if isinstance(t, Tensor)] if isinstance(outputs, tuple) else []
            chosen = next((t for t in tensors if not t.is_floating_point()), None)
            if chosen is None:
                raise ValueError(
                    f"{self._model_name}: its {type(router).__name__} doesn't say which experts it chose; leave out "
                    "--enable-return-routed-experts"
                )
            chosen = chosen.reshape(-1, chosen.shape[-1])
            if self._rows is None:
                self._seen[layer] = (max(t.shape[-1] for t in tensors), chosen.shape[-1])
            else:
                self._rows[: len(chosen), layer].copy_(chosen)

        return keep

    def store(self, batch: RaggedBatch) -> None:
        """Keep what the forward pass of this batch has just left in the hooks' buffer."""
        assert self._rows is not None
        rows = self._rows[: batch.num_tokens].cpu().numpy().view(self.shape.dtype)
        self._slots[batch.slots(self._block_size)] = rows

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        blocks = self._slots.reshape(-1, self._block_size, *self._slots.shape[1:])
        for source, destination in pairs:
            blocks[destination] = blocks[source]

    def read(self, block_table: list[int], start: int, stop: int) -> bytes:
        """The rows of positions [start, stop) of the sequence that holds these blocks; see `RoutingShape`."""
        size = self._block_size
        return self._slots[[block_table[p // size] * size + p % size for p in range(start, stop)]].tobytes()
