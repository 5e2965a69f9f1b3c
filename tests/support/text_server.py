"""A server that speaks text over the fake engine: tokens are bytes, and the next one is the byte that follows."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from rollout.config import ServerConfig
from tests.support import tiny_tokenizers
from tests.support.server_harness import RunningServer, running_server

# Says all that a template can be given, so that a test sees what arrived.
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if mood %}{{ mood }}{% endif %}"
    "{% if mood == 'broken' %}{{ raise_exception('no such mood') }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(added: Sequence[str] = ()) -> Any:
    """The tokenizer of these servers; each text of `added` is a token of its own."""
    made = tiny_tokenizers.byte_level()
    made.add_tokens([*added])
    made.chat_template = CHAT_TEMPLATE
    return made


@contextlib.contextmanager
def text_server(*, added: Sequence[str] = (), **config: Any) -> Iterator[RunningServer]:
    """Serve as `smol` with masks on, and these fields of ServerConfig; see `tokenizer`. With `added` the
    model has an EOS token, too: grammars need one."""
    fields: dict[str, Any] = {"served_model_name": "smol", "enable_scale_out": True, "return_sampling_mask": True}
    with tempfile.TemporaryDirectory() as folder:
        (made := tokenizer(added)).save_pretrained(folder)
        if added:
            (Path(folder) / "eos_token_id").write_text(str(made.eos_token_id))
        with running_server(ServerConfig(**fields | config), model=folder) as running:
            yield running


def ok(response: httpx.Response) -> Any:
    """The body of an answer that is no error."""
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[Any]:
    """The chunks of an OpenAI stream, which ends as it should."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *chunks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def refusal(response: httpx.Response) -> tuple[int, str | None, str]:
    """Status, param and message of an error, whose shape is checked."""
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == response.status_code
    return response.status_code, error["param"], error["message"]
