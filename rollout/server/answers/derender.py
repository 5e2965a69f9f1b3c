"""From the token ids that /inference/v1/generate answered to the text of an OpenAI answer. Runs on threads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET

from rollout.config import ServerConfig
from rollout.outputs import FinishReason, TokenLogprob
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.text.detokenizer import TextReader, Vocabulary
from rollout.server.wire.answer import Answer, Delta, Usage
from rollout.server.wire.chat import ChatChunk, ChatCompletionRequest, ChatResponse, ChatWriter
from rollout.server.wire.completions import CompletionChunk, CompletionRequest, CompletionResponse, CompletionWriter
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

# What stands for a request that the client doesn't send along: everything is told that generate has told.
_ANY_CHAT = ChatCompletionRequest.model_construct(messages=[], top_logprobs=-1)
_ANY_COMPLETION = CompletionRequest.model_construct(prompt="")


@dataclass
class Derenderer:
    """Reads the answers of one request with this vocabulary. A choice may end with one of `eos_token_ids`."""

    config: ServerConfig
    model: str
    vocabulary: Vocabulary
    eos_token_ids: Collection[int]

    def chat(self, body: DerenderChatRequest) -> ChatResponse:
        """The answer of /v1/chat/completions that these ids make."""
        request, response = _asked(body.chat_request), body.generate_response
        answer = self._answer(response, body.prompt_token_ids, body.prompt_tokens)
        made = ChatWriter(request, self.config, [answer]).whole(self._whole(request, answer, response))
        made.system_fingerprint, made.prompt_logprobs = None, response.prompt_logprobs
        return made

    def completion(self, body: DerenderCompletionRequest) -> CompletionResponse:
        """The answer of /v1/completions that these ids make."""
        request, responses = body.completion_request or _ANY_COMPLETION, body.generate_responses
        counts: Sequence[int | None] = body.prompt_tokens or [None] * len(responses)
        prompts: Sequence[Sequence[int] | None] = body.prompt_token_ids or [None] * len(responses)
        for name, given in (("prompt_tokens", counts), ("prompt_token_ids", prompts)):
            if len(given) != len(responses):
                raise ParameterError(
                    f"{name} must have one entry a response, got {len(given)} for {len(responses)}.", name
                )
        answers = [self._answer(*of) for of in zip(responses, prompts, counts, strict=True)]
        choices: list[tuple[Answer, Delta]] = []
        for answer, response in zip(answers, responses, strict=True):
            choices += self._whole(request, answer, response, first_index=len(choices))
        made = CompletionWriter(request, self.config, answers).whole(choices)
        made.system_fingerprint = None
        told = dict(zip(answers, responses, strict=True))
        for choice, (answer, _) in zip(made.choices, choices, strict=True):
            choice.prompt_logprobs = told[answer].prompt_logprobs
        return made

    def chat_chunk(self, body: DerenderChatStreamRequest) -> tuple[ChatChunk, DerenderStreamState]:
        """The chunk of a streamed chat, and the state for the choice's next one. The first has the role."""
        request, generated = _asked(body.chat_request), body.generate_chunk
        answer = self._answer(generated, body.prompt_token_ids, body.prompt_tokens)
        state = _state(body.stream_state, answer)
        writer = ChatWriter(request, self.config, [answer], state.began)
        chunk = writer.envelope([])
        if (choice := _only_choice(generated)) is not None:
            if state.said:
                writer.parts.read(answer, Delta(choice.index, [], state.said))
            delta, after = self._next_delta(request, choice, state)
            made = writer.chunk_choice(answer, delta)
            made.stop_reason = choice.stop_reason
            if not state.role_sent:
                made.delta.role = "assistant"
                chunk.prompt_token_ids = writer.prompt_ids(answer) if request.return_token_ids else UNSET
            chunk.choices.append(made)
            said = state.said + (delta.text or "") if writer.parts.parses else ""
            state = after.model_copy(update={"role_sent": True, "said": said, "began": writer.parts.began})
        chunk.usage = _stated_usage(generated, body.prompt_tokens)
        return chunk, state

    def completion_chunk(self, body: DerenderCompletionStreamRequest) -> tuple[CompletionChunk, DerenderStreamState]:
        """The chunk of a streamed completion, and the state for the choice's next one."""
        request, generated = body.completion_request or _ANY_COMPLETION, body.generate_chunk
        answer = self._answer(generated, body.prompt_token_ids, body.prompt_tokens)
        writer = CompletionWriter(request, self.config, [answer])
        chunk, state = writer.envelope([]), _state(body.stream_state, answer)
        if (choice := _only_choice(generated)) is not None:
            if body.stream_state is not None:
                writer.echoed[choice.index] = len(writer.echo(answer))
            delta, state = self._next_delta(request, choice, state)
            chunk.choices.append(writer.chunk_choice(answer, delta))
        chunk.usage = _stated_usage(generated, body.prompt_tokens)
        return chunk, state

    def _answer(
        self, response: GenerateTokensResponse, prompt_ids: Sequence[int] | None, prompt_tokens: int | None
    ) -> Answer:
        ids = list(prompt_ids or response.prompt_token_ids or [])
        stated = 0 if response.usage is None else response.usage.prompt_tokens
        return Answer(
            request_id=response.request_id,
            model=self.model,
            prompt_token_ids=ids,
            vocabulary=self.vocabulary,
            prompt_tokens=prompt_tokens if prompt_tokens is not None else len(ids) or stated,
            completion_tokens=sum(len(choice.token_ids) for choice in response.choices),
        )

    def _whole(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        answer: Answer,
        response: GenerateTokensResponse,
        first_index: int | None = None,
    ) -> list[tuple[Answer, Delta]]:
        """The choices, numbered from `first_index` on where it is given."""
        found = []
        params = self._params(request)
        for number, choice in enumerate(response.choices):
            delta = self._read(TextReader(self.vocabulary, answer.prompt_token_ids, params), choice)
            if first_index is not None:
                delta.index = first_index + number
            found.append((answer, delta))
        return found

    def _params(self, request: ChatCompletionRequest | CompletionRequest) -> SamplingParams:
        params = request.to_sampling_params()
        request.adapt(params, self.config)
        return params

    def _next_delta(
        self, request: ChatCompletionRequest | CompletionRequest, choice: GeneratedChoice, state: DerenderStreamState
    ) -> tuple[Delta, DerenderStreamState]:
        """What the chunk adds, and the state after it. A new reader goes on where the last one was."""
        asked = self._params(request)
        params = replace(asked, min_tokens=max(0, asked.min_tokens - state.num_tokens))
        reader = TextReader(
            self.vocabulary, state.context, params, read=state.token_ids, tail=state.tail, length=state.text_offset
        )
        delta = self._read(reader, choice)
        skipped = self.vocabulary.special_ids if params.skip_special_tokens else frozenset[int]()
        read = [*state.token_ids, *(token_id for token_id in choice.token_ids if token_id not in skipped)]
        after = DerenderStreamState(
            context=[*state.context, *read[:-CARRIED_IDS]][-CARRIED_IDS:],
            token_ids=read[-CARRIED_IDS:],
            tail=reader.tail,
            num_tokens=state.num_tokens + len(choice.token_ids),
            text_offset=reader.length,
        )
        return delta, after

    def _read(self, reader: TextReader, choice: GeneratedChoice) -> Delta:
        """What a choice's ids add; an EOS or stop token that ended it is read as the engine's end."""
        ids = choice.token_ids
        by_token = isinstance(choice.stop_reason, int) or (bool(ids) and ids[-1] in self.eos_token_ids)
        end = FinishReason.STOP if by_token and choice.finish_reason == FinishReason.STOP else None
        text, offsets = "", []
        for number, token_id in enumerate(ids, start=1):
            offsets.append(reader.length)
            if reader.stop is None:
                text += reader.read(token_id, end if number == len(ids) else None)
        if choice.finish_reason is not None and end is None and reader.stop is None:
            text += reader.read(None, choice.finish_reason)
        return _delta(choice, text, offsets)


