"""The bodies of render's and derender's answers and requests: token-in/token-out as other servers' clients wrap it.

A chunk of a stream is derendered in a call of its own. The server keeps nothing between two: the client carries a
`stream_state` for each choice from one answer to the next request.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.outputs import FinishReason
from rollout.server.text.thinking import ReasoningState
from rollout.server.wire.body import Each, Text, TokenId, TokenIds
from rollout.server.wire.chat import ChatChunk, ChatCompletionRequest
from rollout.server.wire.completions import CompletionChunk, CompletionRequest


class RenderedRequest(msgspec.Struct, kw_only=True):
    """A body that /inference/v1/generate takes as it is. What is always null belongs to what isn't rendered here."""

    request_id: str
    token_ids: list[int]
    token_offsets: list[list[int]] | None = None
    features: None = None
    content_parts: None = None
    sampling_params: dict[str, Any]
    model: str
    reasoning_ended: None = None
    reasoning_parser_kwargs: None = None
    return_token_ids: bool | None
    output_mode: str = "tokens"
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None = None
    ec_transfer_params: None = None


class GeneratedTopLogprob(BaseModel):
    """One candidate, as /inference/v1/generate names it."""

    token_id: TokenId
    logprob: float


class GeneratedLogprob(GeneratedTopLogprob):
    """The sampled token at one position, and what else was told."""

    top_logprobs: Each[GeneratedTopLogprob] = []


class GeneratedLogprobs(BaseModel):
    """One entry a token."""

    content: Each[GeneratedLogprob] = []


class GeneratedChoice(BaseModel):
    """A choice of /inference/v1/generate, whole or a piece."""

    model_config = ConfigDict(extra="allow")  # weight_versions, sampling_mask go through as they are

    index: int = 0
    token_ids: TokenIds = []
    finish_reason: FinishReason | None = None
    stop_reason: int | Text | None = None
    logprobs: GeneratedLogprobs | None = None
    routed_experts: Text | None = None

    @model_validator(mode="after")
    def _an_entry_a_token(self) -> GeneratedChoice:
        if self.logprobs is not None and len(self.logprobs.content) != len(self.token_ids):
            raise ValueError(
                f"logprobs must have an entry a token, got {len(self.logprobs.content)} for {len(self.token_ids)}"
            )
        return self


class GeneratedUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class GenerateTokensResponse(BaseModel):
    """An answer of /inference/v1/generate, or a chunk of one, in token mode: text mode leaves nothing to do."""

    request_id: Text
    choices: Each[GeneratedChoice]
    output_mode: Literal["tokens"] = "tokens"
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: Any = None
    usage: GeneratedUsage | None = None


# As many as one character may take.
CARRIED_IDS = 4
CarriedIds = Annotated[TokenIds, Field(max_length=CARRIED_IDS)]


class DerenderStreamState(BaseModel):
    """What was read of one choice so far, as much as the next chunk needs."""

    context: CarriedIds = []  # what came before those: of the output, or of the prompt
    token_ids: CarriedIds = []  # the last that were read
    tail: Text = ""  # text in which a stop string may have begun
    num_tokens: Annotated[int, Field(ge=0)] = 0
    text_offset: Annotated[int, Field(ge=0)] = 0  # where the next token starts in the text
    role_sent: bool = False
    said: Text = ""  # where calls or reasoning are looked for: all of the choice's text, which is read anew
    began: ReasoningState | None = None  # and whether it began within reasoning


class DerenderChatRequest(BaseModel):
    """A whole answer, to become one of /v1/chat/completions. `chat_request` is what was rendered."""

    stream: Literal[False] = False
    model: Text | None = None
    generate_response: GenerateTokensResponse
    prompt_tokens: int | None = None
    prompt_token_ids: TokenIds | None = None
    chat_request: ChatCompletionRequest | None = None


class DerenderChatStreamRequest(BaseModel):
    """One chunk, to become one of a streamed /v1/chat/completions."""

    stream: Literal[True]
    model: Text | None = None
    generate_chunk: GenerateTokensResponse
    stream_state: DerenderStreamState | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: TokenIds | None = None
    chat_request: ChatCompletionRequest | None = None


class DerenderCompletionRequest(BaseModel):
    """A whole answer a prompt, to become one of /v1/completions. `completion_request` is what was rendered."""

    stream: Literal[False] = False
    model: Text | None = None
    generate_responses: Annotated[Each[GenerateTokensResponse], Field(min_length=1)]
    prompt_tokens: Each[int] | None = None
    prompt_token_ids: Each[TokenIds | None] | None = None
    completion_request: CompletionRequest | None = None


class DerenderCompletionStreamRequest(BaseModel):
    """One chunk, to become one of a streamed /v1/completions."""

    stream: Literal[True]
    model: Text | None = None
    generate_chunk: GenerateTokensResponse
    stream_state: DerenderStreamState | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: TokenIds | None = None
    completion_request: CompletionRequest | None = None


Chunk = TypeVar("Chunk", bound=ChatChunk | CompletionChunk)


class DerenderedChunk(msgspec.Struct, Generic[Chunk]):
    """The chunk, and the state to send with the choice's next one."""

    chunk: Chunk
    stream_state: dict[str, Any]
