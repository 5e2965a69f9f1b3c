"""docs/compatibility.md and docs/flags.md say what the code does."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from rollout.config import EngineConfig, ServerConfig

ROOT = Path(__file__).parents[2]


def generator(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_flags_is_current() -> None:
    page = (ROOT / "docs" / "flags.md").read_text()
    assert page == generator("flags").page(), "run `make flags`"
    names = [field.name for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)]
    rows = [row.split(" | ") for row in page.splitlines() if "`ROLLOUT_" in row]
    assert sorted(row[1] for row in rows) == sorted(f"`ROLLOUT_{name.upper()}`" for name in names)
    assert "| `--block-size` | `ROLLOUT_BLOCK_SIZE` | whole number | `16` |" in page
    assert "| `--enforce-eager` | `ROLLOUT_ENFORCE_EAGER` | switch | off |" in page


def test_the_page_is_current() -> None:
    module = generator("compatibility")
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert page == module.page(), "run `make compatibility`"
    for path in module.DIALECTS:  # what a reader looks for is there
        assert f"`POST {path}`" in page
    for line in (
        "| `logprob_token_ids` | served | served | served | served |",
        "| `best_of` | `null`, `1` | there is no beam search: every choice is sampled |",
        "| `--trust-remote-code` | no code from a model's repository is run: serve a model that transformers knows |",
    ):
        assert line in page