def _asked(request: ChatCompletionRequest | None) -> ChatCompletionRequest:
    """The chat's request; one that asks for no logprobs limits none that generate has told all the same."""
    if request is None or request.logprobs or request.logprob_token_ids:
        return request or _ANY_CHAT
    return request.model_copy(update={"top_logprobs": -1})


def _state(given: DerenderStreamState | None, answer: Answer) -> DerenderStreamState:
    return given or DerenderStreamState(context=answer.prompt_token_ids[-CARRIED_IDS:])


def _delta(choice: GeneratedChoice, text: str, text_offsets: list[int]) -> Delta:
    """The choice as writers take it, with what generate said in this project's own fields."""
    ours = choice.model_extra or {}
    told: Any = choice.routed_experts  # base64 already, which writers leave as it is
    return Delta(
        index=choice.index,
        token_ids=choice.token_ids,
        text=text,
        text_offsets=text_offsets,
        logprobs=_entries(choice.logprobs),
        sampling_mask=ours.get("sampling_mask"),
        routed_experts=told,
        weight_versions=ours.get("weight_versions"),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


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


def _stated_usage(chunk: GenerateTokensResponse, prompt_tokens: int | None) -> Any:
    if chunk.usage is None:
        return UNSET
    prompt = chunk.usage.prompt_tokens if prompt_tokens is None else prompt_tokens
    completion = chunk.usage.completion_tokens
    return Usage(prompt, prompt + completion, completion, UNSET, UNSET)
