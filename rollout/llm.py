"""An engine in the caller's own process, for notebooks and tests: no server, no HTTP, the same answers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from torch import Tensor, nn

from rollout.config import EngineConfig, KVPolicy, ServerConfig
from rollout.engine.engine import Engine
from rollout.engine.process import ready
from rollout.messages import AbortRequests, AddRequest
from rollout.outputs import TokenOutput
from rollout.sampling.grammar import load_tokenizer
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.admit import check_cache_salt, check_prompt, check_satisfiable, resolve_params
from rollout.server.errors import ApiError
from rollout.server.generation import ChoiceReader
from rollout.server.prompts import apply_template
from rollout.server.text.detokenizer import TextReader, Vocabulary
from rollout.server.text.grammars import GrammarChecker
from rollout.server.text.tokenizer import bad_words_token_ids
from rollout.server.wire.answer import Answer, encode_json
from rollout.server.wire.body import ChatFields
from rollout.server.wire.tokens import GenerateRequest, GenerateWriter
from rollout.weights.bodies import StartBody
from rollout.weights.errors import WeightUpdateError
from rollout.weights.transport.local import LocalTransport
from trainer_bridge.push.control import WeightPushError
from trainer_bridge.push.sender import PushResult
from trainer_bridge.push.sources import named_tensors
from trainer_bridge.wire import Generation, generate_body, parse_generation

logger = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's form of either: `{"prompt": …}`, `{"prompt_token_ids": …}`."""
Chat: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, as OpenAI's API has them: `[{"role": "user", "content": "Why?"}]`."""
Params: TypeAlias = SamplingParams | Mapping[str, Any]

_WAKE_S = 1.0


