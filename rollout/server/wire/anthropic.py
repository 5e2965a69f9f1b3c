"""The dialect of `/v1/messages`, Anthropic's form of a chat, and how it becomes one of OpenAI's.

`messages`, `system`, `tools` and `stop_sequences` are Anthropic's; beside them a body may hold any sampling parameter,
`logprobs` and `return_*` field of /v1/chat/completions. The answer then carries them as fields of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout.sampling.params import ParameterError, SamplingParams, StructuredOutputsParams
from rollout.server.wire.body import Body, ChatFields, Each, Message, Prompt, Text
from rollout.server.wire.parts import ChatRequest
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


class ToolChoice(BaseModel):
    """Whether the answer calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(MessagesPrompt, ChatRequest):
    """Answer a chat, or go on with its last message where that is the assistant's."""

    id_prefix = "chatcmpl-"

    max_tokens: int
    stop_sequences: Each[Text] | None = None
    tool_choice: ToolChoice | None = None

    def check(self) -> None:
        """As the base class; also for what Anthropic's form has no place for."""
        super().check()
        if self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use:
            raise ParameterError(
                "tool_choice.disable_parallel_tool_use is not supported by this server: a model calls as many tools as "
                "it will; leave it out.",
                "tool_choice.disable_parallel_tool_use",
            )
        for tool in self.tools or []:
            if tool.input_schema is None:
                raise ParameterError(f"The tool {tool.name!r} has no input_schema, and this server runs none.", "tools")
        if self._format is not None and (self.structured_outputs is not None or self.response_format is not None):
            message = "output_config.format is given beside structured_outputs or response_format: send one of them."
            raise ParameterError(message, "output_config.format")
        if self.n not in (None, 1):
            raise ParameterError(f"n must be 1 here, got {self.n}: a message is one answer.", "n")

    def plain_params(self) -> SamplingParams:
        """The engine's parameters; `stop_sequences` are its stop strings."""
        params = self._sampling_params(self.max_tokens, self.engine_logprobs)
        params.stop += self.stop_sequences or []
        if self._format is not None:
            params.structured_outputs = StructuredOutputsParams(json=self._format.schema_)
        return params

    @property
    def functions(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of the tools' arguments, by name."""
        return {tool.name: tool.input_schema or {} for tool in self.tools or []}

    @property
    def may_call(self) -> bool:
        """Whether the answer may call a tool."""
        return bool(self.tools) and (self.tool_choice is None or self.tool_choice.type != "none")

    @property
    def must_call(self) -> bool:
        """Whether the answer must call some tool."""
        return self.tool_choice is not None and self.tool_choice.type == "any"

    @property
    def named_tool(self) -> str | None:
        """The tool that must be called."""
        choice = self.tool_choice
        return choice.name or "" if choice is not None and choice.type == "tool" else None

    @property
    def _format(self) -> OutputFormat | None:
        return None if self.output_config is None else self.output_config.format

    @property
    def structure_param(self) -> str:
        """The field that asks for structured outputs."""
        return super().structure_param if self._format is None or self.forced else "output_config.format"


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
