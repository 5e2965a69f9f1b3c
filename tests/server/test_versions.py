"""Spans of weight versions, against the stamps that they stand for."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollout.server.generation import weight_versions

stamps = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.sampled_from(["current", "mixed"])))


@given(stamps)
def test_spans_tile_the_tokens_and_say_of_each_its_stamp(given_stamps):
    found = weight_versions(given_stamps)
    assert [(s.version, s.epoch, s.kv) for s in found for _ in range(s.start, s.end)] == given_stamps
    assert [s.start for s in found] == [0, *(s.end for s in found[:-1])][: len(found)]
    for left, right in pairwise(found):
        assert (left.version, left.epoch, left.kv) != (right.version, right.epoch, right.kv)


def test_a_new_epoch_under_the_same_label_starts_a_span():
    found = weight_versions([("v", 1, "current"), ("v", 2, "current")])
    assert [(s.start, s.end, s.epoch) for s in found] == [(0, 1, 1), (1, 2, 2)]
