"""What a CUDA device would be asked to do, traced without one: in what a graph captures no value is read, no device is
mixed, and nothing falls to the host, for every architecture that is served."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import PretrainedConfig
from transformers.models.auto import CONFIG_MAPPING

from rollout.config import EngineConfig
from rollout.kernels import norms, triton_layers
from rollout.kernels.attention import splits, triton_paged
from rollout.kernels.attention.base import AttentionBackend, AttentionParams, RaggedBatch, serving
from rollout.kernels.attention.cuda import TritonAttention
from rollout.kernels.norms import NormKind
from rollout.model import fused_cuda, loader
from rollout.model.load_check import _record_shapes
from rollout.model.parameters import ModelParameters
from rollout.model.rotary import keep_frequencies
from rollout.model.routed_experts import RoutedExperts
from rollout.weights.store import WeightStore
from tests.model.test_loader import COMMON, MOE, SERVED
from tests.model.test_rotary import CASES, SIZES
from tests.support import tiny_models
from tests.support.fake_cuda import CUDA, Launches, cuda_model, fake_cuda
from tests.support.triton_launches import Launch, LaunchRecorder

triton_experts = pytest.importorskip("rollout.kernels.triton_experts", exc_type=ImportError)

ROWS = 64
ARCHITECTURES: dict[str, PretrainedConfig] = {
    **{name: tiny_models.config(name) for name in tiny_models.NAMES},
    **{name: CONFIG_MAPPING[name](**config) for name, config in SERVED.items()},
    "llama/dynamic": CONFIG_MAPPING["llama"](**{**COMMON, **SIZES, "rope_parameters": CASES["dynamic"][1]}),
    "phi3/longrope": CONFIG_MAPPING["phi3"](
        **{**COMMON, **SIZES, "original_max_position_embeddings": 32, "rope_parameters": CASES["longrope"][1]}
    ),
    "glm4": CONFIG_MAPPING["glm4"](**{**COMMON, "head_dim": 16}),
    "granite": CONFIG_MAPPING["granite"](**COMMON),
    "smollm3": CONFIG_MAPPING["smollm3"](**COMMON),
    "qwen2_moe": CONFIG_MAPPING["qwen2_moe"](
        **{**MOE, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    ),
}


class TracedAttention(TritonAttention):
    """TritonAttention without its kernel launches, which FakeTensorMode can't trace, and with a plan that is there."""

    def __init__(self, shapes: list, num_blocks: int, rows: int) -> None:
        AttentionBackend.__init__(self, shapes, num_blocks, 16, torch.bfloat16, CUDA)
        self.step = SimpleNamespace(slots=torch.zeros(rows, dtype=torch.int64, device=CUDA))  # type: ignore[assignment]
        self._kernels, self._layers = triton_paged, triton_layers
        self.attended: list[tuple[torch.dtype, torch.device]] = []

    def launch_kernels(self) -> None:
        """Have attention launch its kernels as well: they are to be replaced before."""
        sizes = ((ROWS + 1,), (ROWS,), (ROWS, 64), (ROWS,), (ROWS,), (ROWS,))
        ints = [torch.zeros(size, dtype=torch.int32, device=CUDA) for size in sizes]
        self._fitting = {}
        self._plan = splits.PagedPlan(
            *ints, num_places=64, split_size=256, max_splits=4, has_decodes=True, has_chunks=False
        )

    def prepare(self, batch: RaggedBatch) -> None:
        raise AssertionError("a plan is no part of a capture")

    def _attend(self, layer: int, query: Tensor, params: AttentionParams) -> Tensor:
        if hasattr(self, "_plan"):
            return super()._attend(layer, query, params)
        assert query.stride(-1) == 1
        assert params.sinks is None or params.sinks.device == CUDA
        self.attended.append((query.dtype, query.device))
        return query.new_empty(query.shape[1], query.shape[0], self.layers[layer].value_dim)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_a_graph_captures_stays_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    config = ARCHITECTURES[name]
    layers = config.get_text_config().num_hidden_layers
    mode = fake_cuda()
    with mode:
        model = cuda_model(config)
    with mode, torch.inference_mode():
        ids, positions = (torch.zeros(1, ROWS, dtype=torch.int64, device=CUDA) for _ in range(2))
        keep_frequencies(model)
        shapes = _record_shapes(model, ids[0, :2], layers)
        backend = TracedAttention(shapes, 8, ROWS)

        def forward(rows: Tensor) -> Tensor:
            with serving(backend):
                return model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows).logits[0]

        with monkeypatch.context() as patch:
            Launches().replace_kernels(patch, triton_layers)
            forward(torch.arange(ROWS, device=CUDA))  # what is made once is made now, as in a warm-up
        backend.attended.clear()
        with Launches() as launches, monkeypatch.context() as patch:
            launches.replace_kernels(patch, triton_layers)
            logits = forward(torch.arange(ROWS, device=CUDA))
        assert logits.shape == (ROWS, config.get_text_config().vocab_size)
        assert logits.device == CUDA
        assert backend.attended == [(torch.bfloat16, CUDA)] * layers
        assert launches.on_host == []
        assert sum(launches.counts.values()) > 10 * layers


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_where_torch_has_no_grouped_product_launch_three_kernels_a_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that FakeTensorMode can't trace are recorded; what routers chose is copied on the device."""
    launches: list[Launch] = []
    for kernel in ("_sort_by_expert", "_grouped_product"):
        monkeypatch.setattr(triton_experts, kernel, LaunchRecorder(getattr(triton_experts, kernel), launches))
    Launches().replace_kernels(monkeypatch, triton_layers)
    monkeypatch.setattr(loader, "resolve_device", lambda config: CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    config = ARCHITECTURES[name]
    mode = fake_cuda()
    with mode:
        model = cuda_model(config)
    with mode, torch.inference_mode():
        experts = loader.experts_implementation(model, EngineConfig())
        assert experts is not None
        model.set_experts_implementation(experts)
        keep_frequencies(model)
        ids = torch.zeros(1, ROWS, dtype=torch.int64, device=CUDA)
        backend = TracedAttention(_record_shapes(model, ids[0, :2], config.num_hidden_layers), 8, ROWS)

        def forward() -> Tensor:
            with serving(backend):
                return model(input_ids=ids, position_ids=ids, use_cache=False).logits

        routing = RoutedExperts(model, 8, 16, ROWS, probe=forward)
        launches.clear()
        with Launches() as traced:
            assert forward().device == CUDA
        assert traced.on_host == []
        assert routing._rows is not None
        assert routing._rows.shape == (ROWS, config.num_hidden_layers, config.num_experts_per_tok)
        assert len(launches) == 3 * config.num_hidden_layers
        tensors = [value for _, arguments, _ in launches for value in arguments if isinstance(value, Tensor)]
        assert {tensor.device for tensor in tensors} == {CUDA}


PER_LAYER = {
    # sum and norm, qkv, heads, attention and merge, output, sum and norm, gate and up, gate, down
    "llama": 10,
    "qwen2": 10,
    "qwen3": 10,
    "mistral": 10,
    "gemma3_text": 14,  # norms behind attention and MLP, whose sums are launches of their own
}
BESIDE = {"gemma3_text": 26}  # two kinds of rotation
"""Launches of a step beside its layers, 14 by default: embeddings, rotary factors, last norm, rows of the head."""


@pytest.mark.parametrize("name", PER_LAYER)
def test_a_layer_takes_few_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the replacements agree is tried elsewhere (test_fused_cuda.py): here no tensor has values."""
    kind = NormKind(1e-6, 1.0, False) if "gemma" in name else NormKind(1e-6, 0.0, True)
    monkeypatch.setattr(norms, "norm_kind", lambda module, _: kind if "RMSNorm" in type(module).__name__ else None)
    monkeypatch.setattr(fused_cuda, "close", lambda mine, theirs: True)
    counts = []
    for layers in (2, 4):
        config = copy.deepcopy(ARCHITECTURES[name])
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = (config.layer_types * 2)[:layers]
        mode, launches = fake_cuda(), Launches()
        with monkeypatch.context() as patch, mode:
            launches.replace_kernels(patch, triton_layers, triton_paged)
            model = cuda_model(config)
            keep_frequencies(model)
            fused_cuda.fuse(ModelParameters(model))
            with torch.inference_mode():
                ids, positions = (torch.zeros(1, ROWS, dtype=torch.int64, device=CUDA) for _ in range(2))
                backend = TracedAttention(_record_shapes(model, ids[0, :2], layers), 8, ROWS)
                backend.launch_kernels()
                rows = torch.arange(ROWS, device=CUDA)
                for _ in range(2):  # what is made once is made in the first
                    launches.counts.clear()
                    with launches, serving(backend):
                        model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
        assert launches.on_host == []
        counts.append(sum(launches.counts.values()))
    assert (counts[1] - counts[0]) / 2 == PER_LAYER[name]
    assert counts[0] - 2 * PER_LAYER[name] <= BESIDE.get(name, 14)


def test_a_value_that_is_read_and_a_device_that_is_mixed_are_seen() -> None:
    with fake_cuda(), torch.inference_mode():
        x = torch.zeros(3, device="cuda")
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        with pytest.raises(RuntimeError, match="device"):
            x + torch.zeros(3)
        with Launches() as launches:
            torch.ones(3) * 2
        assert launches.on_host == ["ones", "mul"]


def test_a_commit_is_a_copy_on_the_device() -> None:
    with fake_cuda(), torch.no_grad():
        parameters = ModelParameters(cuda_model(tiny_models.config("qwen3")))
        staged = parameters.new_set()
        with Launches() as launches:
            parameters.commit(staged)
        assert launches.counts == {"_foreach_copy_": 1}
        assert launches.on_host == []


def test_what_is_put_away_comes_back_to_the_device() -> None:
    with fake_cuda(), torch.no_grad():
        parameters = ModelParameters(cuda_model(tiny_models.config("qwen3")))
        shapes = {name: tensor.shape for name, tensor in parameters.live.tensors.items()}

        def held() -> set[str]:
            assert {name: tensor.shape for name, tensor in parameters.live.tensors.items()} == shapes
            return {tensor.device.type for tensor in parameters.live.tensors.values()}

        for keep, where in ((True, "cpu"), (False, "meta")):
            parameters.put_away(keep=keep)
            assert held() == {where}
            assert {(slot.device.type, slot.numel()) for slot in parameters.slots.values()} == {("cuda", 0)}
            parameters.bring_back()
            assert held() == {"cuda"}
            for name, slot in parameters.slots.items():
                assert (slot.device, slot.shape) == (CUDA, shapes[name])


def test_staging_on_the_host_is_pinned_and_copied_to_the_device_by_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """FakeTensorMode pins nothing: what was asked for is noted, and left out."""
    stock, pinned = torch.empty_like, []

    def empty_like(tensor: Tensor, *, pin_memory: bool = False, **options: object) -> Tensor:
        pinned.append(pin_memory)
        return stock(tensor, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty_like", empty_like)
    with fake_cuda(), torch.no_grad():
        store = WeightStore(ModelParameters(cuda_model(tiny_models.config("qwen3"))), weight_staging="host")
        staging = store.stage()
        tensors = staging.into.tensors
        assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
        assert pinned == [True] * len(tensors)
        (item,) = staging.resolve(["model.norm.weight"], ["bfloat16"], [[64]])
        assert staging.direct(item, CUDA) is None
        assert staging.direct(item, torch.device("cpu")) is not None
        staging.place(item, torch.empty(64, dtype=torch.bfloat16, device=CUDA))
        live = store.parameters.live
        assert store.parameters.commit(staging.into) is staging.into
        assert store.parameters.live is live
        assert {tensor.device.type for tensor in live.tensors.values()} == {"cuda"}
