"""`rollout bench fidelity`: gaps against known ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rollout.bench.fidelity import REFERENCES, gap, references
from rollout.cli.bench import bench
from rollout.launch import serve
from tests.support import tiny_models
from tests.support.foreign_server import foreign_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("fidelity") / "model")


def measure(url: str, folder: Path, file: Path, *options: str) -> dict[str, Any]:
    size = ["--requests", "3", "--n", "2", "--max-tokens", "12"]
    ran = CliRunner().invoke(bench, ["fidelity", str(folder), "--url", url, *size, *options, "--json", str(file)])
    assert ran.exit_code == 0, ran.output
    return json.loads(file.read_text())["fidelity"]


def test_a_gap_against_numpy() -> None:
    generator = np.random.default_rng(0)
    new = [generator.normal(-2, 1, size) for size in (3, 40, 200)]
    old = [values + generator.normal(0, 0.1, len(values)) for values in new]
    found = gap("it", [torch.tensor(x) for x in new], [torch.tensor(x) for x in old])
    every = np.abs(np.concatenate(new) - np.concatenate(old))
    assert found.mean == pytest.approx(every.mean())
    assert found.p99 == pytest.approx(np.quantile(every, 0.99, method="inverted_cdf"))
    assert found.max == pytest.approx(every.max())
    assert (found.tokens, found.differing) == (243, 243)
    same = gap("it", [torch.tensor([0.1, 0.2, -3.0])], [torch.tensor([0.1, 0.2, -3.0000002])])
    assert (same.tokens, same.differing) == (3, 1)
    ratios = [np.exp(n.sum() - o.sum()) for n, o in zip(new, old, strict=True)]
    assert (found.smallest_ratio, found.largest_ratio) == (pytest.approx(min(ratios)), pytest.approx(max(ratios)))


def test_a_server_that_is_off_by_a_known_amount(folder: Path, tmp_path: Path) -> None:
    """Its logprobs are transformers' minus a quarter, from a forward pass of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def answer(body: dict[str, Any]) -> list[dict[str, Any]]:
        prompt, params = body["token_ids"], body["sampling_params"]
        assert (params["temperature"], params["logprobs"]) == (1.0, 0)
        choices = []
        for _ in range(params["n"]):
            ids = torch.randint(2, 256, (params["max_tokens"],)).tolist()
            logprobs = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            choices.append({"token_ids": ids, "logprobs": [row[i].item() - 0.25 for row, i in zip(logprobs, ids)]})  # noqa: B905
        return choices

    with foreign_server(answer) as server:
        found = measure(server.url, folder, tmp_path / "f.json")
        assert len({tuple(body["token_ids"]) for body in server.bodies}) == 3
    assert found["mode"] == "raw_logprobs"  # it has no /weight_info
    assert (found["sequences"], found["tokens"]) == (6, 72)
    exact, bf16, wide_head, bf16_alone, wide_alone = found["gaps"]
    assert exact["what"] == "server – transformers float32"
    assert (exact["mean"], exact["max"]) == (pytest.approx(0.25, abs=1e-4), pytest.approx(0.25, abs=1e-4))
    assert exact["smallest_ratio"] == pytest.approx(np.exp(0.25 * 12), rel=1e-3)
    for rounded in (bf16, wide_head):
        assert rounded["mean"] == pytest.approx(0.25, abs=0.05)
        assert rounded["max"] > 0.2505
    for alone in (bf16_alone, wide_alone):  # between the references, the server's quarter isn't in it
        assert 0.001 < alone["mean"] < 0.1


def test_our_own_server_in_float32_agrees_with_transformers(folder: Path, tmp_path: Path) -> None:
    flags = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
    with serve(folder, tmp_path / "log", *flags, "--logprobs-mode", "processed_logprobs") as url:
        found = measure(url, folder, tmp_path / "f.json")
    assert found["mode"] == "processed_logprobs"
    assert 0 < found["gaps"][0]["max"] < 1e-4


def test_the_references_are_what_they_are_called(folder: Path) -> None:
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    models = dict(references(folder))
    assert tuple(models) == REFERENCES
    with torch.inference_mode():
        body = models["bfloat16"].model(ids).last_hidden_state
        wide = models["bfloat16, float32 head"](ids).logits
        head = models["bfloat16"].lm_head.weight
        assert torch.equal(wide, body.float() @ head.float().T)
        assert models["bfloat16"](ids).logits.dtype == torch.bfloat16
        assert models["float32"](ids).logits.dtype == torch.float32


def test_a_server_without_logprobs_is_refused(folder: Path) -> None:
    with foreign_server() as server:
        ran = CliRunner().invoke(bench, ["fidelity", str(folder), "--url", server.url])
    assert ran.exit_code == 1
    assert "logprob" in ran.output
