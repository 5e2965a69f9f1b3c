"""Which sequences compute which tokens in the next step, and what becomes of the answer.

Running sequences go on first: one token each while they decode, a chunk of what is left while they prefill. Waiting
ones are admitted while tokens, seats and blocks last. When blocks run out, the sequence that is last in order gives up
its own and computes its tokens again later. One order rules all of it: (priority, arrival, index).

A prompt is computed once: sequences that begin with the same one wait for the first of them to end its prefill, fork
from it, and all sample from the same row of logits, be they of one request or of several.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from rollout.config import KVPolicy
from rollout.engine.kv_cache import KVCache
from rollout.engine.request import PromptKey, Request, ScheduledSequence, Sequence
from rollout.messages import LATENCY_BUCKETS


@dataclass
class SchedulerOutput:
    """What one forward pass computes, and the block copies (source, destination) that follow it."""

    scheduled: list[ScheduledSequence]
    copies: list[tuple[int, int]] = field(default_factory=list)


_order = attrgetter("order")

STEP_SECONDS = 0.25
"""What a step's prefills may take: those that decode wait for them. See `Scheduler.seconds_per_token`."""
ALONE_SECONDS = 0.5
"""The same where nothing decodes: only what comes meanwhile waits."""
LEAST_CHUNK = 32
"""Tokens of a prefill that a step may hold on the slowest machine; steps of fewer say little of its speed."""
LONG_PREFILL_STEPS = 4
"""A prefill that has more left than so many steps hold is long: it leaves half a step to those that wait behind it."""


