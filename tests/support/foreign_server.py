"""A token-in/token-out server that is not ours: only what the protocol requires, on a thread of the test's process.

`python foreign_server.py PORT` serves as a process of its own, until it is ended.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""From a request's body to its choices: `token_ids`, and `logprobs` (floats) or None."""


def counting(body: dict[str, Any]) -> list[dict[str, Any]]:
    """As many tokens as were asked for."""
    params = body["sampling_params"]
    return [{"token_ids": list(range(params["max_tokens"])), "logprobs": None} for _ in range(params.get("n", 1))]


@dataclass
class ForeignServer:
    """Where it listens, and the bodies of the requests that came."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def foreign_server(
    answer: Answer = counting, *, root: str = "somewhere/else", limit: int = 4096, port: int = 0
) -> Iterator[ForeignServer]:
    """Serve until the block ends. `root` and `limit` are what /v1/models says of the model."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            answers: dict[str, Any] = {
                "/health": {},
                "/version": {"version": "0.0-foreign"},
                "/v1/models": {"data": [{"id": "foreign", "root": root, "max_model_len": limit}]},
            }
            known = self.path in answers
            self.reply(200 if known else 404, answers.get(self.path, {"error": {"message": "no such path"}}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.bodies.append(body)
            choices = [
                {
                    "index": index,
                    "token_ids": choice["token_ids"],
                    "finish_reason": "length",
                    "logprobs": choice["logprobs"] and {"content": [{"logprob": x} for x in choice["logprobs"]]},
                }
                for index, choice in enumerate(answer(body))
            ]
            if not body.get("stream"):
                self.reply(200, {"request_id": "r", "choices": choices})
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for choice in choices:
                for token in choice["token_ids"]:
                    self.event(json.dumps({"request_id": "r", "choices": [{**choice, "token_ids": [token]}]}))
            self.event("[DONE]")

        def event(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())

        def reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Http(ThreadingHTTPServer):
        request_queue_size = 256  # a load connects all at once

    http = Http(("127.0.0.1", port), Handler)
    server = ForeignServer(f"http://127.0.0.1:{http.server_address[1]}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join(10)
        http.server_close()


if __name__ == "__main__":
    with foreign_server(port=int(sys.argv[1])):
        threading.Event().wait()
