"""The states of a change that several make together, against every order of every outcome."""

from __future__ import annotations

import itertools

import pytest

from rollout.two_phase import TwoPhaseCommit

WHO = ("a", "b", "c")


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(WHO)))
@pytest.mark.parametrize("refusing", [set(c) for n in range(4) for c in itertools.combinations(WHO, n)])
def test_none_commits_unless_all_have_prepared(patient: bool, order: tuple[str, ...], refusing: set[str]) -> None:
    change = TwoPhaseCommit(WHO, patient=patient)
    errors = {who: ValueError(who) for who in refusing}
    for answered, who in enumerate(order, start=1):
        phase = change.report(who, errors.get(who))
        refused = [w for w in order[:answered] if w in refusing]
        if refused and (answered == 3 or not patient):
            assert phase == "aborted"
            assert change.error is errors[refused[0]]
        else:
            assert phase == ("committing" if answered == 3 else "preparing")
    if refusing:
        assert change.undo == ([] if len(refusing) == 3 else list(WHO))
    else:
        assert change.undo == []


@pytest.mark.parametrize("failing", [set(c) for n in range(4) for c in itertools.combinations(WHO, n)])
def test_a_commit_that_some_fail_is_torn_and_names_them(failing: set[str]) -> None:
    change = TwoPhaseCommit(WHO)
    for who in WHO:
        change.report(who)
    for who in WHO:
        assert change.phase == "committing"
        change.report(who, ValueError(who) if who in failing else None)
    assert change.phase == ("committed" if not failing else "torn" if len(failing) < 3 else "aborted")
    assert (set(change.failed), set(change.done)) == (failing, set(WHO) - failing)


def test_what_is_said_after_the_end_changes_nothing() -> None:
    change = TwoPhaseCommit(WHO)
    first = ValueError("first")
    change.report("b", first)
    for who in ("a", "c"):
        assert change.report(who, ValueError("late")) == "aborted"
    assert change.error is first
