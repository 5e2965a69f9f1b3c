"""A request and its sequences: what the scheduler moves through the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rollout.outputs import KVState, TokenLogprob
from rollout.sampling.params import SamplingParams


@dataclass(eq=False)
class Request:
    """What the `n` sequences of one request share. `seed` is always set: the engine draws one where none was given."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival: int
    max_tokens: int
    priority: int = 0
    cache_salt: str | None = None
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    return_sampling_mask: bool = False
    prompt_logprobs: list[list[TokenLogprob] | None] = field(default_factory=lambda: [None])
    prompt_logprobs_delivered: bool = False

    @property
    def needs_every_prompt_row(self) -> bool:
        """True until the prompt logprobs asked for are there: no cached prefix may be skipped."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt_token_ids)


@dataclass(eq=False)
class Sequence:
    """One choice of a request: its tokens, and the cache blocks that hold the first `num_computed` of them.

    `kv_epoch` is the weight epoch that computed every one of these positions, None where it was more than one.
    `prefix_node` names the last of the `num_registered` full blocks found or entered in the prefix cache. `siblings`
    are the request's other sequences, as long as they wait for this one to compute their common prompt. `tokens_of`
    counts the tokens that each weight epoch sampled. `prefill_len` is how many tokens it had when it was admitted last.
    The routing of the first `num_routed` tokens has been delivered.
    """

    request: Request
    index: int
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    prefill_len: int = 0
    kv_epoch: int | None = None
    prefix_node: int | tuple[int, str | None] | None = None
    num_registered: int = 0
    cached_tokens: int = 0
    num_routed: int = 0
    tokens_of: Counter[int] = field(default_factory=Counter)
    siblings: list[Sequence] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def prefills(self) -> bool:
        """True from its admission until it samples, also where it computes again what it had computed before."""
        return self.num_computed < self.prefill_len

    @property
    def kv_state(self) -> KVState:
        return "mixed" if self.kv_epoch is None else "current"

    def __repr__(self) -> str:
        return f"Sequence({self.request.request_id}/{self.index}/{self.num_computed} of {len(self.token_ids)})"
