"""What the bodies of requests have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from rollout.config import ServerConfig
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.wire.fields import is_unknown, refuse_unserved

# More findings than this are told by their number: to list millions would stop the server for minutes.
MAX_FINDINGS = 100
# A body of the largest size could hold millions of prompts, and each of them is a request of its own.
MAX_PROMPTS = 2048

T = TypeVar("T")
Each = Annotated[list[T], Field(fail_fast=True)]  # of a long list's entries, the first wrong one is told


def encodable(text: str) -> str:
    """The text. Raises ValueError for a lone surrogate: JSON can spell it, neither answers nor messages can hold it."""
    text.encode()  # UnicodeEncodeError is a ValueError: pydantic reports it with the field's name
    return text


def _breathe(ids: Any) -> Any:
    """What pydantic validates on a thread holds up all others, but where it calls Python: once a list of ids."""
    return ids


Text = Annotated[str, AfterValidator(encodable)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[Each[TokenId], BeforeValidator(_breathe)]


class Body(BaseModel):
    """A body whose refusal is bounded, however much of it is wrong. (As part of a union it would lose its name.)"""

    @model_validator(mode="wrap")
    @classmethod
    def _bounded(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            if error.error_count() <= MAX_FINDINGS:
                raise
            raise ValueError(f"{error.error_count()} values of the body are wrong") from None


class ContentPart(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Message(BaseModel):
    """One message of a chat. What else it holds (`name`, `tool_calls`, `reasoning_content`) is the template's."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Each[str | ContentPart] | None = None


class ChatFields(BaseModel):
    """How messages become a prompt."""

    messages: Annotated[Each[Message], Field(min_length=1)]
    tools: Each[dict[str, Any]] | None = None
    documents: Each[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_arguments(self) -> dict[str, Any]:
        """What the template gets beside the messages."""
        return dict(self.chat_template_kwargs or {})


class TextPrompt(NamedTuple):
    """A prompt that the tokenizer makes ids of."""

    text: str
    add_special_tokens: bool


Prompt = list[int] | TextPrompt | ChatFields


class StreamOptions(BaseModel):
    """What a stream says of usage: a last chunk with the totals, and the running counts in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What a request to generate has in every dialect.

    `id_prefix` begins the ids of its answers; `text_needs` and `text_param` say what a server without a tokenizer
    refuses, unless `text_optional`: then it answers without text.
    """

    model_config = ConfigDict(extra="allow")  # only to see what `check` refuses and what is `ignored`

    id_prefix: ClassVar[str]
    text_needs: ClassVar[str] = "Text needs"
    text_param: ClassVar[str | None] = None
    text_optional: ClassVar[bool] = False

    model: Text | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    request_id: Text | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    cache_salt: Text | None = None
    session_id: Text | None = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def ignored(self) -> list[str]:
        """The fields with a value that this server doesn't know, by their paths in the body."""
        return [name for name, value in (self.model_extra or {}).items() if value is not None and is_unknown(name)]

    @property
    def session(self) -> str | None:
        """The session that the request belongs to, where its body says so."""
        return self.session_id or ((self.vllm_xargs or {}).get("session_id") or None)

    @property
    def ended_reasoning(self) -> bool | None:
        """Whether the prompt has the answer's reasoning behind it; None: its last tokens say so."""
        return None

    @property
    def last_usage(self) -> bool:
        """Whether a stream ends with the totals."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        """Whether every chunk of a stream has the counts so far."""
        return self.last_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def structure_param(self) -> str:
        """The field that asks for structured outputs."""
        return "structured_outputs"

    @property
    def wants_text(self) -> bool:
        """Whether the answer has text."""
        return True

    @property
    def wants_sampling_mask(self) -> bool:
        """Whether the answer has the support of each filtered step, also where the server adds none by itself."""
        return False

    @property
    def wanted_rank(self) -> int | None:
        """The engine that the body asks for, where no header does."""
        return None

    @property
    def adapter_param(self) -> str:
        """The field that names the adapter."""
        return "model"

    def wanted_adapter(self, index: int) -> str | None:
        """The name of an adapter, or of the base, for the prompt of this number."""
        return self.model

    def own_id(self, first_index: int) -> str | None:
        """The id that the client gives to the prompt whose choices count from here."""
        return self.request_id

    def check(self) -> None:
        """Raise ParameterError, naming the field, for what isn't served and for fields that don't go together."""
        if self.model_extra:
            refuse_unserved(self.model_extra)
        if self.vllm_xargs:
            self.check_xargs()

    def check_xargs(self) -> None:
        """Raise ParameterError for arguments of extensions that aren't here."""
        for name, value in (self.vllm_xargs or {}).items():
            if name != "session_id" or not isinstance(value, str):
                raise ParameterError(
                    f"vllm_xargs holds {name[:64]!r}: of the arguments of extensions only a session_id, which is a "
                    "string, says something here. Leave the others out.",
                    "vllm_xargs",
                )

    def prompts(self) -> Sequence[Prompt]:
        """The prompts to continue. Raises ParameterError for none, for too many, and for content that isn't text."""
        raise NotImplementedError

    def adapt(self, params: SamplingParams, config: ServerConfig) -> None:
        """Let the parameters fit how this server reads the text."""

    def to_sampling_params(self) -> SamplingParams:
        """The engine's parameters, made anew: each prompt has its own."""
        raise NotImplementedError
