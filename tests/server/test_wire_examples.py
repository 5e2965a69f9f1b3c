"""The recorded answers of a vLLM 0.32 server on SmolLM2, each against ours: what was asked, what must come back.

Always equal: status, the keys and their order, the error's type, param and code, and every value that no sampling
decides. What the model generates is transformers' float32 greedy decoding under the request's masks. The recording was
made in bfloat16: where each of its tokens leads by more than MARGIN in float32, it must be the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.config import ServerConfig
from rollout.fleet.connection import run_engine
from tests.support.server_harness import RunningServer, running_server

pytestmark = pytest.mark.smollm2

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "wire_examples.json").read_text())
MARGIN = 0.3
MAX_MODEL_LEN = 2048
GENERATING = ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages")
OWN_KEYS = {"epoch", "kv"}  # of a span; /weight_info has more of them
VOLATILE = {"created", "system_fingerprint", "owned_by", "root"}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[RunningServer]:
    config = ServerConfig(served_model_name="smol", enable_scale_out=True)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "num_threads": 1}
    with running_server(config, model=str(smollm2), target=run_engine, **options) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        http.post("/update_weight_version", json={"new_version": "default"})
        yield http
        http.post("/resume")


# -- the reference


@dataclass
class Generated:
    """What a request must produce."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    prompt_len: int


@cache
def reference(path: str) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


@cache
@torch.inference_mode()
def rows_along(path: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> torch.Tensor:
    """The logits that follow the prompt, and each token of the output after it: (len(output) + 1, vocab)."""
    model, _ = reference(path)
    return model(input_ids=torch.tensor([prompt + output]), use_cache=False, logits_to_keep=len(output) + 1).logits[0]


def prompt_of(body: dict[str, Any], tokenizer: Any) -> list[int]:
    if "messages" in body:
        text = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text, add_special_tokens=False)
    return body.get("token_ids") or body["prompt"]


class Decoding:
    """Greedy decoding in float32, one request's masks applied: the rules, written down once more."""

    def __init__(self, path: Path, body: dict[str, Any]) -> None:
        self.path = str(path)
        self.model, self.tokenizer = reference(self.path)
        self.params = body.get("sampling_params", body)
        self.prompt = prompt_of(body, self.tokenizer)
        self.max_tokens = min(self.params.get("max_tokens") or MAX_MODEL_LEN, MAX_MODEL_LEN - len(self.prompt))
        self.stop = self.params.get("stop") or self.params.get("stop_sequences") or []
        self.stop_ids = self.params.get("stop_token_ids") or []
        eos = self.model.generation_config.eos_token_id
        self.eos = list(eos) if isinstance(eos, list) else [eos]

    def masked(self, row: torch.Tensor, step: int) -> torch.Tensor:
        row = row.clone()
        allowed = self.params.get("allowed_token_ids")
        if allowed:
            kept = row[allowed]
            row[:] = -torch.inf
            row[allowed] = kept
        if step < self.params.get("min_tokens", 0):
            row[[*self.eos, *self.stop_ids]] = -torch.inf
        for token, bias in (self.params.get("logit_bias") or {}).items():
            row[int(token)] += bias
        for word in self.params.get("bad_words") or []:
            spellings = [self.tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}")]
            assert all(len(spelling) == 1 for spelling in spellings), "the reference knows words of one token only"
            row[[spelling[0] for spelling in spellings]] = -torch.inf
        return row

    def generate(self, guesses: list[list[int]]) -> Generated:
        """The greedy output. For as long as it follows a guess, one forward pass along that one does."""
        output: list[int] = []
        while True:
            followed = next((guess for guess in guesses if guess[: len(output)] == output), output)
            row = rows_along(self.path, tuple(self.prompt), tuple(followed))[len(output)]
            output.append(int(self.masked(row, len(output)).argmax()))
            if ended := self.ended(output):
                text, reason, stop = ended
                return Generated(output, text, reason, stop, len(self.prompt))

    def ended(self, output: list[int]) -> tuple[str, str, int | str | None] | None:
        text = self.tokenizer.decode(output, skip_special_tokens=True)
        if len(output) >= self.params.get("min_tokens", 0):
            if output[-1] in self.eos and not self.params.get("ignore_eos"):
                return text, "stop", None if output[-1] == self.eos[0] else output[-1]
            if output[-1] in self.stop_ids:
                return text, "stop", output[-1]
            found = [(text.find(word) + len(word), word) for word in self.stop if word in text]
            if found:
                end, word = min(found)
                return text[: end if self.params.get("include_stop_str_in_output") else end - len(word)], "stop", word
        return (text, "length", None) if len(output) == self.max_tokens else None

    def margin(self, output: list[int]) -> float:
        """By how much the narrowest of these tokens leads all others; negative where one doesn't."""
        along = rows_along(self.path, tuple(self.prompt), tuple(output))[:-1]
        rows = torch.stack([self.masked(row, step) for step, row in enumerate(along)])
        chosen = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        others = rows.scatter(1, torch.tensor(output)[:, None], -torch.inf).max(1).values
        return float((chosen - others).min())


# -- reading an answer


@dataclass
class Told:
    """What an answer says of its one choice; None where it doesn't."""

    token_ids: list[int] | None
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None
    usage: tuple[int, int] | None


