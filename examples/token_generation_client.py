"""A full client of /inference/v1/generate in one file: plain HTTP, the model's own tokenizer, and nothing of rollout.

It writes the chat template and tokenizes itself, streams token ids, decodes them as they come, and knows for each of
them its logprob and the weights that sampled it. Ctrl-C, or --abort-after, ends a request and keeps what it has.

    rollout serve path/to/model --enable-scale-out
    python examples/token_generation_client.py path/to/model "What is the capital of France?"
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from transformers import AutoTokenizer


@dataclass
class Completion:
    """What has come of one choice. `weight_versions` is filled once it has ended."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TokenClient:
    """Chats in, token ids out. The server sees no text; `tokenizer` is transformers' of the model it serves."""

    def __init__(self, url: str, tokenizer: Any, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A token may take long under load, a connection may not.
        timeout = httpx.Timeout(600, connect=10)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        self.tokenizer = tokenizer

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt's ids. The template writes the special tokens, so the tokenizer must not add them again."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def generate(self, token_ids: list[int], *, n: int = 1, **sampling_params: Any) -> list[Completion]:
        """All choices of a prompt, when all have ended."""
        answer = self._post("/inference/v1/generate", self._body(token_ids, n, sampling_params)).json()
        completions = [Completion() for _ in answer["choices"]]
        for choice in answer["choices"]:
            _add(completions[choice["index"]], choice)
        return completions

    def stream(self, token_ids: list[int], request_id: str, **sampling_params: Any) -> Iterator[Completion]:
        """One choice of a prompt, as far as it has come, after every piece of it. Leaving the loop ends the request."""
        body = self._body(token_ids, 1, sampling_params) | {"stream": True, "request_id": request_id}
        completion = Completion()
        with self._http.stream("POST", "/inference/v1/generate", json=body) as response:
            if response.is_error:
                response.read()
                raise RuntimeError(_message(response))
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:  # the answer had begun when something went wrong
                        raise RuntimeError(event["error"]["message"])
                    for choice in event["choices"]:
                        _add(completion, choice)
                        yield completion
        raise RuntimeError("the stream broke off before its end")

    def abort(self, request_id: str) -> None:
        """End a request from anywhere: its stream still gets the last piece, with what it has and the versions."""
        self._post("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]})

    def _body(self, token_ids: list[int], n: int, sampling_params: dict[str, Any]) -> dict[str, Any]:
        return {"token_ids": token_ids, "sampling_params": {"n": n, "logprobs": 0, **sampling_params}}

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        response = self._http.post(path, json=body)
        if response.is_error:
            raise RuntimeError(_message(response))
        return response


def _add(completion: Completion, choice: dict[str, Any]) -> None:
    """Take what is new of a choice."""
    completion.token_ids += choice["token_ids"]
    completion.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
    completion.weight_versions = choice["weight_versions"] or []
    completion.finish_reason, completion.stop_reason = choice["finish_reason"], choice["stop_reason"]


def _message(response: httpx.Response) -> str:
    """The server's own words, where it has some."""
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:500]}"


def main() -> None:
    """Ask one question, print the answer as it comes, then what is known of its tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the folder that the server serves: its tokenizer and chat template are used")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--abort-after", type=int, help="end the request once it has this many tokens")
    args = parser.parse_args()

    client = TokenClient(args.url, AutoTokenizer.from_pretrained(args.model), args.api_key)
    prompt = client.encode([{"role": "user", "content": args.question}])
    request_id, printed, aborted = uuid.uuid4().hex, "", False
    completion = Completion()
    try:
        for completion in client.stream(prompt, request_id, temperature=args.temperature, max_tokens=args.max_tokens):
            text = client.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # else the last character is only begun
                print(text[len(printed) :], end="", flush=True)
                printed = text
            if args.abort_after is not None and len(completion.token_ids) >= args.abort_after and not aborted:
                client.abort(request_id)
                aborted = True
    except KeyboardInterrupt:
        pass  # leaving the loop has ended the request
    print(f"\n\n{len(completion.token_ids)} tokens, finish_reason {completion.finish_reason}")
    print(f"mean logprob {sum(completion.logprobs) / max(1, len(completion.logprobs)):.3f}")
    for span in completion.weight_versions:
        print(f"tokens {span['start']} to {span['end']}: weights {span['version']}")


if __name__ == "__main__":
    main()
