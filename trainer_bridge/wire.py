"""What a client of `/inference/v1/generate` sends and reads: bodies, answers, events of a stream, errors.

What only a `rollout` server says (a span's epoch and cache state) is None elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from rollout.sampling.params import check_names

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0


class RolloutError(Exception):
    """The server refused a request (`status` is HTTP's), could not be reached, or broke off its answer (`status` 0).

    `retry_after_s` is the Retry-After of the answer, None without one.
    """

    def __init__(
        self, status: int, type: str, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{type} ({status}): {message}" if status else message)
        self.status = status
        self.type = type
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Span:
    """Output tokens [start, end) were sampled by the weights of this label and, on a rollout server, epoch."""

    version: str
    start: int
    end: int
    epoch: int | None = None
    kv: Literal["current", "mixed"] | None = None


@dataclass(frozen=True)
class Choice:
    """One continuation, or in a stream what is new of it (`spans` then come with the last piece, for the whole).

    `logprobs` are those of `token_ids`, one each, where asked for. `sampling_mask` holds for each token the ids it was
    drawn from, None where that step was unfiltered; None as a whole where no step was filtered. `text` is None where
    none was asked for.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float] | None
    sampling_mask: list[list[int] | None] | None
    spans: list[Span]
    finish_reason: str | None
    stop_reason: int | str | None
    text: str | None = None


@dataclass(frozen=True)
class Generation:
    """An answer, or one event of a stream. `raw` is its JSON: top logprobs, usage, prompt logprobs."""

    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]
    raw: dict[str, Any] = field(repr=False, compare=False, default_factory=dict)


class Patience:
    """How long to wait before a request is sent again, for at most `limit_s` from the first failure on.

    Waits are what the server's Retry-After says, else 0.2 s at first and twice as long each time, up to 10 s.
    """

    def __init__(self, limit_s: float, lasting: Callable[[RolloutError], bool]) -> None:
        self._limit_s, self._lasting = limit_s, lasting
        self._deadline: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def pause_s(self, error: RolloutError) -> float:
        """Seconds to wait after this failure. Raises it where it is `lasting`, or where the limit would be passed."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._limit_s
        pause = self._pause_s if error.retry_after_s is None else error.retry_after_s
        if self._lasting(error) or now + pause > self._deadline:
            raise error
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause


def not_taken(error: RolloutError) -> bool:
    """Whether the server took the request, or refused it for good: it isn't sent again then."""
    return error.status not in (429, 503) and not isinstance(error.__cause__, httpx.ConnectError)


def as_token_ids(ids: Any) -> list[int]:
    """Ids as JSON has them, of a list, a numpy array or a tensor of one dimension."""
    listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(listed, list) or any(isinstance(i, list) for i in listed):
        raise ValueError(f"token ids must have one dimension, got the shape {tuple(ids.shape)}")
    return [int(i) for i in listed]


def generate_body(
    prompt_token_ids: Sequence[int],
    sampling_params: Mapping[str, Any] | None,
    n: int | None,
    request_id: str | None,
    extra: Mapping[str, Any] | None,
    stream: bool,
) -> dict[str, Any]:
    """The body of a request. Raises ValueError for ids of more than one dimension, and for names that no sampling
    parameter has."""
    params = dict(sampling_params or {})
    check_names(params)
    if n is not None:
        params["n"] = n
    body: dict[str, Any] = {"token_ids": as_token_ids(prompt_token_ids), "sampling_params": params, **(extra or {})}
    if request_id is not None:
        body["request_id"] = request_id
    if stream:
        body["stream"] = True
    return body


def _parse_choice(choice: dict[str, Any]) -> Choice:
    logprobs = choice.get("logprobs")
    return Choice(
        index=choice["index"],
        token_ids=choice["token_ids"],
        logprobs=[entry["logprob"] for entry in logprobs["content"]] if logprobs else None,
        sampling_mask=choice.get("sampling_mask"),
        spans=[
            Span(s["version"], s["start"], s["end"], s.get("epoch"), s.get("kv"))
            for s in choice.get("weight_versions") or ()
        ],
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
        text=choice.get("text"),
    )


def parse_generation(answer: dict[str, Any], prompt_token_ids: list[int]) -> Generation:
    """An answer or an event from its JSON."""
    choices = [_parse_choice(choice) for choice in answer["choices"]]
    return Generation(answer["request_id"], prompt_token_ids, choices, answer)


class EventParser:
    """Server-sent events from the bytes of a stream. (httpx's `iter_lines` would also split at U+2028 in a string.)"""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.began = self.done = False
        self._prompt_token_ids = prompt_token_ids
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Generation]:
        """The chunks that these bytes complete. Raises RolloutError for an error event."""
        self.began = True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for event in (line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")):
            if event == b"[DONE]":
                self.done = True
                return
            answer = json.loads(event)
            if "error" in answer:
                raise as_error(answer["error"], 0)
            yield parse_generation(answer, self._prompt_token_ids)

    def check_done(self, base_url: str) -> None:
        """Raise RolloutError where the stream ended early."""
        if not self.done:
            raise RolloutError(0, "TransportError", f"{base_url}: the stream ended before [DONE]")


def as_error(error: Any, status: int, retry_after: str = "") -> RolloutError:
    """The error of a server's JSON."""
    if not isinstance(error, dict):
        error = {"message": str(error)}
    code = error.get("code")
    return RolloutError(
        code if isinstance(code, int) else status,
        error.get("type") or "HTTPError",
        error.get("message") or "no message",
        error.get("param"),
        float(retry_after) if retry_after.isdecimal() else None,  # a date, which HTTP allows too, counts as none
    )


def check_success(response: httpx.Response) -> httpx.Response:
    """The response, read, if it is a success. Raises RolloutError with what the server said otherwise."""
    if response.is_success:
        return response
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": response.text[:500] or response.reason_phrase, "type": "HTTPError"}
    raise as_error(error, response.status_code, response.headers.get("Retry-After", ""))


def read_answer(response: httpx.Response) -> Any:
    """The JSON of a success, None for an empty one."""
    content = check_success(response).content
    try:
        return json.loads(content) if content else None
    except ValueError:
        raise RolloutError(0, "ProtocolError", f"{response.url} answered no JSON: {response.text[:200]!r}") from None


@contextlib.contextmanager
def connection_errors(base_url: str) -> Iterator[None]:
    """Raise RolloutError for a connection that fails within the block."""
    try:
        yield
    except httpx.HTTPError as error:
        raise RolloutError(0, "TransportError", f"{base_url}: {type(error).__name__}: {error}") from error
