"""Loading the tokenizer while the machine is short of something, and the forms of words in it."""

from __future__ import annotations

import asyncio
import errno
import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.sampling.params import ParameterError
from rollout.server.text import tokenizer
from tests.support import tiny_tokenizers


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
    monkeypatch.setattr(tokenizer, "load_tokenizer", Failing(*errors))
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


def word_tokenizer() -> Tokenizer:
    """Byte-level BPE, as SmolLM2's: " beautiful" is one token, "beautiful" several; "cat" is one, " cat" two."""
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    steps = ["Ġ b", "Ġb e", "Ġbe a", "Ġbea u", "Ġbeau t", "Ġbeaut i", "Ġbeauti f", "Ġbeautif u", "Ġbeautifu l"]
    merges = [(a, b) for a, b in (step.split() for step in [*steps, "b e", "u t", "c a", "ca t", "Ġ t"])]
    vocab = alphabet | {a + b: len(alphabet) + index for index, (a, b) in enumerate(merges)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


WORDS = ["beautiful", " beautiful", "beau", "cat", "t", "\n", "\n\n", " ", "é"]


@pytest.mark.parametrize("word", WORDS)
def test_a_bad_word_was_missed_after_a_space_where_it_has_another_number_of_tokens(word: str) -> None:
    """Every text that holds the word at the start of a word, as the tokenizer spells it, holds a banned sequence."""
    spelling = word_tokenizer()
    banned = tokenizer.bad_words_token_ids(PreTrainedTokenizerFast(tokenizer_object=spelling), [word])
    text = word.strip() or word
    for before, after in itertools.product(["", "a cat ", "é "], ["", " a"] if text.strip() else [""]):
        ids = spelling.encode(before + text + after, add_special_tokens=False).ids
        assert any(ids[i : i + len(b)] == b for b in banned for i in range(len(ids))), (before, text, after)
    for other in ("a tale", "be utile", "Ca"):
        ids = spelling.encode(other, add_special_tokens=False).ids
        if text not in other:
            assert not any(ids[i : i + len(b)] == b for b in banned for i in range(len(ids))), other


def test_a_bad_word_without_a_token_is_refused() -> None:
    without = tiny_tokenizers.byte_fallback()
    without.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(ParameterError, match="a word without a token"):
        tokenizer.bad_words_token_ids(without, ["  "])
