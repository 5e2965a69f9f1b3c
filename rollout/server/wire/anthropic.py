"""The dialect of `/v1/messages`, Anthropic's form of a chat, and how it becomes one of OpenAI's.

`messages`, `system`, `tools` and `stop_sequences` are Anthropic's; beside them a body may hold any sampling parameter,
`logprobs` and `return_*` field of /v1/chat/completions. The answer then carries them as fields of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from rollout.outputs import FinishReason, IdArray, WeightVersionSpan
from rollout.sampling.params import ParameterError, SamplingParams, StructuredOutputsParams
from rollout.server.errors import ApiError
from rollout.server.wire.answer import Answer, Delta, encode_json
from rollout.server.wire.body import Body, ChatFields, Each, Message, Prompt, Text
from rollout.server.wire.logprobs import TextLogprobs, text_logprobs
from rollout.server.wire.openai import ChatLogprobs, OpenAIRequest, TextWriter
from rollout.server.wire.structure import OutputConfig, OutputFormat

Role = Literal["user", "assistant", "system"]


class Block(BaseModel):
    """One block of content; which of the fields it has depends on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Each[Block] | None = None


class Turn(BaseModel):
    """One message."""

    role: Role
    content: str | Each[Block]


class Tool(BaseModel):
    """A tool of the caller's. Those that Anthropic runs itself have no schema."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesPrompt(BaseModel):
    """What a prompt is made of."""

    messages: Annotated[Each[Turn], Field(min_length=1)]
    system: str | Each[Block] | None = None
    tools: Each[Tool] | None = None
    output_config: OutputConfig | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def prompts(self) -> Sequence[Prompt]:
        """The same in OpenAI's form. Raises ParameterError for content that isn't text."""
        system = [] if self.system is None else [Message(role="system", content=_text(self.system, "system"))]
        turns = (m for i, turn in enumerate(self.messages) for m in _messages(turn, f"messages.{i}.content"))
        messages = [*system, *turns]
        prefilled = messages[-1].role == "assistant" and bool(messages[-1].content)
        asked = None if self.output_config is None else self.output_config.effort
        effort = {} if asked is None else {"reasoning_effort": asked}
        chat = ChatFields(
            messages=messages,
            tools=[_openai_tool(tool) for tool in self.tools or []],
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            chat_template=self.chat_template,
            chat_template_kwargs=effort | (self.chat_template_kwargs or {}),
        )
        return [chat]


class CountTokensRequest(MessagesPrompt, Body):
    """How many tokens the prompt of a chat has. Whatever says how to answer it is ignored."""

    model: Text | None = None


class CountTokensResponse(BaseModel):
    """The count."""

    input_tokens: int


class MessagesRequest(MessagesPrompt, ChatLogprobs, OpenAIRequest):
    """Answer a chat, or go on with its last message where that is the assistant's."""

    id_prefix = "chatcmpl-"

    max_tokens: int
    stop_sequences: Each[Text] | None = None
    tool_choice: dict[str, Any] | None = None

    def check(self) -> None:
        """As the base class; also for what Anthropic's form has no place for."""
        super().check()
        self.check_logprobs()
        choice = (self.tool_choice or {}).get("type", "auto")
        if choice not in ("auto", "none"):
            raise ParameterError(
                f"tool_choice must be of type 'auto' or 'none', got {choice!r}: tool calls are left in the text.",
                "tool_choice",
            )
        for tool in self.tools or []:
            if tool.input_schema is None:
                raise ParameterError(f"The tool {tool.name!r} has no input_schema, and this server runs none.", "tools")
        if self._format is not None and (self.structured_outputs is not None or self.response_format is not None):
            message = "output_config.format is given beside structured_outputs or response_format: send one of them."
            raise ParameterError(message, "output_config.format")
        if self.n not in (None, 1):
            raise ParameterError(f"n must be 1 here, got {self.n}: a message is one answer.", "n")

    def to_sampling_params(self) -> SamplingParams:
        """The engine's parameters; `stop_sequences` are its stop strings."""
        params = self._sampling_params(self.max_tokens, self.engine_logprobs)
        params.stop += self.stop_sequences or []
        if self._format is not None:
            params.structured_outputs = StructuredOutputsParams(json=self._format.schema_)
        return params

    @property
    def _format(self) -> OutputFormat | None:
        return None if self.output_config is None else self.output_config.format

    @property
    def structure_param(self) -> str:
        """The field that asks for structured outputs."""
        return super().structure_param if self._format is None else "output_config.format"


