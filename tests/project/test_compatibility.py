"""docs/compatibility.md says what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("compatibility", ROOT / ".ci" / "compatibility.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
