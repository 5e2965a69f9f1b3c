"""The dialect of `/inference/v1/generate`: token ids in, token ids out.

Key sets and their order are those of a vLLM server; `epoch` and `kv` of a span are this project's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, BeforeValidator, Field, field_validator, model_validator

from rollout.outputs import FinishReason, IdArray, WeightVersionSpan
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.wire.answer import Answer, Delta, Usage, Writer, npy
from rollout.server.wire.body import GenerationBody, Prompt, encodable
from rollout.server.wire.logprobs import Logprobs, PromptLogprobs, TextLogprobs, text_logprobs, token_logprobs

OutputMode = Literal["tokens", "text"]

_KNOWN_PARAMS = {field.name for field in dataclasses.fields(SamplingParams)}


def _lenient(value: Any) -> Any:
    """Null means default, and one stop string needs no list, as OpenAI's clients expect."""
    if not isinstance(value, dict):
        return value
    fields = {key: item for key, item in value.items() if item is not None}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    return fields


class PlaceholderRange(BaseModel):
    """Where one item's placeholder tokens are in the prompt."""

    offset: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(gt=0)]


class MultiModalFeatures(BaseModel):
    """What a render step says of a prompt's images, sounds and videos, by modality, one entry an item."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[PlaceholderRange]]
    kwargs_data: dict[str, list[str | None]] | None = None
    mm_metadata: dict[str, list[str | None]] | None = None


class GenerateRequest(GenerationBody):
    """A prompt of token ids and how to continue it. Unknown fields are ignored."""

    id_prefix = "generate-tokens-"
    text_needs = "output_mode='text' needs"
    text_param = "output_mode"

    token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)]
    sampling_params: Annotated[SamplingParams, BeforeValidator(_lenient)]
    output_mode: OutputMode = "tokens"
    features: MultiModalFeatures | None = None
    content_parts: list[dict[str, Any]] | None = None
    reasoning_ended: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _keep_unknown_params(cls, data: Any) -> Any:
        """Parameters that there aren't become fields that there aren't, by their path: both are refused or named."""
        params = data.get("sampling_params") if isinstance(data, dict) else None
        if not isinstance(params, dict) or params.keys() <= _KNOWN_PARAMS:
            return data
        return data | {f"sampling_params.{name}": params[name] for name in params if name not in _KNOWN_PARAMS}

    @field_validator("token_ids")
    @classmethod
    def _no_negative_ids(cls, value: list[int]) -> list[int]:
        if min(value) < 0:
            raise ValueError("token_ids must not contain negative values")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> GenerateRequest:
        if self.features is not None and self.content_parts:
            raise ValueError("content_parts and features are mutually exclusive")
        if self.wants_text and not self.sampling_params.detokenize:
            raise ValueError("output_mode='text' requires sampling_params.detokenize to be true")
        for text in (*self.sampling_params.stop, *self.sampling_params.bad_words):
            encodable(text)
        return self

    @property
    def wants_text(self) -> bool:
        """Whether the answer has text."""
        return self.output_mode == "text"

    @property
    def ended_reasoning(self) -> bool | None:
        """Whether the prompt has the answer's reasoning behind it."""
        return self.reasoning_ended

    def check(self) -> None:
        """As the base class; also for media, which have a form of their own here."""
        super().check()
        if self.features is not None or self.content_parts:
            name = "content_parts" if self.features is None else "features"
            raise ParameterError(f"{name} can't be served: this is a text-only model. Send token_ids alone.", name)

    def prompts(self) -> Sequence[Prompt]:
        """The one prompt."""
        return [self.token_ids]

    def to_sampling_params(self) -> SamplingParams:
        """Those of the body."""
        return self.sampling_params


class _Choice(msgspec.Struct):
    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int]
    routed_experts: str | None
    sampling_mask: list[IdArray | None] | None
    weight_versions: list[WeightVersionSpan] | None


class Choice(_Choice):
    """One continuation, or in a stream what is new of it. Spans are sent once the choice has ended."""

    logprobs: Logprobs | None


class TextChoice(_Choice):
    """One continuation with its text, or in a stream what is new of both."""

    text: str
    logprobs: TextLogprobs | None


C = TypeVar("C", bound=Choice | TextChoice)


class GenerateResponse(msgspec.Struct, Generic[C], kw_only=True):
    """The whole answer. The fields that are always null belong to what this server doesn't do."""

    request_id: str
    model: str
    created: int
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_id_logprobs: None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    output_mode: OutputMode = "tokens"
    choices: Sequence[C]


class GenerateChunk(msgspec.Struct, Generic[C], kw_only=True):
    """One event of a stream. What concerns the prompt comes with the first one only."""

    request_id: str
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    output_mode: OutputMode = "tokens"
    choices: Sequence[C]


class GenerateWriter(Writer[GenerateRequest]):
    """Answers in token ids, and in text too where the request's `output_mode` says so."""

    whole_kinds = (
        GenerateResponse[Choice],
        GenerateResponse[TextChoice],
    )
    event_kinds = (
        GenerateChunk[Choice],
        GenerateChunk[TextChoice],
    )

    _begun = False

    def whole(self, choices: Sequence[tuple[Answer, Delta]]) -> msgspec.Struct:
        """The answer, of choices that have all ended."""
        return GenerateResponse(
            request_id=self.answer.request_id,
            model=self.answer.model,
            created=self.created,
            usage=self.usage(),
            prompt_logprobs=self.answer.told_prompt_logprobs(),
            prompt_token_ids=self.body.token_ids if self.body.return_token_ids else None,
            output_mode=self.body.output_mode,
            choices=[self._choice(delta) for _, delta in choices],
        )

    def chunk(self, answer: Answer, delta: Delta) -> Iterator[msgspec.Struct]:
        """One event."""
        chunk = GenerateChunk(
            request_id=answer.request_id,
            usage=self.usage() if self.body.running_usage else None,
            output_mode=self.body.output_mode,
            choices=[self._choice(delta)],
        )
        if not self._begun:
            self._begun = True
            if self.body.return_token_ids:
                chunk.prompt_token_ids = self.body.token_ids
            chunk.prompt_logprobs = answer.told_prompt_logprobs() or UNSET
        yield chunk

    def end(self) -> Iterator[msgspec.Struct]:
        """The totals, where asked for."""
        if (usage := self.totals()) is not None:
            yield GenerateChunk[Choice](
                request_id=self.answer.request_id, usage=usage, output_mode=self.body.output_mode, choices=[]
            )

    def _choice(self, delta: Delta) -> Choice | TextChoice:
        fields = (
            delta.index,
            delta.finish_reason,
            delta.stop_reason,
            delta.token_ids,
            npy(delta.routed_experts),
            delta.sampling_mask,
            delta.weight_versions,
        )
        if not self.body.wants_text:
            return Choice(*fields, token_logprobs(delta.logprobs))
        by_id = self.config.return_tokens_as_token_ids
        return TextChoice(
            *fields, delta.text or "", text_logprobs(delta.logprobs, self.answer.vocabulary, as_ids=by_id)
        )