def _openai_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(content: str | Each[Block] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_block_text(block, where) for block in content)


def _block_text(block: Block, where: str) -> str:
    if block.type != "text" or block.text is None:
        raise ParameterError(
            f"{where} holds a block of type {block.type!r}; this server runs text-only models, which take text there.",
            where,
        )
    return block.text


def _messages(turn: Turn, where: str) -> Iterator[Message]:
    """The messages that one turn stands for: a result of a tool is one of its own, before the rest."""
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
        return
    if not turn.content:
        raise ParameterError(f"{where} is empty.", where)
    fields: dict[str, Any] = {}
    texts = []
    for block in turn.content:
        match block.type:
            case "tool_result":
                yield Message.model_validate(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content, where)}
                )
            case "tool_use":
                function = {"name": block.name, "arguments": block.input or {}}
                fields.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            case "thinking":
                fields["reasoning_content"] = fields.get("reasoning_content", "") + (block.thinking or "")
            case _:
                texts.append(_block_text(block, where))
    if texts or fields:
        yield Message.model_validate({"role": turn.role, "content": "\n".join(texts), **fields})


_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


def stop_reason(delta: Delta) -> tuple[str, str | None]:
    """Anthropic's `stop_reason`, and the `stop_sequence` where it was one. Theirs has no word for an abort
    or an error."""
    if delta.finish_reason == FinishReason.STOP and isinstance(delta.stop_reason, str):
        return "stop_sequence", delta.stop_reason
    assert delta.finish_reason is not None
    return _STOP_REASONS[delta.finish_reason], None


class MessagesUsage(msgspec.Struct):
    """Token counts: of the input what the prefix cache didn't have, and where it is told what it had."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | UnsetType = UNSET


class TextBlock(msgspec.Struct, tag="text", tag_field="type"):
    """The one block of an answer."""

    text: str


class MessageExtras(msgspec.Struct, kw_only=True):
    """What an answer or a piece of one says of its tokens beside Anthropic's fields, where asked for."""

    token_ids: list[int] | UnsetType = UNSET
    logprobs: TextLogprobs | UnsetType = UNSET
    sampling_mask: list[IdArray | None] | UnsetType | None = UNSET
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET


class AnthropicMessage(MessageExtras, kw_only=True):
    """An answer, or in a stream what is known of it as it begins."""

    id: str
    type: str = "message"
    role: str = "assistant"
    content: list[TextBlock]
    model: str
    stop_reason: str | None
    stop_sequence: str | UnsetType | None = UNSET
    usage: MessagesUsage
    prompt_token_ids: list[int] | UnsetType = UNSET


class MessageStart(msgspec.Struct, tag="message_start", tag_field="type"):
    """The first event."""

    message: AnthropicMessage


class BlockStart(msgspec.Struct, tag="content_block_start", tag_field="type"):
    """The one block begins."""

    content_block: TextBlock
    index: int = 0


class TextDelta(msgspec.Struct, tag="text_delta", tag_field="type"):
    """More of its text."""

    text: str


class BlockDelta(MessageExtras, tag="content_block_delta", tag_field="type", kw_only=True):
    """More of it."""

    delta: TextDelta
    index: int = 0


