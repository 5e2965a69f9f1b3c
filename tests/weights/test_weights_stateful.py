"""Engine and updates in any order of calls, requests, pauses and faults, against a model of what must be true."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.model.parameters import CommitMethod
from tests.support.update_machine import Machine


def op(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


KIND = st.sampled_from(["whole", "whole", "partial", "sparse"])
POLICY = st.sampled_from([None, "keep", "recompute"])
FAULT = st.sampled_from([None, None, None, None, "nan", "shape", "unknown", "missing", "dies"])
YES = st.booleans()
SELDOM = st.sampled_from([False, False, True])
LENGTH = st.sampled_from([1, 7, 20, 21])
STEP = op("step", count=st.sampled_from([1, 2, 5]))
PUSH = op("push", kind=KIND, in_place=YES, policy=POLICY, verify=YES, fault=FAULT)
START = op("start", kind=KIND, in_place=YES, policy=POLICY, verify=YES, stale_base=SELDOM)
UPDATE = op("update", share=st.sampled_from([1, 2, 3, 3]), fault=FAULT, stalls=SELDOM)
FINISH = op("finish", prepare=YES, label=st.sampled_from([None, "a", "b"]), wrong_sum=SELDOM)
LATE = st.sampled_from(
    [
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "finish_weight_update",
        "abort_weight_update",
        "shutdown_weight_transfer_engine",
    ]
)
OPS = st.one_of(
    STEP,
    STEP,
    PUSH,
    PUSH,
    START,
    START,
    UPDATE,
    UPDATE,
    op("go_on"),
    FINISH,
    FINISH,
    op("init", force=YES, by=st.sampled_from("ab")),
    op("abort_update"),
    op("late", method=LATE, by=st.sampled_from(["other", "nobody", "earlier"])),
    op("pause", how=st.sampled_from(["keep", "keep", "abort", "resume", "resume"])),
    op("add", length=LENGTH, n=st.integers(1, 3), tokens=st.integers(1, 16), shared=YES),
    op("abort_request", which=st.integers(0, 9), index=st.sampled_from([None, 0, 2])),
    op("aside", what=st.sampled_from(["checksums", "relabel", "zombies"])),
)


@settings(max_examples=12)
@given(
    policy=st.sampled_from(["keep", "recompute"]),
    chunk=st.sampled_from([6, 24]),
    method=st.sampled_from(["flip", "copy"]),
    ops=st.lists(OPS, min_size=15, max_size=40),
)
def test_any_order_of_calls_requests_pauses_and_faults(
    policy: str, chunk: int, method: CommitMethod, ops: list[tuple[str, dict[str, Any]]]
) -> None:
    machine = Machine(policy, chunk, method)
    for name, arguments in ops:
        getattr(machine, name)(**arguments)
        machine.says_what_is()
    machine.end()
