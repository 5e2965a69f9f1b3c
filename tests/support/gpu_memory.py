"""Which models fit which cards, by the runner's own arithmetic: as a script, it prints the table of docs/gpu.md.

Nothing is measured. The parameters are counted on the meta device; the memory of a step is traced through two of the
model's layers (what a layer leaves is freed before the next) by FakeTensorMode, with transformers' own modules.
"""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

from rollout.bench.gpu_speed import SHAPES as BENCHED
from rollout.config import EngineConfig, WeightStaging
from rollout.kernels.attention.base import RaggedBatch, serving
from rollout.model import runner
from rollout.model.load_check import _record_shapes, _Recorder
from rollout.model.rotary import keep_frequencies
from tests.support.fake_cuda import CUDA, cuda_model, fake_cuda

CARDS = (40, 80, 141)  # 10⁹ bytes
MODELS = {"Qwen3-8B": BENCHED["8B"], "Qwen3-30B-A3B": BENCHED["30B-A3B / 4"]}
LAYERS = {"Qwen3-8B": 36, "Qwen3-30B-A3B": 48}
STAGINGS: tuple[WeightStaging, ...] = ("full", "host", "in_place")
MAX_MODEL_LEN = 16384


class Peak(TorchDispatchMode):
    """The most bytes that tensors made in this mode have at once; a view is the tensor that it looks at."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return output

    def _free(self, cdata: int, nbytes: int) -> None:
        self._known.discard(cdata)
        self.now -= nbytes


class PlannedRunner(runner.ModelRunner):
    """The runner's arithmetic for a model that nobody loads; `shapes` are those of all its layers."""

    def __init__(self, kind: str, shape: dict[str, Any]) -> None:
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape), dtype=torch.bfloat16)
        self.device, self.dtype, self.vocab_size = torch.device("cuda"), torch.bfloat16, shape["vocab_size"]
        self.max_model_len = MAX_MODEL_LEN
        self.mode = fake_cuda()
        with self.mode:
            self._traced = cuda_model(CONFIG_MAPPING[kind](**{**shape, "num_hidden_layers": 2}))
        with self.mode, torch.inference_mode():
            keep_frequencies(self._traced)
            two = _record_shapes(self._traced, torch.zeros(2, dtype=torch.int64, device=CUDA), 2)
        self.shapes = two[:1] * shape["num_hidden_layers"]
        self._peaks: dict[tuple[int, int], int] = {}

    def traced(self, tokens: int, rows: int) -> int:
        """The memory of a forward pass over so many tokens, of which so many go through the head."""
        if (tokens, rows) not in self._peaks:
            with self.mode, torch.inference_mode():
                ids, head = (torch.zeros(n, dtype=torch.int64, device=CUDA) for n in (tokens, rows))
                with Peak(self._traced) as peak, serving(_Recorder(torch.bfloat16, CUDA)):
                    self._traced(input_ids=ids[None], position_ids=ids[None], use_cache=False, logits_to_keep=head)
            self._peaks[tokens, rows] = peak.peak
        return self._peaks[tokens, rows]

    def forward(self, token_ids: Any, batch: RaggedBatch, head_rows: Any, drawn: Any = None) -> Any:
        return self.traced(len(token_ids), len(head_rows))

    def _backend(self, *args: Any) -> Any:
        return None

    def fit(self, card: int, staging: WeightStaging) -> str:
        """How many tokens the KV cache holds on a card of so many 10⁹ bytes, or what a refusal says would help."""
        self.config = EngineConfig(weight_staging=staging)
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        self._free_at_start = card * 10**9
        free = self._free_at_start - weights
        if free < 0:
            return "too small for the weights"
        with (
            mock.patch.object(torch.cuda, "mem_get_info", return_value=(free, card * 10**9)),
            mock.patch.object(torch.cuda, "empty_cache"),
            mock.patch.object(runner, "peak_bytes", lambda device, work: work()),
            mock.patch.object(psutil, "virtual_memory", return_value=mock.Mock(available=1 << 40)),
        ):
            needs = self._memory_needs(self.shapes)
        block_bytes = self.config.block_size * sum(shape.bytes_per_token(self.dtype) for shape in self.shapes)
        least = 1 + -(-MAX_MODEL_LEN // self.config.block_size)
        try:
            blocks = needs.blocks(block_bytes, least, self.config.gpu_memory_utilization)
        except ValueError as error:
            return "refused; would help: " + str(error).partition("What would help: ")[2]
        return f"{float(f'{(blocks - 1) * self.config.block_size:.2g}') / 1000:g}k tokens"


def table() -> str:
    """The rows of the table, as Markdown."""
    lines = []
    for name, (kind, shape) in MODELS.items():
        planned = PlannedRunner(kind, {**shape, "num_hidden_layers": LAYERS[name]})
        for card in CARDS:
            lines.append(f"| {name} | {card} GB | {' | '.join(planned.fit(card, staging) for staging in STAGINGS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    print(table())
