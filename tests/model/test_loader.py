"""Which models load, in which dtype, and which are refused by name; those that load are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations.moe import ExpertsInterface
from transformers.models.auto import CONFIG_MAPPING

from rollout.config import EngineConfig
from rollout.kernels.attention.base import AttentionParams
from rollout.kernels.attention.torch_paged import TorchAttention
from rollout.model import loader, model_config, runner
from rollout.model.load_check import UnsupportedModelError
from rollout.model.loader import eos_token_ids, load_model
from rollout.model.model_config import resolve_device, resolve_dtype
from tests.support import tiny_models
from tests.support.engine_utils import assert_exact, engine, ids, prompt, request, run
from tests.support.model_lab import plug_in

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MOE = {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA = {
    **COMMON,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 256,
}
SERVED: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},  # learned positions
    "phi": COMMON,  # a rotary embedding of a part of each head
    "olmo2": COMMON,  # norms after attention
    "gpt_oss": {**MOE, "head_dim": 16, "sliding_window": 12, "rope_parameters": {"rope_type": "default"}},  # sinks
    "deepseek_v3": {  # values narrower than keys
        **COMMON,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gemma3n_text": {  # its last layer reads the keys and values of another
        **GEMMA,
        "num_kv_shared_layers": 1,
        "intermediate_size": [96] * 4,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": GEMMA,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2}, "MambaForCausalLM .*linear_attention"),
    "llama4_text": ({**MOE, "head_dim": 16, "intermediate_size_mlp": 64}, "Llama4ForCausalLM .*chunked_attention"),
    "bloom": ({"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "BloomForCausalLM: 0 of 2 layers"),
    "diffllama": (COMMON, r"DiffLlamaForCausalLM: 2 of 2 layers .*\(in 4 calls\)"),
}


@torch.no_grad()
def random_model(name: str, config: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**config), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn(parameter.shape))
        else:
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return model.eval()


@pytest.mark.parametrize("name", SERVED)
def test_another_architecture_is_exact(name: str, tmp_path: Path) -> None:
    random_model(name, SERVED[name]).save_pretrained(tmp_path)
    e = engine(tmp_path, max_num_batched_tokens=16)
    requests = [request("long", prompt(30), n=2), request("short", prompt(7), max_tokens=12)]
    outputs = run(e, requests)
    assert e.stats["partial_chunks"] > 0
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert_exact(reference.eval(), requests, outputs)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_attends_otherwise_is_refused_by_name(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message):
        plug_in(random_model(name, config))


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "exact", "expected"),
    [
        ("cuda", (9, 0), "bfloat16", False, None),  # torch's own grouped product runs on the device
        ("cuda", (10, 3), "bfloat16", False, None),
        ("cuda", (9, 0), "float32", False, "rollout"),
        ("cuda", (8, 6), "bfloat16", False, "rollout"),
        ("cuda", (12, 0), "bfloat16", False, "rollout"),
        ("cuda", (8, 0), "bfloat16", True, "batched_mm"),
        ("cpu", (8, 0), "float32", False, None),
    ],
)
def test_experts_are_ours_where_torch_would_loop_over_them_on_the_host(
    device: str, capability: tuple[int, int], dtype: str, exact: bool, expected: str | None, monkeypatch: Any
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(loader, "resolve_device", lambda config: torch.device(device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    config = EngineConfig(batch_invariant=exact)
    moe = tiny_models.model("mixtral").to(getattr(torch, dtype))
    assert loader.experts_implementation(moe, config) == expected
    assert loader.experts_implementation(tiny_models.model("llama"), config) is None


@pytest.fixture
def interpreted_experts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Engines compute experts by our kernels, as on a GPU that torch has no grouped product for."""
    triton_experts = pytest.importorskip("rollout.kernels.triton_experts", exc_type=ImportError)
    ExpertsInterface.register(triton_experts.EXPERTS_NAME, triton_experts.experts_forward)
    monkeypatch.setattr(runner, "experts_implementation", lambda *args: triton_experts.EXPERTS_NAME)
    return triton_experts


ONE_LAYER = {**MOE, "num_hidden_layers": 1}  # the interpreter is slow


def test_an_engine_whose_experts_are_our_kernels_is_exact(interpreted_experts: Any, tmp_path: Path) -> None:
    model = random_model("mixtral", ONE_LAYER)
    model.save_pretrained(tmp_path)
    e = engine(tmp_path, enable_return_routed_experts=True)
    requests = [request("chunk", prompt(9), max_tokens=2), request("one", prompt(3), max_tokens=1)]
    outputs = run(e, requests)
    assert_exact(model, requests, outputs)
    routed = b"".join(output.routed_experts or b"" for output in outputs["chunk", 0])
    token_ids = torch.tensor([prompt(9) + ids(outputs["chunk", 0])[:-1]])
    (logits,) = model(token_ids, output_router_logits=True).router_logits
    assert list(routed) == logits.topk(2).indices.flatten().tolist()


def test_experts_that_differ_a_little_are_found_out_at_load(
    interpreted_experts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = interpreted_experts.grouped_product
    monkeypatch.setattr(interpreted_experts, "grouped_product", lambda *args, **options: 1.01 * stock(*args, **options))
    random_model("mixtral", ONE_LAYER).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="1 of 1 layers differ"):
        engine(tmp_path)


def served_model(name: str) -> PreTrainedModel:
    return tiny_models.model(name) if name in tiny_models.NAMES else random_model(name, SERVED[name])


