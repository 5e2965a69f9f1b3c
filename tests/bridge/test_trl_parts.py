"""What needs no server of trainer_bridge.integrations.trl, and its example."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from trl.experimental.async_grpo import async_rollout_worker

from tests.support import tiny_trl
from tests.support.engine_utils import TOLERANCE
from trainer_bridge.integrations.trl_compat import check_version, varlen_attention
from trainer_bridge.integrations.trl_worker import _advantages

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_async_grpo.py"


@pytest.mark.parametrize(
    "scores",
    [
        [[0.5, 0.25, 1.0, 0.0]],
        [[0.5, None, 1.0, None], [1.0, None, None, 2.0]],
        [[None, None, None, None]],
        [[1.0, 1.0, 1.0, 1.0]],
    ],
)
def test_advantages_are_those_of_trls_own_worker(scores: list[list[float | None]]) -> None:
    PartialState(cpu=True)  # TRL's logger asks for it
    loop = object.__new__(async_rollout_worker._AsyncRolloutLoop)  # its scoring needs nothing else of it
    loop.reward_funcs = [lambda values=values, **_: values for values in scores]
    loop.reward_func_names = [f"f{i}" for i in range(len(scores))]
    loop._env_reward_types = []
    n = len(scores[0])
    row = async_rollout_worker.TrainingSequence([1, 2], [0, 1], [0.0, -1.0], "id")
    group = async_rollout_worker.RolloutGroup(
        *([["p"]] * n, {}, [["c"]] * n, [[2]] * n, [[row]] * n, [0] * n, [0] * n, 1, 0, [None] * n, [None] * n)
    )
    theirs = asyncio.run(loop._score_group(group))
    table = np.array([[math.nan if r is None else r for r in column] for column in scores])
    rewards, advantages, std = _advantages(table)
    np.testing.assert_allclose(advantages, [sample.advantage for sample in theirs])
    np.testing.assert_allclose(rewards, [sample.metrics["reward"] for sample in theirs])
    np.testing.assert_allclose(std, theirs[0].metrics["reward_std"])


def test_versions_of_trl() -> None:
    check_version(importlib.metadata.version("trl"))
    check_version("1.16.3")
    for version in ("1.15.0", "1.17.0", "2.0.0.dev0"):
        with pytest.raises(ImportError, match=re.escape(f"trl 1.16, found {version}")):
            check_version(version)


@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (2, 1)])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("causal", [True, False])
def test_varlen_attention(window: tuple[int, int], softcap: float, causal: bool) -> None:
    """Value and gradient against a loop over single queries."""
    generator = torch.Generator().manual_seed(0)
    segments = [(3, 3), (1, 5), (4, 9)]  # queries, keys
    q = torch.randn(8, 4, 16, generator=generator, requires_grad=True)
    k, v = (torch.randn(17, 2, 16, generator=generator, requires_grad=True) for _ in range(2))
    cu_q, cu_k = torch.tensor([0, 3, 4, 8]), torch.tensor([0, 3, 8, 17])
    got = varlen_attention(q, k, v, cu_q, cu_k, 4, 9, 0.3, causal, window, softcap)
    rows = []
    for s, (queries, keys) in enumerate(segments):
        for i in range(queries):
            at = keys - queries + i
            last = at if causal else (keys - 1 if window[1] < 0 else min(keys - 1, at + window[1]))
            seen = slice(int(cu_k[s]) + (0 if window[0] < 0 else max(0, at - window[0])), int(cu_k[s]) + last + 1)
            for head in range(4):
                score = k[seen, head // 2] @ q[int(cu_q[s]) + i, head] * 0.3
                score = softcap * torch.tanh(score / softcap) if softcap else score
                rows.append(score.softmax(0) @ v[seen, head // 2])
    expected = torch.stack(rows).view(8, 4, 16)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn(8, 4, 16, generator=generator)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), upstream) for x in (got, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_example(tmp_path: Path) -> None:
    folder = tiny_trl.build(tmp_path / "model")
    command = [sys.executable, EXAMPLE, "--model", folder, "--max-steps", "2", "--output", tmp_path / "out"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"step +(\d+)  reward (\S+)  gap (\S+)", result.stdout)
    assert [int(step) for step, _, _ in lines] == [1, 2]
    assert float(lines[0][2]) < TOLERANCE
    assert all(0 <= float(reward) <= 1 for _, reward, _ in lines)
    assert "first quarter of the steps" in result.stdout
    assert len(json.loads((tmp_path / "out" / "log.json").read_text())) == 2
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.smollm2
def test_reward_rises(smollm2: Path, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE, "--model", smollm2, "--max-steps", "20", "--output", tmp_path]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr
    rewards = [step["reward"] for step in json.loads((tmp_path / "log.json").read_text())]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15
