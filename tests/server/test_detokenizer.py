"""Text of tokens one at a time, against the tokenizers themselves; stop strings, against brute force."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from rollout.outputs import FinishReason
from rollout.sampling.params import SamplingParams
from rollout.server.text import detokenizer
from rollout.server.text.detokenizer import Detokenizer, StopMatcher, TextReader, Vocabulary
from tests.support import tiny_tokenizers

BYTE_LEVEL = Vocabulary(tiny_tokenizers.byte_level())
BYTE_FALLBACK = Vocabulary(tiny_tokenizers.byte_fallback())
WORD_PIECE = Vocabulary(tiny_tokenizers.word_piece())
BYT5 = Vocabulary(ByT5Tokenizer())

TEXT = st.text(st.sampled_from("aé你😀 the\u200b\ufffd") | st.characters(codec="utf-8"), max_size=12)
SKIP = st.booleans()


def ids_of(vocabulary: Vocabulary, extra: int = 3) -> st.SearchStrategy[list[int]]:
    """Any ids at all, some beyond the vocabulary."""
    return st.lists(st.integers(0, len(vocabulary.tokenizer) + extra), max_size=30)


def read(vocabulary: Vocabulary, ids: Sequence[int], prompt: Sequence[int] = (), **options: bool) -> str:
    detokenizer = Detokenizer(vocabulary, prompt, **options)
    return "".join([*map(detokenizer.read, ids), detokenizer.flush()])


@given(ids=ids_of(BYTE_LEVEL), prompt=ids_of(BYTE_LEVEL), skip=SKIP)
def test_byte_level_text_is_the_tokenizers_own_whatever_the_ids(ids: list[int], prompt: list[int], skip: bool) -> None:
    expected = BYTE_LEVEL.tokenizer.decode(ids, skip_special_tokens=skip)
    assert read(BYTE_LEVEL, ids, prompt, skip_special_tokens=skip) == expected


def byte_runs_decoded(ids: Sequence[int]) -> str:
    """What BYTE_FALLBACK's ids mean in the middle of a text: each run of bytes by itself, other tokens as written.

    Ids that the tokenizer doesn't have are nothing, also between the bytes of a character.
    """
    text = ""
    known = [i for i in ids if BYTE_FALLBACK.tokenizer.convert_ids_to_tokens(i) is not None]
    for is_byte, run in groupby(known, lambda i: i < 256):
        if is_byte:
            text += bytes(run).decode("utf-8", "replace")
        else:
            text += "".join(BYTE_FALLBACK.tokenizer.convert_ids_to_tokens(list(run))).replace("▁", " ")
    return text


@given(ids=ids_of(BYTE_FALLBACK))
@example(ids=[0xE4, 0xBD, 0xA0, 0xE4, 260, 0x80])
@example(ids=[194, 267, 128])
def test_byte_fallback_text_follows_its_prompt_whatever_the_ids(ids: list[int]) -> None:
    prompt = BYTE_FALLBACK.tokenizer.convert_tokens_to_ids(["▁Hi", ","])
    assert read(BYTE_FALLBACK, ids, prompt, skip_special_tokens=False) == byte_runs_decoded(ids)


@given(ids=ids_of(BYTE_FALLBACK), skip=SKIP)
def test_byte_fallback_text_is_the_tokenizers_own_where_the_bytes_are_valid(ids: list[int], skip: bool) -> None:
    tokenizer = BYTE_FALLBACK.tokenizer
    prompt = tokenizer.convert_tokens_to_ids(["▁Hi", ","])
    valid: list[int] = []
    for is_byte, group in groupby(ids, lambda i: i < 256):
        run = list(group)
        valid += bytes(run).decode("utf-8", "ignore").encode() if is_byte else run
    expected = tokenizer.decode([*prompt, *valid], skip_special_tokens=skip)
    assert "Hi," + read(BYTE_FALLBACK, valid, prompt, skip_special_tokens=skip) == expected


@given(ids=ids_of(WORD_PIECE, extra=0), first=st.integers(1, 8), skip=SKIP)
def test_word_piece_text_is_the_tokenizers_own(ids: list[int], first: int, skip: bool) -> None:
    decode: Callable[..., str] = WORD_PIECE.tokenizer.decode
    whole = decode([first, *ids], skip_special_tokens=skip)
    assert decode([first]) + read(WORD_PIECE, ids, [first], skip_special_tokens=skip) == whole


@given(text=TEXT)
def test_a_slow_tokenizers_text_comes_back(text: str) -> None:
    assert read(BYT5, BYT5.tokenizer.encode(text, add_special_tokens=False)) == text


@given(ids=ids_of(BYT5))
def test_a_slow_tokenizer_copes_with_any_ids(ids: list[int]) -> None:
    read(BYT5, ids)


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, BYTE_FALLBACK, BYT5], ids=["byte-level", "byte-fallback", "slow"])
def test_a_character_is_given_whole_and_at_once(vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary, [])
    ids = [i for i in vocabulary.tokenizer.encode("😀é", add_special_tokens=False) if vocabulary.piece(i)[0] != " "]
    assert [detokenizer.read(i) for i in ids] == ["", "", "", "😀", "", "é"]


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, BYTE_FALLBACK])
def test_an_incomplete_character_comes_out_as_soon_as_it_cannot_be_completed(vocabulary: Vocabulary) -> None:
    detokenizer = Detokenizer(vocabulary, [])
    assert [detokenizer.read(i) for i in (0xF0, 0x9F, 0x61, 0xE4)] == ["", "", "\ufffda", ""]
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_do_not_tear_a_character() -> None:
    (end,) = BYTE_LEVEL.tokenizer.convert_tokens_to_ids([tiny_tokenizers.SPECIAL])
    first, *rest = "你".encode()
    assert read(BYTE_LEVEL, [first, end, *rest]) == "你"
    assert (
        read(BYTE_LEVEL, [first, end, *rest], skip_special_tokens=False)
        == f"\ufffd{tiny_tokenizers.SPECIAL}\ufffd\ufffd"
    )


def test_spaces_between_special_tokens() -> None:
    special = WORD_PIECE.tokenizer.convert_tokens_to_ids([tiny_tokenizers.SPECIAL, tiny_tokenizers.ADDED])
    both = tiny_tokenizers.SPECIAL, tiny_tokenizers.ADDED
    assert read(WORD_PIECE, [3, *special, 4], skip_special_tokens=False) == "is {} {} it".format(*both)
    text = read(WORD_PIECE, [3, *special, 4], skip_special_tokens=False, spaces_between_special_tokens=False)
    assert text == "is {}{} it".format(*both)


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE])
def test_pieces_add_up_to_the_text(vocabulary: Vocabulary) -> None:
    ids = vocabulary.tokenizer.encode("is it unlikely, 好", add_special_tokens=False)
    prompt = vocabulary.tokenizer.encode("it", add_special_tokens=False)
    assert b"".join(vocabulary.piece(i)[1] for i in ids).decode() == read(vocabulary, ids, prompt)
    assert vocabulary.piece(ids[0])[0].strip() == vocabulary.tokenizer.decode(ids[:1])


# -- stop strings

STOP = st.text("ab", min_size=1, max_size=4)
STOPS = st.lists(STOP, max_size=4)
PIECES = st.lists(st.text("abc", max_size=4), max_size=12)


def stopped(pieces: list[str], armed: Sequence[bool], stops: list[str], include: bool) -> tuple[str, str | None, int]:
    """Text, stop string and number of pieces up to the first match, looking at every prefix of the text."""
    text = ""
    for count, (piece, counts) in enumerate(zip(pieces, armed, strict=True), start=1):
        for char in piece:
            text += char
            found = next((stop for stop in stops if text.endswith(stop)), None) if counts else None
            if found is not None:
                return text if include else text[: -len(found)], found, count
    return text, None, len(pieces)


@given(pieces=PIECES, stops=STOPS, include=st.booleans(), unarmed=st.integers(0, 4))
@example(pieces=["x", "aa", "a"], stops=["aa"], include=False, unarmed=2)
@example(pieces=["xab", "z"], stops=["xaby", "ab"], include=False, unarmed=1)
def test_the_first_stop_string_to_be_completed_ends_the_text(
    pieces: list[str], stops: list[str], include: bool, unarmed: int
) -> None:
    armed = [i >= unarmed for i in range(len(pieces))]
    expected, stop, count = stopped(pieces, armed, stops, include)
    matcher, text = StopMatcher(stops, include=include), ""
    for piece, counts in zip(pieces[:count], armed, strict=False):
        assert matcher.matched is None
        text += matcher.push(piece, armed=counts)
    assert matcher.matched == stop
    assert text + (matcher.flush() if stop is None else "") == expected


@given(pieces=PIECES, stops=STOPS, include=st.booleans())
def test_no_more_is_held_back_than_may_become_a_stop_string(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher, text, given_out = StopMatcher(stops, include=include), "", ""
    for piece in pieces:
        text += piece
        given_out += matcher.push(piece, armed=False)
        starts = (i for i in range(len(text)) if any(s != text[i:] and s.startswith(text[i:]) for s in stops))
        assert given_out == (text if include else text[: next(starts, len(text))])


@given(text=TEXT, cuts=st.lists(st.integers(0, 12), max_size=6), stops=st.lists(TEXT.filter(bool), max_size=3))
def test_how_the_text_comes_does_not_matter(text: str, cuts: list[int], stops: list[str]) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]

    def run(pieces: list[str]) -> tuple[str, str | None]:
        matcher, out = StopMatcher(stops, include=False), ""
        for piece in pieces:
            out += matcher.push(piece, armed=True)
            if matcher.matched is not None:
                return out, matcher.matched
        return out + matcher.flush(), None

    assert run(pieces) == run([text]) == run(list(text))


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of the detokenizer's module this call runs through."""
    count, before = 0, sys.gettrace()

    def in_frame(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return in_frame

    def on_call(frame: FrameType, *_: Any) -> Any:
        return in_frame if frame.f_code.co_filename == detokenizer.__file__ else None

    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_long_stop_strings_that_repeat_themselves_took_seconds_a_token() -> None:
    """Each token compared every end of the text with every stop string."""
    stops = [f"aa{chr(0x4E00 + i)}{'c' * 4093}" for i in range(63)] + ["a" * 4095 + "b"]
    matcher = StopMatcher(stops, include=False)
    assert lines_run(lambda: matcher.push("a" * 4000, armed=True)) < 4000 * 100
    for _ in range(3):
        assert lines_run(lambda: matcher.push("aaaa", armed=True)) < 4 * 100
    assert matcher.push("a" * 83 + "b", armed=True) == ""
    assert (matcher.matched, matcher.tail) == (stops[-1], "")


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=60), min_size=1, max_size=8),
    text=st.text("ab", max_size=300),
)
@settings(max_examples=30)
def test_work_is_linear_in_the_text_and_the_stop_strings(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops, include=False)
    read = lines_run(lambda: matcher.push(text, armed=False))
    assert read <= 100 * (len(text) + sum(map(len, stops)))


