"""What the dialects of OpenAI's kind have in common. Unknown fields are ignored.

Names, defaults and refusals are those of a vLLM server; `return_weight_versions` is this project's own. What would
change the answer and isn't done here is refused by name (`fields.py`), rather than ignored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, create_model

from rollout.config import ServerConfig
from rollout.outputs import FinishReason, IdArray, WeightVersionSpan
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.wire.answer import Answer, Delta, Writer, npy
from rollout.server.wire.body import Each, GenerationBody, Text
from rollout.server.wire.structure import ResponseFormat
from rollout.version import __version__

FINGERPRINT = f"rollout-{__version__}"

# Sampling parameters that a body carries under another name or in another form, or not at all.
_OTHER_FORM = {"logprobs", "max_tokens", "stop", "detokenize"}
_TYPES = {name: kind for name, kind in get_type_hints(SamplingParams).items() if name not in _OTHER_FORM}

_FIELDS: dict[str, Any] = {name: (kind | None, None) for name, kind in _TYPES.items()}
_Shared: Any = create_model("_Shared", __base__=GenerationBody, **_FIELDS)


class OpenAIRequest(_Shared):  # type: ignore[misc]  # the base is made from SamplingParams
    """What both kinds of completion take: every sampling parameter, and what the answer shall carry."""

    stop: Text | Each[Text] | None = None
    bad_words: Each[Text] | None = None
    response_format: ResponseFormat | None = None
    return_weight_versions: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_offsets: bool | None = None

    @property
    def ignored(self) -> list[str]:
        """As the base class; also a field that only render reads."""
        return [*super().ignored, *(["return_token_offsets"] if self.return_token_offsets else [])]

    def check(self) -> None:
        """Raise ParameterError, naming the field, for what isn't served and for fields that don't go together."""
        super().check()
        if self.response_format is not None and self.structured_outputs is not None:
            message = "response_format and structured_outputs ask for the same thing: send one of them."
            raise ParameterError(message, "response_format")
        if self.stream_options is not None and not self.stream:
            raise ParameterError("Stream options can only be defined when `stream=True`.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ParameterError("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")

    def _sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        given = {name: value for name in _TYPES if (value := getattr(self, name)) is not None}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        params = SamplingParams(**given, stop=stop, max_tokens=max_tokens, logprobs=logprobs)
        if self.response_format is not None:
            params.structured_outputs = self.response_format.structured_outputs()
        return params

    @property
    def structure_param(self) -> str:
        """The field that asks for structured outputs."""
        return "structured_outputs" if self.response_format is None else "response_format"


class ChatLogprobs(BaseModel):
    """What a chat says of the candidates for each token."""

    logprobs: bool | None = False
    top_logprobs: int | None = None
    logprob_token_ids: Each[int] | None = None

    @property
    def engine_logprobs(self) -> int | None:
        """How many the engine is asked for beside the sampled token; `logprob_token_ids` say so themselves."""
        return (self.top_logprobs or 0) if self.logprobs and not self.logprob_token_ids else None

    @property
    def shown_logprobs(self) -> int:
        """How many `top_logprobs` are sent a token; -1: all there are."""
        return -1 if self.logprob_token_ids else self.top_logprobs or 0

    def check_logprobs(self) -> None:
        """Raise ParameterError for `top_logprobs` without `logprobs`, or below -1."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        if self.top_logprobs is not None and self.top_logprobs < -1:
            raise ParameterError(f"`top_logprobs` must be at least -1, got {self.top_logprobs}.", "top_logprobs")


class TokenExtras(msgspec.Struct, kw_only=True):
    """What a choice says of its tokens beside OpenAI's fields, where asked for."""

    sampling_mask: list[IdArray | None] | UnsetType | None = UNSET
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET


R = TypeVar("R", bound=OpenAIRequest)


class TextWriter(Writer[R]):
    """What the writers have in common whose requests may ask to be told more of the tokens behind the text."""

    def __init__(self, body: R, config: ServerConfig, answers: Sequence[Answer]) -> None:
        super().__init__(body, config, answers)
        by_id = body.return_tokens_as_token_ids
        self.as_ids = config.return_tokens_as_token_ids if by_id is None else by_id

    def token_fields(self, delta: Delta) -> dict[str, Any]:
        """The fields of a choice that say of its tokens what the request asks for."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["token_ids"] = delta.token_ids
            if self.config.return_sampling_mask:
                fields["sampling_mask"] = delta.sampling_mask
        if self.body.return_weight_versions and delta.weight_versions is not None:
            fields["weight_versions"] = delta.weight_versions
        if delta.routed_experts is not None:
            fields["routed_experts"] = npy(delta.routed_experts)
        return fields

    def prompt_ids(self, answer: Answer) -> list[int] | None:
        """The prompt's ids, where asked for."""
        return (answer.prompt_token_ids or None) if self.body.return_token_ids else None


class OpenAIWriter(TextWriter[R]):
    """What the writers of chats and of completions have in common."""

    @abstractmethod
    def envelope(self, choices: list[Any]) -> Any:
        """An event of a stream around these choices."""

    def chunk_of(self, choice: Any, finish_reason: FinishReason | None = None) -> Any:
        """The event that tells this choice, with the counts so far where asked for."""
        chunk = self.envelope([choice])
        if self.body.running_usage:
            chunk.usage = self.usage()
        if finish_reason is not None:
            chunk.system_fingerprint = FINGERPRINT
        return chunk

    def end(self) -> Iterator[msgspec.Struct]:
        """The totals, where asked for."""
        if (usage := self.totals()) is not None:
            totals = self.envelope([])
            totals.usage, totals.metrics = usage, self.metrics() or UNSET
            yield totals
