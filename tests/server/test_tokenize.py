"""`/tokenize` and `/detokenize` against transformers' own tokenizer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support import fake_engine, text_server, tiny_tokenizers
from tests.support.text_server import ok, refusal

TOKENIZER = text_server.tokenizer()
USER = {"role": "user", "content": "Hi?"}


@pytest.mark.parametrize(
    "text", ["", "Hi there", "héllo 你好 😀", f"a{tiny_tokenizers.SPECIAL}b{tiny_tokenizers.ADDED}"]
)
def test_text_to_ids_and_back(client: httpx.Client, text: str) -> None:
    answer = ok(client.post("/tokenize", json={"prompt": text, "return_token_strs": True}))
    ids = TOKENIZER.encode(text)
    assert answer == {
        "count": len(ids),
        "max_model_len": fake_engine.MAX_MODEL_LEN,
        "tokens": ids,
        "token_strs": TOKENIZER.convert_ids_to_tokens(ids),
    }
    assert ok(client.post("/detokenize", json={"tokens": ids})) == {"prompt": text}


def test_special_tokens_are_added_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers.processors import TemplateProcessing

    made = text_server.tokenizer()
    special = [(tiny_tokenizers.SPECIAL, made.convert_tokens_to_ids(tiny_tokenizers.SPECIAL))]
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tiny_tokenizers.SPECIAL} $A", special_tokens=special
    )
    monkeypatch.setattr(text_server, "tokenizer", lambda _: made)
    with text_server.text_server() as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def tokens(**body: Any) -> list[int]:
            return ok(client.post("/tokenize", json=body))["tokens"]

        assert tokens(prompt="a") == [special[0][1], 97]
        assert tokens(prompt="a", add_special_tokens=False) == [97]
        chat = TOKENIZER.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
        assert made.decode(tokens(messages=[USER])) == chat
        assert tokens(messages=[USER], add_special_tokens=True) == [special[0][1], *tokens(messages=[USER])]


def test_a_chat_is_tokenized_as_the_model_sees_it(client: httpx.Client) -> None:
    for options in ({}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"mood": "glad"}}):
        body = {"messages": [USER], **options}
        tokens = ok(client.post("/tokenize", json=body))["tokens"]
        answer = ok(client.post("/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True}))
        assert tokens == answer["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "`gpt`"),
        ("/detokenize", {"tokens": [97], "model": "gpt"}, 404, "`gpt`"),
        ("/tokenize", {}, 400, "Field required"),
        ("/tokenize", {"prompt": "a" * 1_000_000}, 400, "1000000 characters"),
        ("/tokenize", {"messages": [USER], "chat_template": "x"}, 400, "--trust-request-chat-template"),
        ("/detokenize", {"tokens": [-1]}, 400, "greater than or equal to 0"),
        ("/detokenize", {"tokens": [fake_engine.VOCAB_SIZE]}, 400, "out of vocabulary"),
        ("/detokenize", {"tokens": [2**70]}, 400, "out of vocabulary"),
    ],
)
def test_refusals(client: httpx.Client, path: str, body: dict[str, Any], status: int, says: str) -> None:
    found, _, message = refusal(client.post(path, json=body))
    assert found == status
    assert says in message
