"""What a server gets from clients that are careless, broken or hostile, by number: the same seed sends the same."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

PATH = "/inference/v1/generate"
CHATS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/chat/completions/render")
NONSENSE: list[Any] = [None, True, -1, 2**63, 1e308, "", "\ud800", "x" * 300, [], [[]], {}, {"n": {}}, [None] * 99]


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=30)


def head(path: str, length: int | str, *, kind: str = "application/json") -> bytes:
    """The start of a POST."""
    text = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nX-Request-Id: same"
    return f"{text}\r\nContent-Length: {length}\r\n\r\n".encode()


def leave_somewhere(url: str, seed: int, vocab_size: int, max_len: int, max_seqs: int) -> None:
    """Send a valid request, or a part of it, and go: before, while or after the answer comes."""
    choose = random.Random(seed)
    params: dict[str, Any] = {"max_tokens": choose.choice([1, 30]), "n": choose.choice([1, 2, max_seqs]), "top_p": 0.9}
    if choose.random() < 0.3:
        params["prompt_logprobs"] = 1
    length = choose.choice([1, 17, max_len - 40])
    ids = choose.choices(range(2, vocab_size), k=length)
    data = json.dumps({"token_ids": ids, "sampling_params": params, "stream": choose.random() < 0.7}).encode()
    data = head(PATH, len(data)) + data
    with connect(url) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data if choose.random() < 0.8 else data[: choose.randrange(len(data))] or b"P")
        if choose.random() < 0.3:
            connection.sendall(data)  # pipelined
        elif choose.random() < 0.5:
            connection.settimeout(0.05)
            for _ in range(choose.randrange(4)):
                try:
                    connection.recv(choose.choice([1, 2000]))
                except TimeoutError:
                    break


def _answer(url: str, data: bytes) -> bytes:
    """Send, and read some of what comes back; nothing where the server has closed, but no answer at all is an error."""
    with connect(url) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(65536)
        except TimeoutError:
            raise
        except OSError:
            return b""


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def malformed(url: str, seed: int) -> None:
    """A request that no one could answer; whatever comes back is an error of the client's."""
    choose = random.Random(seed)
    name = choose.choice(["temperature", "n", "logprobs", "stop", "logit_bias", "seed", "max_tokens", "bad_words"])
    wrong = {"token_ids": [5], "sampling_params": {name: choose.choice(NONSENSE), "max_tokens": 1}}
    good = _json({"token_ids": [5], "sampling_params": {"max_tokens": 1}})
    bodies: list[bytes] = [
        b"{nope",
        b"[" * 50_000,
        b'{"token_ids": [' + b"9" * 5000 + b'], "sampling_params": {}}',
        b'{"token_ids": [NaN], "sampling_params": {"temperature": NaN}}',
        choose.randbytes(500),
        good[:-5],
        _json({"token_ids": choose.choice(NONSENSE), "sampling_params": {}}),
        _json(wrong),
        _json({"token_ids": [5], "sampling_params": choose.choice(NONSENSE), "stream": choose.choice(NONSENSE)}),
        _json({"messages": choose.choice(NONSENSE), "prompt": choose.choice(NONSENSE), "max_tokens": 1}),
    ]
    body = choose.choice(bodies)
    path = choose.choice([PATH, PATH, *CHATS])
    whole: list[bytes] = [
        head(path, len(body)) + body,
        head(path, len(body)) + body,
        head(path, len(body)) + body,
        head(path, len(body), kind="text/plain") + body,
        head(path, "x") + body,
        head(path, "1\r\nTransfer-Encoding: chunked") + b"zz\r\n" + body,
        b"\x16\x03\x01" + choose.randbytes(200),
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
        f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
        b"GET /no/such/path HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    answer = _answer(url, choose.choice(whole))
    assert answer[:10] in (b"", b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.1 200"), answer[:300]


def oversized(url: str, seed: int, limit: int) -> None:
    """A body larger than the server takes: announced, or in chunks without an end."""
    if seed % 2:
        answer = _answer(url, head(PATH, limit + 1) + b" " * limit)
    else:
        chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
        answer = _answer(url, head(PATH, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + chunk * 20)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413"), answer[:300]


def half_sent(url: str, seed: int) -> socket.socket:
    """The first part of a request, on a connection that stays open."""
    data = head(PATH, 100) + b'{"token_ids": [5'
    connection = connect(url)
    connection.sendall(data[: random.Random(seed).randrange(len(data))])
    return connection


def kinds(url: str, vocab_size: int, max_len: int, max_seqs: int, body_limit: int) -> list[Callable[[int], object]]:
    """The ways of abuse, each a function of a seed; `half_sent` gives the connection that it leaves open."""
    return [
        lambda seed: malformed(url, seed),
        lambda seed: oversized(url, seed, body_limit),
        lambda seed: half_sent(url, seed),
        lambda seed: leave_somewhere(url, seed, vocab_size, max_len, max_seqs),
    ]
