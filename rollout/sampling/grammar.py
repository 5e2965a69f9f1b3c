"""Structured outputs: the grammar that a choice's text follows, and the tokens that may come next in it.

llguidance (https://github.com/guidance-ai/llguidance) parses the grammars and computes the masks; `LIMITS` bound what
one of them may cost. Nothing here needs torch: a server checks grammars with it, too.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from rollout.sampling.params import ParameterError, StructuredOutputsParams, Thinking

MAX_SCHEMA_LENGTH = 1 << 16  # characters of JSON
MAX_GRAMMAR_LENGTH = 1 << 14  # of a regex, a grammar or all choices: they become larger automata than a schema does
LIMITS = LLParserLimits(  # measured on hostile grammars: a compilation ends in seconds, a mask in tenths of one
    max_items_in_row=1000,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,
    step_max_items=5000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
_CACHED = 64
_VALUES = {"enum", "const", "default", "examples"}  # keywords that hold values, and those that hold schemas by name
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}


def load_tokenizer(model: str) -> Any:
    """transformers' tokenizer of a folder, a .gguf file or a hub id. Raises what transformers raises."""
    from transformers import AutoTokenizer  # imports torch: seconds, and only here

    path = Path(model)
    if path.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(model)


class Grammar:
    """A compiled grammar, from whose start each choice goes its own way, after its `thinking` where there is any."""

    def __init__(self, start: LLMatcher, tokens: int, thinking: Thinking | None = None) -> None:
        self._start, self._tokens, self._thinking = start, tokens, thinking

    def after(self, thinking: Thinking | None) -> Grammar:
        """The same, after this."""
        return self if thinking is None else Grammar(self._start, self._tokens, thinking)

    def begin(self) -> GrammarState:
        """The state of a choice that has no token yet."""
        return GrammarState(self._start.deep_copy(), self._tokens, self._thinking)


class GrammarState:
    """Where one choice is in its grammar, which knows so many `tokens`. `append` takes each token of its output.

    While it is `free`, anything may come next. `first` is a token that may, whatever the grammar says.
    """

    __slots__ = ("_end", "first", "free", "matcher", "tokens")

    def __init__(self, matcher: LLMatcher, tokens: int, thinking: Thinking | None = None) -> None:
        self.matcher, self.tokens = matcher, tokens
        self._end = None if thinking is None else thinking.end
        self.first = None if thinking is None else thinking.begin
        self.free = thinking is not None and thinking.begin is None

    def append(self, token_id: int) -> None:
        """The output has one more token. After one that the last mask forbade, nothing may follow."""
        first, self.first = self.first, None
        if self.free:
            self.free = token_id != self._end
        elif token_id == first:
            self.free = True
        else:
            self.matcher.consume_token(token_id)

    @property
    def error(self) -> str | None:
        """Why nothing may follow: a limit was reached, or the grammar has no way on."""
        return self.matcher.get_error().partition("\n")[0] or None


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor()


def next_tokens(states: Sequence[GrammarState], vocab_size: int) -> np.ndarray:
    """Which tokens may come next in these states, none of which is free: a bit a token, (states, ⌈vocab_size / 8⌉)
    uint8, the lowest bit first.

    At the end of its grammar a choice may only have EOS, and in error nothing. The states are worked on in parallel.
    """
    words = np.zeros((len(states), -(-states[0].tokens // 32)), np.int32)  # a tokenizer may know more than the model
    matchers = [(state.matcher, place) for place, state in enumerate(states)]
    _executor().unsafe_compute_mask_ptr(matchers, words.ctypes.data, 4 * words.shape[1], len(words))
    words[[state.matcher.is_error() for state in states]] = 0
    bits = words.view(np.uint8)
    for place, state in enumerate(states):
        if state.first is not None:
            bits[place, state.first // 8] |= 1 << state.first % 8
    return bits[:, : -(-vocab_size // 8)]


class GrammarCompiler:
    """Compiles grammars for one tokenizer and model; those compiled last are kept. One thread at a time may use it.

    `tokenizer` is one of transformers'; a grammar ends with one of `eos_token_ids`. Raises ValueError where the
    tokenizer or the model can't have grammars.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise ValueError("structured outputs need a fast tokenizer (tokenizer.json), and this model has a slow one")
        size = fast.get_vocab_size()
        ends = [token for token in eos_token_ids if token < min(size, vocab_size)]
        if not ends:
            raise ValueError("structured outputs end with an EOS token, and this model has none")
        self._tokens = max(size, vocab_size)
        self._tokenizer = LLTokenizer(fast.to_str(), n_vocab=self._tokens, eos_token=ends)
        self.compile = functools.lru_cache(maxsize=_CACHED)(self._compile)

    def _compile(self, grammar: str) -> Grammar:
        """The grammar that `as_grammar` made. Raises ValueError where it is none, or too complex."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(matcher.get_error().replace("\n<non-verbose/>", "")[:500])
        return Grammar(matcher, self._tokens)


def as_grammar(params: StructuredOutputsParams) -> str:
    """What these parameters ask for, in llguidance's own form. Raises ParameterError for what isn't well formed."""
    params.validate()
    try:
        if params.json_object:
            return _schema({"type": "object"}, params)
        if params.json is not None:
            return _schema(params.json, params)
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(_bounded("regex", params.regex))
        if params.choice is not None:
            return grammar_from("choice", _bounded("choice", json.dumps(params.choice)))
        return grammar_from("grammar", _bounded("grammar", params.grammar or ""))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(f"structured_outputs can't be read: {str(error)[:500]}", "structured_outputs") from None


def _bounded(name: str, text: str, most: int = MAX_GRAMMAR_LENGTH) -> str:
    if len(text) > most:
        raise ParameterError(
            f"structured_outputs.{name} must have at most {most} characters, got {len(text)}.", "structured_outputs"
        )
    return text


def _schema(schema: str | dict[str, Any], params: StructuredOutputsParams) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    read = json.loads(_bounded("json", text, MAX_SCHEMA_LENGTH))
    if params.disable_additional_properties:
        read = _closed(read)
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(json.dumps(read), overrides=options)  # type: ignore[arg-type]


def _closed(schema: Any) -> Any:
    """The schema, whose objects that name properties have no others unless they say so (as vLLM's option has it)."""

    def close(one: dict[str, Any]) -> dict[str, Any]:
        named = isinstance(one.get("properties"), dict) and isinstance(one.get("type", "object"), str)
        return {"additionalProperties": False} | one if named else one

    return each_schema(schema, close)


def each_schema(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with `change` made to it and to each one within it."""
    if isinstance(schema, list):
        return [each_schema(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            changed[key] = {name: each_schema(one, change) for name, one in value.items()}
        else:
            changed[key] = value if key in _VALUES else each_schema(value, change)
    return change(changed)
