"""What is fused for GPUs, by Triton's interpreter: the same logits as transformers', and nothing that differs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

from rollout.kernels import norms, products, triton_layers
from rollout.kernels.attention import splits
from rollout.kernels.attention.base import ATTENTION_NAME, AttentionBackend, RaggedBatch, serving
from rollout.kernels.attention.cuda import TritonAttention
from rollout.model import fused_cuda, invariance, joined
from rollout.model.load_check import _in_parts, _record_shapes, plug_in_attention
from rollout.model.parameters import ModelParameters
from tests.model.test_loader import COMMON
from tests.support import tiny_models
from tests.support.triton_launches import (
    LaunchRecorder,
    assert_compiles,
    compile_launch,
    interpreted_bfloat16,
    ordered_products,
)
from trainer_bridge.score import exact, exact_cuda

DEVICE = torch.device("cpu")
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 48, "head_dim": 16}
CONFIGS = {
    **{
        name: CONFIG_MAPPING[name](**{**tiny_models._COMMON, **tiny_models._SPECIFIC[name], **SMALL})
        for name in ("llama", "qwen2", "qwen3")
    },
    "gemma3_text": CONFIG_MAPPING["gemma3_text"](
        **{**tiny_models._COMMON, **tiny_models._GEMMA, **SMALL, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "granite": CONFIG_MAPPING["granite"](**{**COMMON, **SMALL, "residual_multiplier": 0.5}),
    "glm4": CONFIG_MAPPING["glm4"](**{**COMMON, **SMALL}),
}
EVERYTHING = {"joined products": 4, "norms": 5, "sums": 2, "gates": 2, "attention layers": 2}
FUSED = {
    "llama": EVERYTHING,
    "qwen2": EVERYTHING,
    "qwen3": {**EVERYTHING, "norms": 9},
    "gemma3_text": {**EVERYTHING, "norms": 13, "sums": 0},  # its layers have norms behind attention and MLP as well
    "granite": {**EVERYTHING, "sums": 0},  # it scales what is added
    "glm4": {"joined products": 2, "norms": 9, "sums": 0, "gates": 0, "attention layers": 0},  # turns neighbours
}


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype, attn_implementation="eager").eval()
    for parameter in model.requires_grad_(False).parameters():
        spread = 0.2 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5
        parameter.add_((spread * torch.randn(parameter.shape)).to(dtype))
    return model


def backend(model: PreTrainedModel, shapes: list, blocks: int) -> AttentionBackend:
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return TritonAttention(shapes, blocks, 16, model.dtype, DEVICE, **limits)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen2", torch.float32), ("gemma3_text", torch.float32), ("qwen3", torch.bfloat16)],
)
@torch.no_grad()
def test_a_fused_model_says_what_it_said(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.model.load_check.LENGTHS", (7, 4))
    monkeypatch.setattr("rollout.model.load_check.LayerCheck", NoLayerCheck)  # slow here, and no part of this test
    model = build(name, dtype)
    with interpreted_bfloat16() if dtype is torch.bfloat16 else nullcontext():
        shapes, stock = plug_in_attention(model, lambda shapes, *_: backend(model, shapes, 3), 16, 64)
        fused = fused_cuda.fuse(ModelParameters(model)).fused
        logits = _in_parts(model, lambda blocks: backend(model, shapes, blocks), 16, stock.sequences)
    assert fused == FUSED[name]
    for mine, theirs in zip(logits, stock.logits, strict=True):
        tolerance = 1e-4 if dtype is torch.float32 else 0.1
        torch.testing.assert_close(mine, theirs, atol=tolerance * theirs.std().item(), rtol=0)


@pytest.mark.parametrize("name", ["granite", "glm4"])
def test_what_differs_is_left_alone(name: str) -> None:
    model = build(name)
    model.set_attn_implementation(ATTENTION_NAME)
    assert fused_cuda.fuse(ModelParameters(model)).fused == FUSED[name]


class NoLayerCheck:
    def __init__(self, model: PreTrainedModel) -> None:
        self.stock, self.errors, self.parts = True, {0: 0.0}, []

    def watching(self) -> Any:
        return nullcontext()


@torch.no_grad()
def test_joined_weights_follow_commits_and_moves() -> None:
    model = build("qwen2")
    parameters = ModelParameters(model, "copy")
    mlp, x = model.model.layers[1].mlp, torch.randn(1, 3, 64)
    expected = mlp(x)
    weights = joined.JoinedWeights(parameters)
    q = model.model.layers[0].self_attn.q_proj
    assert torch.allclose(mlp(x), expected, atol=1e-6)  # a BLAS may sum in another order where a product is wider
    staged = parameters.new_set()
    for name, tensor in parameters.live.tensors.items():
        staged.tensors[name].copy_(2 * tensor)
    address = q.weight.data_ptr()
    parameters.commit(staged)
    doubled = nn.functional.linear(x, mlp.gate_proj.weight)
    assert torch.allclose(mlp.gate_proj(x), doubled)
    assert torch.allclose(mlp.up_proj(x), nn.functional.linear(x, mlp.up_proj.weight))
    assert q.weight.data_ptr() == address
    # Elsewhere, as after a sleep: right at once, and one product again once they are packed.
    for name, slot in parameters.slots.items():
        slot.data = parameters.live.tensors[name] = slot.data.clone()
    assert joined._together([mlp.gate_proj.weight, mlp.up_proj.weight]) is None
    assert torch.allclose(mlp.gate_proj(x), doubled)
    weights.pack(parameters.live)
    assert joined._together([mlp.gate_proj.weight, mlp.up_proj.weight]) is not None
    assert torch.allclose(mlp.gate_proj(x), doubled)
    assert all(slot.data_ptr() == parameters.live.tensors[name].data_ptr() for name, slot in parameters.slots.items())


def test_what_a_joined_product_computed_goes_with_its_layer() -> None:
    model = build("llama")
    layer = model.model.layers[1].mlp
    joined.JoinedWeights(ModelParameters(model, "copy"))
    gate, up = layer.gate_proj(x := torch.randn(1, 3, 64)), layer.up_proj(x)
    product = StorageWeakRef(gate.untyped_storage())
    assert up.untyped_storage().data_ptr() == gate.untyped_storage().data_ptr()
    del gate, up
    assert product.expired()


def test_a_norm_with_another_arithmetic_is_left_alone() -> None:
    class CubedRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight**3 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    assert norms.norm_kind(CubedRMSNorm(), triton_layers.normalize) is None


@pytest.fixture
def exact_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's CPU counts as a GPU; splits are short; a product's row doesn't depend on its place among others.

    That is what a GPU shows when it starts. Of a CPU's BLAS it need not hold: with MKL and AVX-512 it doesn't.
    """

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = (x[..., None, :] * weight).sum(-1)
        return product if bias is None else product + bias

    monkeypatch.setattr(nn.functional, "linear", linear)
    monkeypatch.setattr(exact_cuda, "serves", lambda device: True)
    monkeypatch.setattr(splits, "SPLIT_SIZE", 16)
    with ordered_products():
        yield


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # rows of padding hold anything
@pytest.mark.usefixtures("exact_on_cuda")
def test_exact_tokens_have_the_same_bits_in_every_company_and_in_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIGS["qwen3"], "num_hidden_layers", 1)
    served, trained, stock = (build("qwen3") for _ in range(3))
    served.set_attn_implementation(ATTENTION_NAME)
    with torch.inference_mode():
        shapes = _record_shapes(served, torch.arange(2), 1)
        fused_cuda.make_invariant(ModelParameters(served))
    monkeypatch.setattr(invariance, "LENGTHS", (21, 3))
    invariance.prove_batch_invariance(served, lambda blocks: backend(served, shapes, blocks), 16)
    ids = torch.randint(64, (23,), generator=torch.Generator().manual_seed(3))
    table, rows = [[1, 2]], []
    cache = backend(served, shapes, 3)
    for start, end in ((0, 15), (15, 21), (21, 22), (22, 23)):
        cache.prepare(RaggedBatch([0, end - start], [end], table))
        with serving(cache), torch.inference_mode():
            positions = torch.arange(start, end)[None]
            rows.append(served(input_ids=ids[None, start:end], position_ids=positions, use_cache=False).logits[0])
    logits = exact.install(trained.requires_grad_(True))(input_ids=ids[None]).logits[0]
    assert torch.equal(torch.cat(rows), logits)
    # Gradients are those of transformers' own operations.
    expected = stock.requires_grad_(True)(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for output in (logits, expected):
        (output * torch.linspace(-1, 1, 64)).sum().backward()
    for (name, mine), theirs in zip(trained.named_parameters(), stock.parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs.grad is not None
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(mine.grad, theirs.grad, atol=2e-4 * scale, rtol=0)


def test_a_product_has_the_same_shape_for_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    linear = nn.functional.linear

    def recorded(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return linear(x, *rest)

    monkeypatch.setattr(nn.functional, "linear", recorded)
    weight, bias = torch.randn(24, 32), torch.randn(24)
    for rows in (1, 255, 256, 257, 700):
        x = torch.randn(1, rows, 32)
        output = products.multiply_in_blocks(x, weight, bias)
        torch.testing.assert_close(output, x @ weight.T + bias)
    assert set(shapes) == {(products.BLOCK_ROWS, 32)}
    assert len(shapes) == 1 + 1 + 1 + 2 + 3


@pytest.mark.parametrize("capability", [90, *(pytest.param(sm, marks=pytest.mark.long) for sm in (80, 100))])
def test_the_kernels_compile_for_gpus(capability: int, tmp_path: Path) -> None:
    assert_compiles(__name__, capability, tmp_path)


def compile_kernels(capability: int) -> None:
    """Of Qwen3-8B's shapes."""
    kept: list[Any] = []
    for name in ("_normalize", "_gate", "_write_heads"):
        setattr(triton_layers, name, LaunchRecorder(getattr(triton_layers, name), kept))

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    kind, x, weight = norms.NormKind(1e-6, 0.0, True), zeros(1, 4, 4096), zeros(4096)
    triton_layers.normalize(x, weight, kind)
    triton_layers.add_and_normalize(x, x, weight, kind)
    for gelu in (False, True):
        triton_layers.gate(*zeros(1, 4, 2 * 12288).split(12288, -1), gelu=gelu)
    norm = norms.HeadNorm(nn.RMSNorm(128, dtype=torch.bfloat16), kind)
    query, key, value = zeros(4, 48, 128).transpose(0, 1).split([32, 8, 8])
    caches, slots = [zeros(3, 16, 8, 128) for _ in range(2)], torch.zeros(4, dtype=torch.int64)
    for deferred in (norms.Deferred(norm, norm, zeros(4, 128), zeros(4, 128)), norms.Deferred()):
        triton_layers.write_heads(query, key, value, *caches, slots, deferred)
    assert len(kept) == 6
    for launch in kept:
        assert compile_launch(*launch, capability).metadata.shared <= 48 * 1024
