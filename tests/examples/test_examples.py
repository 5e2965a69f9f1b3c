"""The examples run as they are, against a live server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rollout.launch import serve
from tests.support import tiny_models

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_weights_are_pushed_into_a_running_request(tmp_path: Path) -> None:
    model = tiny_models.build("llama", tmp_path / "model")
    with serve(model, tmp_path / "server.log", "--enable-scale-out", "--num-threads", "1") as url:
        command = [sys.executable, EXAMPLES / "push_while_generating.py", model, "--url", url, "--max-tokens", "900"]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"tokens +(\d+) to +(\d+): (\S+) \(epoch (\d), cache (\w+)\)", result.stdout)
    assert [row[2:4] for row in found] == [("default", "0"), ("a-little-larger", "1")]
    assert found[0][0] == "0"
    assert found[0][1] == found[1][0]
    assert found[1][1] == "900"
