"""`rollout bench push`: its numbers from made-up arrivals, and the command against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout.bench.push import summarize
from rollout.cli.bench import bench
from rollout.launch import serve
from tests.support import tiny_models


def test_the_numbers_of_made_up_streams() -> None:
    steady = [(float(t), 1) for t in range(20)]
    stalled = [(float(t), 2) for t in range(12)] + [(17.0, 2), (18.0, 2)]
    median, longest, before, during = summarize([steady, stalled], 2.0, 10.0, 14.0)
    assert (median, longest) == (1.0, 6.0)
    assert before == (8 + 16) / 8
    assert during == (4 + 4) / 4


def test_a_gap_that_spans_the_start_of_the_push_counts() -> None:
    assert summarize([[(0.0, 1), (1.0, 1), (2.0, 1), (9.0, 1), (9.5, 1)]], 0.0, 5.0, 9.0)[1] == 7.0


def test_the_command_measures_both_policies(tmp_path: Path) -> None:
    path = tiny_models.build("llama", tmp_path / "model")
    flags = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--max-num-seqs", "4"]
    with serve(path, tmp_path / "log", *flags) as url:
        options = ["--url", url, "--streams", "1", "--n", "2", "--prompt-len", "8", "--seconds", "0.3"]
        ran = CliRunner().invoke(bench, ["push", "--model", str(path), *options, "--json", str(tmp_path / "json")])
        assert ran.exit_code == 0, ran.output
    results = json.loads((tmp_path / "json").read_text())["pushes"]
    assert [result["kv_policy"] for result in results] == ["keep", "recompute"]
    assert all(f"{result['throughput_before']:.1f} tokens/s" in ran.output for result in results)
    for result in results:
        assert result["push_bytes"] == sum(p.nbytes for p in tiny_models.model("llama").parameters())
        assert min(result["median_gap"], result["longest_gap"]) > 0
        assert result["bound"] == pytest.approx(3 * result["median_gap"] + result["push_seconds"] / 10)
        assert result["throughput_before"] > 0
        assert 0 < result["commit_seconds"] < result["push_seconds"]
