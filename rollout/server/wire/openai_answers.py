"""What OpenAI's clients get back. Key sets and their order are those of a vLLM server.

`weight_versions` and `sampling_mask` are this project's own, and absent unless asked for; what is always null belongs
to what this server doesn't do.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from rollout import __version__
from rollout.outputs import IdArray, WeightVersionSpan
from rollout.server.wire.tokens import PromptLogprobs, TextLogprobs, Usage

FINGERPRINT = f"rollout-{__version__}"


class Extras(msgspec.Struct, kw_only=True):
    """What a choice says of its tokens beside OpenAI's fields, where asked for."""

    sampling_mask: list[IdArray | None] | UnsetType | None = UNSET
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """One entry a token in each list; `text_offset` is where the token starts in the text, in characters."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionChoice(Extras, kw_only=True):
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
    metrics: None = None


class CompletionChunkChoice(Extras, kw_only=True):
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


class AssistantMessage(msgspec.Struct, kw_only=True):
    """What the model answered, tool calls and reasoning included, as text."""

    role: str = "assistant"
    content: str
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None


class ChatChoice(Extras, kw_only=True):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None


class ChatResponse(msgspec.Struct, kw_only=True):
    """The whole answer of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str | None = FINGERPRINT
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class MessageDelta(msgspec.Struct, kw_only=True):
    """What is new of a message: its role first, then its text."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Extras, kw_only=True):
    """What is new of one answer. The stop reason comes with the finish reason."""

    index: int
    delta: MessageDelta
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    routed_experts: str | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat. The first of a choice has the role, and what concerns the prompt."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_text: UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET
