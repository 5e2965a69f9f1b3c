"""The scheduler without a model: hypothesis drives it, and a model of the cache's memory says what every slot holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.config import KVPolicy
from rollout.engine.kv_cache import KVCache
from rollout.engine.request import Request, Sequence
from rollout.engine.scheduler import STEP_SECONDS, Scheduler, SchedulerOutput
from rollout.outputs import TokenLogprob
from rollout.sampling.params import SamplingParams
from tests.support.trace import count_lines

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
        scheduled = [item.sequence for item in step.scheduled]
        assert scheduled or not (s.running or s.waiting), "there is work, and nothing goes on"
        assert sum(item.count for item in step.scheduled) <= s.max_num_batched_tokens
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
        return steps


def world(
    *, num_blocks: int = 40, seqs: int = 8, tokens: int = 16, head_rows: int = 8, prefixes: bool = True, **kwargs: Any
) -> World:
    kv = KVCache(num_blocks + 1, BLOCK, enable_prefix_caching=prefixes)
    return World(Scheduler(kv, max_num_seqs=seqs, max_num_batched_tokens=tokens, max_head_rows=head_rows, **kwargs))


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=26)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, groups, aborts and commits at any time, in caches that hold little more than one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.world = world()
        self.kept = False  # a commit has left running sequences their old cache

    @initialize(
        num_blocks=st.integers(MAX_MODEL_LEN // BLOCK, 24),
        seqs=st.integers(1, 6),
        tokens=st.integers(0, 12),
        head_rows=st.integers(1, 8),
        prefixes=st.booleans(),
        by_priority=st.booleans(),
    )
    def begin(self, seqs: int, tokens: int, **kwargs: Any) -> None:
        self.world = world(seqs=seqs, tokens=seqs + tokens, **kwargs)

    @rule(
        prompt=prompts,
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 9),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        copies=st.integers(1, 3),
    )
    def add(self, copies: int, salt: str | None, n: int, **kwargs: Any) -> None:
        for _ in range(copies):
            self.world.add(n=min(n, self.world.scheduler.max_num_seqs), cache_salt=salt, **kwargs)

    @rule(steps=st.integers(1, 6))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            for sampled in self.world.step():
                assert self.kept or sampled.epochs == {self.world.scheduler.epoch}

    @precondition(lambda self: self.world.scheduler.running or self.world.scheduler.waiting)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        sequences = list(self.world.scheduler)
        self.world.scheduler.remove(sequences[which % len(sequences)])

    @precondition(lambda self: self.world.scheduler.running or self.world.scheduler.waiting)
    @rule(which=st.integers(0, 99))
    def abort_request(self, which: int) -> None:
        sequences = list(self.world.scheduler)
        request = sequences[which % len(sequences)].request
        for sequence in sequences:
            if sequence.request is request:
                self.world.scheduler.remove(sequence)

    @rule(policy=st.sampled_from(["keep", "recompute"]))
    def commit(self, policy: KVPolicy) -> None:
        self.world.scheduler.commit(self.world.scheduler.epoch + 1, policy)
        self.kept = policy == "keep"

    @rule()
    def reset_prefixes(self) -> None:
        self.world.scheduler.kv.reset_prefixes()

    @invariant()
    def blocks_in_use_are_those_of_running_sequences(self) -> None:
        s = self.world.scheduler
        held = {block for q in s.running for block in q.block_table}
        assert len(held) + s.kv.num_free == s.kv.num_usable
        assert not any(q.block_table for q in s if q not in s.running)

    def teardown(self) -> None:
        self.world.run()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def finish_order(w: World) -> list[str]:
    """Run to the end; the requests in the order of their first tokens."""
    first: dict[str, None] = {}
    while w.scheduler.running or w.scheduler.waiting:
        for sampled in w.step():
            first.setdefault(sampled.sequence.request.request_id)
    return list(first)


@pytest.mark.parametrize(("by_priority", "expected"), [(False, ["r1", "r2", "r3"]), (True, ["r2", "r3", "r1"])])
def test_order(by_priority: bool, expected: list[str]) -> None:
    w = world(seqs=1, by_priority=by_priority)
    for priority in (5, -1, 0):
        w.add([priority % 3] * 9, priority=priority)
    assert finish_order(w) == expected


def test_a_group_computes_its_prompt_once_and_shares_its_full_blocks() -> None:
    w = world()
    w.add(list(range(10)), n=4, max_tokens=3)
    assert [sampled.sequence.index for sampled in w.step()] == [0, 1, 2, 3]
    tables = [q.block_table for q in w.scheduler.running]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    w.run()
    assert w.computed_tokens == 10 + 4 * 2
    assert w.scheduler.counters["forked_sequences"] == 3
    assert w.scheduler.counters["shared_blocks"] == 6


@pytest.mark.parametrize("tokens", [8, 16, 64])
@pytest.mark.parametrize("length", [1, 3, 4, 20, 21])
def test_identical_prompts_that_arrive_together_are_computed_once(length: int, tokens: int) -> None:
    w = world(tokens=tokens)
    for n in (1, 2, 1, 3):
        w.add(([1, 2, 0] * 7)[:length], n=n, max_tokens=2)
    w.step()
    w.add(([1, 2, 0] * 7)[:length], max_tokens=2)  # one more in the middle of the prefill, or after it
    late = length <= tokens
    w.run()
    counters = w.scheduler.counters
    again = length - (length - 1) // BLOCK * BLOCK if late else 0  # what no full block of the cache has
    assert w.computed_tokens == length + again + 8
    assert counters["forked_sequences"] == 7 - late
    assert counters["prefix_hit_tokens"] == (3 * length + length - again)
    assert counters["prefix_query_tokens"] == 5 * length


@pytest.mark.parametrize(
    ("limits", "samples"),
    [({"seqs": 3}, 3), ({"num_blocks": 8}, 3), ({"tokens": 21}, 5), ({"tokens": 45, "prefixes": False}, 2)],
)
def test_twins_fork_as_far_as_there_is_room(limits: dict[str, int], samples: int) -> None:
    w = world(**{"tokens": 64, **limits})
    requests = [w.add([1, 2, 0] * 7, max_tokens=3) for _ in range(5)]  # six blocks, and one for each that forks
    assert [sampled.sequence.request for sampled in w.step()] == requests[:samples]
    assert w.scheduler.counters["forked_sequences"] == (samples - 1 if w.scheduler.kv.enable_prefix_caching else 0)
    w.run()


def test_a_twin_does_not_overtake_one_that_waits_for_room() -> None:
    w = world(tokens=8)
    for prompt in ([0] * 8, [0] * 8, [1] * 9, [0] * 8):
        w.add(prompt, max_tokens=5)
    assert [sampled.sequence.request.request_id for sampled in w.step()] == ["r1", "r2"]
    assert [q.request.request_id for q in w.scheduler.waiting] == ["r3", "r4"]
    assert len(w.step()) == 2
    assert [q.request.request_id for q in w.scheduler.running] == ["r1", "r2", "r3"]
    w.run()


@pytest.mark.parametrize("event", ["abort", "commit"])
def test_twins_of_a_prefill_that_stops_go_on_without_it(event: str) -> None:
    w = world(tokens=8)
    first = w.add([1, 0] * 12, max_tokens=2)
    w.add([1, 0] * 12, n=2, max_tokens=2)
    w.step()
    if event == "abort":
        w.scheduler.remove(next(q for q in w.scheduler if q.request is first))
    else:
        w.scheduler.commit(1, "keep")
    w.run()
    assert w.scheduler.counters["forked_sequences"] == (1 if event == "abort" else 2)
    # the blocks of an aborted one serve on, those of older weights don't
    assert w.computed_tokens == (24 + 2 if event == "abort" else 8 + 24 + 3)


def test_who_wants_prompt_logprobs_computes_the_prompt() -> None:
    w = world(tokens=64, head_rows=30)
    for prompt_logprobs in (None, 0, None, 0):
        w.add([1, 2, 0] * 7, max_tokens=1, prompt_logprobs=prompt_logprobs)
    assert len(w.step()) == 3  # one forks; 64 tokens are three prompts
    w.run()
    assert w.computed_tokens == 3 * 21


def test_a_different_salt_shares_nothing() -> None:
    w = world(tokens=64)
    for salt in (None, "a", "b"):
        w.add([1, 2, 0] * 7, max_tokens=1, cache_salt=salt)
    w.run()
    assert w.computed_tokens == 3 * 21


def test_decodes_go_on_beside_a_long_prefill() -> None:
    w = world(tokens=8)
    running = w.add([1], max_tokens=20)
    w.step()
    w.add([2] * 30, max_tokens=1)
    for length in range(2, 7):
        counts = Counter({sampled.sequence.request.request_id: 1 for sampled in w.step()})
        assert counts[running.request_id] == 1
        assert length < 6 or counts["r2"] == 1  # 30 tokens at 7 a step
    assert w.scheduler.counters["partial_chunks"] == 4


def test_single_token_prompts_count_against_the_budget() -> None:
    w = world(seqs=8, tokens=8)
    w.add([0, 1, 2, 0, 1, 2, 0])
    for token in range(7):
        w.add([token])
    w.step()  # checks the budget
    assert len(w.scheduler.running) == 2


def test_the_last_in_order_is_preempted_and_ends_all_the_same() -> None:
    w = world(num_blocks=8)
    first, second = w.add([0] * 8, max_tokens=20), w.add([1] * 8, max_tokens=20)
    preempted: set[str] = set()
    while w.scheduler.running or w.scheduler.waiting:
        w.step()
        preempted |= {q.request.request_id for q in w.scheduler.waiting}
    assert w.scheduler.counters["preemptions"] > 0
    assert preempted == {second.request_id} != {first.request_id}


def test_a_prompt_waits_until_there_is_room_for_the_whole_of_it() -> None:
    w = world(num_blocks=8)
    w.add([0] * 12, max_tokens=16)  # it grows to seven blocks
    w.step()
    w.add([1] * 28, max_tokens=1)  # its first chunk has room, all of it has none
    w.run()
    assert w.computed_tokens == 12 + 15 + 28
    assert not w.scheduler.counters["preemptions"]


@pytest.mark.parametrize("prompt_len", [1, 2, 20])
def test_prompt_logprobs_restart_with_a_new_leader(prompt_len: int) -> None:
    w = world(tokens=8, head_rows=3)
    request = w.add([1] * prompt_len, n=3, prompt_logprobs=0)
    if prompt_len > 8:
        w.step()
        assert 1 < len(request.prompt_logprobs) < prompt_len
    w.scheduler.remove(next(iter(w.scheduler)))
    w.run()
    w.check_prompt_logprobs(request)


@pytest.mark.parametrize("prompt_len", [8, 20])  # one token is left to compute, or more
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_commit_restarts_a_prefill_and_leaves_a_decode_its_cache_under_keep(
    policy: KVPolicy, prompt_len: int
) -> None:
    w = world(tokens=8)
    decoding = w.add([1, 2], max_tokens=9)
    w.step()
    prefilling = w.add([0] * prompt_len, max_tokens=9)
    w.step()
    assert [q.num_computed for q in w.scheduler.running] == [3, 7]
    w.scheduler.commit(1, policy)
    kinds: dict[str, set[frozenset[int]]] = {decoding.request_id: set(), prefilling.request_id: set()}
    while w.scheduler.running or w.scheduler.waiting:
        for sampled in w.step():
            kinds[sampled.sequence.request.request_id].add(sampled.epochs)
    assert kinds[prefilling.request_id] == {frozenset({1})}
    assert kinds[decoding.request_id] == {frozenset({0, 1}) if policy == "keep" else frozenset({1})}
    assert w.scheduler.counters["recomputed_sequences"] == (1 if policy == "keep" else 2)


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    w = world(num_blocks=8)
    w.add([0] * 8, max_tokens=20)
    second = w.add([1] * 8, max_tokens=20)
    (sequence,) = second.sequences.values()
    while w.scheduler.running or w.scheduler.waiting:
        w.step()
        assert sequence.cached_tokens == 0
    assert w.scheduler.counters["preemptions"] > 0
    assert w.scheduler.counters["prefix_hit_tokens"] > 0, "it found its own blocks when it came back"


@pytest.mark.parametrize("n", [1, 16])
def test_an_abort_costs_the_same_for_any_number_of_others(n: int) -> None:
    def abort_all(count: int) -> int:
        w = world()
        requests = [w.add([1, 2, 0] * 7, n=n) for _ in range(count)]
        w.step()

        def abort() -> None:
            for request in requests:
                for sequence in reversed([*request.sequences.values()]):
                    w.scheduler.remove(sequence)

        return count_lines(abort)

    assert abort_all(128) < 2.2 * abort_all(64)


class CountedIds(list[int]):
    """Token ids that count how many of them are read."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        type(self).read += len(self)
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        type(self).read += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)


def test_a_step_does_not_read_the_prompts_of_those_that_wait() -> None:
    w = world(tokens=8)
    for arrival in range(50):
        prompt = CountedIds([1, 2, 0] * 1000)
        request = Request(f"r{arrival}", prompt, SamplingParams(), 0, arrival, 4)
        w.scheduler.add([Sequence(request, 0, prompt)])
    w.scheduler.computed(w.scheduler.schedule())
    CountedIds.read = 0
    for _ in range(5):
        w.scheduler.computed(w.scheduler.schedule())
    assert CountedIds.read < 2 * 3000


def test_a_prefill_on_a_slow_machine_is_cut_into_steps_of_some_seconds() -> None:
    w = world(tokens=1000, num_blocks=500)
    w.add([1] * 1000, max_tokens=1)
    w.scheduler.seconds_per_token = STEP_SECONDS / 100  # until a step was measured
    chunks = []
    while w.scheduler.requests:
        step = w.schedule()
        (item,) = step.scheduled
        chunks.append(item.count)
        w.scheduler.computed(step)
        w.scheduler.keep_pace(step, item.count * STEP_SECONDS / 300)
        if item.samples:
            w.scheduler.remove(item.sequence)
    assert chunks == [100, 300, 300, 300]
