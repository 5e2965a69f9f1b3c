"""The dialect of `/v1/chat/completions`. Key sets of answers and their order are those of a vLLM server.

What is always null belongs to what this server doesn't do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from rollout.config import ServerConfig
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.errors import ErrorBody
from rollout.server.wire.answer import Answer, Delta, Usage
from rollout.server.wire.body import ChatFields, Prompt
from rollout.server.wire.logprobs import PromptLogprobs, TextLogprobs, text_logprobs
from rollout.server.wire.openai import FINGERPRINT, ChatLogprobs, OpenAIRequest, OpenAIWriter, TokenExtras


class ChatCompletionRequest(ChatLogprobs, OpenAIRequest, ChatFields):
    """Answer a chat. Tool calls and reasoning are left in the text, for whoever knows the model to find."""

    id_prefix = "chatcmpl-"

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    echo: bool | None = False
    return_prompt_text: bool | None = None

    def check(self) -> None:
        """As the base class; also a forced tool call, which only a grammar could keep."""
        super().check()
        if self.tool_choice not in (None, "auto", "none"):
            raise ParameterError(
                f"tool_choice must be 'auto' or 'none', got {self.tool_choice!r}: tool calls are left in the text.",
                "tool_choice",
            )
        self.check_logprobs()

    def template_arguments(self) -> dict[str, Any]:
        """As the base class; models with levels of reasoning read this one too."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | super().template_arguments()

    @property
    def echoed(self) -> str:
        """What the answer begins with: with `echo` the text of the last message, where that is the assistant's."""
        if not self.echo or self.messages[-1].role != "assistant":
            return ""
        last = self.messages[-1]
        parts = last.content if isinstance(last.content, list) else [last.content or ""]
        return "\n".join(part if isinstance(part, str) else part.text or "" for part in parts)

    def prompts(self) -> Sequence[Prompt]:
        """The chat."""
        return [self]

    def to_sampling_params(self) -> SamplingParams:
        """The engine's parameters. Without a limit, the answer may fill the model's length."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling_params(limit, self.engine_logprobs)


class AssistantMessage(msgspec.Struct, kw_only=True):
    """What the model answered, tool calls and reasoning included, as text."""

    role: str = "assistant"
    content: str
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None


class ChatChoice(TokenExtras, kw_only=True):
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
    prompt_text: str | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class MessageDelta(msgspec.Struct, kw_only=True):
    """What is new of a message: its role first, then its text."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(TokenExtras, kw_only=True):
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
    prompt_text: str | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET


class ChatWriter(OpenAIWriter[ChatCompletionRequest]):
    """Answers of /v1/chat/completions."""

    whole_kinds = (ChatResponse,)
    event_kinds = (ChatChunk, ErrorBody)

    def __init__(self, body: ChatCompletionRequest, config: ServerConfig, answers: Sequence[Answer]) -> None:
        super().__init__(body, config, answers)
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[tuple[Answer, Delta]]) -> ChatResponse:
        """The answer, of choices that have all ended."""
        return ChatResponse(
            id=self.answer.request_id,
            created=self.created,
            model=self.answer.model,
            choices=[
                ChatChoice(
                    message=AssistantMessage(content=self.body.echoed + (delta.text or "")),
                    stop_reason=delta.stop_reason,
                    **self._choice(answer, delta),
                )
                for answer, delta in choices
            ],
            usage=self.usage(),
            prompt_logprobs=self.answer.told_prompt_logprobs(),
            prompt_token_ids=self.prompt_ids(self.answer),
            prompt_text=self._prompt_text,
        )

    def chunk(self, answer: Answer, delta: Delta) -> Iterator[msgspec.Struct]:
        """One event; before the first of a choice another one, with its role."""
        if delta.index not in self._begun:
            role = MessageDelta(role="assistant", content=self.body.echoed)
            first = self.chunk_of(ChatChunkChoice(index=delta.index, delta=role))
            first.prompt_token_ids = None if self._begun else self.prompt_ids(answer)
            first.prompt_text = None if self._begun else self._prompt_text
            self._begun.add(delta.index)
            yield first
        yield self.chunk_of(self.chunk_choice(answer, delta), delta.finish_reason)

    def chunk_choice(self, answer: Answer, delta: Delta) -> ChatChunkChoice:
        """What is new of a choice."""
        made = ChatChunkChoice(delta=MessageDelta(content=delta.text or ""), **self._choice(answer, delta))
        if delta.finish_reason is not None:
            made.stop_reason = delta.stop_reason
        return made

    @property
    def _prompt_text(self) -> str | None:
        return self.answer.prompt_text if self.body.return_prompt_text else None

    def envelope(self, choices: list[Any]) -> ChatChunk:
        """An event of a stream around these choices."""
        return ChatChunk(id=self.answer.request_id, created=self.created, model=self.answer.model, choices=choices)

    def _choice(self, answer: Answer, delta: Delta) -> dict[str, Any]:
        top = self.body.shown_logprobs
        return {
            "index": delta.index,
            "logprobs": text_logprobs(delta.logprobs, answer.vocabulary, as_ids=self.as_ids, top=top),
            "finish_reason": delta.finish_reason,
            "token_ids": None,
            **self.token_fields(delta),
        }
