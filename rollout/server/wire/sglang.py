"""The dialect of SGLang's `/generate`: token ids or text in, ids, text and `meta_info` out.

Names and forms are SGLang's (sglang 0.5.23: `managers/io_struct.py` and `sampling/sampling_params.py` for what is read,
`managers/tokenizer_manager.py` for what is written); `epoch` and `kv` of a span are this project's own.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field

from rollout.config import ServerConfig
from rollout.outputs import NOTHING_LEFT, FinishReason, IdArray, TokenLogprob, WeightVersionSpan
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.server.errors import ApiError, ErrorBody
from rollout.server.wire.answer import Answer, Delta, Writer
from rollout.server.wire.body import MAX_PROMPTS, Each, Prompt, Text, TextPrompt, TokenIds
from rollout.server.wire.logprobs import sendable, token_text
from rollout.server.wire.lora_path import NamesAdapters
from rollout.server.wire.sglang_fields import SGLangGrammars, refuse, unknown_names

DEFAULT_MAX_NEW_TOKENS = 128

_READ_APART = {"stop", "no_stop_trim", "custom_params", *SGLangGrammars.model_fields}
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}


class SGLangSampling(SGLangGrammars):
    """`sampling_params`. Null means the default; of `max_new_tokens` it means as many as the model's length allows."""

    n: int | None = None
    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Text | Each[Text] | None = None
    stop_token_ids: Each[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None


class SGLangRequest(NamesAdapters):
    """Continue one prompt or several, each token ids or a text."""

    id_prefix = ""
    text_optional = True

    text: Text | Each[Text] | None = None
    input_ids: TokenIds | Each[TokenIds] | None = None
    sampling_params: Annotated[SGLangSampling, BeforeValidator(lambda given: {} if given is None else given)] = (
        SGLangSampling()
    )
    rid: Text | Each[Text] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0)] | None = None
    token_ids_logprob: TokenIds | None = None
    return_text_in_logprobs: bool | None = None
    return_sampling_mask: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Annotated[int, Field(ge=0)] | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None

    @property
    def unknown(self) -> dict[str, Any]:
        """The fields that have no type here, by their paths in the body."""
        inner = (self.sampling_params.model_extra or {}).items()
        return (self.model_extra or {}) | {f"sampling_params.{name}": value for name, value in inner}

    @property
    def ignored(self) -> list[str]:
        """The fields with a value that this server doesn't know; those that `check` lets pass ask for nothing."""
        return unknown_names(self.unknown)

    @property
    def structure_param(self) -> str:
        """The field that asks for structured outputs."""
        return f"sampling_params.{self.sampling_params.given}"

    @property
    def in_batch(self) -> bool:
        """Whether the prompts came as a list of them, so that the answer is a list, too."""
        given = self.text if self.input_ids is None else self.input_ids
        return isinstance(given, list) and not (given and isinstance(given[0], int))

    @property
    def n(self) -> int:
        """Choices a prompt."""
        return self.sampling_params.n or 1

    @property
    def only_scores(self) -> bool:
        """Whether no token is wanted, only what can be said of the prompt."""
        return self.sampling_params.max_new_tokens == 0

    @property
    def returns_top_p_token_ids(self) -> bool:
        """Whether the support of each step is wanted as slime's patch of SGLang tells it."""
        return bool((self.sampling_params.custom_params or {}).get("return_top_p_token_ids"))

    @property
    def wants_sampling_mask(self) -> bool:
        """In either of its two forms."""
        return bool(self.return_sampling_mask) or self.returns_top_p_token_ids

    @property
    def wanted_rank(self) -> int | None:
        """Under its name, or the older one."""
        return self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank

    def own_id(self, first_index: int) -> str | None:
        """The `rid`: of several prompts each has its own, or the one that all have with its number behind it."""
        if isinstance(self.rid, list):
            return self.rid[first_index // self.n]
        return f"{self.rid}_{first_index // self.n}" if self.rid and self.in_batch else self.rid

    def check(self) -> None:
        """Refuse by name what this server doesn't do, and what doesn't go together."""
        refuse(self.unknown)
        self.check_xargs()
        if (self.text is None) == (self.input_ids is None):
            raise ParameterError("Send either text or input_ids.", "input_ids")
        if isinstance(self.rid, list) and len(self.rid) != len(self.prompts()):
            raise ParameterError(f"rid holds {len(self.rid)} ids, not one a prompt.", "rid")
        if self.token_ids_logprob and self.top_logprobs_num:
            raise ParameterError("token_ids_logprob takes the place of top_logprobs_num: send one.", "top_logprobs_num")
        if self.token_ids_logprob and self.scores_prompt:
            raise ParameterError(
                "token_ids_logprob can be had of output tokens only: leave logprob_start_len out.", "logprob_start_len"
            )

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt logprobs are wanted, from `logprob_start_len` on."""
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)

    def prompts(self) -> Sequence[Prompt]:
        """Every prompt. Raises ParameterError for none, and for too many."""
        given: Any = self.text if self.input_ids is None else self.input_ids
        given = given if self.in_batch else [given]
        name = "text" if self.input_ids is None else "input_ids"
        if not 1 <= len(given) <= MAX_PROMPTS:
            raise ParameterError(f"{name} must hold 1 to {MAX_PROMPTS} prompts, got {len(given)}.", name)
        for beginning in ("logprob_start_len", "routed_experts_start_len"):
            start = getattr(self, beginning) or 0
            if any(isinstance(ids, list) and start > len(ids) for ids in given):
                raise ParameterError(f"{beginning} {start} is beyond a prompt's end.", beginning)
        return [TextPrompt(one, add_special_tokens=True) if isinstance(one, str) else one for one in given]

    def to_sampling_params(self) -> SamplingParams:
        """The engine's parameters. An engine step yields a token, so a mere score generates one that isn't sent."""
        sampling = self.sampling_params
        asked = sampling.model_dump(exclude=_READ_APART, exclude_none=True)
        known = {_NAMES.get(name, name): asked[name] for name in asked if name in SGLangSampling.model_fields}
        if self.only_scores:
            known["max_tokens"] = 1
        logprobs = (self.top_logprobs_num or 0) if self.return_logprob else None
        ids = (self.token_ids_logprob or None) if self.return_logprob else None
        return SamplingParams(
            **known,
            stop=[sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or [],
            include_stop_str_in_output=bool(sampling.no_stop_trim),
            logprobs=None if ids else logprobs,
            logprob_token_ids=ids,
            prompt_logprobs=logprobs if self.scores_prompt else None,
            structured_outputs=sampling.structured_outputs(),
        )


class Stopped(msgspec.Struct, tag="stop", tag_field="type"):
    """`matched`: the stop string, or the stop token's or EOS's id."""

    matched: int | str


class Filled(msgspec.Struct, tag="length", tag_field="type"):
    """`length`: how many tokens there are."""

    length: int


class Aborted(msgspec.Struct, tag="abort", tag_field="type"):
    """What there is of the choice is sent all the same."""

    message: str = "Aborted"
    status_code: int | None = None
    err_type: str | None = None


Logprob = tuple[float | None, int, str | None]


class MetaInfo(msgspec.Struct, kw_only=True):
    """What is said of a choice beside its ids and its text. `weight_versions` come once it has ended."""

    id: str
    finish_reason: Stopped | Filled | Aborted | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET
    input_token_logprobs: list[Logprob] | UnsetType = UNSET
    output_token_logprobs: list[Logprob] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    input_top_logprobs: list[list[Logprob] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Logprob]] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[Logprob] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[Logprob]] | UnsetType = UNSET
    output_token_sampling_mask: list[IdArray | None] | UnsetType = UNSET
    top_p_token_ids: str | UnsetType = UNSET
    top_p_token_offsets: str | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    routed_experts_start_len: int | UnsetType = UNSET


class SGLangAnswer(msgspec.Struct, kw_only=True):
    """A choice, or all there is of it so far; `index` where there are several."""

    text: str | UnsetType = UNSET
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: list[int] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class _Told:
    """A choice as far as it has come: what is new is made once, and sent again with every event."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.ids: list[int] = []
        self.logprobs: list[Logprob] = []
        self.top: list[list[Logprob]] = []
        self.masks: list[IdArray | None] = []
        self.routed: list[np.ndarray] = []


class SGLangWriter(Writer[SGLangRequest]):
    """Answers of /generate, whose events repeat what came before."""

    whole_kinds = (SGLangAnswer, list[SGLangAnswer])
    event_kinds = (SGLangAnswer, ErrorBody)

    def __init__(self, body: SGLangRequest, config: ServerConfig, answers: Sequence[Answer]) -> None:
        super().__init__(body, config, answers)
        self._told: dict[int, _Told] = {}
        self._prompts: dict[Answer, dict[str, Any]] = {}

    def whole(self, choices: Sequence[tuple[Answer, Delta]]) -> Any:
        """The answer, of choices that have all ended. Raises ApiError for one that failed."""
        made = [self._answer(answer, delta) for answer, delta in choices]
        return made if self.body.in_batch or self.body.n > 1 else made[0]

    def chunk(self, answer: Answer, delta: Delta) -> Iterator[msgspec.Struct]:
        """One event."""
        yield self._answer(answer, delta)

    def end(self) -> Iterator[msgspec.Struct]:
        """Nothing more."""
        return iter(())

    def _answer(self, answer: Answer, delta: Delta) -> SGLangAnswer:
        told = self._told.setdefault(delta.index, _Told())
        if not self.body.only_scores:
            self._add(told, answer, delta)
        return SGLangAnswer(
            text=UNSET if delta.text is None else told.text or "",
            output_ids=told.ids,
            meta_info=self._meta(told, answer, delta),
            prompt_token_ids=answer.prompt_token_ids if self.body.return_prompt_token_ids else UNSET,
            index=delta.index if self.body.in_batch or self.body.n > 1 else UNSET,
        )

    def _add(self, told: _Told, answer: Answer, delta: Delta) -> None:
        told.text = (told.text or "") + (delta.text or "")
        told.ids += delta.token_ids
        for entry in delta.logprobs or ():
            told.logprobs.append(self._logprob(answer, entry[0]))
            told.top.append(self._others(answer, entry))
        if self.body.wants_sampling_mask:
            told.masks += delta.sampling_mask or [None] * len(delta.token_ids)
        if self.body.return_routed_experts and delta.routed_experts is not None:
            told.routed.append(delta.routed_experts)

    def _meta(self, told: _Told, answer: Answer, delta: Delta) -> MetaInfo:
        meta = MetaInfo(
            id=answer.request_id,
            finish_reason=self._finish(told, delta),
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=len(told.ids),
            cached_tokens=answer.cached_tokens,
            weight_version=answer.weight_version,
        )
        if delta.weight_versions is not None:
            meta.weight_versions = [] if self.body.only_scores else delta.weight_versions
        if self.body.return_logprob:
            meta.output_token_logprobs = told.logprobs
            meta.output_token_logprobs_length = len(told.logprobs)
            if self.body.token_ids_logprob:
                meta.input_token_ids_logprobs, meta.output_token_ids_logprobs = [], told.top
            elif self.body.top_logprobs_num:
                meta.output_top_logprobs = told.top
            for name, value in self._of_prompt(answer).items():
                setattr(meta, name, value)
        if self.body.return_sampling_mask:
            meta.output_token_sampling_mask = told.masks
        if self.body.returns_top_p_token_ids:
            meta.top_p_token_ids, meta.top_p_token_offsets = _joined(told.masks)
        if told.routed and delta.finish_reason is not None:
            start, end = self.body.routed_experts_start_len or 0, answer.prompt_tokens + len(told.ids) - 1
            meta.routed_experts = _packed(np.concatenate(told.routed)[start:end].astype("<i4"))
            meta.routed_experts_start_len = start
        return meta

    def _of_prompt(self, answer: Answer) -> dict[str, Any]:
        """Its logprobs, from `logprob_start_len` on; the prompt's first token has none."""
        if not self.body.scores_prompt or answer.prompt_logprobs is None:
            return {"input_token_logprobs": []} | ({"input_top_logprobs": []} if self.body.top_logprobs_num else {})
        if answer not in self._prompts:
            entries = answer.prompt_logprobs[self.body.logprob_start_len or 0 :]
            first = self._piece(answer, answer.prompt_token_ids[0])
            made: dict[str, Any] = {}
            made["input_token_logprobs"] = [first if e is None else self._logprob(answer, e[0]) for e in entries]
            if self.body.top_logprobs_num:
                made["input_top_logprobs"] = [None if e is None else self._others(answer, e) for e in entries]
            self._prompts[answer] = made
        return self._prompts[answer]

    def _others(self, answer: Answer, entry: list[TokenLogprob]) -> list[Logprob]:
        """Of a position: the tokens that the request names, in its order, or else the likeliest ones."""
        found = {candidate.token_id: candidate for candidate in entry}
        if self.body.token_ids_logprob:
            return [self._logprob(answer, found[named]) for named in self.body.token_ids_logprob]
        likeliest = sorted(found.values(), key=lambda candidate: candidate.rank)
        return [self._logprob(answer, candidate) for candidate in likeliest[: self.body.top_logprobs_num or 0]]

    def _logprob(self, answer: Answer, candidate: TokenLogprob) -> Logprob:
        _, token_id, text = self._piece(answer, candidate.token_id)
        return sendable(candidate.logprob), token_id, text

    def _piece(self, answer: Answer, token_id: int) -> Logprob:
        known = answer.vocabulary if self.body.return_text_in_logprobs else None
        return None, token_id, None if known is None else token_text(token_id, known, as_ids=False)[0]

    def _finish(self, told: _Told, delta: Delta) -> Stopped | Filled | Aborted | None:
        match delta.finish_reason:
            case None:
                return None
            case FinishReason.ABORT:
                return Aborted()
            case FinishReason.ERROR:
                asked = str(delta.stop_reason).startswith(NOTHING_LEFT)
                raise ApiError(400 if asked else 500, f"Choice {delta.index} failed: {delta.stop_reason}")
            case FinishReason.STOP if told.ids:
                return Stopped(told.ids[-1] if delta.stop_reason is None else delta.stop_reason)
        return Filled(len(told.ids))


def _joined(masks: Sequence[IdArray | None]) -> tuple[str, str]:
    """The ids of all masks one behind the other, and where each begins and the last ends; int32 in base64.

    An unfiltered step has none.
    """
    ids, offsets = array("i"), array("i", [0])
    for mask in masks:
        ids.extend(mask or ())
        offsets.append(len(ids))
    return _packed(ids), _packed(offsets)


def _packed(values: np.ndarray | IdArray) -> str:
    return base64.b64encode(values.tobytes()).decode()
