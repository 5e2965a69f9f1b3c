"""Grammars of structured outputs: masks against languages written out, and what is refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.sampling.grammar import MAX_GRAMMAR_LENGTH, MAX_SCHEMA_LENGTH, GrammarCompiler, as_grammar, next_tokens
from rollout.sampling.params import ParameterError, SamplingParams, StructuredOutputsParams, Thinking
from tests.support import tiny_tokenizers

VOCAB, EOS = 260, 1  # a model's vocabulary is often larger than its tokenizer's
LONGEST = 7
TOKENIZER = tiny_tokenizers.of_tiny_models()
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, [EOS, 10**6])
TEXTS = {token_id: TOKENIZER.decode([token_id]) for token_id in range(2, 256)}


def allowed(*states: Any) -> list[set[int]]:
    bits = np.unpackbits(next_tokens(states, VOCAB), axis=-1, bitorder="little")[:, :VOCAB]
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def expected(language: set[str], so_far: str) -> set[int]:
    """The tokens after which some word of the language can still be completed, and EOS after a whole word."""
    going_on = {t for t, text in TEXTS.items() if any(word.startswith(so_far + text) for word in language)}
    return going_on | ({EOS} if so_far in language else set())


Regex = tuple[str, int]  # and the length of its longest word


def bounded(regex: Regex) -> bool:
    return regex[1] <= LONGEST


REPEATS = [("?", 1), ("{1,2}", 2), ("{2}", 2), ("{0,3}", 3)]
regexes: st.SearchStrategy[Regex] = st.recursive(
    st.sampled_from([("a", 1), ("b", 1), ("[ab]", 1), ("ab", 2)]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: (two[0][0] + two[1][0], two[0][1] + two[1][1])).filter(bounded),
        st.tuples(inner, inner).map(lambda two: (f"({two[0][0]}|{two[1][0]})", max(two[0][1], two[1][1]))),
        st.tuples(inner, st.sampled_from(REPEATS))
        .map(lambda two: (f"({two[0][0]}){two[1][0]}", two[0][1] * two[1][1]))
        .filter(bounded),
    ),
    max_leaves=5,
)


def words(regex: str) -> set[str]:
    texts = ("".join(letters) for length in range(LONGEST + 1) for letters in itertools.product("ab", repeat=length))
    return {text for text in texts if re.fullmatch(regex, text)}


@settings(max_examples=60, deadline=None)
@given(made=regexes, data=st.data())
def test_a_mask_is_what_some_word_of_the_language_goes_on_with(made: Regex, data: st.DataObject) -> None:
    regex, _ = made
    language = words(regex)
    state = COMPILER.compile(as_grammar(StructuredOutputsParams(regex=regex))).begin()
    so_far = ""
    while True:
        (mask,) = allowed(state)
        going_on = [word for word in language if word.startswith(so_far)]
        first, last = min(going_on), max(going_on)  # what these have in common, all between them have
        if (
            first[len(so_far) :][:1] == last[len(so_far) :][:1] != ""
        ):  # one text alone: the tokenizer's own first token of it
            assert mask
            assert mask <= expected(language, so_far)
        else:
            assert mask == expected(language, so_far)
        token = data.draw(st.sampled_from(sorted(mask)))
        state.append(token)
        if token == EOS:
            break
        so_far += TEXTS[token]


def test_choices_of_one_grammar_go_their_own_ways_and_end_with_eos_alone() -> None:
    grammar = COMPILER.compile(as_grammar(StructuredOutputsParams(choice=["ab", "aab", 'q"{\n', "é"])))
    one, other = grammar.begin(), grammar.begin()
    language = {"ab", "aab", 'q"{\n', "é"}
    assert allowed(one, other) == [expected(language, "") | {0xC3}] * 2  # the first byte of é, too
    one.append(ord("a"))
    other.append(ord("q"))
    assert allowed(other, one) == [expected(language, "q"), expected(language, "a")]
    one.append(ord("b"))
    assert allowed(one) == [{EOS}]
    one.append(EOS)
    assert one.error is None
    assert allowed(grammar.begin()) == allowed(grammar.begin()) == [expected(language, "") | {0xC3}]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([65, 66, 97, 98, 200]), max_size=8), st.booleans(), st.sampled_from([66, 97]))
def test_a_grammar_holds_once_a_choice_has_thought(tokens: list[int], must_begin: bool, end: int) -> None:
    begin = 65 if must_begin else None
    state = COMPILER.compile(as_grammar(StructuredOutputsParams(regex="[ab]{4}"))).after(Thinking(end, begin)).begin()
    thinks, answer = not must_begin, None if not must_begin else ""
    for place, token in enumerate(tokens):
        assert state.free == thinks
        if thinks:
            thinks = token != end
            answer = answer if thinks else ""
        else:
            also = {65} if must_begin and place == 0 else set()
            (mask,) = allowed(state)
            assert answer is not None
            assert mask == also | ({97, 98, *longer_ones(answer)} if len(answer) < 4 else {EOS})
            if token not in mask:
                break
            if token in also:
                thinks = True
            else:
                answer += chr(token)
        state.append(token)
        assert state.error is None


def longer_ones(answer: str) -> set[int]:
    """The tokens of several letters that fit behind this."""
    return {t for t, text in TEXTS.items() if 1 < len(text) <= 4 - len(answer) and set(text) <= {"a", "b"}}


def text_of(params: StructuredOutputsParams, text: str) -> bool:
    """Whether this text is a whole answer."""
    state = COMPILER.compile(as_grammar(params)).begin()
    for byte in text.encode():
        token = 3 if byte == 10 else byte
        if token not in allowed(state)[0]:
            return False
        state.append(token)
    return EOS in allowed(state)[0]


@pytest.mark.parametrize(
    ("params", "right", "wrong"),
    [
        ({"json_object": True}, '{"a": [1, {"b": null}]}', "[1]"),
        ({"json": {"type": "integer", "minimum": 3}}, "17", "2"),
        ({"json": '{"enum": ["x", 1]}'}, '"x"', '"y"'),
        ({"json": {"type": "array", "items": {}}}, "[1,\n 2]", "[1,"),
        ({"json": {"type": "array"}, "disable_any_whitespace": True}, "[1,2]", "[1, 2]"),
        ({"json": {"type": "array"}, "whitespace_pattern": " {2}"}, "[1,  2]", "[1,\n2]"),
        ({"json": {"properties": {"a": {}}, "type": "object"}}, '{"z":1}', "1"),
        (
            {"json": {"properties": {"a": {}}, "type": "object"}, "disable_additional_properties": True},
            '{"a":1}',
            '{"z":1}',
        ),
        ({"grammar": 'start: "a" b+\nb: "b"'}, "abb", "a"),
        ({"grammar": 'root ::= "a" b+\nb ::= "b" | "c"'}, "acb", "ad"),
        ({"regex": r"\d{2}-x?"}, "12-", "1-"),
    ],
)
def test_each_kind_says_what_it_asks_for(params: dict[str, Any], right: str, wrong: str) -> None:
    asked = StructuredOutputsParams(**params)
    assert text_of(asked, right)
    assert not text_of(asked, wrong)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"json_object": False}, "got none"),
        ({"choice": []}, "at least one"),
        ({"structural_tag": "{}"}, "structural_tag is not supported"),
        ({"json": "nonsense"}, "can't be read"),
        ({"json": '{"a":' * 20_000}, f"at most {MAX_SCHEMA_LENGTH} characters, got 100000"),
        ({"json": '{"a":' * 5000 + "1" + "}" * 5000}, "can't be read"),
        ({"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)}, f"regex must have at most {MAX_GRAMMAR_LENGTH}"),
        ({"choice": ["a" * 99] * 999}, "choice must have at most"),
        ({"grammar": "a ::= ("}, "can't be read"),
    ],
)
def test_what_is_not_well_formed_is_refused_by_name(params: dict[str, Any], why: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(why)) as refused:
        as_grammar(StructuredOutputsParams(**params))
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "params",
    [
        {"json": {"$ref": "https://example.org/schema"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": {"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(4)]} for i in range(12)]}},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"regex": "(?=a)b"},
        {"grammar": "start: missing"},
    ],
)
def test_what_cannot_be_compiled_within_limits_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        COMPILER.compile(as_grammar(StructuredOutputsParams(**params)))


HOSTILE = [
    {"json": {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(1500)}}},
    {"json": {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}},
    {"json": {"type": "string", "minLength": 10**9}},
    {"json": {"type": "array", "items": {"type": "string"}, "minItems": 10**9}},
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "(a|b)*a(a|b){60}"},
    {"regex": "a" * MAX_GRAMMAR_LENGTH},
    {"grammar": 'start: start start | "a"'},
    {
        "grammar": f"start: {' '.join(f'r{i}?' for i in range(500))}\n"
        + "\n".join(f'r{i}: "a" r{i * 7 % 500}?' for i in range(500))
    },
]


@pytest.mark.parametrize("params", HOSTILE)
def test_a_hostile_grammar_ends_a_choice_or_lets_it_go_on_and_holds_nobody_up(params: dict[str, Any]) -> None:
    try:
        state = COMPILER.compile(as_grammar(StructuredOutputsParams(**params))).begin()
    except ValueError:  # as the test above has it
        return
    for _ in range(60):
        (mask,) = allowed(state)
        if state.error is not None:
            assert mask == set()
            return
        token = max(mask)
        state.append(token)
        if token == EOS:
            return


@pytest.mark.parametrize(
    ("tokenizer", "eos", "why"),
    [
        (object(), [1], "a slow one"),
        (TOKENIZER, [], "this model has none"),
        (tiny_tokenizers.word_piece(), [9], "decoder"),
    ],
)
def test_a_model_that_cannot_have_grammars_says_why(tokenizer: Any, eos: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        GrammarCompiler(tokenizer, VOCAB, eos)


def test_ignore_eos_is_refused_by_name() -> None:
    params = SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputsParams(json_object=True))
    with pytest.raises(ParameterError, match="only EOS is left") as refused:
        params.validate(vocab_size=VOCAB, max_logprobs=5, max_num_seqs=4)
    assert refused.value.param == "ignore_eos"
