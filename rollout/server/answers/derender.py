"""From the token ids that /inference/v1/generate answered to the text of an OpenAI answer. Runs on threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET

from rollout.outputs import FinishReason, TokenLogprob
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.answers.text_answers import chat_logprobs, completion_logprobs, names_by_id
from rollout.server.context import Server
from rollout.server.text.detokenizer import TextReader, Vocabulary
from rollout.server.wire.openai_answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatResponse,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionResponse,
    MessageDelta,
)
from rollout.server.wire.openai_requests import ChatCompletionRequest, ChatLogprobs, CompletionRequest, OpenAIRequest
from rollout.server.wire.render import (
    CARRIED_IDS,
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    DerenderStreamState,
    GeneratedChoice,
    GeneratedLogprobs,
    GenerateTokensResponse,
)
from rollout.server.wire.tokens import TextLogprobs, Usage


class Derenderer:
    """Reads one request's answers. `request` is what was rendered, None where the client doesn't say."""

    def __init__(
        self, server: Server, vocabulary: Vocabulary, request: OpenAIRequest | None, model: str | None
    ) -> None:
        self._server = server
        self._vocabulary = vocabulary
        self._request = request
        self._params = SamplingParams()
        if isinstance(request, ChatCompletionRequest | CompletionRequest):
            self._params = request.sampling_params()
        self._top = request.shown_logprobs if isinstance(request, ChatLogprobs) else -1
        self._as_ids = server.config.return_tokens_as_token_ids if request is None else names_by_id(server, request)
        self._with_ids = request is not None and bool(request.return_token_ids)
        self._model = model or server.model_name

    def chat(self, body: DerenderChatRequest) -> ChatResponse:
        """The answer of /v1/chat/completions that these ids make."""
        response = body.generate_response
        prompt_ids = body.prompt_token_ids or response.prompt_token_ids or []
        choices = [
            ChatChoice(
                message=AssistantMessage(content=self._whole_text(choice, prompt_ids)),
                logprobs=self._chat_logprobs(choice),
                **self._of_choice(choice),
                **self._carried(choice),
            )
            for choice in response.choices
        ]
        return ChatResponse(
            id=response.request_id,
            created=int(time.time()),
            model=self._model,
            choices=choices,
            system_fingerprint=None,
            usage=_usage([response], [_prompt_tokens(response, body.prompt_tokens, prompt_ids)]),
            prompt_logprobs=response.prompt_logprobs,
            prompt_token_ids=prompt_ids or None if self._with_ids else None,
        )

    def completion(self, body: DerenderCompletionRequest) -> CompletionResponse:
        """The answer of /v1/completions that these ids make."""
        responses = body.generate_responses
        if body.prompt_tokens is not None and len(body.prompt_tokens) != len(responses):
            raise ParameterError(
                f"prompt_tokens must have one count a response, got {len(body.prompt_tokens)} for {len(responses)}.",
                "prompt_tokens",
            )
        choices: list[CompletionChoice] = []
        counts = []
        for number, response in enumerate(responses):
            prompt_ids = response.prompt_token_ids or []
            given = None if body.prompt_tokens is None else body.prompt_tokens[number]
            counts.append(_prompt_tokens(response, given, prompt_ids))
            for choice in response.choices:
                of_choice = self._of_choice(choice) | {"index": len(choices)}
                made = CompletionChoice(
                    text=self._whole_text(choice, prompt_ids),
                    logprobs=self._completion_logprobs(choice, 0),
                    prompt_logprobs=response.prompt_logprobs,
                    prompt_token_ids=prompt_ids or None if self._with_ids else None,
                    **of_choice,
                    **self._carried(choice),
                )
                choices.append(made)
        return CompletionResponse(
            id=responses[0].request_id,
            created=int(time.time()),
            model=self._model,
            choices=choices,
            system_fingerprint=None,
            usage=_usage(responses, counts),
        )

    def chat_chunk(self, body: DerenderChatStreamRequest) -> tuple[ChatChunk, DerenderStreamState]:
        """The chunk of a streamed chat, and the state for the choice's next one. The first has the role."""
        generated = body.generate_chunk
        prompt_ids = body.prompt_token_ids or generated.prompt_token_ids or []
        state = body.stream_state or DerenderStreamState(context=prompt_ids[-CARRIED_IDS:])
        chunk = ChatChunk(id=generated.request_id, created=int(time.time()), model=self._model, choices=[])
        if (choice := _only_choice(generated)) is not None:
            text, after = self._next_text(choice, state)
            role = UNSET if state.role_sent else "assistant"
            made = ChatChunkChoice(
                delta=MessageDelta(role=role, content=text),
                logprobs=self._chat_logprobs(choice),
                **self._of_choice(choice),
                **self._carried(choice),
            )
            chunk.choices.append(made)
            if self._with_ids and not state.role_sent:
                chunk.prompt_token_ids = prompt_ids or None
            state = after.model_copy(update={"role_sent": True})
        if generated.usage is not None:
            chunk.usage = _stated_usage(generated, body.prompt_tokens)
        return chunk, state

    def completion_chunk(self, body: DerenderCompletionStreamRequest) -> tuple[CompletionChunk, DerenderStreamState]:
        """The chunk of a streamed completion, and the state for the choice's next one."""
        generated = body.generate_chunk
        prompt_ids = generated.prompt_token_ids or []
        state = body.stream_state or DerenderStreamState(context=prompt_ids[-CARRIED_IDS:])
        chunk = CompletionChunk(id=generated.request_id, created=int(time.time()), model=self._model, choices=[])
        if (choice := _only_choice(generated)) is not None:
            text, after = self._next_text(choice, state)
            logprobs = self._completion_logprobs(choice, state.text_offset)
            if logprobs is not None and logprobs.tokens:
                after.text_offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
            made = CompletionChunkChoice(
                text=text,
                logprobs=logprobs,
                prompt_token_ids=prompt_ids or None if self._with_ids and body.stream_state is None else None,
                **self._of_choice(choice),
                **self._carried(choice),
            )
            chunk.choices.append(made)
            state = after
        if generated.usage is not None:
            chunk.usage = _stated_usage(generated, body.prompt_tokens)
        return chunk, state

    def _whole_text(self, choice: GeneratedChoice, prompt_ids: Sequence[int]) -> str:
        return self._read(TextReader(self._vocabulary, prompt_ids, self._params), choice)

    def _next_text(self, choice: GeneratedChoice, state: DerenderStreamState) -> tuple[str, DerenderStreamState]:
        """What the chunk adds to the text, and the state after it. A new reader goes on where the last one was."""
        params = replace(self._params, min_tokens=max(0, self._params.min_tokens - state.num_tokens))
        reader = TextReader(self._vocabulary, state.context, params, read=state.token_ids, tail=state.tail)
        text = self._read(reader, choice)
        skipped = self._vocabulary.special_ids if params.skip_special_tokens else frozenset[int]()
        read = [*state.token_ids, *(token_id for token_id in choice.token_ids if token_id not in skipped)]
        after = DerenderStreamState(
            context=[*state.context, *read[:-CARRIED_IDS]][-CARRIED_IDS:],
            token_ids=read[-CARRIED_IDS:],
            tail=reader.tail,
            num_tokens=state.num_tokens + len(choice.token_ids),
            text_offset=state.text_offset,
        )
        return text, after

    def _read(self, reader: TextReader, choice: GeneratedChoice) -> str:
        """The text that a choice's ids add; an EOS or stop token that ended it is read as the engine's end."""
        ids = choice.token_ids
        eos = self._server.engine.info.eos_token_ids
        by_token = isinstance(choice.stop_reason, int) or (bool(ids) and ids[-1] in eos)
        end = FinishReason.STOP if by_token and choice.finish_reason == FinishReason.STOP else None
        text = []
        for number, token_id in enumerate(ids, start=1):
            text.append(reader.read(token_id, end if number == len(ids) else None))
            if reader.stop is not None:
                return "".join(text)
        if choice.finish_reason is not None and end is None:
            text.append(reader.read(None, choice.finish_reason))
        return "".join(text)

    def _of_choice(self, choice: GeneratedChoice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._with_ids else None,
        }

    def _carried(self, choice: GeneratedChoice) -> dict[str, Any]:
        """What generate said in this project's own fields, where the request asks for them, and of routed experts."""
        given = choice.model_extra or {}
        carried: dict[str, Any] = {}
        if given.get("routed_experts") is not None:
            carried["routed_experts"] = given["routed_experts"]
        if self._request is None:
            return carried
        if self._request.return_weight_versions and given.get("weight_versions") is not None:
            carried["weight_versions"] = given["weight_versions"]
        if self._with_ids and self._server.config.return_sampling_mask:
            carried["sampling_mask"] = given.get("sampling_mask")
        return carried

    def _chat_logprobs(self, choice: GeneratedChoice) -> TextLogprobs | None:
        return chat_logprobs(_entries(choice.logprobs), self._vocabulary, top=self._top, as_ids=self._as_ids)

    def _completion_logprobs(self, choice: GeneratedChoice, offset: int) -> CompletionLogprobs | None:
        entries = _entries(choice.logprobs)
        return completion_logprobs(choice.token_ids, entries, self._vocabulary, offset=offset, as_ids=self._as_ids)


