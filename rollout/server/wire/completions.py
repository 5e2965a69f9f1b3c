"""The dialect of `/v1/completions`. Key sets of answers and their order are those of a vLLM server.

What is always null belongs to what this server doesn't do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import ValidationError, ValidatorFunctionWrapHandler, field_validator

from rollout.config import ServerConfig
from rollout.outputs import FinishReason, TokenLogprob
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.errors import ErrorBody
from rollout.server.latency import RequestTiming
from rollout.server.text.detokenizer import Detokenizer
from rollout.server.wire.answer import Answer, Delta, Usage
from rollout.server.wire.body import MAX_PROMPTS, Each, Prompt, Text, TextPrompt, TokenIds
from rollout.server.wire.logprobs import PromptLogprobs, sendable, token_text
from rollout.server.wire.openai import FINGERPRINT, OpenAIRequest, OpenAIWriter, TokenExtras

# What is generated where nothing is said, as ever in OpenAI's API.
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(OpenAIRequest):
    """Continue one prompt or several, each a text or token ids."""

    id_prefix = "cmpl-"

    prompt: Text | TokenIds | Each[Text] | Each[TokenIds] | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _plainly_refused(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:  # one for each form that a prompt can have
            found = error.errors()[-1]
            raise ValueError(
                f"prompt must be a text, a list of token ids, or a list of either ({found['msg']})"
            ) from None

    @property
    def only_echo(self) -> bool:
        """Whether the prompt alone is asked back (and its logprobs): `echo` with no token to generate."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> Sequence[Prompt]:
        """The ids of every prompt, or its text. Raises ParameterError for none, and for too many."""
        prompt: Any = self.prompt
        if prompt is None:
            message = "Either prompt or prompt_embeds must be provided and non-empty. This server takes a prompt."
            raise ParameterError(message, "prompt")
        given = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not 1 <= len(given) <= MAX_PROMPTS:
            raise ParameterError(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(given)}.", "prompt")
        return [TextPrompt(one, self.add_special_tokens) if isinstance(one, str) else one for one in given]

    def to_sampling_params(self) -> SamplingParams:
        """The engine's parameters. An engine step yields a token, so a mere echo generates one that isn't sent."""
        logprobs = None if self.logprob_token_ids else self.logprobs  # the ids say themselves how many they are
        params = self._sampling_params(1 if self.only_echo else self.max_tokens, logprobs)
        if self.echo and self.logprobs is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = self.logprobs
        return params


class CompletionLogprobs(msgspec.Struct):
    """One entry a token in each list; `text_offset` is where the token starts in the choice's text, in characters.

    A token that is only part of a character starts where the character does.
    """

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionChoice(TokenExtras, kw_only=True):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: str | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The whole answer of /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None = None
    system_fingerprint: str | None = FINGERPRINT
    usage: Usage
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: RequestTiming | None = None


