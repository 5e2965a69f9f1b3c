"""Requests on adapters beside requests on the base, held against PEFT's own models."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.engine.engine import Engine
from rollout.kernels.lora import LoraTables, LoraWeight
from rollout.lora.peft_config import PeftConfig
from rollout.messages import AddRequest
from rollout.weights.errors import WeightUpdateError
from tests.support import adapters, tiny_models
from tests.support.engine_utils import assert_exact, engine, ids, logprobs, prompt, request, run

BASES = ("llama", "qwen3", "gemma3_text")


def asked(name: str, adapter: str | None, token_ids: list[int], **params: Any) -> AddRequest:
    message = request(name, token_ids, **params)
    message.adapter = adapter
    return message


@pytest.mark.parametrize("base", BASES)
def test_a_mixed_batch_is_what_peft_computes(base: str, tmp_path: Path) -> None:
    """Prompts in chunks, groups, prefixes found again and sequences preempted; tied embeddings in llama."""
    kinds = range(4 if base == "llama" else 5)
    models: dict[str | None, Any] = {f"a{kind}@1": adapters.model(base, kind) for kind in kinds}
    served = engine(tiny_models.build(base, tmp_path / "base"), enable_lora=True, max_num_batched_tokens=24)
    for kind, (label, model) in enumerate(models.items()):
        adapters.load(served, str(label), adapters.save(model, tmp_path / f"a{kind}"))
    models[None] = tiny_models.model(base)
    for turn in range(2):  # the second finds the first's prefixes
        requests = [asked(f"{label}-{turn}", label, prompt(33), n=2) for label in models]
        requests += [asked(f"{label}-{turn}-short", label, prompt(5, seed=1)) for label in models]
        outputs = run(served, requests)
        for label, model in models.items():
            own = [item for item in requests if item.adapter == label]
            assert_exact(model, own, outputs)
            for item in own:
                assert {o.version for o in outputs[item.request_id, 0]} == {label or "default"}
    assert served.stats["prefix_hit_tokens"] >= 32 * len(models)
    assert served.stats["forked_sequences"] >= len(models)
    assert_apart(models, prompt(33))


def assert_apart(models: dict[str | None, Any], token_ids: list[int]) -> None:
    """No two of the models could be taken for one another."""
    row = torch.tensor([token_ids])
    with torch.no_grad():
        last = [model(input_ids=row).logits[0, -1].log_softmax(-1) for model in models.values()]
    for index, one in enumerate(last):
        for other in last[index + 1 :]:
            assert (one - other).abs().max() > 0.02


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("qwen3", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def served(base: Path) -> Iterator[Engine]:
    running = engine(base, enable_lora=True, num_gpu_blocks_override=66, max_loras=2, max_lora_rank=16)
    yield running
    running.close()


def test_preempted_sequences_go_on_with_their_adapters(served: Engine, tmp_path: Path) -> None:
    """Of a cache of 260 tokens eight sequences need 480; no step runs on more than two of three adapters."""
    models: dict[str | None, Any] = {f"p{kind}@1": adapters.model("qwen3", kind) for kind in (0, 1, 3)}
    for label, model in models.items():
        adapters.load(served, str(label), adapters.save(model, tmp_path / str(label)))
    models[None] = tiny_models.model("qwen3")
    before = served.stats["preemptions"]
    requests = [
        asked(f"{label}-{seed}", label, prompt(20, seed=seed), max_tokens=40, ignore_eos=True)
        for label in models
        for seed in range(2)
    ]
    outputs = run(served, requests)
    assert served.stats["preemptions"] > before
    for label, model in models.items():
        assert_exact(model, [item for item in requests if item.adapter == label], outputs)


def test_a_version_lives_as_long_as_its_requests(served: Engine, tmp_path: Path) -> None:
    """A request ends on the version that it began on, also where that was dropped meanwhile."""
    assert served.adapters is not None
    old, new = adapters.model("qwen3", 1, seed=1), adapters.model("qwen3", 1, seed=2)
    adapters.load(served, "policy@1", adapters.save(old, tmp_path / "old"))
    before = asked("before", "policy@1", prompt(9), max_tokens=12, ignore_eos=True)
    served.add_request(before)
    outputs = {("before", 0): [*served.step(), *served.step()]}
    adapters.load(served, "policy@2", adapters.save(new, tmp_path / "new"))
    served.adapters.call("drop_adapter", {"label": "policy@1"}).result(10)
    assert "policy@1" not in served.adapters
    after = asked("after", "policy@2", prompt(9), max_tokens=12, ignore_eos=True)
    for key, found in run_on(served, [after]).items():
        outputs.setdefault(key, []).extend(found)
    assert_exact(old, [before], outputs)
    assert_exact(new, [after], outputs)
    assert {o.version for o in outputs["before", 0]} == {"policy@1"}


def run_on(served: Engine, requests: list[AddRequest]) -> dict[tuple[str, int], list[Any]]:
    found: dict[tuple[str, int], list[Any]] = {}
    for item in requests:
        served.add_request(item)
    while served.has_work:
        for output in served.step():
            found.setdefault((output.request_id, output.index), []).append(output)
    return found


def test_a_batch_without_adapters_is_computed_as_ever(base: Path, served: Engine) -> None:
    """Not a bit differs from an engine that knows of no adapters."""
    requests = [request(str(seed), prompt(12, seed=seed), seed=seed) for seed in range(4)]
    plain = run(engine(base, num_gpu_blocks_override=66), requests)
    for key, outputs in run(served, requests).items():
        assert ids(outputs) == ids(plain[key])
        assert torch.equal(logprobs(outputs), logprobs(plain[key]))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_a_rows_bits_depend_on_no_other_row(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Layers of odd sizes, 1 to 9 rows an adapter, and rows that no adapter has; PEFT's order is the definition."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    plain = [(drawn(rank, 53), drawn(37, rank)) for rank in (1, 6, 16, 3)]
    parts: list[LoraWeight | None] = [LoraWeight.of(a, b, 0.5 * len(a)) for a, b in plain]
    parts[2] = None
    x, y = drawn(24, 53).to(dtypes[0]), drawn(24, 40).to(dtypes[1])[:, :37]
    bounds = [2, 3, 12, 14, 21]
    expected = y.clone()
    for (a, b), part, start, end in zip(plain, parts, bounds, bounds[1:], strict=False):
        if part is not None:
            delta = x[start:end].float() @ a.T @ b.T * part.scale
            expected[start:end] = (y[start:end] + delta).to(y.dtype)
    tables = LoraTables([[part] for part in parts])
    whole = tables.add(y.clone(), x, 0, torch.tensor(bounds).numpy(), exact=True)
    torch.testing.assert_close(whole, expected, rtol=1e-5 if y.dtype is torch.float32 else 1e-2, atol=1e-4)
    assert torch.equal(whole[:2], y[:2])
    assert torch.equal(whole[12:14], y[12:14])
    assert torch.equal(whole[21:], y[21:])
    for number, part in enumerate(parts):
        for row in range(bounds[number], bounds[number + 1]):
            if part is not None:
                one, given = y[row : row + 1].clone(), x[row : row + 1]
                alone = LoraTables([[part]]).add(one, given, 0, torch.arange(2).numpy(), exact=True)
                assert torch.equal(alone[0], whole[row])


def saved(tmp_path: Path, kind: int = 0) -> Path:
    return adapters.save(adapters.model("qwen3", kind), tmp_path / "adapter")


def refusal(served: Engine, path: Path) -> WeightUpdateError:
    with pytest.raises(WeightUpdateError) as caught:
        adapters.load(served, "refused@1", path)
    assert served.adapters is not None
    assert "refused@1" not in served.adapters
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("use_dora", True, "use_dora"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("bias", "all", "bias 'all'"),
        ("target_parameters", ["mlp.experts.down_proj"], "target_parameters"),
        ("trainable_token_indices", [1, 2], "trainable_token_indices"),
        ("alora_invocation_tokens", [3], "alora_invocation_tokens"),
        ("layer_replication", [[0, 2]], "layer_replication"),
        ("init_lora_weights", "pissa_niter_4", "has changed the base"),
        ("peft_type", "IA3", "only LORA"),
        ("fan_in_fan_out", True, "fan_in_fan_out"),
        ("r", 64, "LoRA rank 64 is greater than max_lora_rank 16"),
        ("r", -1, "no LoraConfig"),
        ("alpha_pattern", {"(a+)+$": 1}, "simple pattern"),
        ("alpha_pattern", {".*a.*b.*c.*d": 1}, "simple pattern"),
        ("alpha_pattern", {f"{key}.*": 1 for key in range(65)}, "65 patterns with + or .*"),
        ("alpha_pattern", {f"{key}{'a' * 128}": 1 for key in range(1024)}, "alpha_pattern has 1024 entries of 13"),
        ("alpha_pattern", {"+": 1}, "no pattern: nothing to repeat"),
        ("target_modules", ["q_proj"] * 5000, "target_modules has 5000 entries"),
        ("target_modules", ["q_proj", "v_proj", "o_proj"], "o_proj: no tensor"),
        ("target_modules", "all-linear", "all-linear"),
        ("rank_pattern", {"q_proj": "x"}, "no LoraConfig"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    served: Engine, tmp_path: Path, field: str, value: Any, why: str
) -> None:
    folder = saved(tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {field: value}))
    error = refusal(served, folder)
    assert (error.status, why in error.message) == (400, True), error.message


def test_what_is_refused_is_quoted_in_part(served: Engine, tmp_path: Path) -> None:
    """However deep or long it is: no depth that can be read is one that can't be told."""
    folder = saved(tmp_path)
    for depth in range(940, 1010):
        value = "[" * depth + "]" * depth
        (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "modules_to_save": {value}}}')
        error = refusal(served, folder)
        assert (error.status, len(error.message) < 300) == (400, True), (depth, error.message)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "x" * (1 << 20)}))
    assert len(refusal(served, folder).message) < 5000
    save_file({"a" * (1 << 20) + ".lora_A.weight": torch.zeros(1, 1)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert len(refusal(served, folder).message) < 5000


def test_a_tensor_that_is_announced_twice_is_refused(served: Engine) -> None:
    assert served.adapters is not None
    staging = served.adapters._staging("twice@1", PeftConfig(peft_type="LORA", r=4))
    announced = [f"{Q}.lora_A.weight"] * 2
    with pytest.raises(WeightUpdateError, match="named twice"):
        staging.resolve(announced, ["float32"] * 2, [[4, 64]] * 2)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_A.weight"][1, 2] = torch.nan


def _halved(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{Q}.lora_B.weight"]


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"][:, :60].contiguous()


def _other_rank(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"][:3].contiguous()


def _stranger(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 64)


def _norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.norm.weight"] = torch.zeros(64)


def _magnitude(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_magnitude_vector"] = torch.zeros(128)


def _counted(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"].int()


def _empty(tensors: dict[str, torch.Tensor]) -> None:
    tensors.clear()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_infinite, "not every value is finite"),
        (_halved, "its other half (lora_B) is missing"),
        (_cut, "the layer needs [rank, 64]"),
        (_other_rank, "rank 3, adapter_config.json says [4]"),
        (_stranger, "no linear layer or embedding 'model.layers.9.self_attn.q_proj'"),
        (_norm, "no tensor of a LoRA adapter"),
        (_magnitude, "use_dora"),
        (_counted, "dtype"),
        (_empty, "no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(served: Engine, tmp_path: Path, change: Any, why: str) -> None:
    folder = saved(tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    error = refusal(served, folder)
    assert (error.status, why in error.message) == (400, True), error.message


def test_what_is_no_adapter_is_said_so(served: Engine, tmp_path: Path) -> None:
    assert refusal(served, tmp_path / "nothing").status == 404
    folder = saved(tmp_path)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    assert refusal(served, folder).status == 400
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert "a pickle" in refusal(served, folder).message
    os.mkfifo(weights)
    assert "is not a regular file" in refusal(served, folder).message
    (folder / "adapter_config.json").write_text("[" * 100_000)
    assert "no LoraConfig" in refusal(served, folder).message


def test_a_copy_of_the_bases_head_must_be_the_bases(served: Engine, tmp_path: Path) -> None:
    """PEFT saves it along with an adapter of the head."""
    folder = saved(tmp_path, kind=2)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert "base_model.model.lm_head.base_layer.weight" in tensors
    tensors["base_model.model.lm_head.base_layer.weight"][3, 4] += 1
    save_file(tensors, folder / "adapter_model.safetensors")
    assert "isn't the weight that serves" in refusal(served, folder).message