class BlockStop(msgspec.Struct, tag="content_block_stop", tag_field="type"):
    """The one block has ended."""

    index: int = 0


class StopDelta(msgspec.Struct):
    """Why the message ended."""

    stop_reason: str
    stop_sequence: str | None


class AnthropicMessageDelta(MessageExtras, tag="message_delta", tag_field="type", kw_only=True):
    """The message has ended; the counts are totals."""

    delta: StopDelta
    usage: MessagesUsage


class MessageStop(msgspec.Struct, tag="message_stop", tag_field="type"):
    """The last event."""


class ErrorEventDetail(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class ErrorEvent(msgspec.Struct, tag="error", tag_field="type"):
    """An error in the midst of a stream."""

    error: ErrorEventDetail


def _event(event: msgspec.Struct) -> bytes:
    return f"event: {event.__struct_config__.tag}\ndata: ".encode() + encode_json(event) + b"\n\n"


class MessagesWriter(TextWriter[MessagesRequest]):
    """Answers of /v1/messages: one choice, one block of text."""

    whole_kinds = (AnthropicMessage,)
    event_kinds = (
        MessageStart,
        BlockStart,
        BlockDelta,
        BlockStop,
        AnthropicMessageDelta,
        MessageStop,
        ErrorEvent,
    )
    after = _event(MessageStop())

    def whole(self, choices: Sequence[tuple[Answer, Delta]]) -> msgspec.Struct:
        """The message, which has ended."""
        ((_, delta),) = choices
        message = self._message(**self.token_fields(delta))
        message.content = [TextBlock(delta.text or "")]
        message.stop_reason, sequence = stop_reason(delta)
        message.stop_sequence = UNSET if sequence is None else sequence
        return message

    def begin(self) -> Iterator[msgspec.Struct]:
        """The message and its block begin."""
        start = self._message()
        start.stop_sequence = None
        yield MessageStart(start)
        yield BlockStart(TextBlock(""))

    def chunk(self, answer: Answer, delta: Delta) -> Iterator[msgspec.Struct]:
        """More of the block, and the end of the message."""
        fields = self.token_fields(delta)
        versions = fields.pop("weight_versions", UNSET)
        if delta.text or fields:
            yield BlockDelta(delta=TextDelta(delta.text or ""), **fields)
        if delta.finish_reason is not None:
            yield BlockStop()
            end = StopDelta(*stop_reason(delta))
            yield AnthropicMessageDelta(delta=end, usage=self._usage(), weight_versions=versions)

    def end(self) -> Iterator[msgspec.Struct]:
        """Nothing: the message has told its end itself."""
        return iter(())

    def event(self, event: msgspec.Struct) -> bytes:
        """An event as it is sent, with its name."""
        return _event(event)

    def error(self, error: ApiError) -> bytes:
        """An error in the midst of a stream, as Anthropic's clients look for it."""
        return _event(ErrorEvent(ErrorEventDetail(error.type, error.message)))

    def _message(self, **fields: Any) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.answer.request_id,
            content=[],
            model=self.answer.model,
            stop_reason=None,
            usage=self._usage(),
            prompt_token_ids=self.prompt_ids(self.answer) or UNSET,
            **fields,
        )

    def token_fields(self, delta: Delta) -> dict[str, Any]:
        """What the answer says of these tokens beside their text, where asked for."""
        fields = super().token_fields(delta)
        if delta.logprobs is not None:
            top = self.body.shown_logprobs
            fields["logprobs"] = text_logprobs(delta.logprobs, self.answer.vocabulary, as_ids=self.as_ids, top=top)
        return fields

    def _usage(self) -> MessagesUsage:
        usage = MessagesUsage(self.answer.prompt_tokens, self.answer.completion_tokens)
        if self.config.enable_prompt_tokens_details:
            usage.cache_read_input_tokens = self.answer.cached_tokens
            usage.input_tokens -= self.answer.cached_tokens
        return usage
