"""The scheduler under any order of requests, aborts and commits, against a model of the cache's memory."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.config import KVPolicy
from tests.support.scheduler_world import BLOCK, MAX_MODEL_LEN, world

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
        tokens=st.integers(0, 40),
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

    @rule(tokens_a_second=st.integers(10, 80))
    def measure(self, tokens_a_second: int) -> None:
        self.world.scheduler.seconds_per_token = 1 / tokens_a_second

    @rule()
    def reset_prefixes(self) -> None:
        self.world.scheduler.kv.reset_prefixes()

    @invariant()
    def blocks_in_use_are_those_of_running_sequences(self) -> None:
        self.world.check_tables()
        s = self.world.scheduler
        held = {block for q in s.running for block in q.block_table}
        assert len(held) + s.kv.num_free == s.kv.num_usable
        assert not any(q.block_table or q.num_computed or q.num_registered for q in s if q not in s.running)

    def teardown(self) -> None:
        self.world.run()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
