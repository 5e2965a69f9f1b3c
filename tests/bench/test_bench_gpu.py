"""`rollout bench gpu` on a machine without a GPU: all sections run dry, and one that fails does so alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollout.bench import gpu
from rollout.bench.gpu_sections import Place, gap
from rollout.bench.gpu_speed import SHAPES
from rollout.cli.bench import bench

pytest.importorskip("triton")


def test_every_section_runs_dry(tmp_path: Path) -> None:
    ran = CliRunner().invoke(bench, ["gpu", "--dry", "--json", str(tmp_path / "json")])
    assert ran.exit_code == 0, ran.output
    rows = json.loads((tmp_path / "json").read_text())["rows"]
    assert [row for row in rows if row["failed"]] == []
    assert list(dict.fromkeys(row["section"] for row in rows)) == list(gpu.SECTIONS)
    served = [row["what"] for row in rows if row["section"] in ("pushes", "sleep")]
    assert served == ["gloo", "disk", "level 1", "level 2"]
    speed = {row["what"] for row in rows if row["section"] == "speed"}
    assert {f"{shape}, 2 sequences, {peer}" for shape in SHAPES for peer in ("ours", "transformers")} <= speed
    assert "no figure of a GPU" in ran.output


def test_a_section_that_fails_keeps_its_rows_and_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(at: Place) -> Iterator[tuple[str, str]]:
        yield "first", "well"
        raise AssertionError("second isn't")

    def whole(at: Place) -> Iterator[tuple[str, str]]:
        yield "third", "well"

    monkeypatch.setattr(gpu, "SECTIONS", {"half": half, "whole": whole})
    rows = gpu.measure((), dry=True)
    assert [(row.section, row.what, row.found, row.failed) for row in rows] == [
        ("half", "first", "well", False),
        ("half", "failed", "AssertionError: second isn't", True),
        ("whole", "third", "well", False),
    ]


def test_a_section_has_a_process_and_its_time() -> None:
    assert [row.what for row in gpu.apart("versions", 200)][:2] == ["torch", "transformers"]
    (late,) = gpu.apart("versions", 0.0)
    assert late.failed
    assert late.found.startswith("not done after 0 s")


def test_what_is_refused_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no section speeed: there are versions, kernels"):
        gpu.measure(["speeed"], dry=True)
    with pytest.raises(RuntimeError, match="--dry"):
        gpu.measure([], dry=False)


def test_a_gap_sees_a_logprob_that_is_off_or_missing(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = Place(True, tmp_path, None).model("qwen3", 0)  # type: ignore[arg-type]
        table = model(torch.tensor([[3, 4, 5]])).logits[0].log_softmax(-1)
    logprobs = [table[0, 4].item(), table[1, 5].item()]
    assert gap(model, [3], [4, 5], logprobs) < 1e-5
    assert gap(model, [3], [4, 5], [logprobs[0], logprobs[1] - 0.5]) == pytest.approx(0.5, abs=1e-4)
    assert gap(model, [3], [4, 5], [logprobs[0], math.nan]) == math.inf
    assert gap(model, [3], [4, 5], logprobs[:1]) == math.inf
