"""The bodies of `/inference/v1/generate`: pydantic checks what comes in, msgspec writes what goes out.

Key sets and their order are those of a vLLM server; `epoch` and `kv` of a span are this project's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, field_validator, model_validator

from rollout.outputs import FinishReason, IdArray, WeightVersionSpan
from rollout.sampling.params import SamplingParams
from rollout.server.wire.body import Body

OutputMode = Literal["tokens", "text"]


def _lenient(value: Any) -> Any:
    """Null means default, and one stop string needs no list, as OpenAI's clients expect."""
    if not isinstance(value, dict):
        return value
    fields = {key: item for key, item in value.items() if item is not None}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    return fields


def _encodable(text: str) -> str:
    """JSON can spell a lone surrogate, which neither an answer nor the engine's messages can hold."""
    text.encode()  # UnicodeEncodeError is a ValueError: pydantic reports it with the field's name
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class StreamOptions(BaseModel):
    """What a stream says of usage: a last chunk with the totals, and the running counts in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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


class GenerateRequest(Body):
    """A prompt of token ids and how to continue it. Unknown fields are ignored."""

    token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)]
    sampling_params: Annotated[SamplingParams, BeforeValidator(_lenient)]
    output_mode: OutputMode = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    features: MultiModalFeatures | None = None
    content_parts: list[dict[str, Any]] | None = None
    request_id: Text | None = None
    model: Text | None = None
    cache_salt: Text | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None

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
        if self.output_mode == "text" and not self.sampling_params.detokenize:
            raise ValueError("output_mode='text' requires sampling_params.detokenize to be true")
        for text in (*self.sampling_params.stop, *self.sampling_params.bad_words):
            _encodable(text)
        return self


class Usage(msgspec.Struct):
    """Token counts; a stream's last chunk leaves the details out."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: UnsetType | None = None
    completion_tokens_details: UnsetType | None = None


class TopLogprob(msgspec.Struct):
    """One candidate at one position."""

    token_id: int
    logprob: float
    rank: int


class SampledLogprob(msgspec.Struct):
    """The sampled token at one position; `top_logprobs` names it first, then the others by rank."""

    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct):
    """One entry a token."""

    content: list[SampledLogprob]


class TextTopLogprob(msgspec.Struct):
    """One candidate at one position, as text.

    `bytes` are the token's own, also where it is only part of a character, and null where `token` is `token_id:N`.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class TextLogprob(msgspec.Struct):
    """The sampled token at one position, as text; `top_logprobs` names it first, then the others by rank."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TextTopLogprob]


class TextLogprobs(msgspec.Struct):
    """One entry a token, in the shape of chat completions."""

    content: list[TextLogprob]


class PromptLogprob(msgspec.Struct):
    """One candidate at one prompt position, under its token id."""

    logprob: float
    rank: int
    decoded_token: str | None


class Choice(msgspec.Struct):
    """One continuation, or in a stream what is new of it. Spans are sent once the choice has ended."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int]
    routed_experts: str | None
    sampling_mask: list[IdArray | None] | None
    weight_versions: list[WeightVersionSpan] | None
    logprobs: Logprobs | None


class TextChoice(msgspec.Struct):
    """One continuation with its text, or in a stream what is new of both."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int]
    routed_experts: str | None
    sampling_mask: list[IdArray | None] | None
    weight_versions: list[WeightVersionSpan] | None
    text: str
    logprobs: TextLogprobs | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
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
