"""Answers of `/v1/messages`: one message of blocks, Anthropic's events with `stream`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from rollout.config import ServerConfig
from rollout.outputs import FinishReason, IdArray, WeightVersionSpan
from rollout.server.errors import ApiError
from rollout.server.text.call_formats import ToolCall
from rollout.server.text.calls import Part
from rollout.server.wire.answer import Answer, Delta, encode_json
from rollout.server.wire.anthropic import MessagesRequest
from rollout.server.wire.logprobs import TextLogprobs, text_logprobs
from rollout.server.wire.openai import TextWriter
from rollout.server.wire.parts import PartReader

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


def stop_reason(delta: Delta, *, called: bool) -> tuple[str, str | None]:
    """Anthropic's `stop_reason`, and the `stop_sequence` where it was one. Theirs has no word for an abort
    or an error."""
    if delta.finish_reason == FinishReason.STOP and isinstance(delta.stop_reason, str):
        return "stop_sequence", delta.stop_reason
    if delta.finish_reason == FinishReason.STOP and called:
        return "tool_use", None
    assert delta.finish_reason is not None
    return _STOP_REASONS[delta.finish_reason], None


class MessagesUsage(msgspec.Struct):
    """Token counts: of the input what the prefix cache didn't have, and where it is told what it had."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | UnsetType = UNSET


class TextBlock(msgspec.Struct, tag="text", tag_field="type"):
    """What the model says."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type"):
    """The reasoning before it. Nothing is signed: a client may send it back, or not."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    """A tool that the model calls; as it begins in a stream, `input` is empty."""

    id: str
    name: str
    input: dict[str, msgspec.Raw]


Block = TextBlock | ThinkingBlock | ToolUseBlock


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
    content: list[Block]
    model: str
    stop_reason: str | None
    stop_sequence: str | UnsetType | None = UNSET
    usage: MessagesUsage
    prompt_token_ids: list[int] | UnsetType = UNSET


class MessageStart(msgspec.Struct, tag="message_start", tag_field="type"):
    """The first event."""

    message: AnthropicMessage


class BlockStart(msgspec.Struct, tag="content_block_start", tag_field="type"):
    """A block begins."""

    content_block: Block
    index: int = 0


class TextDelta(msgspec.Struct, tag="text_delta", tag_field="type"):
    """More of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta", tag_field="type"):
    """More of the reasoning."""

    thinking: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta", tag_field="type"):
    """More of a call's input, JSON as text."""

    partial_json: str


class BlockDelta(MessageExtras, tag="content_block_delta", tag_field="type", kw_only=True):
    """More of a block."""

    delta: TextDelta | ThinkingDelta | InputJsonDelta
    index: int = 0


class BlockStop(msgspec.Struct, tag="content_block_stop", tag_field="type"):
    """A block has ended."""

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


_DELTAS: dict[type[Block], type[TextDelta] | type[ThinkingDelta] | type[InputJsonDelta]] = {
    TextBlock: TextDelta,
    ThinkingBlock: ThinkingDelta,
    ToolUseBlock: InputJsonDelta,
}


def _called(call: ToolCall) -> Block:
    """A whole call; where its arguments were cut off, what there is of them as text."""
    try:
        arguments = msgspec.json.decode(call.arguments, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return TextBlock(call.arguments)
    return ToolUseBlock(call.id or "", call.name or "", arguments)


def _pieces(part: Part) -> list[tuple[Block, str, bool]]:
    """What this part adds: a block as it begins, more of it, and whether it is another one than what is of its kind."""
    said: list[tuple[Block, str]] = [(ThinkingBlock(""), part.reasoning), (TextBlock(""), part.content)]
    pieces = [(block, text, False) for block, text in said if text]
    for call in part.calls:
        pieces.append((ToolUseBlock(call.id or "", call.name or "", {}), call.arguments, call.name is not None))
    return pieces


def _joined(first: Delta, then: Delta) -> Delta:
    """What two deltas of a choice say of its tokens."""
    masks: list[Any] | None = None
    if first.sampling_mask is not None or then.sampling_mask is not None:
        masks = [mask for one in (first, then) for mask in one.sampling_mask or [None] * len(one.token_ids)]
    rows = [one.routed_experts for one in (first, then) if one.routed_experts is not None]
    return replace(
        then,
        token_ids=first.token_ids + then.token_ids,
        logprobs=None if then.logprobs is None else (first.logprobs or []) + then.logprobs,
        sampling_mask=masks,
        routed_experts=np.concatenate(rows) if rows else None,
    )


class MessagesWriter(TextWriter[MessagesRequest]):
    """Answers of /v1/messages: one choice, of one block of text where nothing in it is parsed."""

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

    def __init__(self, body: MessagesRequest, config: ServerConfig, answers: Sequence[Answer]) -> None:
        super().__init__(body, config, answers)
        self._parts = PartReader(body, config)
        self._open: Block | None = None
        self._index = -1
        self._held: Delta | None = None  # tokens that a block will tell: which one isn't known yet

    def whole(self, choices: Sequence[tuple[Answer, Delta]]) -> msgspec.Struct:
        """The message, which has ended."""
        ((answer, delta),) = choices
        message, part = self._message(**self.token_fields(delta)), self._parts.read(answer, delta)
        if part.reasoning:
            message.content.append(ThinkingBlock(part.reasoning))
        if part.content or not (part.reasoning or part.calls):
            message.content.append(TextBlock(part.content))
        message.content += map(_called, part.calls)
        message.stop_reason, sequence = stop_reason(delta, called=delta.index in self._parts.called)
        message.stop_sequence = UNSET if sequence is None else sequence
        return message

    def begin(self) -> Iterator[msgspec.Struct]:
        """The message begins, and its block where there will be one only."""
        start = self._message()
        start.stop_sequence = None
        yield MessageStart(start)
        if not self._parts.parses:
            yield from self._begin(TextBlock(""))

    def _begin(self, block: Block) -> Iterator[msgspec.Struct]:
        if self._open is not None:
            yield BlockStop(self._index)
        self._open, self._index = block, self._index + 1
        yield BlockStart(block, self._index)

    def chunk(self, answer: Answer, delta: Delta) -> Iterator[msgspec.Struct]:
        """More of a block or of several, and the end of the message."""
        pieces = _pieces(self._parts.read(answer, delta))
        if self._held is not None:
            delta, self._held = _joined(self._held, delta), None
        if self._open is None and not pieces and delta.finish_reason is None:
            self._held = delta
            return
        fields = self.token_fields(delta)
        versions = fields.pop("weight_versions", UNSET)
        if not pieces and (fields or self._open is None):
            pieces = [(self._open or TextBlock(""), "", False)]
        for block, text, another in pieces:
            if another or type(self._open) is not type(block):
                yield from self._begin(block)
            yield BlockDelta(delta=_DELTAS[type(block)](text), index=self._index, **fields)
            fields = {}
        if delta.finish_reason is not None:
            yield BlockStop(self._index)
            end = StopDelta(*stop_reason(delta, called=delta.index in self._parts.called))
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
