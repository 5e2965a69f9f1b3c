"""Tool calls in chat templates of every shape that models come with, against transformers' own rendering."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.server.prompts import apply_template
from rollout.server.wire.body import ChatFields
from tests.support import tiny_tokenizers

_EACH = "{% for message in messages %}"
_CALLS = "{% if message.tool_calls %}{% for call in message.tool_calls %}"
_JSON = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'

QWEN = (  # prints content where there is any, and arguments as JSON
    _EACH
    + "<|im_start|>{{ message.role }}\n{% if message.content %}{{ message.content }}{% endif %}"
    + _CALLS
    + f"<tool_call>{_JSON}</tool_call>"
    + "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)
LLAMA = (  # has no place for content beside calls
    _EACH
    + "<|{{ message.role }}|>{% if 'tool_calls' in message %}"
    + "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    + "{% set call = message.tool_calls[0] %}"
    + _JSON
    + "{% else %}{{ message.content | trim }}{% endif %}<|eot|>{% endfor %}"
)
CONCATENATING = (  # fails at null
    _EACH
    + "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    + _CALLS
    + "[{{ call.function.name }}: {{ call.function.arguments | tojson }}]{% endfor %}{% endif %}{% endfor %}"
)
DEEPSEEK = (  # concatenates content, and the client's string of arguments
    _EACH
    + "{% if message['role'] == 'user' %}{{ '<User>' + message['content'] }}"
    + "{% elif message['tool_calls'] is defined and message['tool_calls'] is not none %}<Assistant>"
    + "{% for call in message['tool_calls'] %}"
    + "{% if message['content'] is not none %}{{ message['content'] }}{% endif %}"
    + "{{ '<Call>' + call['function']['name'] + '<sep>' + call['function']['arguments'] + '</Call>' }}"
    + "{% endfor %}{% else %}{{ '<Assistant>' + message['content'] }}{% endif %}{% endfor %}"
)
PRINTING = (  # prints an object in Python's notation
    _EACH
    + "{{ message.role }}: {{ message.content }}"
    + _CALLS
    + "({{ call.function.name }} {{ call.function.arguments }}){% endfor %}{% endif %}{% endfor %}"
)
XML = (  # has no JSON at all
    _EACH
    + "<{{ message.role }}>{{ message.content or '' }}"
    + _CALLS
    + "<function={{ call.function.name }}>{% for name, value in call.function.arguments | items %}"
    + "<parameter={{ name }}>{{ value }}</parameter>{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)
MISTRAL = (  # checks its ids
    _EACH
    + "{% if message['role'] == 'user' %}[INST] {{ message['content'] }}[/INST]"
    + "{% elif message['tool_calls'] is defined and message['tool_calls'] is not none %}[TOOL_CALLS] ["
    + "{% for call in message['tool_calls'] %}{{ call.function | tojson }}"
    + "{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}{{ call.id }}{% endfor %}]"
    + "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)

# With whether each is written for arguments as an object.
TEMPLATES = {
    "qwen": (QWEN, True),
    "llama": (LLAMA, True),
    "concatenating": (CONCATENATING, True),
    "deepseek": (DEEPSEEK, False),
    "printing": (PRINTING, False),
    "xml": (XML, True),
    "mistral": (MISTRAL, True),
}
ARGUMENTS = '{"city": "Z\u00fcrich", "days":2}'


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": arguments}}


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}], ids=["null", "absent", "empty"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tool_calls_without_content_were_refused_or_left_out(name: str, content: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.chat_template, as_object = TEMPLATES[name]
    user = {"role": "user", "content": "Will it rain?"}
    sent = [user, {"role": "assistant", **content, "tool_calls": [call(ARGUMENTS)]}]
    rendered = apply_template(tokenizer, ChatFields.model_validate({"messages": sent}))
    arguments = json.loads(ARGUMENTS) if as_object else ARGUMENTS
    shaped = {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}
    assert rendered == tokenizer.apply_chat_template([user, shaped], tokenize=False, add_generation_prompt=True)
    assert "city" in rendered


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_object_of_arguments_is_told_like_the_string_of_it(name: str) -> None:
    """Anthropic's clients send objects."""
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.chat_template = TEMPLATES[name][0]
    user = {"role": "user", "content": "Will it rain?"}

    def rendered(arguments: Any) -> str:
        sent = [user, {"role": "assistant", "tool_calls": [call(arguments)]}]
        return apply_template(tokenizer, ChatFields.model_validate({"messages": sent}))

    assert rendered({"city": "Rome", "days": 2}) == rendered('{"city": "Rome", "days": 2}')


@pytest.mark.parametrize("name", ["qwen", "concatenating", "printing"])
def test_an_assistants_message_without_anything_is_empty(name: str) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.chat_template = TEMPLATES[name][0]
    texts = [
        apply_template(tokenizer, ChatFields.model_validate({"messages": [{"role": "assistant", **content}]}))
        for content in ({"content": None}, {}, {"content": ""})
    ]
    assert len(set(texts)) == 1
