"""A batch-invariant engine's adapters, and PEFT's models with the exact arithmetic: equal in every bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support import adapters, tiny_models
from tests.support.engine_utils import prompt
from tests.support.exact_rollouts import (
    DTYPES,
    Rollout,
    differing,
    exact_engine,
    request,
    roll_out,
    trainer_logprobs,
)
from trainer_bridge.score import exact


def trainers(base: Path, folder: Path, dtype: str) -> Any:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exact.install(PeftModel.from_pretrained(plain, folder, is_trainable=True).eval())


@pytest.mark.parametrize("dtype", DTYPES)
def test_four_adapters_in_one_batch_have_the_trainers_bits(dtype: str, tmp_path: Path) -> None:
    base = tiny_models.build("qwen3", tmp_path / "base")
    folders = {f"a{kind}@1": adapters.save(adapters.model("qwen3", kind), tmp_path / f"a{kind}") for kind in range(5)}
    served = exact_engine(base, dtype, enable_lora=True, num_gpu_blocks_override=150)
    for label, folder in folders.items():
        adapters.load(served, label, folder)
    requests = []
    for number, label in enumerate([*folders, None] * 2):
        item = request(f"r{number}", prompt(9 + 5 * number, seed=number), n=2, max_tokens=14)
        item.adapter = label
        requests.append(item)
    found = roll_out(served, requests, [0, 0, 1, 1, 2, 3, 3, 5, 6, 6, 9, 9])
    groups: dict[str | None, list[Rollout]] = {}
    for rollout in found.values():
        groups.setdefault(rollout.request.adapter, []).append(rollout)
    total = 0
    for label, folder in folders.items():
        model = trainers(base, folder, dtype)
        for packed in (False, True):
            different, tokens = differing(groups[label], trainer_logprobs(model, groups[label], packed=packed))
            assert different == 0, (label, different, tokens)
        total += tokens
        with model.disable_adapter():
            assert differing(groups[label], trainer_logprobs(model, groups[label]))[0] > tokens // 2
            assert differing(groups[None], trainer_logprobs(model, groups[None]))[0] == 0
    assert total == 5 * 4 * 14


def test_gradients_are_pefts(tmp_path: Path) -> None:
    """Of every A and B, also of the head's and the embeddings'."""
    base = tiny_models.build("qwen3", tmp_path / "base")
    row = torch.tensor([prompt(24)])
    for kind in range(5):
        folder = adapters.save(adapters.model("qwen3", kind), tmp_path / str(kind))
        mine, theirs = trainers(base, folder, "float32"), adapters.model("qwen3", kind)
        for model in (mine, theirs):
            model(input_ids=row).logits.log_softmax(-1)[0, :-1].gather(-1, row[0, 1:, None]).sum().backward()
        expected = {name: p.grad for name, p in theirs.named_parameters() if "lora_" in name}
        got = {name: p.grad for name, p in mine.named_parameters() if "lora_" in name}
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item())


def test_what_no_server_runs_is_refused(tmp_path: Path) -> None:
    base = tiny_models.build("qwen3", tmp_path / "base")
    folder = adapters.save(adapters.model("qwen3", 0), tmp_path / "adapter")
    model = trainers(base, folder, "float32")
    model.merge_adapter()
    with pytest.raises(ValueError, match="call unmerge_adapter"):
        model(input_ids=torch.tensor([prompt(4)]))
