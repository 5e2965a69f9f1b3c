"""Engines that fail, die and come back while a fleet sleeps: a fleet of scripts, on a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout.fleet.errors import EngineError
from rollout.messages import SLEEP_TAGS
from tests.support.scripted_fleet import ScriptedFleet


@pytest.fixture
def lab() -> Iterator[ScriptedFleet]:
    made = ScriptedFleet(2)
    made.run(made.push(7, "seven"))
    yield made
    made.close()


def sleep(lab: ScriptedFleet, level: int, mode: str = "abort") -> None:
    lab.run(lab.fleet.sleeping.sleep(level, mode, 1e5))


def wake_up(lab: ScriptedFleet, *tags: str) -> None:
    lab.run(lab.fleet.sleeping.wake_up(tags or SLEEP_TAGS, 1e5))


def asleep(lab: ScriptedFleet) -> list[set[str]]:
    return [engine.asleep for engine in lab.engines.values()]


def refusal(lab: ScriptedFleet) -> str:
    try:
        lab.fleet.check_room(1)
    except EngineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("level", [1, 2])
def test_one_that_comes_back_sleeps_as_the_others_do(lab: ScriptedFleet, level: int) -> None:
    sleep(lab, level)
    lab.kill(1)
    lab.heal()
    assert asleep(lab) == [set(SLEEP_TAGS)] * 2
    assert f"asleep (level {level})" in refusal(lab)
    assert [engine.valid for engine in lab.engines.values()] == [level == 1] * 2
    wake_up(lab, "weights")
    lab.kill(1)
    lab.heal()
    assert asleep(lab) == [{"kv_cache"}] * 2
    lab.run(lab.push(8, "eight"))
    lab.kill(0)
    lab.heal()
    assert asleep(lab) == [{"kv_cache"}] * 2
    assert all(engine.valid for engine in lab.engines.values())  # what was pushed is not given up again
    wake_up(lab)
    assert lab.serving() == {(2, "eight", 8, False)}
    assert refusal(lab) == ""


def test_all_that_die_asleep_come_back_asleep(lab: ScriptedFleet) -> None:
    sleep(lab, 2, "keep")
    lab.kill(0)
    lab.kill(1)
    lab.heal()
    assert asleep(lab) == [set(SLEEP_TAGS)] * 2
    assert not any(engine.valid for engine in lab.engines.values())
    assert "push them" in refusal(lab)
    wake_up(lab)
    lab.run(lab.push(8, "eight"))
    assert lab.serving() == {(2, "eight", 8, False)}


def test_an_open_update_keeps_all_awake(lab: ScriptedFleet) -> None:
    lab.run(lab.call("start_weight_update"))
    lab.engines[1].session = None  # the second engine has just dropped it
    with pytest.raises(EngineError, match="a weight update is open") as refused:
        sleep(lab, 2)
    assert refused.value.status == 409
    assert asleep(lab) == [set(), set()]
    assert (lab.fleet.sleeping.level, refusal(lab)) == (0, "")


def test_where_one_fails_the_others_sleep_until_all_are_woken(lab: ScriptedFleet) -> None:
    lab.engines[1].refuses.add("sleep")
    with pytest.raises(EngineError, match="scripted"):
        sleep(lab, 1)
    assert "asleep (level 1)" in refusal(lab)
    lab.engines[0].refuses.add("wake_up")
    with pytest.raises(EngineError, match="scripted"):
        wake_up(lab)
    assert "asleep (level 1)" in refusal(lab)
    wake_up(lab)
    assert lab.serving() == {(1, "seven", 7, False)}
    assert refusal(lab) == ""


def test_no_update_begins_while_they_fall_asleep(lab: ScriptedFleet) -> None:
    falling = lab.begin(lab.fleet.sleeping.sleep(1, "wait", 1e5))
    started = lab.begin(lab.call("start_weight_update"))
    lab.heal(until=started.done)
    falling.result()
    with pytest.raises(EngineError, match="the weights are asleep"):
        started.result()
