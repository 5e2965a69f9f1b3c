"""What the scheduler does in the cases that have a name: order, groups, twins, preemption, commits, what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from rollout.config import KVPolicy
from rollout.engine.request import Request, Sequence
from rollout.sampling.params import SamplingParams
from tests.support.scheduler_world import BLOCK, World, world
from tests.support.trace import count_lines


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


def pace(w: World, seconds_per_token: float) -> tuple[float, list[Sequence]]:
    """A step of a machine that needs so long for a token: the seconds, and who got a token."""
    step = w.schedule()
    w.scheduler.computed(step)
    seconds = sum(item.count for item in step.scheduled) * seconds_per_token
    w.scheduler.keep_pace(step, seconds)
    sampled = [sequence for item in step.scheduled for sequence in item.samples]
    for sequence in sampled:
        sequence.token_ids.append(0)
        if sequence.output_len >= sequence.request.max_tokens:
            w.scheduler.remove(sequence)
    return seconds, sampled


def slow_world(tokens_a_second: float = 350) -> World:
    w = world(tokens=2048, num_blocks=5000)
    w.scheduler.seconds_per_token = 1 / tokens_a_second
    return w


def test_a_stream_does_not_stand_still_for_seconds_beside_a_long_prompt() -> None:
    w = slow_world()
    (victim,) = w.add([1], max_tokens=100).sequences.values()
    pace(w, 1 / 350)
    w.add([2] * 2000, max_tokens=1)
    while len(w.scheduler.requests) == 2:
        seconds, sampled = pace(w, 1 / 350)
        assert victim in sampled
        assert seconds < 0.3
    assert victim.output_len < 26, "no slower than need be"


def test_a_prefill_follows_the_speed_that_was_measured() -> None:
    w = slow_world(tokens_a_second=100)
    w.add([1] * 1000, max_tokens=1)
    chunks = [round(pace(w, 1 / 500)[0] * 500) for _ in range(5)]
    assert chunks == [50, 250, 250, 250, 200]


def test_decodes_say_nothing_of_what_a_prefill_costs() -> None:
    w = world(seqs=32, tokens=64, num_blocks=200)
    w.add([1], n=32, max_tokens=9)
    for _ in range(3):
        pace(w, 1.0)
    assert w.scheduler.seconds_per_token == 0


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    w = slow_world()
    (long,) = w.add([1] * 8000, max_tokens=1).sequences.values()
    pace(w, 1 / 350)
    (short,) = w.add([2] * 50, max_tokens=1).sequences.values()
    assert short in pace(w, 1 / 350)[1]
    before = long.num_computed
    pace(w, 1 / 350)
    assert long.num_computed - before == 175, "alone it has the whole step"