class Scheduler:
    """Owns every unfinished sequence: `waiting` and `running`, both in order, and siblings beside their leader.

    `requests` are those with unfinished sequences, by id. `seconds_per_token` is what a token has cost in the last
    step with a prefill: no more of prefills is put into a step than takes STEP_SECONDS, so that those that decode get
    their next tokens soon on a slow machine too (ALONE_SECONDS where none does). Where nothing is measured it is 0.
    `max_loras` is how many adapters one step may run on.
    `tables` (max_num_seqs, width) int32 holds the block table of each running sequence, in the row of its `seat`,
    filled up with 0: what a device reads, changed by what changes.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_head_rows: int,
        by_priority: bool = False,
    ) -> None:
        self.kv = kv_cache
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_head_rows, self.by_priority = max(max_head_rows, max_num_seqs), by_priority
        self.seconds_per_token = 0.0
        self.max_loras = max_num_seqs
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.tables = np.zeros((max_num_seqs, 1), np.int32)
        self._free_seats = list(reversed(range(max_num_seqs)))
        self.epoch = 0
        self.counters: Counter[str] = Counter()
        self.waits, self.waited_s = [0] * (len(LATENCY_BUCKETS) + 1), 0.0  # counts by bucket, and their sum

    # -- sequences come and go

    def add(self, sequences: list[Sequence]) -> None:
        """Add the sequences of one request: the first computes the prompt, the others wait beside it."""
        request = sequences[0].request
        self.requests[request.request_id] = request
        for sequence in sequences:
            sequence.order = (request.priority if self.by_priority else 0, request.arrival, sequence.index)
        self._enqueue(sequences)

    def _enqueue(self, sequences: list[Sequence]) -> None:
        leader, *leader.siblings = sequences
        leader.leader = None
        for sibling in leader.siblings:
            sibling.leader = leader
        insort(self.waiting, leader, key=_order)

    def __iter__(self) -> Iterator[Sequence]:
        for request in self.requests.values():
            yield from request.sequences.values()

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence and give back its blocks. A leader's siblings find a new leader."""
        request, sequence.decode = sequence.request, None
        del request.sequences[sequence.index]
        if not request.sequences:
            del self.requests[request.request_id]
        if sequence.leader is not None:
            _take_out(sequence.leader.siblings, sequence)
            return
        if sequence.block_table:
            self._unseat(sequence)
        else:
            _take_out(self.waiting, sequence)
        if sequence.siblings:
            self._enqueue(sequence.siblings)

    def commit(self, epoch: int, policy: KVPolicy) -> None:
        """New weights serve from the next step on.

        A sequence that is still prefilling starts again. One that decodes keeps its cache, now mixed, or under
        "recompute" computes all of it again.
        """
        self.epoch = epoch
        for sequence in list(self.running):
            if policy == "recompute" or sequence.prefills:
                self.counters["recomputed_sequences"] += 1
                self._requeue(sequence)
            else:
                sequence.kv_epoch = None

    def _requeue(self, sequence: Sequence) -> None:
        self._unseat(sequence)
        insort(self.waiting, sequence, key=_order)

    def _seat(self, sequence: Sequence, blocks: list[int]) -> None:
        """Let it run, with these blocks."""
        insort(self.running, sequence, key=_order)
        sequence.seat = self._free_seats.pop()
        self._extend(sequence, blocks)

    def _extend(self, sequence: Sequence, blocks: list[int]) -> None:
        """Let it hold these blocks as well."""
        start = len(sequence.block_table)
        sequence.block_table += blocks
        if (end := len(sequence.block_table)) > self.tables.shape[1]:
            self.tables = np.pad(self.tables, ((0, 0), (0, end)))
        self.tables[sequence.seat, start:end] = blocks

    def _unseat(self, sequence: Sequence) -> None:
        """Let it run no longer: free its blocks. Prompt logprobs that are not delivered yet are collected again."""
        _take_out(self.running, sequence)
        self.tables[sequence.seat, : len(sequence.block_table)] = 0
        self._free_seats.append(sequence.seat)
        self.kv.free(sequence)
        if not sequence.request.prompt_logprobs_delivered:
            del sequence.request.prompt_logprobs[1:]

    # -- one step

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and allocate their blocks. An empty step means that there is nothing to do."""
        step = SchedulerOutput([])
        decoding = sum([s.in_flight + len(s.token_ids) - s.num_computed == 1 for s in self.running])
        seconds = STEP_SECONDS if decoding else ALONE_SECONDS
        in_time = max(LEAST_CHUNK, int(seconds / max(self.seconds_per_token, 1e-9)))
        self._prefill_budget = min(self.max_num_batched_tokens - decoding, in_time)
        self._long_prefill = LONG_PREFILL_STEPS * self._prefill_budget
        self._head_rows = self.max_head_rows - decoding
        preemptions = self.counters["preemptions"]
        self._schedule_running(step)
        twins = self._schedule_waiting(step) if self.counters["preemptions"] == preemptions else []
        self._fork_from_prompts(step, twins)
        self._count(step)
        return step

    def _schedule_running(self, step: SchedulerOutput) -> None:
        index, block_size, scheduled = 0, self.kv.block_size, step.scheduled
        while index < len(self.running):
            sequence = self.running[index]
            if sequence.in_flight and sequence.output_len + sequence.in_flight >= sequence.request.max_tokens:
                index += 1  # its last token is in flight
                continue
            start = sequence.num_computed
            decodes = sequence.in_flight + len(sequence.token_ids) - start == 1
            count = 1 if decodes else self._chunk(sequence, start)
            if start + count > len(sequence.block_table) * block_size and not self._make_room(sequence, count):
                return  # it was the last one, and went itself
            if decodes and start >= sequence.prompt_len:
                if (item := sequence.decode) is None:
                    item = sequence.decode = ScheduledSequence(sequence, start, 1, False, 1, [sequence])
                item.start = start  # the one object for all its decodes: only this ever changes
                scheduled.append(item)
            elif count:
                self._append(step, sequence, count, reserved=decodes)
            index += 1

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Allocate blocks for `count` more tokens, preempting from the end of the order; False if it went itself."""
        needed = self.kv.blocks_for(sequence.num_computed + count) - len(sequence.block_table)
        while needed > self.kv.num_free:
            victim = self.running[-1]
            self.counters["preemptions"] += 1
            self._requeue(victim)
            if victim is sequence:
                return False
        self._extend(sequence, self.kv.allocate(needed))
        return True

    def _schedule_waiting(self, step: SchedulerOutput) -> list[Sequence]:
        """Admit waiting sequences, in order, up to one for which there is no room. Those before it that wait because
        their very prompt is being computed are returned."""
        twins: list[Sequence] = []
        if not self.waiting:
            return twins
        prompts = {self.kv.prompt_key(s) for s in self.running}
        adapters = {s.request.adapter for s in self.running} - {None}
        coming = {self.kv.coming_edge(s, self.epoch) for s in self.running if s.num_to_compute > 0}
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_num_seqs:
                break
            prompt = self.kv.prompt_key(sequence)
            if prompt is not None and prompt in prompts:
                twins.append(sequence)
                continue
            if self._prefill_budget < 1:
                break
            adapter = sequence.request.adapter
            if adapter is not None and adapter not in adapters and len(adapters) >= self.max_loras:
                continue  # until one of those that run has ended
            matched, edge = self.kv.match(sequence, self.epoch)
            if edge is not None and edge in coming:
                continue  # another sequence computes this prefix right now: share it when it is there
            shared = [cached.block for cached in matched]
            self.kv.share(shared)
            hit = len(matched) * self.kv.block_size
            count = self._chunk(sequence, hit)
            # room for the whole of it, though only a chunk is allocated: else two long prompts starve each other
            if not count or self.kv.blocks_for(len(sequence.token_ids)) - len(matched) > self.kv.num_free:
                sequence.block_table = shared
                self.kv.free(sequence)
                break
            _take_out(self.waiting, sequence)
            self._seat(sequence, shared + self.kv.allocate(self.kv.blocks_for(hit + count) - len(matched)))
            sequence.num_computed, sequence.kv_epoch = hit, self.epoch
            sequence.prefill_len = len(sequence.token_ids)
            sequence.num_registered = len(matched)
            sequence.prefix_node = matched[-1].node if matched else None
            if not sequence.output_len:
                sequence.cached_tokens = hit
            self._note_wait(sequence.request)
            self.counters["prefix_query_tokens"] += len(sequence.token_ids)
            self.counters["prefix_hit_tokens"] += hit
            self._append(step, sequence, count, reserved=False)
            coming.add(self.kv.coming_edge(sequence, self.epoch))
            prompts.add(prompt)
            if adapter is not None:
                adapters.add(adapter)
        return twins

    def _note_wait(self, request: Request) -> None:
        if request.waits_since is not None:
            waited, request.waits_since = time.monotonic() - request.waits_since, None
            self.waits[bisect_left(LATENCY_BUCKETS, waited)] += 1
            self.waited_s += waited
            request.waited_s = waited

    def _chunk(self, sequence: Sequence, start: int) -> int:
        """How many tokens of a prefilling sequence, from `start` on, fit into this step."""
        left, budget = len(sequence.token_ids) - start, self._prefill_budget
        if left > self._long_prefill and self.waiting and self.waiting[-1] is not sequence:
            budget = -(-budget // 2)
        count = min(left, budget)
        if sequence.request.needs_every_prompt_row:
            count = min(count, self._head_rows)
        return max(count, 0)

    def _append(self, step: SchedulerOutput, sequence: Sequence, count: int, *, reserved: bool) -> None:
        start = sequence.num_computed
        wants_prompt_rows = start < sequence.prompt_len - 1 and sequence.request.needs_every_prompt_row
        samples = [sequence] if start + count == len(sequence.token_ids) + sequence.in_flight else []
        head_rows = count if wants_prompt_rows else len(samples)
        item = ScheduledSequence(sequence, start, count, wants_prompt_rows, head_rows, samples)
        if not reserved:
            self._prefill_budget -= count
            self._head_rows -= head_rows
        step.scheduled.append(item)

    def _fork_from_prompts(self, step: SchedulerOutput, twins: list[Sequence]) -> None:
        """Where this step ends a prefill, let its siblings and then its twins, in order, sample from the same row."""
        ended: dict[PromptKey | None, ScheduledSequence] = {}
        for item in step.scheduled:
            if item.samples and item.start + item.count == item.sequence.prompt_len:
                self._fork_siblings(step, item, item.sequence)
                ended[self.kv.prompt_key(item.sequence)] = item
        for twin in twins:
            if (end := ended.get(self.kv.prompt_key(twin))) is None:
                continue
            if not self._fork(step, end, twin):
                return  # it keeps its place, and will find the prompt in the prefix cache
            _take_out(self.waiting, twin)
            twin.cached_tokens = twin.prompt_len
            self._note_wait(twin.request)
            self.counters["prefix_query_tokens"] += twin.prompt_len
            self.counters["prefix_hit_tokens"] += twin.prompt_len
            self._fork_siblings(step, end, twin)

    def _fork_siblings(self, step: SchedulerOutput, item: ScheduledSequence, leader: Sequence) -> None:
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            sibling.leader = None
            if self._fork(step, item, sibling):
                sibling.cached_tokens = leader.cached_tokens
            else:
                insort(self.waiting, sibling, key=_order)  # it will find the prompt in the prefix cache

    def _fork(self, step: SchedulerOutput, item: ScheduledSequence, sequence: Sequence) -> bool:
        """Let a sequence sample from the item's last row: full blocks shared, the last one copied. False: no room."""
        table, full = item.sequence.block_table, item.sequence.prompt_len // self.kv.block_size
        if len(self.running) >= self.max_num_seqs or len(table) - full > self.kv.num_free:
            return False
        self.kv.share(table[:full])
        own = self.kv.allocate(len(table) - full)
        step.copies += zip(table[full:], own, strict=True)
        self._seat(sequence, table[:full] + own)
        sequence.kv_epoch = item.sequence.kv_epoch
        item.samples.append(sequence)
        self.counters["forked_sequences"] += 1
        self.counters["shared_blocks"] += full
        return True

    def _count(self, step: SchedulerOutput) -> None:
        if not step.scheduled:
            return
        self.counters["steps"] += 1
        self.counters["computed_tokens"] += sum(item.count for item in step.scheduled)
        self.counters["partial_chunks"] += sum(not item.samples for item in step.scheduled)

    def keep_pace(self, step: SchedulerOutput, seconds: float) -> None:
        """The step took this long. What it decoded counts too, as if its tokens cost no more than a prefill's."""
        counts = [item.count for item in step.scheduled]
        if sum(count for count in counts if count > 1) >= LEAST_CHUNK:
            self.seconds_per_token = seconds / sum(counts)

    def computed(self, step: SchedulerOutput) -> None:
        """The forward pass is done: its tokens are in the cache, and their full blocks may be found."""
        block_size = self.kv.block_size
        for item in step.scheduled:
            leader = item.sequence
            leader.num_computed = computed = item.start + item.count
            if computed >= (leader.num_registered + 1) * block_size:
                self.kv.register(leader, self.epoch)
            if len(item.samples) > 1:
                for sequence in item.samples[1:]:
                    sequence.num_computed = computed
                    sequence.num_registered, sequence.prefix_node = leader.num_registered, leader.prefix_node


def _take_out(ordered: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a list in order, without looking at all of it."""
    del ordered[bisect_left(ordered, sequence.order, key=_order)]
