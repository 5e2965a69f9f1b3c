"""Every kind of rotary scaling: sequences on both sides of its border, side by side, against transformers' forward."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

from rollout.model.rotary import fix_rotary, longest_exact
from tests.model.test_loader import COMMON, MOE, random_model
from tests.support.engine_utils import assert_exact, engine, prompt, request, run

BORDER, LIMIT = 32, 128
THETA = {"rope_theta": 1e4}
LONG = {**THETA, "short_factor": [1.0] * 8, "long_factor": [1.0 + 0.7 * i for i in range(8)]}
SIZES = {"max_position_embeddings": LIMIT, "tie_word_embeddings": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {"rope_type": "default", **THETA}),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0, **THETA}),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0, **THETA}),
    "yarn": ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": BORDER, **THETA}),
    "llama3": (
        "llama",
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": BORDER, **THETA},
    ),
    "longrope": ("phi3", {"rope_type": "longrope", "original_max_position_embeddings": BORDER, **LONG}),
    "longrope in phimoe": (
        "phimoe",
        {"rope_type": "longrope", "original_max_position_embeddings": BORDER, "short_mscale": 1.1, "long_mscale": 1.3,
         **LONG},
    ),
}  # fmt: skip


def save(kind: str, folder: Path) -> None:
    name, rope = CASES[kind]
    more: dict[str, Any] = {"original_max_position_embeddings": BORDER} if name == "phi3" else {}
    common = MOE if name == "phimoe" else COMMON
    random_model(name, {**common, **SIZES, **more, "rope_parameters": rope}).save_pretrained(folder)


@pytest.mark.parametrize("kind", CASES)
def test_rotary_factors_follow_neither_neighbours_nor_chunks(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    e = engine(tmp_path, max_model_len=None, max_num_batched_tokens=16)
    longest = BORDER if "longrope" in kind else LIMIT
    assert e.runner.max_model_len == longest
    requests = [
        request("short", prompt(5), max_tokens=12),
        request("crosses", prompt(BORDER - 6), max_tokens=min(30, longest - BORDER + 6)),
        request("long", prompt(longest - 9), max_tokens=9, n=2),
    ]
    outputs = run(e, requests)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert_exact(reference.eval(), requests, outputs)


@pytest.mark.parametrize("kind", ["longrope", "longrope in phimoe"])
def test_longrope_beyond_its_original_length_is_refused_with_what_to_set(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(kind, tmp_path)
    with pytest.raises(ValueError, match=rf"max_model_len \(64\) .* Set --max-model-len to at most {BORDER}"):
        engine(tmp_path, max_model_len=64)
    with caplog.at_level(logging.WARNING):
        engine(tmp_path, max_model_len=None)
    assert f"max_model_len is {BORDER}, not the model's own {LIMIT}" in caplog.text


def test_the_border_is_the_smallest_of_a_models_kinds_of_layers() -> None:
    longrope, dynamic = CASES["longrope"][1], CASES["dynamic"][1]
    config = CONFIG_MAPPING["llama"](**COMMON)
    for parameters, expected in [
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": longrope}, BORDER),
        ({"full_attention": dynamic, "sliding_attention": {"rope_type": "default"}}, COMMON["max_position_embeddings"]),
        ({"rope_type": "linear", "factor": 2.0}, None),
    ]:
        config.rope_parameters = parameters
        assert longest_exact(config) == expected


@pytest.mark.parametrize(("kind", "max_model_len"), [("longrope", BORDER + 1), ("dynamic", LIMIT + 1)])
def test_factors_that_depend_on_what_is_beside_them_are_found_by_trying(kind: str, max_model_len: int) -> None:
    name, rope = CASES[kind]
    more: dict[str, Any] = {"original_max_position_embeddings": BORDER} if name == "phi3" else {}
    config = {**COMMON, **SIZES, **more, "rope_parameters": rope}
    fix_rotary(random_model(name, config), max_model_len - 1)
    with pytest.raises(ValueError, match=f"up to {max_model_len} positions: set a smaller --max-model-len"):
        fix_rotary(random_model(name, config), max_model_len)
