"""What is left for the KV cache on a GPU, in numbers; torch.cuda is a stand-in where the runner asks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.config import EngineConfig
from rollout.kernels.attention.base import LayerShape, RaggedBatch
from rollout.model import loader, runner
from rollout.model.memory import GRAPH_BYTES, SAMPLER_COPIES, MemoryNeeds
from tests.support import tiny_models

GIB = 1 << 30
NEEDS = MemoryNeeds(total=80 * GIB, free=60 * GIB, held=20 * GIB, staging=16 * GIB, step=2 * GIB, graphs=1 * GIB)


def test_the_share_is_of_the_whole_device_and_counts_what_is_held() -> None:
    assert NEEDS.left(0.9) == (72 - 20 - 16 - 2 - 1) * GIB
    assert NEEDS.left(0.5) == (40 - 20 - 16 - 2 - 1) * GIB
    assert NEEDS.blocks(GIB, least=1, utilization=0.9) == 33


def test_what_others_hold_is_not_given_away() -> None:
    assert replace(NEEDS, free=25 * GIB).left(0.9) == (25 - 16 - 2 - 1) * GIB


@pytest.mark.parametrize(
    ("changes", "blocks", "utilization", "helps", "does_not"),
    [
        ({}, 40, 0.9, ["--gpu-memory-utilization", "in_place"], ["--enforce-eager"]),
        ({}, 45, 0.9, ["in_place"], ["--gpu-memory-utilization"]),
        ({"staging": 0}, 50, 0.9, ["--enforce-eager", "a smaller cache"], ["in_place"]),
        ({"free": 0, "held": 80 * GIB, "staging": 0}, 900, 0.9, ["a larger device"], ["in_place", "tensor-parallel"]),
    ],
)
def test_a_refusal_names_the_remedies_that_would_work(
    changes: dict[str, int], blocks: int, utilization: float, helps: list[str], does_not: list[str]
) -> None:
    with pytest.raises(ValueError, match=f"needs a KV cache of {blocks}.00 GiB") as caught:
        replace(NEEDS, **changes).blocks(GIB, least=blocks, utilization=utilization)
    remedies = str(caught.value).split("What would help: ")[1]
    assert [text for text in helps if text not in remedies] == []
    assert [text for text in does_not if text in remedies] == []


class FakeRunner(runner.ModelRunner):
    """The runner's arithmetic over a model that says it is on a GPU of `free` bytes and computes nothing."""

    def __init__(self, free: int, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, block_size=16, **config)
        self.model = tiny_models.model("llama")
        self.device, self.dtype, self.vocab_size = torch.device("cuda"), torch.bfloat16, 256
        self.max_model_len, self._free_at_start = 48, free + GIB
        self.computed: list[RaggedBatch] = []
        cuda = {"mem_get_info": lambda device: (free, 8 * GIB), "empty_cache": lambda: None, "memory_allocated": int}
        cuda |= {"max_memory_allocated": lambda device: 1000, "memory_allocated": lambda device: 400}
        cuda |= {"reset_peak_memory_stats": lambda device: None, "synchronize": lambda device: None}
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def _backend(self, *args: Any) -> Any:
        return SimpleNamespace()

    def forward(self, token_ids: list[int], batch: RaggedBatch, head_rows: list[int]) -> Any:
        assert len(token_ids) == batch.num_tokens == head_rows[-1] + 1
        self.computed.append(batch)


SHAPES = [LayerShape(2, 16, 16)]
BLOCK_BYTES = 16 * 2 * 32 * 2


def test_a_step_of_the_most_tokens_is_tried_and_staging_and_graphs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRunner(3 * GIB, monkeypatch)
    needs = fake._memory_needs(SHAPES)
    assert [batch.query_lens for batch in fake.computed] == [[48, 16], [1, 1, 1, 1]]
    parameters = sum(p.numel() * p.element_size() for p in fake.model.parameters())
    assert needs == MemoryNeeds(
        total=8 * GIB, free=3 * GIB, held=GIB, staging=parameters, step=600 + SAMPLER_COPIES * 4 * 4 * 256,
        graphs=600 + 2 * 4 * 256 + 3 * GRAPH_BYTES,
    )  # fmt: skip
    in_place = FakeRunner(3 * GIB, monkeypatch, weight_staging="in_place", enforce_eager=True)._memory_needs(SHAPES)
    assert (in_place.staging, in_place.graphs) == (0, 0)


@pytest.mark.parametrize("asked", [{"num_gpu_blocks_override": 1 << 20}, {"kv_cache_memory_bytes": 1 << 40}])
def test_staging_is_counted_with_a_cache_that_was_asked_for(
    asked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FakeRunner(3 * GIB, monkeypatch, **dict.fromkeys(asked, 1 << 16))._num_blocks(SHAPES) > 1
    fake = FakeRunner(1 << 20, monkeypatch, **asked)
    with pytest.raises(ValueError, match=r"the cache that was asked for needs a KV cache of .* to receive weights"):
        fake._num_blocks(SHAPES)


def test_weights_go_straight_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.build("llama", tmp_path)
    options: dict[str, Any] = {}

    class Loaded(Exception):
        pass

    def from_pretrained(path: str, **given: Any) -> None:
        options.update(given)
        raise Loaded

    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(loader, "resolve_device", lambda config: torch.device("cuda"))
    with pytest.raises(Loaded):
        loader.load_model(EngineConfig(model=str(tmp_path)))
    assert options["device_map"] == torch.device("cuda")
