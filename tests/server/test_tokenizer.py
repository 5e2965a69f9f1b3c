"""Loading the tokenizer while the machine is short of something."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from rollout.server.text import tokenizer


class Failing:
    """Stands in for transformers' loading: fails with these errors in turn, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, model: str) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return "loaded"


def wrapped(error: Exception) -> Exception:
    outer = RuntimeError("Could not import module 'AutoTokenizer'")
    outer.__context__ = error
    return outer


def load(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> Any:
    monkeypatch.setattr(tokenizer, "_load", Failing(*errors))
    monkeypatch.setattr(tokenizer, "Vocabulary", lambda loaded: loaded)
    monkeypatch.setattr(tokenizer, "_RETRY_S", 0.001)
    return asyncio.run(tokenizer.BackgroundTokenizer("model", enabled=True).vocabulary())


def test_a_tokenizer_is_loaded_once_there_are_descriptors_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One moment without them used to make a server that only takes token ids until its restart."""
    full = OSError(errno.EMFILE, "Too many open files")
    rust = Exception("Too many open files (os error 24)")
    assert load(monkeypatch, full, wrapped(full), rust, wrapped(rust), MemoryError()) == "loaded"


@pytest.mark.parametrize(
    "error", [OSError("no tokenizer in it"), ValueError("(os error 2)"), OSError(errno.ENOENT, "")]
)
def test_a_folder_without_a_tokenizer_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    assert load(monkeypatch, error) is None
