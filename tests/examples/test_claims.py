"""examples/claims.py: what it prints is so. And the table of the README names its commands."""

from __future__ import annotations

import re
from pathlib import Path

import claims
import pytest

from tests.support import tiny_models

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_each_claim_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims.main(str(tiny_models.build("llama", tmp_path / "model")), [])
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert said.keys() == claims.CLAIMS.keys()
    found = re.match(r"(\d+) tokens were sampled during (\d+) updates", said["no-pause"])
    assert found
    assert int(found[1]) >= 10
    epoch = int(found[2])
    assert "tokens 0 to 20: " in said["versions"]
    later = f"tokens 20 to 40: step-20, epoch {epoch + 1}; tokens 40 to 64: step-40, epoch {epoch + 2}"
    assert said["versions"].endswith(later)
    assert "finite" in said["atomic"]
    assert "lacks" in said["atomic"]
    assert said["cache"] == "asked again, 32 of 40 prompt tokens came from the cache; after an update, 0"


def test_the_table_of_the_readme_has_a_command_for_each() -> None:
    assert set(re.findall(r"python examples/claims\.py path/to/model ([\w-]+)", README)) == claims.CLAIMS.keys()