ANTHROPIC = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}


def told_by_message(events: list[dict[str, Any]]) -> Told:
    """An Anthropic answer: a message, or its events."""
    if events[0]["type"] == "message":
        (message,) = events
        text = "".join(block["text"] for block in message["content"])
        ended, usage = message, message["usage"]
    else:
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        (end,) = (event for event in events if event["type"] == "message_delta")
        ended, usage = end["delta"], end["usage"]
    stop = ended.get("stop_sequence")
    return Told(None, text, ANTHROPIC[ended["stop_reason"]], stop, (usage["input_tokens"], usage["output_tokens"]))


def told(path: str, body: Any) -> Told:
    """An answer in one piece, or a stream's parts joined."""
    parts = [part for part in (body if isinstance(body, list) else [body]) if isinstance(part, dict)]
    if path == "/v1/messages":
        return told_by_message(parts)
    ids: list[int] | None = None
    text: str | None = None
    finish_reason = stop_reason = usage = None
    for part in parts:
        if part.get("usage"):
            usage = (part["usage"]["prompt_tokens"], part["usage"]["completion_tokens"])
        for choice in part["choices"]:
            if choice.get("token_ids") is not None:
                ids = (ids or []) + choice["token_ids"]
            message = choice.get("message", choice.get("delta", {}))
            new = choice.get("text", message.get("content"))
            text = text if new is None else (text or "") + new
            finish_reason = choice["finish_reason"] or finish_reason
            stop_reason = choice.get("stop_reason") or stop_reason
    return Told(ids, text, finish_reason, stop_reason, usage)


def parsed(response: httpx.Response) -> Any:
    """An answer as the recording has it: JSON, text, or the events of a stream."""
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        return response.json() if kind == "application/json" else response.text
    events: list[Any] = []
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            events.append(json.loads(line.removeprefix("data: ")))
        elif line:
            events.append(line)
    return events


def keys(value: Any) -> Any:
    """The nested keys, in order. Of a list of objects the first one stands for all."""
    if isinstance(value, dict):
        return [(key, keys(item)) for key, item in value.items() if key not in OWN_KEYS]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [keys(value[0])]
    return None


def kinds(events: list[Any]) -> list[Any]:
    """The keys of a stream's parts, of neighbours that are alike only once: a slow reader gets fewer, longer ones."""
    found: list[Any] = []
    for event in events:
        kind = event if isinstance(event, str) else keys(event)
        if not found or found[-1] != kind:
            found.append(kind)
    return found


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal but for what is made anew each time, and for keys of our own."""
    if isinstance(theirs, dict):
        assert theirs.keys() <= ours.keys(), where
        for key, item in theirs.items():
            if key in ("id", "request_id") and re.fullmatch(r".*-[0-9a-f]{16}", item):
                assert ours[key].rpartition("-")[0] == item.rpartition("-")[0], where
            elif key not in VOLATILE:
                assert_same(ours[key], item, f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert ours == theirs, where


# -- the cases


@pytest.mark.timeout(900)  # one prompt is 2,040 tokens long, and forwarded three times
@pytest.mark.parametrize("name", CASES)
def test_a_recorded_case(client: httpx.Client, smollm2: Path, name: str) -> None:
    case = CASES[name]
    request, recorded = case["request"], case["body"]
    path, body = request["path"], request.get("json")
    if recorded == {"is_paused": True}:
        client.post("/pause?mode=keep")
    content = {"content": request["data"]} if "data" in request else {"json": body}
    response = client.request(request["method"], path, headers=request.get("headers"), **content)
    answer = parsed(response)
    assert response.status_code == case["status"], answer
    if isinstance(recorded, dict) and "error" in recorded:
        assert answer["error"].pop("message")
        recorded["error"].pop("message")
        assert answer == recorded
    elif path in GENERATING:
        assert_generated(smollm2, path, body, answer, recorded)
    else:
        assert_same(answer, recorded)
        if path != "/weight_info":
            assert keys(answer) == keys(recorded)


def assert_generated(smollm2: Path, path: str, body: dict[str, Any], answer: Any, recorded: Any) -> None:
    decoding = Decoding(smollm2, body)
    ours, theirs = told(path, answer), told(path, recorded)
    recorded_ids, our_ids = (
        one.token_ids or decoding.tokenizer.encode(one.text, add_special_tokens=False) for one in (theirs, ours)
    )
    expected = decoding.generate([recorded_ids, our_ids])
    if decoding.margin(recorded_ids) > MARGIN:
        expected_of(expected, theirs)
    expected_of(expected, ours, like=theirs)
    if isinstance(recorded, list):
        assert kinds(answer) == kinds(recorded)
    else:
        assert keys(answer) == keys(recorded)


def expected_of(expected: Generated, told: Told, like: Told | None = None) -> None:
    """Assert that an answer tells what is expected, as far as the recorded one (`like`) tells it."""
    like = like or told
    assert (told.finish_reason, told.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert told.text == (None if like.text is None else expected.text)
    assert told.token_ids == (None if like.token_ids is None else expected.token_ids)
    usage = (expected.prompt_len, len(expected.token_ids))
    assert told.usage == (None if like.usage is None else usage)