def _entries(logprobs: GeneratedLogprobs | None) -> list[list[TokenLogprob]] | None:
    if logprobs is None:
        return None
    return [[TokenLogprob(c.token_id, c.logprob, 0) for c in (one, *one.top_logprobs)] for one in logprobs.content]


def _only_choice(chunk: GenerateTokensResponse) -> GeneratedChoice | None:
    """The chunk's choice, if any. Raises ParameterError for several: the state is that of one."""
    if len(chunk.choices) > 1:
        raise ParameterError(
            f"A chunk to derender has at most one choice, got {len(chunk.choices)}.", "generate_chunk.choices"
        )
    return chunk.choices[0] if chunk.choices else None


def _prompt_tokens(response: GenerateTokensResponse, given: int | None, prompt_ids: Sequence[int]) -> int:
    if given is not None:
        return given
    if prompt_ids:
        return len(prompt_ids)
    return 0 if response.usage is None else response.usage.prompt_tokens


def _usage(responses: Sequence[GenerateTokensResponse], prompt_tokens: Sequence[int]) -> Usage:
    prompt = sum(prompt_tokens)
    completion = sum(len(choice.token_ids) for response in responses for choice in response.choices)
    return Usage(prompt_tokens=prompt, total_tokens=prompt + completion, completion_tokens=completion)


def _stated_usage(chunk: GenerateTokensResponse, prompt_tokens: int | None) -> Usage:
    assert chunk.usage is not None
    prompt = chunk.usage.prompt_tokens if prompt_tokens is None else prompt_tokens
    completion = chunk.usage.completion_tokens
    return Usage(prompt, prompt + completion, completion, UNSET, UNSET)