class LLM:
    """One model, generating in the thread that calls it, while its weights are replaced between two steps.

    `model` is a transformers folder, a .gguf file or a hub id; `engine` are fields of `EngineConfig`, which are the
    flags of `rollout serve` (`dtype="float32"`, `max_num_seqs=64`). `tokenizer` is a folder, a .gguf file or a hub id;
    without one it is the model's. With `return_sampling_mask` answers have the support of each filtered step. Several
    threads may generate at once: their requests share the steps. Close it, or use `with`. Raises ValueError for what
    can't be served.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        return_sampling_mask: bool = False,
        **engine: Any,
    ) -> None:
        self.config = EngineConfig(model=str(model), **engine)
        for name, wrong in (
            ("tensor_parallel_size", self.config.tensor_parallel_size > 1),
            ("weight_staging", self.config.weight_staging == "in_place"),
        ):
            if wrong:
                value = getattr(self.config, name)
                raise ValueError(f"{name} {value!r} can't be had in process: start a server with `rollout.serve`")
        self._options = ServerConfig(
            tokenizer=None if tokenizer is None else str(tokenizer), return_sampling_mask=return_sampling_mask
        )
        self._woken = threading.Event()
        self._turn = threading.Lock()
        self._engine = Engine(self.config, self._woken.set)
        self._facts = ready(self._engine)
        self._grammars = GrammarChecker()
        self._requests: dict[str, _Request] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop an update under way. The memory of the model goes with the last reference to this object."""
        with self._turn:
            self._engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        n: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[Generation]:
        """One answer a prompt, in order; also to a single prompt it is a list.

        What was asked in text is answered in text, too: `answer.choices[0].text`. `sampling_params` are one for all
        prompts, or one for each; `n` and `extra` are those of `RolloutClient.generate`. Raises ValueError for what a
        server would refuse.
        """
        return self._generate(_listed(prompts), sampling_params, n, extra)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        n: int | None = None,
        extra: Mapping[str, Any] | None = None,
        **template: Any,
    ) -> list[Generation]:
        """`generate` for one chat, or for several, as the tokenizer's template renders them; the answers have texts.

        `template` are the fields of /v1/chat/completions that say how: `chat_template` (a Jinja text),
        `chat_template_kwargs`, `tools`, `documents`, `add_generation_prompt`, `continue_final_message`. Raises
        TypeError for another name, and ValueError for what a server would refuse.
        """
        if unknown := sorted(template.keys() - ChatFields.model_fields.keys()):
            raise TypeError(f"chat has no argument {unknown[0]!r}: it has {', '.join(ChatFields.model_fields)}")
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for chat in messages if messages and not isinstance(messages[0], Mapping) else [messages]:
            fields = ChatFields.model_validate({"messages": chat, **template})
            ids = tokenizer(apply_template(tokenizer, fields), add_special_tokens=fields.add_special_tokens).input_ids
            prompts.append(_AsText(ids))
        return self._generate(prompts, sampling_params, n, extra)

    def _generate(
        self,
        listed: list[Prompt],
        sampling_params: Params | Sequence[Params] | None,
        n: int | None,
        extra: Mapping[str, Any] | None,
    ) -> list[Generation]:
        each: Sequence[Any] = (
            sampling_params if isinstance(sampling_params, list | tuple) else [sampling_params] * len(listed)
        )
        if len(each) != len(listed):
            raise ValueError(f"there are {len(listed)} prompts and {len(each)} sampling_params: give one, or one each")
        requests = [self._request(prompt, params, n, extra) for prompt, params in zip(listed, each, strict=True)]
        with self._entered(requests):
            while not all(request.ended for request in requests):
                self._step()
            return [request.whole() for request in requests]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        n: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Iterator[Generation]:
        """`generate` for one prompt in pieces, as they are sampled. Between two of them the weights may be updated.

        Closing the iterator early aborts the request.
        """
        (one,) = _listed(prompt)
        request = self._request(one, sampling_params, n, extra)
        with self._entered([request]):
            while not request.ended:
                self._step()
                with self._turn:
                    news = list(request.news())
                yield from news

    def update_weights(
        self,
        weights: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        version: str | None = None,
        partial: bool = False,
        kv_policy: KVPolicy | None = None,
    ) -> PushResult:
        """Check these weights (a module, its state dict, or pairs) and commit them between two steps, as `version`.

        They are copied: the caller may go on to change theirs. May be called while other threads generate. Raises
        WeightPushError, and keeps the weights that serve, for any that don't fit the model, are missing (unless
        `partial`), or aren't finite.
        """
        tensors = named_tensors(weights) if isinstance(weights, nn.Module) else dict(weights)
        start = StartBody(update_id=uuid.uuid4().hex, partial=partial, kv_policy=kv_policy)
        began, limit_s = time.monotonic(), self.config.weight_update_timeout_s
        updater = self._engine.weights
        try:
            answer = updater.receive(LocalTransport(tensors, limit_s), start, version)
            answer.add_done_callback(lambda _: self._woken.set())
            while not answer.done():
                self._woken.wait(_WAKE_S)
                self._woken.clear()
                with self._turn:
                    self._deliver(self._engine.commit_weights())
                if time.monotonic() - began > limit_s:
                    updater.call("abort_weight_update", {"update_id": start.update_id})
            done = answer.result()
        except WeightUpdateError as error:
            raise WeightPushError(error.message) from error
        label = self._engine.store.label if version is None else version
        return PushResult(label, (done["epoch"],), done["bytes"], time.monotonic() - began)

    def weight_info(self) -> dict[str, Any]:
        """The weights that serve, as `RolloutClient.weight_info` tells: `weight_version`, `epoch`, `last_error` …"""
        return self._engine.weights.call("weight_info", {}).result(_WAKE_S)

    def stats(self) -> dict[str, int]:
        """The engine's counters since its start, and what is in use now: what /metrics is made of."""
        return dict(self._engine.stats)

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer. Raises ValueError where the model has none."""
        if self._vocabulary is None:
            raise ValueError(f"{self._tokenizer} has no tokenizer: use token ids, and stop_token_ids")
        return self._vocabulary.tokenizer

    @property
    def _tokenizer(self) -> str:
        """Where it is."""
        return self._options.tokenizer or self.config.model

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        try:
            return Vocabulary(load_tokenizer(self._tokenizer))
        except Exception as error:  # whatever transformers raises on such a folder
            logger.warning("No tokenizer in %s, so only token ids are served: %s", self._tokenizer, error)
            return None

    # -- requests

    def _request(
        self, prompt: Prompt, params: Params | None, n: int | None, extra: Mapping[str, Any] | None
    ) -> _Request:
        """The checked request. Raises ValueError (ParameterError, pydantic's ValidationError)."""
        given: Any = prompt
        if isinstance(prompt, Mapping):
            given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        wants_text = isinstance(given, str | _AsText)
        ids = self.get_tokenizer()(given).input_ids if isinstance(given, str) else given
        asked = dataclasses.asdict(params) if isinstance(params, SamplingParams) else params
        told = generate_body(ids, asked, n, None, extra, stream=False)
        body = GenerateRequest(**{**told, "output_mode": "text" if wants_text else "tokens"})
        sampling = body.to_sampling_params()
        try:
            check_cache_salt(body.cache_salt)
            check_prompt(self._facts, body.token_ids)
            resolve_params(self._facts, self.config, sampling, len(body.token_ids))
            vocabulary = None
            if wants_text or sampling.stop:
                self.get_tokenizer()  # says that there is none
                vocabulary = self._vocabulary
            bad_words = bad_words_token_ids(self.get_tokenizer(), sampling.bad_words) if sampling.bad_words else []
            check_satisfiable(sampling, bad_words, self._facts)
            grammar = None
            if (structured := sampling.structured_outputs) is not None:
                grammar = self._grammars.check(structured, self.get_tokenizer(), self._facts, "structured_outputs")
        except ApiError as error:
            raise ParameterError(error.message, error.param) from None
        message = AddRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=body.token_ids,
            sampling_params=sampling,
            bad_words_token_ids=bad_words,
            priority=body.priority,
            cache_salt=body.cache_salt,
            return_sampling_mask=self._options.return_sampling_mask or body.wants_sampling_mask,
            grammar=grammar,
            tokenizer=self._options.tokenizer,
        )
        answer = Answer(message.request_id, self.config.model, body.token_ids, vocabulary, len(body.token_ids))
        routing = self._facts.routing
        readers = [TextReader(vocabulary, body.token_ids, sampling) if vocabulary else None for _ in range(sampling.n)]
        choices = [
            ChoiceReader(i, sampling, routing, reader, wants_text=wants_text) for i, reader in enumerate(readers)
        ]
        return _Request(message, answer, choices, GenerateWriter(body, self._options, [answer]))

    @contextlib.contextmanager
    def _entered(self, requests: list[_Request]) -> Iterator[None]:
        """What of the requests still runs at the end of the block is aborted."""
        with self._turn:
            for request in requests:
                self._requests[request.message.request_id] = request
                self._engine.add_request(request.message)
        try:
            yield
        finally:
            ids = [request.message.request_id for request in requests]
            with self._turn:
                self._engine.abort(AbortRequests(ids, silent=True))
                for request_id in ids:
                    del self._requests[request_id]

    def _step(self) -> None:
        with self._turn:
            self._deliver(self._engine.step())

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is not None and request.add(output):
                self._engine.abort(AbortRequests([output.request_id], output.index, silent=True))


