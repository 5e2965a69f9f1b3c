"""A request and its sequences: what the scheduler moves through the engine, and where each of them ends."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from rollout.lora.layers import Adapter
from rollout.outputs import FinishReason, TokenLogprob
from rollout.sampling.grammar import Grammar
from rollout.sampling.params import SamplingParams
from rollout.sampling.rows import RequestFilters, SamplingRow

CacheKey = tuple[str | None, str | None]
"""A salt, and the label of an adapter: what shares keys and values has both alike."""
PromptKey = tuple[CacheKey, bytes]
"""That, and a whole prompt."""


@dataclass(eq=False)
class Request:
    """What the `n` sequences of one request share. `sequences` are those that have not ended, by index.

    `max_tokens` is what the request and the model's length leave room for. Of several `eos_token_ids` the first ends a
    sequence with stop reason None, another with its id. `prompt_is_finite`: no logits of prompt rows have held NaN.
    `waits_since` is None once it has been scheduled, and `waited_s`, how long that took, once it has been told.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival: int
    max_tokens: int
    priority: int = 0
    cache_salt: str | None = None
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    eos_token_ids: list[int] = field(default_factory=list)
    return_sampling_mask: bool = False
    grammar: Grammar | None = None
    adapter: Adapter | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] = field(default_factory=lambda: [None])
    prompt_logprobs_delivered: bool = False
    prompt_is_finite: bool = True
    sequences: dict[int, Sequence] = field(default_factory=dict)
    waits_since: float | None = field(default_factory=time.monotonic)
    waited_s: float | None = None

    def __post_init__(self) -> None:
        self.filters = RequestFilters(
            self.params,
            self.prompt_token_ids,
            self.bad_words_token_ids,
            self.eos_token_ids,
            want_mask=self.return_sampling_mask,
            grammar=self.grammar,
        )
        self.stop_reasons: dict[int, int | None] = {token: token for token in self.params.stop_token_ids}
        if not self.params.ignore_eos and self.eos_token_ids:
            self.stop_reasons |= {token: token for token in self.eos_token_ids} | {self.eos_token_ids[0]: None}

    @property
    def needs_every_prompt_row(self) -> bool:
        """True until the prompt logprobs asked for are there: no cached prefix may be skipped."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    @cached_property
    def cache_key(self) -> CacheKey:
        return self.cache_salt, None if self.adapter is None else self.adapter.label

    @cached_property
    def prompt_key(self) -> PromptKey:
        """Equal for requests of one prompt, salt and adapter. As bytes, quick to hash and to compare."""
        return self.cache_key, array("q", self.prompt_token_ids).tobytes()


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request: its tokens, and the cache blocks that hold the first `num_computed` of them.

    `kv_epoch` is the weight epoch that computed every one of these positions, None where it was more than one.
    `prefix_node` names the last of the `num_registered` full blocks found or entered in the prefix cache. `siblings`
    are the request's other sequences, as long as they wait for this one, their `leader`, to compute their common
    prompt. `seat` is its row of the scheduler's tables while it runs. `tokens_of` counts the tokens that each weight
    epoch sampled. `prefill_len` is how many tokens it had when it was admitted last. The routing of the first
    `num_routed` tokens has been delivered. `in_flight` tokens were drawn that the host hasn't read, the last of them in
    place `drawn_at` of its step. `row` is what the sampler keeps of it, `decode` what steps hold of it while it
    decodes. `order` is its place in the scheduler's lists.
    """

    request: Request
    index: int
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    prefill_len: int = 0
    kv_epoch: int | None = None
    prefix_node: int | tuple[int, CacheKey] | None = None
    num_registered: int = 0
    cached_tokens: int = 0
    num_routed: int = 0
    seat: int = -1
    in_flight: int = 0
    drawn_at: int = -1
    tokens_of: Counter[int] = field(default_factory=Counter)
    siblings: list[Sequence] = field(default_factory=list)
    leader: Sequence | None = None
    order: tuple[int, int, int] = (0, 0, 0)
    decode: ScheduledSequence | None = None
    prompt_len: int = field(init=False)
    row: SamplingRow = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.prompt_len = len(request.prompt_token_ids)
        self.row = SamplingRow(request.filters, request.seed, self.index, request_id=request.request_id)
        request.sequences[self.index] = self

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_tokens(self) -> int:
        """Those in flight included."""
        return len(self.token_ids) + self.in_flight

    @property
    def num_to_compute(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def prefills(self) -> bool:
        """True from its admission until it samples, also where it computes again what it had computed before."""
        return self.num_computed < self.prefill_len

    def append(self, token_id: int, epoch: int) -> tuple[FinishReason, int | None] | None:
        """Add a token that the weights of `epoch` sampled. (Finish reason, stop reason) if it ends the sequence.

        Length ends a sequence also before min_tokens (before which EOS and stop tokens are banned, so that none is
        sampled). Stop strings are the server's business.
        """
        request = self.request
        if self.token_ids is request.prompt_token_ids:  # shared with its siblings until here
            self.token_ids = self.token_ids.copy()
        self.token_ids.append(token_id)
        self.tokens_of[epoch] += 1
        if (row := self.row).learns:
            row.append(token_id)
        else:
            row.position += 1
        output_len = len(self.token_ids) - self.prompt_len
        if token_id in request.stop_reasons and output_len >= request.params.min_tokens:
            return FinishReason.STOP, request.stop_reasons[token_id]
        return (FinishReason.LENGTH, None) if output_len >= request.max_tokens else None

    def __repr__(self) -> str:
        return f"Sequence({self.request.request_id}/{self.index}/{self.num_computed} of {len(self.token_ids)})"


@dataclass(slots=True)
class ScheduledSequence:
    """Compute `count` tokens of the sequence, from `start` on.

    `samples` lists the sequences that sample a token from the last one's logits: the sequence itself, and on the last
    chunk of a prompt those that fork from it. `num_head_rows`: how many of its last rows need logits, which is all of
    them where `wants_prompt_rows` says that prompt logprobs do.
    """

    sequence: Sequence
    start: int
    count: int
    wants_prompt_rows: bool
    num_head_rows: int
    samples: list[Sequence] = field(default_factory=list)
