"""From texts and chats to the token ids that the engine continues. All of it runs on threads: either can take long."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from jinja2 import TemplateError

from rollout.sampling.params import ParameterError
from rollout.server.context import ServerContext
from rollout.server.errors import ApiError
from rollout.server.text.detokenizer import Vocabulary
from rollout.server.wire.body import ChatFields, ContentPart, Message, Prompt


async def require_vocabulary(server: ServerContext, what: str, *, param: str | None = None) -> Vocabulary:
    """The tokenizer's vocabulary; a 400 where the server has no tokenizer, for `what` ("Text needs") one."""
    vocabulary = await server.tokenizer.vocabulary()
    if vocabulary is None:
        message = f"{what} a tokenizer, and this server has none: use token ids, and stop_token_ids."
        raise ApiError(400, message, param=param)
    return vocabulary


async def require_tokenizer(server: ServerContext) -> Any:
    """Transformers' tokenizer. Raises a 400 where this server has none."""
    return (await require_vocabulary(server, "Text needs")).tokenizer


class Encoded(NamedTuple):
    """A prompt as the tokenizer made it: its ids, the text that they stand for, and where each token is in that text
    (start, end in characters; None where that wasn't asked for, or the tokenizer can't tell)."""

    token_ids: list[int]
    text: str | None = None
    offsets: list[list[int]] | None = None


async def encode(server: ServerContext, prompt: Prompt, *, offsets: bool = False) -> Encoded:
    """The prompt's ids and text. Raises a 400 for a text that no prompt of the model's length can hold."""
    if isinstance(prompt, list):
        return Encoded(prompt)
    if isinstance(prompt, ChatFields):
        return await _render_chat(server, prompt, offsets)
    tokenizer = await require_tokenizer(server)
    return await asyncio.to_thread(_encode, tokenizer, *prompt, server.model.max_model_len, offsets)


async def token_ids(server: ServerContext, prompt: Prompt) -> list[int]:
    """The same, the ids alone."""
    return (await encode(server, prompt)).token_ids


async def _render_chat(server: ServerContext, chat: ChatFields, offsets: bool) -> Encoded:
    """A chat, by the tokenizer's template or, where the server trusts it, the request's.

    Raises ParameterError for content that isn't text, and for what the template itself refuses.
    """
    if chat.chat_template is not None and not server.config.trust_request_chat_template:
        raise ParameterError(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template.",
            "chat_template",
        )
    if chat.continue_final_message and chat.add_generation_prompt:
        raise ParameterError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "continue_final_message"
        )
    tokenizer, limit = await require_tokenizer(server), server.model.max_model_len

    def render() -> Encoded:
        text = apply_template(tokenizer, chat)
        return _encode(tokenizer, text, chat.add_special_tokens, limit, offsets)

    return await asyncio.to_thread(render)


def _encode(tokenizer: Any, text: str, add_special_tokens: bool, max_model_len: int, offsets: bool) -> Encoded:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(f"The prompt holds a lone surrogate, which is no character: {error}") from None
    most = max_model_len * _longest_token(tokenizer)
    if len(text) > most:  # before the tokenizer spends seconds on it
        raise ParameterError(
            f"The prompt ({len(text)} characters) is longer than the maximum model length of {max_model_len} tokens "
            f"can hold ({most} characters at most)."
        )
    offsets &= bool(tokenizer.is_fast)
    found = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False, return_offsets_mapping=offsets)
    return Encoded(found.input_ids, text, [list(span) for span in found["offset_mapping"]] if offsets else None)


@lru_cache(maxsize=4)
def _longest_token(tokenizer: Any) -> int:
    """Characters of the longest token: a prompt of n tokens is no longer than n of these."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def apply_template(tokenizer: Any, chat: ChatFields) -> str:
    """The text of a chat, by its own template or the tokenizer's. Raises ParameterError as `_render_chat` does."""
    variables = chat.template_arguments()
    known = {
        p.name for p in inspect.signature(tokenizer.apply_chat_template).parameters.values() if p.kind != p.VAR_KEYWORD
    }
    own = sorted(known & variables.keys())
    if own:  # they would steer transformers rather than the template, past the checks made here
        raise ParameterError(f"chat_template_kwargs can't hold {', '.join(own)}.", "chat_template_kwargs")
    try:
        has_calls = any((message.model_extra or {}).get("tool_calls") for message in chat.messages)
        as_objects = has_calls and _reads_objects(tokenizer, chat.chat_template)
        text: str = tokenizer.apply_chat_template(
            [_conversation_message(message, index, as_objects) for index, message in enumerate(chat.messages)],
            tools=chat.tools or None,
            documents=chat.documents,
            chat_template=chat.chat_template,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tokenize=False,
            **variables,
        )
    except ParameterError:
        raise
    except TemplateError as error:
        raise ParameterError(f"The chat template refused these messages: {error}", "messages") from None
    except Exception as error:  # what a template runs into depends on the request alone
        raise ParameterError(
            f"The chat template failed on these messages: {type(error).__name__}: {error}", "messages"
        ) from None
    return text


@lru_cache(maxsize=16)
def _reads_objects(tokenizer: Any, template: str | None) -> bool:
    """Whether this template prints the arguments of a tool call itself, from an object, or concatenates the client's
    string, as DeepSeek's do. Found by trial, as llama.cpp does."""

    def told(arguments: Any) -> bool:
        call = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        except Exception:  # whatever a template runs into
            return False
        # Neither in Python's notation nor as JSON within JSON.
        return "needle" in text and "'needle'" not in text and '\\"needle' not in text

    return told({"needle": 1}) or not told('{"needle": 1}')


def _conversation_message(message: Message, index: int, as_objects: bool) -> dict[str, Any]:
    """The message as templates expect it: one text as content, also where there is none; tool calls' arguments as
    objects or as strings."""
    fields: dict[str, Any] = {"role": message.role, **(message.model_extra or {}), "content": message.content or ""}
    if isinstance(message.content, list):
        fields["content"] = "\n".join(_part_text(part, index) for part in message.content)
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_formed_call(call, as_objects) for call in fields["tool_calls"]]
    return fields


def _part_text(part: str | ContentPart, index: int) -> str:
    if isinstance(part, str):
        return part
    if part.type != "text" or part.text is None:
        raise ParameterError(
            f"messages.{index}.content holds a part of type {part.type!r}; this server runs text-only models, "
            "which take parts of type 'text'.",
            f"messages.{index}.content",
        )
    return part.text


def _formed_call(call: Any, as_objects: bool) -> Any:
    """The call with its arguments so. OpenAI's clients send them as JSON in a string, Anthropic's as an object; what
    isn't JSON stays as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if as_objects and isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError):
            arguments = msgspec.json.decode(arguments or "{}")
    elif not as_objects and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
