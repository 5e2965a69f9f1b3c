"""The bodies that OpenAI's clients send, and those of the endpoints beside them. Unknown fields are ignored.

Names, defaults and refusals are those of a vLLM server; `return_weight_versions` is this project's own. What would
change the answer and isn't done here is refused by name (`check`), rather than ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.wire.body import Body, Each
from rollout.server.wire.tokens import StreamOptions, Text

# What /v1/completions generates where nothing is said, as ever in OpenAI's API.
DEFAULT_MAX_TOKENS = 16

# Sampling parameters that a body carries under another name or in another form, or not at all.
_OTHER_FORM = {"logprobs", "max_tokens", "stop", "detokenize"}
_TYPES = {name: kind for name, kind in get_type_hints(SamplingParams).items() if name not in _OTHER_FORM}

# Fields that this server can't honour, and what they may hold without asking for it.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
}

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Each[TokenId]

_FIELDS: dict[str, Any] = {name: (kind | None, None) for name, kind in _TYPES.items()}
_Shared: Any = create_model("_Shared", __base__=Body, **_FIELDS)


class OpenAIRequest(_Shared):  # type: ignore[misc]  # the base is made from SamplingParams
    """What both kinds of completion take: every sampling parameter, and what the answer shall carry."""

    model_config = ConfigDict(extra="allow")  # only to see what `check` refuses

    model: Text | None = None
    stop: Text | Each[Text] | None = None
    bad_words: Each[Text] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Text | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    cache_salt: Text | None = None

    def check(self) -> None:
        """Raise ParameterError, naming the field, for what isn't served and for fields that don't go together."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name in _UNSUPPORTED and value not in _UNSUPPORTED[name]:
                raise ParameterError(f"{name} is not supported by this server; leave it out.", name)
        if self.stream_options is not None and not self.stream:
            raise ParameterError("Stream options can only be defined when `stream=True`.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ParameterError("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")

    @property
    def last_usage(self) -> bool:
        """Whether a stream ends with the totals."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        """Whether every chunk of a stream has the counts so far."""
        return self.last_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def _sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        given = {name: value for name in _TYPES if (value := getattr(self, name)) is not None}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(**given, stop=stop, max_tokens=max_tokens, logprobs=logprobs)


class CompletionRequest(OpenAIRequest):
    """Continue one prompt or several, each a text or token ids."""

    prompt: Text | TokenIds | Each[Text] | Each[TokenIds]
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True

    @property
    def only_echo(self) -> bool:
        """Whether the prompt alone is asked back (and its logprobs): `echo` with no token to generate."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        """The engine's parameters. An engine step yields a token, so a mere echo generates one that isn't sent."""
        params = self._sampling_params(1 if self.only_echo else self.max_tokens, self.logprobs)
        if self.echo and self.logprobs is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = self.logprobs
        return params


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


class ChatCompletionRequest(ChatLogprobs, OpenAIRequest, ChatFields):
    """Answer a chat. Tool calls and reasoning are left in the text, for whoever knows the model to find."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    echo: bool | None = False

    def check(self) -> None:
        """As the base class; also a forced tool call, which only a grammar could keep."""
        super().check()
        if self.tool_choice not in (None, "auto", "none"):
            raise ParameterError(
                f"tool_choice must be 'auto' or 'none', got {self.tool_choice!r}: tool calls are left in the text.",
                "tool_choice",
            )
        if self.echo:
            raise ParameterError("echo is not supported in a chat; the messages are the prompt.", "echo")
        self.check_logprobs()

    def template_arguments(self) -> dict[str, Any]:
        """As the base class; models with levels of reasoning read this one too."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | super().template_arguments()

    def sampling_params(self) -> SamplingParams:
        """The engine's parameters. Without a limit, the answer may fill the model's length."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling_params(limit, self.engine_logprobs)


class TokenizeCompletionRequest(BaseModel):
    """Count and list the tokens of a text."""

    model: Text | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatFields):
    """Count and list the tokens of a chat, as the model would see it."""

    model: Text | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """The text of these ids."""

    model: Text | None = None
    tokens: TokenIds
