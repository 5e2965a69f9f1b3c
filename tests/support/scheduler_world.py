"""The scheduler without a model: a model of the cache's memory says what every slot holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.engine.kv_cache import KVCache
from rollout.engine.request import Request, Sequence
from rollout.engine.scheduler import ALONE_SECONDS, LEAST_CHUNK, STEP_SECONDS, Scheduler, SchedulerOutput
from rollout.outputs import TokenLogprob
from rollout.sampling.params import SamplingParams

BLOCK = 4
MAX_MODEL_LEN = 32


History = int | str | None
"""A number for each (history before it, token, epoch that computed its key and value); it begins with the salt."""


@dataclass(frozen=True)
class Sampled:
    """A token, and the epochs that computed the keys and values it attended to."""

    sequence: Sequence
    epochs: frozenset[int]


@dataclass
class World:
    """A scheduler, the memory that its block tables point into, and a model whose next token is arithmetic."""

    scheduler: Scheduler
    histories: dict[tuple[History, int, int], int] = field(default_factory=dict)
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot → history and epoch
    arrivals: int = 0
    computed_tokens: int = 0
    steps: int = 0

    def add(self, prompt: list[int], *, n: int = 1, max_tokens: int = 4, priority: int = 0, **kwargs: Any) -> Request:
        self.arrivals += 1
        params = SamplingParams(n=n, prompt_logprobs=kwargs.pop("prompt_logprobs", None))
        name = f"r{self.arrivals}"
        request = Request(name, prompt, params, 0, self.arrivals, max_tokens, priority=priority, **kwargs)
        self.scheduler.add([Sequence(request, index, list(prompt)) for index in range(n)])
        return request

    def schedule(self) -> SchedulerOutput:
        """Schedule a step and check that it keeps within every budget and passes nobody over."""
        s = self.scheduler
        before, decoding = list(s.running), [q for q in s.running if q.num_to_compute == 1]
        step = s.schedule()
        self.check_tables()
        scheduled = [item.sequence for item in step.scheduled]
        assert scheduled or not (s.running or s.waiting), "there is work, and nothing goes on"
        assert sum(item.count for item in step.scheduled) <= s.max_num_batched_tokens
        prefilled = sum(item.count for item in step.scheduled if item.sequence not in decoding)
        assert prefilled <= LEAST_CHUNK or prefilled * s.seconds_per_token <= (
            STEP_SECONDS if decoding else ALONE_SECONDS
        )
        assert len(s.running) <= s.max_num_seqs
        assert sum(item.count for item in step.scheduled if item.wants_prompt_rows) <= s.max_head_rows
        assert sum(item.num_head_rows for item in step.scheduled) <= s.max_head_rows + len(s.running)
        assert len(set(scheduled)) == len(scheduled)
        stayed = [q for q in before if q in s.running]
        assert all(q in scheduled for q in decoding if q in stayed), "a decode stood still"
        assert all(self.order(a) < self.order(b) for a in stayed for b in before if b not in stayed)
        of_old_groups = {q.request for q in before}
        for late in s.running:  # who overtakes another: that one waits for a prefix under way
            for early in s.waiting:
                if late.request not in of_old_groups and early not in before and self.order(early) < self.order(late):
                    assert any(self.common_block(early, running) for running in s.running)
        for item in step.scheduled:
            for forked in item.samples[1:]:
                assert forked.token_ids == item.sequence.token_ids == forked.request.prompt_token_ids
                assert forked.request.cache_salt == item.sequence.request.cache_salt
                assert s.kv.enable_prefix_caching or forked.request is item.sequence.request
                if forked.request is not item.sequence.request:
                    assert forked.cached_tokens == forked.prompt_len
                    assert not forked.request.needs_every_prompt_row
        return step

    def check_tables(self) -> None:
        """What the device reads is the block table of every running sequence, and nothing else."""
        expected = np.zeros_like(self.scheduler.tables)
        for q in self.scheduler.running:
            assert not expected[q.seat].any(), "two sequences on one seat"
            expected[q.seat, : len(q.block_table)] = q.block_table
        assert np.array_equal(self.scheduler.tables, expected)

    def order(self, q: Sequence) -> tuple[int, int, int]:
        return (q.request.priority if self.scheduler.by_priority else 0, q.request.arrival, q.index)

    @staticmethod
    def common_block(a: Sequence, b: Sequence) -> bool:
        return a.request.cache_salt == b.request.cache_salt and a.token_ids[:BLOCK] == b.token_ids[:BLOCK]

    def history(self, before: History, token: int, epoch: int) -> int:
        return self.histories.setdefault((before, token, epoch), len(self.histories))

    def epochs(self, q: Sequence) -> tuple[History, list[int]]:
        """The epochs of the computed positions, which hold this sequence's own history and nothing of another's."""
        history: History = q.request.cache_salt
        epochs: list[int] = []
        for p in range(q.num_computed):
            held, epoch = self.memory[q.block_table[p // BLOCK] * BLOCK + p % BLOCK]
            history = self.history(history, q.token_ids[p], epoch)
            assert held == history
            epochs.append(epoch)
        return history, epochs

    def step(self) -> list[Sampled]:
        """Schedule, compute, copy, sample, stop: as the engine does."""
        step = self.schedule()
        self.steps += bool(step.scheduled)
        epoch = self.scheduler.epoch
        for item in step.scheduled:
            q = item.sequence
            assert item.start == q.num_computed
            history, _ = self.epochs(q)
            for p in range(item.start, item.start + item.count):
                history = self.history(history, q.token_ids[p], epoch)
                self.memory[q.block_table[p // BLOCK] * BLOCK + p % BLOCK] = history, epoch
            self.computed_tokens += item.count
            if item.wants_prompt_rows:
                positions = range(item.start + 1, min(item.start + item.count + 1, q.prompt_len))
                q.request.prompt_logprobs += [[TokenLogprob(p, epoch, 1)] for p in positions]
        for source, target in step.copies:
            for offset in range(BLOCK):
                self.memory.pop(target * BLOCK + offset, None)
                if source * BLOCK + offset in self.memory:
                    self.memory[target * BLOCK + offset] = self.memory[source * BLOCK + offset]
        self.scheduler.computed(step)
        return [self.sample(q) for item in step.scheduled for q in item.samples]

    def sample(self, q: Sequence) -> Sampled:
        assert q.num_computed == len(q.token_ids)
        epochs = frozenset(self.epochs(q)[1])
        current = epochs == {self.scheduler.epoch}
        assert q.kv_epoch == (self.scheduler.epoch if current else None)
        if not q.output_len:
            assert current
            self.check_prompt_logprobs(q.request)
            q.request.prompt_logprobs_delivered = True
        q.token_ids.append((sum(q.token_ids) + q.index) % 3)
        if q.output_len >= q.request.max_tokens or len(q.token_ids) >= MAX_MODEL_LEN:
            self.scheduler.remove(q)
        return Sampled(q, epochs)

    @staticmethod
    def check_prompt_logprobs(request: Request) -> None:
        """One entry for each prompt token but the first, in order, all of one epoch."""
        if request.params.prompt_logprobs is not None:
            first, *rest = [entry and entry[0] for entry in request.prompt_logprobs]
            assert first is None
            assert [entry and entry.token_id for entry in rest] == list(range(1, len(request.prompt_token_ids)))
            assert len({entry and entry.logprob for entry in rest}) <= 1

    def run(self) -> int:
        """Steps until nothing is left."""
        steps = 0
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            steps += 1
            assert steps < 3000, "livelock"
        kv = self.scheduler.kv
        assert kv.num_free == kv.num_usable
        assert self.scheduler.counters["computed_tokens"] == self.computed_tokens
        assert self.scheduler.counters["steps"] == self.steps
        return steps


def world(
    *, num_blocks: int = 40, seqs: int = 8, tokens: int = 16, head_rows: int = 8, prefixes: bool = True, **kwargs: Any
) -> World:
    kv = KVCache(num_blocks + 1, BLOCK, enable_prefix_caching=prefixes)
    return World(Scheduler(kv, max_num_seqs=seqs, max_num_batched_tokens=tokens, max_head_rows=head_rows, **kwargs))
