"""Sampling parameters: the fields a request may carry, with vLLM's names, and what makes them valid."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

MAX_SEED = 2**63 - 1
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOPS = 64  # each is looked for in the text of every token
MAX_STOP_LENGTH = 4096
MAX_BAD_WORDS = 4096
MAX_BAD_WORD_LENGTH = 256  # in characters: every token is compared with the words that may be under way


class ParameterError(ValueError):
    """A sampling parameter that can't be served. `param` names the field, None where several are at odds."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Thinking:
    """What a choice may say before its grammar holds: anything, up to and with the token `end`; where there is a
    `begin`, only if that is its first token."""

    end: int
    begin: int | None = None


@dataclass
class StructuredOutputsParams:
    """What the text of a choice must be: exactly one of `json` (a schema, or JSON that is one), `json_object` (any
    object), `regex`, `choice` (one of these strings) and `grammar` (Lark's notation, or GBNF).

    Of JSON, `disable_any_whitespace` leaves out all white space between its parts, `whitespace_pattern` is a regex
    for it, and `disable_additional_properties` closes objects whose schema doesn't. Source: vLLM's class of this name.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}  # what isn't known would change the answer

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def validate(self) -> None:
        """Raise ParameterError where not exactly one kind is asked for, or one that isn't served."""
        name = "structured_outputs"
        if self.structural_tag is not None:
            raise ParameterError(f"{name}.structural_tag is not supported by this server; use grammar.", name)
        kinds = ("json", "json_object", "regex", "choice", "grammar")
        given = [kind for kind in kinds if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise ParameterError(f"{name} must hold exactly one of {', '.join(kinds)}, got {got}.", name)
        if self.choice == []:
            raise ParameterError(f"{name}.choice must hold at least one string.", name)


@dataclass
class SamplingParams:
    """How to sample the tokens of one request.

    The server validates the types (from this very class), the engine receives it as msgpack. `validate` checks the
    values. Ids are token ids of the model's vocabulary; `logit_bias` maps them to an addend of the logit. Where
    `logprob_token_ids` are given, their logprobs are reported in place of the top `logprobs`, which is their number.
    A `seed` of -1 is none, as in vLLM. `routed_experts` begin with the row of prompt token
    `routed_experts_prompt_start`: a later turn of a dialogue leaves out what an earlier one was told.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    routed_experts_prompt_start: int = 0
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = len(self.logprob_token_ids)
        if self.seed == -1:
            self.seed = None

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken instead of a draw."""
        return self.temperature == 0

    def validate(self, *, vocab_size: int, max_logprobs: int, max_num_seqs: int) -> None:
        """Raise ParameterError, naming the field and the value, for the first value out of range.

        A `logprobs` of -1 asks for the whole vocabulary, and counts as that many; a `max_logprobs` of -1 is no limit.
        Sources: spec "control-plane" (ranges) and the recorded answers (wording).
        """
        self._validate_ranges()
        self._validate_counts(vocab_size, max_logprobs, max_num_seqs)
        self._validate_ids(vocab_size)
        self._validate_strings()

    def _validate_strings(self) -> None:
        def check(name: str, most: int, longest: int) -> None:
            strings = getattr(self, name)
            if len(strings) > most:
                raise ParameterError(f"{name} must hold at most {most} strings, got {len(strings)}.", name)
            if (length := max(map(len, strings), default=0)) > longest:
                raise ParameterError(
                    f"{name} must hold strings of at most {longest} characters, got one of {length}.", name
                )

        if "" in self.stop:
            raise ParameterError("stop cannot contain an empty string.")
        if self.stop and not self.detokenize:
            raise ParameterError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
            )
        check("stop", MAX_STOPS, MAX_STOP_LENGTH)
        if "" in self.bad_words:
            raise ParameterError("bad_words cannot contain an empty string.", "bad_words")
        check("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)

    def _validate_ranges(self) -> None:
        def check(name: str, ok: bool, expected: str) -> None:
            value = getattr(self, name)
            if not ok:  # never true of NaN
                raise ParameterError(f"{name} must be {expected}, got {value}. (parameter={name}, value={value})", name)

        check("temperature", 0 <= self.temperature <= 2, "in [0, 2]")
        check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        check("top_k", self.top_k >= -1, "0 or -1 (off), or at least 1")
        check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        check("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "greater than 0, and finite")
        check("routed_experts_prompt_start", self.routed_experts_prompt_start >= 0, "at least 0")
        if self.seed is not None:
            check("seed", 0 <= self.seed <= MAX_SEED, "in [0, 2^63 - 1], or -1 for none")

    def _validate_counts(self, vocab_size: int, max_logprobs: int, max_num_seqs: int) -> None:
        if self.n < 1:
            raise ParameterError(f"n must be at least 1, got {self.n}.")
        if self.n > 1 and self.greedy:
            raise ParameterError(f"n must be 1 when using greedy sampling, got {self.n}.")
        if self.n > max_num_seqs:
            raise ParameterError(f"n must be at most max_num_seqs ({max_num_seqs}), got {self.n}.", "n")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ParameterError(
                f"max_tokens must be at least 1, got {self.max_tokens}. "
                f"(parameter=max_tokens, value={self.max_tokens})",
                "max_tokens",
            )
        if self.min_tokens < 0:
            raise ParameterError(f"min_tokens must be greater than or equal to 0, got {self.min_tokens}.", "min_tokens")
        if self.ignore_eos and self.structured_outputs is not None:
            raise ParameterError(
                "ignore_eos can't be had with structured_outputs: after what they ask for, only EOS is left.",
                "ignore_eos",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}."
            )
        for name, what in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            value = getattr(self, name)
            if value is not None and value < -1:
                raise ParameterError(
                    f"{name} must be at least -1, got {value}. (parameter={name}, value={value})", name
                )
            wanted = vocab_size if value == -1 else value or 0
            if name == "logprobs" and self.logprob_token_ids:
                continue  # they have a limit of their own
            if wanted > max_logprobs != -1:
                raise ParameterError(
                    f"Requested {what} logprobs of {wanted}, which is greater than max allowed: {max_logprobs} "
                    f"(parameter={name}, value={value})",
                    name,
                )

    def _validate_ids(self, vocab_size: int) -> None:
        def check(name: str, ids: list[int]) -> None:
            if len(ids) > vocab_size:  # before anything looks at each of them
                raise ParameterError(
                    f"{name} holds {len(ids)} ids, more than the vocabulary of {vocab_size}: name each once", name
                )
            wrong = [i for i in ids if not 0 <= i < vocab_size]
            if wrong:
                raise ParameterError(f"{name} holds ids outside the vocabulary of {vocab_size}: {wrong[:5]}", name)

        check("stop_token_ids", self.stop_token_ids)
        if self.logprob_token_ids is not None:
            check("logprob_token_ids", self.logprob_token_ids)
            self._validate_logprob_token_ids(len(self.logprob_token_ids))
        if self.logit_bias is not None:
            check("logit_bias", list(self.logit_bias))
            wrong = [v for v in self.logit_bias.values() if not math.isfinite(v)]
            if wrong:
                raise ParameterError(f"logit_bias values must be finite, got {wrong[0]}", "logit_bias")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids is not None and empty!", "allowed_token_ids")
            check("allowed_token_ids", self.allowed_token_ids)

    def _validate_logprob_token_ids(self, count: int) -> None:
        """Sources: vLLM's `SamplingParams._validate_logprobs` (the limit, the rule and the wording)."""
        name = "logprob_token_ids"
        if count > MAX_LOGPROB_TOKEN_IDS:
            raise ParameterError(
                f"Requested {name} of length {count}, which is greater than max allowed: {MAX_LOGPROB_TOKEN_IDS} "
                f"(parameter={name}, value={count})",
                name,
            )
        if self.logprobs is not None and self.logprobs != count:
            raise ParameterError(
                f"When both logprobs and {name} are set, logprobs must equal len({name}). Got "
                f"logprobs={self.logprobs}, len({name})={count}. (parameter={name}, value={count})",
                name,
            )


def check_names(names: Iterable[str]) -> None:
    """Raise ParameterError for the first name that no field of SamplingParams has, with the closest ones that one has.

    For a trainer's side: a server lets fields pass that other servers know.
    """
    known = [f.name for f in fields(SamplingParams)]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
            raise ParameterError(f"{name!r} is no sampling parameter: {hint}", name)
