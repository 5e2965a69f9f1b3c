"""The answer that every dialect writes from, and what a dialect must be able to write."""

from __future__ import annotations

import base64
import io
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from rollout.config import ServerConfig
from rollout.outputs import FinishReason, IdArray, TokenLogprob, WeightVersionSpan
from rollout.server.errors import ApiError, error_body
from rollout.server.latency import RequestTiming
from rollout.server.text.detokenizer import Vocabulary
from rollout.server.wire.body import GenerationBody
from rollout.server.wire.logprobs import PromptLogprobs, prompt_logprobs

# Sampling masks become lists one at a time: as Python ints a wide one takes nine times the memory.
encode_json = msgspec.json.Encoder(enc_hook=array.tolist).encode


@dataclass(slots=True)
class Delta:
    """What is new of one choice since its last Delta.

    `text` is None where no text was asked for. One entry a token: `text_offsets` (where the token begins in the
    choice's text, in characters; empty without text), `logprobs` (the sampled token first, then what else
    the engine was asked for; None where no logprobs were), `sampling_mask` (ids of the support, None for an unfiltered
    step; None where all are). `routed_experts` are (rows, layers, experts per token), uint8
    or uint16; those of a choice's first n tokens make prompt + n - 1 rows; None where there is nothing to tell.
    `weight_versions` cover the whole choice, and come once it has ended.
    """

    index: int
    token_ids: list[int]
    text: str | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    sampling_mask: list[IdArray | None] | None = None
    routed_experts: np.ndarray | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Answer:
    """What the choices of one prompt have in common. The counts, for usage, are those of what has come so far.

    `cached_tokens` of the prompt were found in the prefix cache. `prompt_logprobs` has one entry a prompt token, the
    first None; it is None where none were asked for. `prompt_text` is None where the prompt came as ids.
    `weight_version` is the label that served last, as far as this answer knows.
    """

    request_id: str
    model: str
    prompt_token_ids: list[int]
    vocabulary: Vocabulary | None
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    prompt_text: str | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    weight_version: str = ""

    def timing(self) -> RequestTiming | None:
        """How long it took; None where that isn't known, and of several choices."""
        return None

    def told_prompt_logprobs(self) -> PromptLogprobs | None:
        """The prompt's logprobs as answers tell them. Long prompts take long: not for the event loop."""
        return None if self.prompt_logprobs is None else prompt_logprobs(self.prompt_logprobs, self.vocabulary)


class PromptTokensDetails(msgspec.Struct):
    """How many of the prompts' tokens were found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts; a stream's last chunk leaves out the details that nobody asked for."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType | None = None
    completion_tokens_details: UnsetType | None = None


def npy(array: np.ndarray | str | None) -> str | None:
    """Base64 of an array as an `.npy` file; of a str, which is that already, itself."""
    if array is None or isinstance(array, str):
        return array
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


B = TypeVar("B", bound=GenerationBody)


class Writer(ABC, Generic[B]):
    """How one dialect says the answer to one request: `whole`, or as events: `begin`, `chunk` after `chunk`, `end`.

    `answers` has one entry a prompt. `whole_kinds` and `event_kinds` are the types of what it writes, and `after` is
    what ends a stream, also one that failed.
    """

    whole_kinds: ClassVar[tuple[Any, ...]]
    event_kinds: ClassVar[tuple[Any, ...]]
    after: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(self, body: B, config: ServerConfig, answers: Sequence[Answer]) -> None:
        self.body = body
        self.config = config
        self.answers = answers
        self.answer = answers[0]
        self.created = int(time.time())

    @property
    def reads_prompt(self) -> bool:
        """Whether to write takes work for every token of the prompt: more than an event loop should wait for."""
        return self.answer.prompt_logprobs is not None

    @abstractmethod
    def whole(self, choices: Sequence[tuple[Answer, Delta]]) -> msgspec.Struct:
        """The answer, of choices that have all ended."""

    def begin(self) -> Iterator[msgspec.Struct]:
        """The events before the first token."""
        return iter(())

    @abstractmethod
    def chunk(self, answer: Answer, delta: Delta) -> Iterator[msgspec.Struct]:
        """The events that tell what is new of a choice."""

    @abstractmethod
    def end(self) -> Iterator[msgspec.Struct]:
        """The events after the last token."""

    def event(self, event: msgspec.Struct) -> bytes:
        """An event as it is sent."""
        return b"data: " + encode_json(event) + b"\n\n"

    def error(self, error: ApiError) -> bytes:
        """The event that says that the stream failed."""
        return b"data: " + error_body(error) + b"\n\n"

    def usage(self) -> Usage:
        """The counts so far, over all prompts."""
        prompt = completion = 0
        for answer in self.answers:
            prompt += answer.prompt_tokens
            completion += answer.completion_tokens
        usage = Usage(prompt_tokens=prompt, total_tokens=prompt + completion, completion_tokens=completion)
        if self.config.enable_prompt_tokens_details:
            usage.prompt_tokens_details = PromptTokensDetails(sum(answer.cached_tokens for answer in self.answers))
        return usage

    def metrics(self) -> RequestTiming | None:
        """How long the one choice of the one prompt took, where the server tells that."""
        return self.answer.timing() if self.config.enable_per_request_metrics and len(self.answers) == 1 else None

    def totals(self) -> Usage | None:
        """The counts as the last event of a stream states them, without details; None where they aren't asked for."""
        if not (self.body.last_usage or self.config.enable_force_include_usage):
            return None
        usage = self.usage()
        usage.completion_tokens_details = UNSET
        if usage.prompt_tokens_details is None:
            usage.prompt_tokens_details = UNSET
        return usage