def careless(change: Callable[[AttentionParams], AttentionParams]) -> type[TorchAttention]:
    """An attention that computes with other parameters than it is given."""

    class Careless(TorchAttention):
        def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
            return super().forward(layer, query, key, value, change(params))

    return Careless


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", lambda params: replace(params, window=None)),
        ("mistral", lambda params: replace(params, window=params.window + 1)),
        ("gemma2", lambda params: replace(params, softcap=None)),
        ("gemma2", lambda params: replace(params, scaling=1.1 * params.scaling)),
        ("gpt_oss", lambda params: replace(params, sinks=None)),
    ],
)
def test_an_attention_that_differs_a_little_is_found_out_in_models_of_any_size_and_dtype(
    name: str, change: Callable[[AttentionParams], AttentionParams], dtype: torch.dtype
) -> None:
    plug_in(served_model(name).to(dtype))
    with pytest.raises(UnsupportedModelError, match=r"ForCausalLM: through rollout's attention \d of \d layers differ"):
        plug_in(served_model(name).to(dtype), careless(change))


def test_a_fault_that_only_single_tokens_show_is_found_out() -> None:
    class Forgetful(TorchAttention):
        def _decode(self, *args: Any) -> Tensor:
            return 0.99 * super()._decode(*args)

    with pytest.raises(UnsupportedModelError, match="3 of 3 layers differ"):
        plug_in(tiny_models.model("mixtral"), Forgetful)


def test_the_check_computes_in_float32_and_leaves_parameters_as_they_were() -> None:
    model = tiny_models.model("qwen3_moe").to(torch.bfloat16)
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    plug_in(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    for name, (parameter, value) in before.items():
        assert after[name] is parameter
        assert torch.equal(parameter, value)


def test_the_check_leaves_windows_as_they_were() -> None:
    model = tiny_models.model("mistral")
    plug_in(model)
    windows = {module.sliding_window for module in model.modules() if hasattr(module, "sliding_window")}
    assert {model.config.sliding_window, *windows} == {tiny_models.SLIDING_WINDOW}


def test_a_backend_that_the_device_cannot_run_is_refused(tmp_path: Path) -> None:
    tiny_models.build("llama", tmp_path)
    with pytest.raises(ValueError, match=r"attention_backend triton serves CUDA devices, not cpu"):
        engine(tmp_path, attention_backend="triton")


# -- dtypes, devices, folders


@pytest.mark.parametrize(
    ("asked", "checkpoint", "device", "fast_bf16", "expected"),
    [
        ("auto", "float32", "cpu", True, torch.float32),
        ("auto", "bfloat16", "cpu", True, torch.bfloat16),
        ("auto", "bfloat16", "cpu", False, torch.float32),
        ("auto", "float16", "cpu", True, torch.bfloat16),
        ("auto", "float16", "cpu", False, torch.float32),
        ("auto", "float16", "cuda", False, torch.float16),
        ("auto", None, "cuda", False, torch.float32),
        ("bfloat16", "float32", "cpu", False, torch.bfloat16),
    ],
)
def test_dtype(
    asked: Any, checkpoint: str | None, device: str, fast_bf16: bool, expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(model_config, "cpu_multiplies_bf16", lambda: fast_bf16)
    config = LlamaConfig(dtype=checkpoint)
    assert resolve_dtype(EngineConfig(dtype=asked), config, torch.device(device)) is expected


def test_parameters_have_the_dtype_asked_for(tmp_path: Path) -> None:
    tiny_models.build("llama", tmp_path)
    model = load_model(EngineConfig(model=str(tmp_path), dtype="bfloat16", device="cpu"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(EngineConfig(device="auto")) == CPU
    with pytest.raises(ValueError, match=r"device 'cuda' was asked for, .* use --device cpu"):
        resolve_device(EngineConfig(device="cuda"))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} holds no config.json"):
        load_model(EngineConfig(model=str(tmp_path)))


def test_dummy_weights_come_from_the_seed_and_need_no_checkpoint(tmp_path: Path) -> None:
    tiny_models.config("qwen3").save_pretrained(tmp_path)

    def weight(seed: int) -> Tensor:
        config = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32", device="cpu", seed=seed)
        return load_model(config).get_parameter("model.embed_tokens.weight")

    assert torch.equal(weight(3), weight(3))
    assert not torch.equal(weight(3), weight(4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_model_len": 1025}, r"max_model_len \(1025\) exceeds the model's own limit of 1024"),
        ({"num_gpu_blocks_override": 7, "max_model_len": 29}, r"holds 28 tokens, fewer than .*max_model_len \(29\)"),
    ],
)
def test_lengths_that_cannot_be_served_are_refused(config: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        engine(tiny_models.build("llama", tmp_path), **config)


def test_an_eos_that_only_the_tokenizer_knows_ends_a_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_models.build("llama", tmp_path / "model")  # its generation config says EOS_TOKEN_ID
    config = EngineConfig(model=str(path), dtype="float32", device="cpu")
    model = load_model(config)
    assert eos_token_ids(config, model) == [tiny_models.EOS_TOKEN_ID]
    vocabulary = {"a": 0, "b": 1, "</s>": 2}
    words = Tokenizer(WordLevel(vocabulary, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(path)
    assert eos_token_ids(config, model) == [2, tiny_models.EOS_TOKEN_ID]
    assert "at 2, the tokenizer's EOS, and at [1]" in caplog.text
    ending = engine(path)
    params = {"allowed_token_ids": [2], "max_tokens": 5}
    for token, reason in ((2, None), (1, 1)):
        (outputs,) = run(ending, [request("r", [5, 6], **{**params, "allowed_token_ids": [token]})]).values()
        assert [(o.token_id, o.finish_reason, o.stop_reason) for o in outputs] == [(token, "stop", reason)]
