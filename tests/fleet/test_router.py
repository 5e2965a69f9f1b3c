"""Which rank a request goes to, against a brute-force model of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout.fleet.router import CHUNK, STICKINESS, Router

WORK = st.dictionaries(st.integers(0, 3), st.integers(0, 2000), min_size=1)
PROMPTS = st.builds(
    lambda head, tail: [7] * (CHUNK * head) + [9] * tail, st.integers(0, 3), st.integers(0, CHUNK // 2)
).filter(bool)
REQUESTS = st.tuples(PROMPTS, st.sampled_from([None, "a"]), st.integers(1, 100), WORK)


def shared(a: list[int], b: list[int]) -> int:
    """How many tokens of `a` a rank that was given `b` is known for: whole chunks, and all of it if that is its end."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if length == len(a) and (len(a) == len(b) or len(a) % CHUNK == 0):
        return length
    return length // CHUNK * CHUNK


@given(st.lists(REQUESTS, max_size=30), st.sets(st.integers(0, 29), max_size=2))
def test_a_request_goes_to_the_longest_prefix_unless_that_rank_is_overloaded(requests, deaths) -> None:  # type: ignore[no-untyped-def]
    router, given_to = Router(), []
    for number, (prompt, salt, own, work) in enumerate(requests):
        if number in deaths:
            router.forget(1)
            given_to = [entry for entry in given_to if entry[2] != 1]
        depth = {
            length: {rank for p, s, rank in given_to if s == salt and shared(prompt, p) >= length} & work.keys()
            for length in {shared(prompt, p) for p, s, _ in given_to if s == salt} - {0}
        }
        least = min(work.values())
        chosen = router.choose(prompt, salt, own, work)
        holders = next((depth[length] for length in sorted(depth, reverse=True) if depth[length]), set())
        if holders and (busy := min(work[rank] for rank in holders)) - least <= STICKINESS * own:
            assert chosen in holders
            assert work[chosen] == busy
        else:
            assert work[chosen] == least
        given_to.append((prompt, salt, chosen))


def test_groups_stay_together_and_groups_spread() -> None:
    router, work = Router(), {0: 0, 1: 0}
    placed = {}
    for group in range(8):
        for _ in range(8):
            rank = router.choose([group] * 40, None, 100, work)
            work[rank] += 100
            placed.setdefault(group, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in placed.values())
    assert work == {0: 3200, 1: 3200}


def test_a_session_stays_where_its_last_turn_went_unless_that_rank_is_overloaded() -> None:
    router, own = Router(), 10
    shared, turn = [1] * CHUNK, [2] * CHUNK
    assert router.choose(shared, None, own, {0: 0, 1: 1}) == 0
    assert router.choose(shared + turn, None, own, {0: 5, 1: 0}, "a") == 0  # its first turn goes by its prefix
    assert router.choose([9] * CHUNK, None, own, {0: 5, 1: 0}, "a") == 0  # and what comes after it along
    assert router.choose([9] * CHUNK, None, own, {0: 5 + STICKINESS * own, 1: 0}, "a") == 1
    assert router.choose(shared + turn, None, own, {0: 0, 1: 5}, "a") == 1  # where the last one went
    assert router.choose([8] * CHUNK, None, own, {0: 0, 1: 5}, "b") == 0
    router.forget(1)
    assert router.choose([7] * CHUNK, None, own, {0: 0, 1: 5}, "a") == 0


def test_a_prompt_that_all_share_does_not_bind_them_all() -> None:
    router, work = Router(), {0: 0, 1: 0, 2: 0}
    for number in range(300):
        rank = router.choose([5] * CHUNK + [number] * 10, None, 10, work)
        work[rank] += 10
    assert max(work.values()) - min(work.values()) <= (STICKINESS + 1) * 10


def test_what_a_commit_made_worthless_is_forgotten() -> None:
    router = Router()
    assert router.choose([1] * 100, None, 10, {0: 0, 1: 5}) == 0
    assert router.choose([1] * 100, None, 10, {0: 5, 1: 0}) == 0
    router.forget()
    assert router.choose([1] * 100, None, 10, {0: 5, 1: 0}) == 1