class _AsText(list[int]):
    """The ids of a prompt that is answered in text."""


class _Request:
    """A request in the engine, and what was read of its choices."""

    def __init__(
        self, message: AddRequest, answer: Answer, choices: list[ChoiceReader], writer: GenerateWriter
    ) -> None:
        self.message = message
        self._answer, self._choices, self._writer = answer, choices, writer

    @property
    def ended(self) -> bool:
        """Whether all choices have."""
        return all(choice.ended for choice in self._choices)

    def add(self, output: TokenOutput) -> bool:
        """Take what came of a choice. True where its text completes a stop string, which ends it."""
        if output.prompt_logprobs is not None:
            self._answer.prompt_logprobs = output.prompt_logprobs
        choice = self._choices[output.index]
        if choice.ended:
            return False
        self._answer.completion_tokens += output.token_id is not None
        return choice.add(output)

    def whole(self) -> Generation:
        """The answer of choices that have all ended."""
        return self._parsed(self._writer.whole([(self._answer, choice.pop()) for choice in self._choices]))

    def news(self) -> Iterator[Generation]:
        """What came since the last call, choice by choice."""
        for choice in self._choices:
            if choice.has_news:
                yield from map(self._parsed, self._writer.chunk(self._answer, choice.pop()))

    def _parsed(self, told: msgspec.Struct) -> Generation:
        return parse_generation(json.loads(encode_json(told)), self._answer.prompt_token_ids)


def _listed(prompts: Any) -> list[Prompt]:
    """The prompts, of one or many. Raises ValueError for none."""
    given = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(given, str | Mapping):
        return [given]
    listed = list(given)
    if not listed:
        raise ValueError("there is no prompt: give a text, token ids, or a list of either")
    return [listed] if isinstance(listed[0], int) else listed
