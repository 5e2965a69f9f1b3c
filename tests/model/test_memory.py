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
from rollout.model.memory import GRAPH_BYTES, SAMPLER_COPIES, MemoryNeeds, ReceivedBytes
from tests.support import tiny_models

GIB = 1 << 30
NEEDS = MemoryNeeds(
    total=80 * GIB, free=60 * GIB, held=20 * GIB, staging=15 * GIB, landing=1 * GIB, step=2 * GIB, graphs=1 * GIB,
    pinned=18 * GIB, host_free=18 * GIB,
)  # fmt: skip


def test_the_share_is_of_the_whole_device_and_counts_what_is_held() -> None:
    assert NEEDS.left(0.9) == (72 - 20 - 16 - 2 - 1) * GIB
    assert NEEDS.left(0.5) == (40 - 20 - 16 - 2 - 1) * GIB
    assert NEEDS.blocks(GIB, least=1, utilization=0.9) == 33


def test_what_others_hold_is_not_given_away() -> None:
    assert replace(NEEDS, free=25 * GIB).left(0.9) == (25 - 16 - 2 - 1) * GIB


@pytest.mark.parametrize(
    ("changes", "blocks", "utilization", "helps", "does_not"),
    [
        ({}, 40, 0.9, ["--gpu-memory-utilization", "in_place", "--weight-staging host"], ["--enforce-eager"]),
        ({}, 45, 0.9, ["in_place", "--weight-staging host"], ["--gpu-memory-utilization"]),
        ({"host_free": 17 * GIB}, 45, 0.9, ["in_place"], ["--weight-staging host"]),
        ({"pinned": 0}, 50, 0.9, [], ["in_place", "--weight-staging host"]),  # what lands stays on the device
        ({"staging": 0}, 49, 0.9, ["--enforce-eager", "a smaller cache"], ["in_place", "host"]),
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
    assert [batch.query_lens.tolist() for batch in fake.computed] == [[48, 16], [1, 1, 1, 1]]
    sizes = [p.numel() * p.element_size() for p in fake.model.parameters()]
    assert needs == MemoryNeeds(
        total=8 * GIB, free=3 * GIB, held=GIB, staging=sum(sizes), landing=sum(sizes),
        step=600 + SAMPLER_COPIES * 4 * 4 * 256, graphs=600 + 2 * 4 * 256 + 3 * GRAPH_BYTES, pinned=needs.pinned,
        host_free=needs.host_free,
    )  # fmt: skip
    assert sum(sizes) <= needs.pinned < 2 * sum(sizes) < needs.host_free
    in_place = FakeRunner(3 * GIB, monkeypatch, weight_staging="in_place", enforce_eager=True)._memory_needs(SHAPES)
    assert (in_place.staging, in_place.landing, in_place.graphs) == (0, sum(sizes), 0)
    assert FakeRunner(3 * GIB, monkeypatch, weight_staging="host")._memory_needs(SHAPES).staging == 0


def test_a_host_too_small_for_pinned_staging_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 10))
    with pytest.raises(ValueError, match=r"host takes 0\.00 GiB of pinned host memory, 0\.00 GiB are left"):
        FakeRunner(3 * GIB, monkeypatch, weight_staging="host")._num_blocks(SHAPES)


def test_received_weights_land_one_at_a_time_or_in_a_packed_buffer() -> None:
    parameters = [torch.empty(count, dtype=torch.bfloat16, device="meta") for count in (3 * GIB, 10, GIB // 4)]
    received = ReceivedBytes.of(parameters, parameters, "full")
    assert (received.staging, received.landing) == (2 * sum(p.numel() for p in parameters), 6 * GIB)
    assert received.pinned == 8 * GIB + 32 + GIB // 2
    assert ReceivedBytes.of(parameters[1:], parameters[1:], "host").landing == GIB // 2 + 20


@pytest.mark.parametrize("asked", [{"num_gpu_blocks_override": 1 << 20}, {"kv_cache_memory_bytes": 1 << 40}])
def test_staging_is_counted_with_a_cache_that_was_asked_for(
    asked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FakeRunner(3 * GIB, monkeypatch, **dict.fromkeys(asked, 1 << 16))._num_blocks(SHAPES) > 1
    fake = FakeRunner(1 << 20, monkeypatch, **asked)
    with pytest.raises(ValueError, match=r"the cache that was asked for needs a KV cache of .* to receive weights"):
        fake._num_blocks(SHAPES)


def test_the_table_in_the_docs_is_what_the_runner_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.support.gpu_memory import table

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    assert table() in (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


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
