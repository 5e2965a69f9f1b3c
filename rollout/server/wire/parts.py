"""What chats of every dialect share: tools that answers may call, and what of an answer is reasoning or a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.config import ServerConfig
from rollout.sampling.params import ParameterError, SamplingParams, StructuredOutputsParams
from rollout.server.text.call_formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    arguments_schema,
    calls_schema,
)
from rollout.server.text.calls import AnswerReader, Part
from rollout.server.text.thinking import ReasoningState, reasoning_state
from rollout.server.wire.answer import Answer, Delta
from rollout.server.wire.openai import ChatLogprobs, OpenAIRequest


class ChatRequest(ChatLogprobs, OpenAIRequest):
    """A chat, in any dialect's form."""

    @property
    def functions(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of the tools' arguments, by name."""
        raise NotImplementedError

    @property
    def may_call(self) -> bool:
        """Whether the answer may call a tool."""
        raise NotImplementedError

    @property
    def must_call(self) -> bool:
        """Whether the answer must call some tool."""
        raise NotImplementedError

    @property
    def named_tool(self) -> str | None:
        """The tool that must be called."""
        raise NotImplementedError

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.must_call or self.named_tool is not None

    def check(self) -> None:
        """As the base class; also a tool choice that can't be kept."""
        super().check()
        self.check_logprobs()
        named = self.named_tool
        if not self.forced:
            return
        if named not in (None, *self.functions) or not self.functions:
            raise ParameterError(f"tool_choice asks for {named or 'a tool'!r}, which isn't in `tools`.", "tool_choice")
        if self.to_sampling_params(forces=False).structured_outputs is not None:
            message = "tool_choice forces an answer's form, as structured outputs do: send one of them."
            raise ParameterError(message, "tool_choice")

    def to_sampling_params(self, *, forces: bool = True) -> SamplingParams:
        """The engine's parameters; an answer that must be a call has its form, where that is asked for."""
        params = self.plain_params()
        if forces and self.named_tool is not None:
            params.structured_outputs = StructuredOutputsParams(json=arguments_schema(self.functions[self.named_tool]))
        elif forces and self.must_call:
            params.structured_outputs = StructuredOutputsParams(json=calls_schema(self.functions))
        return params

    def plain_params(self) -> SamplingParams:
        """The engine's parameters but for a call's form."""
        raise NotImplementedError

    @property
    def structure_param(self) -> str:
        """The field that asks for structured outputs."""
        return "tool_choice" if self.forced else super().structure_param

    def adapt(self, params: SamplingParams, config: ServerConfig) -> None:
        """Marks of calls and of reasoning may be special tokens: parsers must see them."""
        if config.reasoning_parser or self.call_format(config):
            params.skip_special_tokens = False

    def call_format(self, config: ServerConfig) -> CallFormat | None:
        """How calls are written that the answer may have."""
        return CALL_FORMATS[config.tool_call_parser or ""] if config.enable_auto_tool_choice and self.may_call else None


class PartReader:
    """The parts of an answer's choices. Where there is nothing to look for, all is content. `began` is how the answer
    stands to its reasoning at its start, where the prompt isn't there to say so."""

    def __init__(self, body: ChatRequest, config: ServerConfig, began: ReasoningState | None = None) -> None:
        self.called: set[int] = set()
        """The choices that have called a tool."""
        self._body, self._config = body, config
        self._readers: dict[int, AnswerReader] = {}
        self._format = REASONING_FORMATS.get(config.reasoning_parser or "")
        self.began = began
        self.parses = bool(self._format or body.call_format(config) or body.forced)

    def read(self, answer: Answer, delta: Delta) -> Part:
        """The parts of what is new of a choice."""
        if not self.parses:
            return Part(content=delta.text or "")
        reader = self._readers.get(delta.index)
        if reader is None:
            if self.began is None and self._format is not None:
                self.began = reasoning_state(answer.vocabulary, answer.prompt_token_ids, self._format)
            reader = self._readers[delta.index] = AnswerReader(
                calls=self._body.call_format(self._config),
                reasoning=None if self.began == "ended" else self._format,
                tools=self._body.functions,
                required=self._body.must_call,
                named=self._body.named_tool,
                begun=self.began == "begun",
            )
        part = reader.take(delta.text or "")
        if delta.finish_reason is not None:
            last = reader.end()
            part = Part(part.reasoning + last.reasoning, part.content + last.content, part.calls + last.calls)
        if part.calls:
            self.called.add(delta.index)
        return part