def reader(**params: Any) -> TextReader:
    return TextReader(BYTE_LEVEL, [], SamplingParams(**params))


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab\n")])
def test_the_token_that_stopped_the_engine_is_text_only_if_stops_are(include: bool, text: str) -> None:
    read_on = reader(include_stop_str_in_output=include)
    pieces = [read_on.read(token, None) for token in b"ab"]
    assert "".join([*pieces, read_on.read(10, FinishReason.STOP)]) == text


def test_what_is_held_back_comes_with_the_end() -> None:
    read_on = reader(stop=["abc"])
    assert [read_on.read(token, None) for token in b"xab"] == ["x", "", ""]
    assert read_on.read(None, FinishReason.ABORT) == "ab"
    cut = reader(stop=["abc"])
    assert [cut.read(ord("a"), None), cut.read(0xE4, FinishReason.LENGTH)] == ["", "a\ufffd"]


def test_stop_strings_wait_for_min_tokens() -> None:
    read_on = reader(stop=["a"], min_tokens=2)
    texts = []
    for token in b"aaa":
        assert read_on.stop is None
        texts.append(read_on.read(token, None))
    assert ("".join(texts), read_on.stop) == ("aa", "a")


def test_a_stop_string_may_end_in_what_the_flush_gives() -> None:
    read_on = reader(stop=["a\ufffd"])
    assert [read_on.read(ord("a"), None), read_on.read(0xE4, FinishReason.LENGTH)] == ["", ""]
    assert read_on.stop == "a\ufffd"