class CompletionChunkChoice(TokenExtras, kw_only=True):
    """What is new of one continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    routed_experts: str | UnsetType = UNSET


class CompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed /v1/completions; the fingerprint comes with the last one of a choice."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    system_fingerprint: str | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET
    metrics: RequestTiming | UnsetType = UNSET


class CompletionWriter(OpenAIWriter[CompletionRequest]):
    """Answers of /v1/completions. `echoed` has, by choice that has begun, how much of its text is the prompt."""

    whole_kinds = (CompletionResponse,)
    event_kinds = (CompletionChunk, ErrorBody)

    def __init__(self, body: CompletionRequest, config: ServerConfig, answers: Sequence[Answer]) -> None:
        super().__init__(body, config, answers)
        self.echoed: dict[int, int] = {}

    @property
    def reads_prompt(self) -> bool:
        """Whether to write takes work for every token of the prompt."""
        return bool(self.body.echo) or super().reads_prompt

    def whole(self, choices: Sequence[tuple[Answer, Delta]]) -> CompletionResponse:
        """The answer, of choices that have all ended."""
        made = []
        for answer, delta in choices:
            told = answer.told_prompt_logprobs() if self.body.prompt_logprobs is not None else None
            made.append(CompletionChoice(prompt_logprobs=told, **self._choice(answer, delta)))
        return CompletionResponse(
            id=self.answer.request_id,
            created=self.created,
            model=self.answer.model,
            choices=made,
            usage=self.usage(),
            metrics=self.metrics(),
        )

    def chunk(self, answer: Answer, delta: Delta) -> Iterator[msgspec.Struct]:
        """One event."""
        yield self.chunk_of(self.chunk_choice(answer, delta), delta.finish_reason)

    def chunk_choice(self, answer: Answer, delta: Delta) -> CompletionChunkChoice:
        """What is new of a choice."""
        return CompletionChunkChoice(**self._choice(answer, delta))

    def envelope(self, choices: list[Any]) -> CompletionChunk:
        """An event of a stream around these choices."""
        return CompletionChunk(
            id=self.answer.request_id, created=self.created, model=self.answer.model, choices=choices
        )

    def usage(self) -> Usage:
        """The counts so far; a mere echo has generated nothing."""
        usage = super().usage()
        if self.body.only_echo:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _choice(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        """The fields of a choice, or of what is new of it: with `echo`, it begins with its prompt."""
        first = delta.index not in self.echoed
        if self.body.only_echo:
            delta = _nothing_generated(delta)
        echo = self.echo(answer) if first else ""
        self.echoed.setdefault(delta.index, len(echo))
        return {
            "index": delta.index,
            "text": echo + (delta.text or ""),
            "logprobs": self._logprobs(answer, delta, echo if first and self.body.echo else None),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": self.prompt_ids(answer) if first else None,
            **self.token_fields(delta),
        }

    def echo(self, answer: Answer) -> str:
        """What a choice's text begins with, where asked for: the prompt as it was given, or the text of its ids."""
        if not self.body.echo:
            return ""
        given = self.body.prompts()[self.answers.index(answer)]
        if isinstance(given, TextPrompt):
            return given.text
        assert answer.vocabulary is not None
        assert isinstance(given, list)
        return answer.vocabulary.decode(given)

    def _logprobs(self, answer: Answer, delta: Delta, echo: str | None) -> CompletionLogprobs | None:
        """Those of the new tokens, after an `echo` those of the prompt first, whose first token has none."""
        if delta.logprobs is None:
            return None
        ids, entries = delta.token_ids, list[list[TokenLogprob] | None](delta.logprobs)
        offsets = [self.echoed[delta.index] + offset for offset in delta.text_offsets]
        if echo is not None and answer.prompt_logprobs is not None:
            ids, entries = [*answer.prompt_token_ids, *ids], [*answer.prompt_logprobs, *entries]
            offsets = [*_prompt_offsets(answer, echo), *offsets]
        found = CompletionLogprobs(offsets, [], [], [])
        for token_id, entry in zip(ids, entries, strict=True):
            found.tokens.append(token_text(token_id, answer.vocabulary, as_ids=self.as_ids)[0])
            top: dict[str, float] = {}
            for candidate in entry or []:  # the sampled one first: it wins where two read alike
                name = token_text(candidate.token_id, answer.vocabulary, as_ids=self.as_ids)[0]
                top.setdefault(name, sendable(candidate.logprob))
            found.token_logprobs.append(None if entry is None else sendable(entry[0].logprob))
            found.top_logprobs.append(None if entry is None else top)
        return found


def _prompt_offsets(answer: Answer, echo: str) -> list[int]:
    """Where each token of the prompt starts in its echo, which may lack what the tokenizer has put before the text."""
    assert answer.vocabulary is not None
    detokenizer = Detokenizer(answer.vocabulary, (), skip_special_tokens=False)
    pieces = [detokenizer.read(token_id) for token_id in answer.prompt_token_ids]
    before = max(0, "".join(pieces).find(echo))
    ends = accumulate((len(piece) for piece in pieces), initial=-before)
    return [min(max(0, start), len(echo)) for start, _ in zip(ends, pieces, strict=False)]


def _nothing_generated(delta: Delta) -> Delta:
    """The delta without its one token: only the prompt was asked back."""
    return Delta(
        index=delta.index,
        token_ids=[],
        text="",
        logprobs=None if delta.logprobs is None else [],
        weight_versions=None if delta.weight_versions is None else [],
        finish_reason=None if delta.finish_reason is None else FinishReason.LENGTH,
    )
