"""How long a victim's stream stands still under each hostile input: `python -m tests.support.hostile_clients URL`.

For a server that was started with `--enable-scale-out` and runs on an idle machine. Prints a table: the longest gap
between two tokens of the victim, in seconds, beside what the server answered.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.support import abuse

STATUS_SHOWN = 60


class Victim:
    """A client that streams one answer after the other. `longest_gap` is in seconds, since it was last set to 0."""

    def __init__(self, url: str) -> None:
        self.longest_gap = 0.0
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Victim:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 64, "ignore_eos": True}, "stream": True}
        last = time.monotonic()
        with httpx.Client(timeout=600) as http:
            while not self._over.is_set():
                with http.stream("POST", self._url + abuse.PATH, json=body) as response:
                    for _ in response.iter_lines():
                        now = time.monotonic()
                        self.longest_gap, last = max(self.longest_gap, now - last), now


def post(url: str, path: str, content: Any) -> str:
    """What came back: status and the start of the message."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        answer = httpx.post(url + path, content=data, headers={"Content-Type": "application/json"}, timeout=600)
    except httpx.TransportError as error:
        return type(error).__name__
    said = answer.json().get("error", {}).get("message", "") if not answer.is_success else ""
    return f"{answer.status_code} {said[:STATUS_SHOWN]}"


def generate(url: str, **params: Any) -> str:
    return post(url, abuse.PATH, {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 32, **params}})


def long_stops(url: str) -> str:
    stops = [f"aa{chr(0x4E00 + i)}{'c' * 4093}" for i in range(63)] + ["a" * 4095 + "b"]
    body = {"prompt": "a", "max_tokens": 128, "stop": stops, "logit_bias": {}, "n": 4, "ignore_eos": True}
    return post(url, "/v1/completions", body)


def leave_many(url: str) -> str:
    """256 prompts with 64 choices each, from a client that goes at once."""
    body = {"prompt": [[5, 6, i % 64 + 5] for i in range(256)], "n": 64, "max_tokens": 64}
    return leave(url, json.dumps(body).encode(), patience_s=0.5)


def leave(url: str, content: bytes, patience_s: float = 10.0) -> str:
    """A client that goes before its answer comes, which may take long."""
    headers = {"Content-Type": "application/json"}
    with contextlib.suppress(httpx.TimeoutException):
        timeout = httpx.Timeout(60, read=patience_s)
        answer = httpx.post(url + "/v1/completions", content=content, headers=headers, timeout=timeout)
        return f"{answer.status_code} {answer.text[:STATUS_SHOWN]}"
    return "gone"


def unfinished(url: str) -> str:
    """60 connections whose bodies never come."""
    with contextlib.ExitStack() as open_:
        for _ in range(60):
            connection = open_.enter_context(abuse.connect(url))
            connection.sendall(abuse.head("/no/such/path", 60_000_000) + b"x")
        return f"60 held, {httpx.get(url + '/health', timeout=60).status_code} for others"


def inputs(max_model_len: int) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Each input's name, and what sends it."""
    ids = b",".join([b"5"] * 30_000_000)
    yield "nothing", lambda url: time.sleep(3) or ""  # type: ignore[func-returns-value]
    yield "60 MB of ids", lambda url: post(url, abuse.PATH, b'{"token_ids":[' + ids + b'],"sampling_params":{}}')
    yield "60 MB of ids as a prompt", lambda url: post(url, "/v1/completions", b'{"prompt":[' + ids + b"]}")
    prompt = json.dumps([(37 * i) % 8000 + 5 for i in range(max_model_len - 8)], separators=(",", ":"))
    prompts = ",".join([prompt] * min(2000, 57_000_000 // (len(prompt) + 1)))
    yield "57 MB of prompts, a valid batch", lambda url: leave(url, f'{{"max_tokens":4,"prompt":[{prompts}]}}'.encode())
    yield "30 MB of lists", lambda url: post(url, "/v1/completions", b'{"prompt":[' + b"[5]," * 7_500_000 + b"[5]]}")
    yield "24 MB of strings", lambda url: post(url, "/v1/completions", b'{"prompt":[' + b'"a",' * 6_000_000 + b'"a"]}')
    allowed = b'{"token_ids":[5],"sampling_params":{"allowed_token_ids":[' + ids[:20_000_001] + b"]}}"
    yield "10,000,001 allowed_token_ids", lambda url: post(url, abuse.PATH, allowed)
    yield "64 stop strings of 4 KB", long_stops
    yield "4,096 bad words", lambda url: generate(url, bad_words=[f"word{i}" for i in range(4096)])
    yield (
        "repetition_penalty on a long prompt",
        lambda url: post(
            url,
            abuse.PATH,
            {
                "token_ids": [5] * min(2000, max_model_len - 40),
                "sampling_params": {"repetition_penalty": 1.1, "n": 8, "max_tokens": 32},
            },
        ),
    )
    yield "256 prompts of 64 choices, gone", leave_many
    yield "100,000 brackets", lambda url: post(url, abuse.PATH, b"[" * 100_000)
    yield "60 bodies that never come", unfinished


def main() -> None:
    url = sys.argv[1].rstrip("/")
    max_model_len = httpx.get(url + "/v1/models").json()["data"][0]["max_model_len"]
    with Victim(url) as victim, ThreadPoolExecutor(1) as pool:
        time.sleep(2)
        for name, send in inputs(max_model_len):
            victim.longest_gap = 0.0
            told = pool.submit(send, url).result()
            time.sleep(1)
            print(f"{name:<38} {victim.longest_gap:7.3f} s   {told}", flush=True)


if __name__ == "__main__":
    main()
