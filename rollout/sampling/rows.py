"""What a sampler knows of a request and of each of its choices: worked out once, and kept up to date token by token."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rollout.outputs import NOTHING_LEFT
from rollout.sampling.grammar import Grammar, GrammarState
from rollout.sampling.params import SamplingParams

MIN_TEMPERATURE = 0.01  # vLLM's: a smaller temperature above 0 is raised to it, since dividing by it overflows


class RequestFilters:
    """What the sampling parameters of one request ask of its logits, the same for all its choices and steps.

    `bad_words_token_ids` are the token sequences of `params.bad_words`; `eos_token_ids` are banned, as
    `params.stop_token_ids` are, until `params.min_tokens` outputs exist. `want_mask` asks for the support. `grammar` is
    what `params.structured_outputs` were compiled to.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        eos_token_ids: Collection[int] = (),
        *,
        want_mask: bool = False,
        grammar: Grammar | None = None,
    ) -> None:
        self.params, self.want_mask, self.grammar = params, want_mask, grammar
        self.greedy = params.greedy
        self.temperature = 1.0 if self.greedy else max(params.temperature, MIN_TEMPERATURE)
        self.penalizes = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
        self.early_stops = np.array([*{*eos_token_ids, *params.stop_token_ids}], np.int64)
        self.bad_words = WordNode()
        for word in bad_words_token_ids:
            self.bad_words.add(word)
        self.bans = params.min_tokens > 0 or any(bad_words_token_ids)
        self.narrows = self.greedy or params.top_k > 0 or params.top_p != 1
        self._prompt_token_ids = prompt_token_ids
        self._forbidden: Tensor | None = None

    @cached_property
    def logit_bias(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The ids (n,) int64 that `params.logit_bias` names, and what is added to their logits, (n,) float64."""
        bias = self.params.logit_bias
        return (np.array([*bias], np.int64), np.array([*bias.values()], np.float64)) if bias else None

    def forbidden(self, logits: Tensor) -> Tensor:
        """Bool (vocab,), on the device of `logits` (rows, vocab): True for all but `params.allowed_token_ids`."""
        if self._forbidden is None:
            mask = torch.ones(logits.shape[-1], dtype=torch.bool)
            mask[torch.tensor(self.params.allowed_token_ids)] = False
            self._forbidden = mask.to(logits.device)
        return self._forbidden

    @cached_property
    def prompt_slots(self) -> dict[int, int]:
        """The tokens of the prompt that penalties look at, each with its place among them."""
        seen = dict.fromkeys(self._prompt_token_ids if self.params.repetition_penalty != 1 else ())
        return {token: slot for slot, token in enumerate(seen)}


class WordNode:
    """A node of the trie of bad words: `ends` are the tokens that would complete one here, (n,) int64."""

    def __init__(self) -> None:
        self.after: dict[int, WordNode] = {}
        self._ends: list[int] = []

    def add(self, word: Sequence[int]) -> None:
        """Enter a word below this node; an empty one is none."""
        node = self
        for token in word[:-1]:
            node = node.after.setdefault(token, WordNode())
        node._ends += word[-1:]

    @cached_property
    def ends(self) -> np.ndarray:
        """Read once all words are there."""
        return np.array(self._ends, np.int64)


class TokenCounts:
    """How often the output has each token that penalties look at: token `ids[i]` (int64) `counts[i]` times (float64).

    A token of the prompt is there from the start, with a count of 0.
    """

    def __init__(self, prompt_slots: dict[int, int]) -> None:
        self._slots = dict(prompt_slots)
        self._ids = np.array([*prompt_slots], np.int64)
        self._counts = np.zeros(len(prompt_slots))

    def append(self, token_id: int) -> None:
        """Count one more token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):  # twice the room, so that a token costs the same however many there are
            self._ids = np.concatenate([self._ids, np.empty(slot + 16, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(slot + 16)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> np.ndarray:
        """The tokens, each once."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        """Their counts."""
        return self._counts[: len(self._slots)]


class SamplingRow:
    """One choice of a request, as the sampler sees it: a row of logits is filtered and drawn from by what is here.

    `seed` and `index` (which of the request's n choices) name the row's noise, `position` (how many tokens the output
    has) the draw. `banned` are arrays of ids that may not come next: EOS and stop tokens before `min_tokens`, and what
    would complete a bad word. `grammar` is where the choice is in its grammar. `append` tells it each token of the
    output; it costs the same for any length of prompt and output. Where nothing of it `learns` from tokens, all that
    `append` does is count one more `position`.
    """

    __slots__ = (
        *("_counts", "_grammar", "_matching", "banned", "filters", "index", "learns", "position", "request_id", "seed"),
    )

    def __init__(
        self,
        filters: RequestFilters,
        seed: int,
        index: int,
        output_token_ids: Sequence[int] = (),
        *,
        request_id: str = "",
    ) -> None:
        self.filters, self.seed, self.index, self.request_id = filters, seed, index, request_id
        self.position = 0
        self.learns = filters.penalizes or filters.bans or filters.grammar is not None
        self._matching = [filters.bad_words]
        self._counts: TokenCounts | None = None
        self._grammar: GrammarState | None = None
        self.banned = self._banned()
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """The output has one more token."""
        self.position += 1
        filters = self.filters
        if filters.penalizes:
            self.counts.append(token_id)
        if self.grammar is not None:
            self.grammar.append(token_id)
        if filters.bans:
            matching = (after for node in self._matching if (after := node.after.get(token_id)))
            self._matching = [filters.bad_words, *matching]
            self.banned = self._banned()

    def _banned(self) -> list[np.ndarray]:
        ids = [node.ends for node in self._matching if len(node.ends)]
        if self.position < self.filters.params.min_tokens and len(self.filters.early_stops):
            ids.append(self.filters.early_stops)
        return ids

    @property
    def grammar(self) -> GrammarState | None:
        """Made when it is first needed, as `counts` are; None where the choice may say anything."""
        if self._grammar is None and self.filters.grammar is not None:
            self._grammar = self.filters.grammar.begin()
        return self._grammar

    @property
    def constrained(self) -> bool:
        """Whether a grammar says what may come next."""
        return (grammar := self.grammar) is not None and not grammar.free

    @property
    def grammar_error(self) -> str | None:
        """Why the grammar lets nothing follow, where that is an error."""
        error = None if self._grammar is None else self._grammar.error
        return None if error is None else f"{NOTHING_LEFT} by structured_outputs: {error}"

    @property
    def counts(self) -> TokenCounts:
        """What penalties look at; made when it is first needed, since a request may wait for long."""
        if self._counts is None:
            self._counts = TokenCounts(self.filters.prompt_slots)
        return self._counts


class Rows(list[SamplingRow]):
    """The rows of one step, in their order, and what their filters ask for in every step: worked out once.

    So a step costs little Python for each of its rows as long as none comes or goes. `structured` (by a grammar),
    `limited` (by `allowed_token_ids`), `biased`, `banning`, `penalizing`, `narrowing` (to the likeliest tokens) and
    `greedy` list the rows, by their places, that a filter may have work with; `drawing` are those that aren't greedy.
    `only_scale`: no filter ever does more than divide by a temperature; `only_draw`: or than leave the likeliest token;
    `only_narrow`: or leave the likeliest ones, and no row asks which. `asked` (4, rows) float64 are temperatures, 0 for
    a greedy row, and the logarithms of `min_p`, `top_k` and `top_p` of the others. `scored` are the rows that ask for
    logprobs; `want_one_logprob`: at most for the sampled token's.
    `look_back`: the filters of one change with each token. `temperatures` and `min_ps` are (rows,) float64, `noise` is
    each row's seed and sample index, (2, rows) uint64; `ahead`, uint64, is how many tokens further than its `position`
    a row draws: it hasn't been told yet which they are. `uniforms` (steps, rows) are the numbers that the rows draw
    with in the steps from the positions `uniforms_from` (rows,) on.
    """

    def __init__(self, rows: Iterable[SamplingRow] = ()) -> None:
        super().__init__(rows)
        filters = [row.filters for row in self]
        self.structured = [r for r, f in enumerate(filters) if f.grammar is not None]
        self.limited = [r for r, f in enumerate(filters) if f.params.allowed_token_ids is not None]
        self.biased = [r for r, f in enumerate(filters) if f.params.logit_bias]
        self.banning = [r for r, f in enumerate(filters) if f.bans]
        self.penalizing = [r for r, f in enumerate(filters) if f.penalizes]
        self.narrowing = [r for r, f in enumerate(filters) if f.narrows]
        self.greedy = [r for r, f in enumerate(filters) if f.greedy]
        self.drawing = [r for r, f in enumerate(filters) if not f.greedy] if self.greedy else [*range(len(self))]
        self.temperatures = np.array([f.temperature for f in filters], np.float64)
        self.min_ps = np.array([f.params.min_p for f in filters], np.float64)
        self.noise = np.array([[row.seed for row in self], [row.index for row in self]], np.uint64)
        self.ahead = np.zeros(1, np.uint64)
        self.look_back = bool(self.banning or self.penalizing or self.structured)
        idle = not (self.structured or self.limited or self.biased or self.banning or self.penalizing)
        self.only_scale = bool(idle and not self.narrowing and not self.min_ps.any())
        self.only_draw = bool(idle and all(f.greedy or not (f.narrows or f.params.min_p) for f in filters))
        narrowed = [None if f.greedy else f.params for f in filters]
        self.only_narrow = idle and not any(
            f.want_mask and p is not None and (f.narrows or p.min_p) for f, p in zip(filters, narrowed, strict=True)
        )
        self.asked = np.array(
            [
                [0.0 if f.greedy else f.temperature for f in filters],
                [math.log(p.min_p) if p is not None and p.min_p > 0 else -math.inf for p in narrowed],
                [p.top_k if p is not None and p.top_k > 0 else math.inf for p in narrowed],
                [1.0 if p is None else p.top_p for p in narrowed],
            ]
        )
        self.uniforms, self.uniforms_from = np.empty((0, 0)), np.zeros(1, np.uint64)
        self.scored = [r for r, f in enumerate(filters) if f.params.logprobs is not None]
        self.want_one_logprob = not any(f.params.logprobs or f.params.logprob_token_ids for f in filters)
