"""Engines that die, refuse or are late at the worst moments: a fleet of scripts, on a clock of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rollout.config import EngineConfig
from rollout.fleet.errors import EngineError
from rollout.fleet.fleet import Fleet
from rollout.model.parameters import ModelParameters
from rollout.weights.offer import offer_weights
from rollout.weights.store import WeightStore
from tests.support import tiny_models
from tests.support.scripted_fleet import Script, ScriptedFleet

Make = Callable[..., ScriptedFleet]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ScriptedFleet] = []

    def make_one(size: int = 2, **options: Any) -> ScriptedFleet:
        made.append(ScriptedFleet(size, **options))
        return made[-1]

    yield make_one
    for lab in made:
        lab.close()


def test_each_engine_keeps_its_snapshots_in_a_folder_of_its_own() -> None:
    for size, folders in ((1, ["kept"]), (2, ["kept/rank-0", "kept/rank-1"])):
        fleet = Fleet(EngineConfig(model="any", keep_weight_snapshot="kept"), size=size)
        assert [client.config.keep_weight_snapshot for client in fleet.ranks] == folders


def open_update(lab: ScriptedFleet) -> None:
    lab.run(lab.call("init_weight_transfer_engine", init_info={"backend": "disk"}))
    lab.run(lab.call("start_weight_update"))


def killed_and_updating(make: Make) -> ScriptedFleet:
    """Two engines that served a push; the second one has died, and a trainer's update is open."""
    lab = make()
    lab.run(lab.push(7, "seven"))
    lab.kill(1)
    open_update(lab)
    return lab


def deliver_until(lab: ScriptedFleet, rank: int, method: str) -> Script:
    """All but this call, which waits in front of the rank's engine."""

    def waits(engine: Script) -> bool:
        return getattr(engine.inbox[0] if engine.inbox else None, "method", None) == method

    for _ in range(200):
        engine = lab.engines[rank]
        engine.boot()
        if waits(engine):
            return engine
        for each in lab.engines.values():
            if each is engine or not waits(engine):
                each.deliver()
        lab.loop.settle(0.1)
    raise AssertionError(f"engine {rank} was never asked for {method}")


def test_an_engine_that_dies_twice_is_restored_once_for_each_life(make: Make) -> None:
    """The restore of the first life waits for the end of an update, and must not go on with the second life."""
    lab = killed_and_updating(make)
    for _ in range(20):
        lab.turn()  # copied, and waits for the update's end
    assert "finish_weight_update" in lab.engines[1].calls
    assert "restore" not in lab.engines[1].calls
    lab.kill(1)
    lab.run(lab.call("abort_weight_update"))
    lab.heal()
    assert lab.engines[1].calls.count("restore") == 1
    assert lab.serving() == {(1, "seven", 7, False)}


def test_an_engine_that_dies_just_after_its_restore_is_not_taken_for_living(make: Make) -> None:
    lab = make()
    lab.run(lab.push(7, "seven"))
    lab.kill(1)
    engine = deliver_until(lab, 1, "restore")
    lab.loop.call_soon(engine.deliver)
    lab.loop.call_soon(lab.kill_now, 1)
    lab.loop.settle()
    assert lab.fleet.ranks[1].error is not None
    lab.heal()
    assert lab.serving() == {(1, "seven", 7, False)}


def test_a_commit_while_an_engine_is_admitted(make: Make) -> None:
    """The one that is left commits just before it says that no update is open: what was copied is old by then."""
    lab = killed_and_updating(make)
    lab.run(lab.call("update_weights", update_info={"weights": 8}))
    for _ in range(20):
        lab.turn()
    finish = lab.begin(lab.call("finish_weight_update", weight_version="eight"))
    lab.loop.settle(0.2)  # the poll comes before the answer
    lab.heal()
    assert finish.result()["epoch"] == 2
    assert lab.serving() == {(2, "eight", 8, False)}


def test_a_process_that_is_gone_unnoticed_does_not_split_a_commit(make: Make) -> None:
    lab = make(3)
    for dead in range(3):
        pushing = lab.begin(lab.push(7 + dead, f"push {dead}"))
        for rank in range(3):
            deliver_until(lab, rank, "finish_weight_update").deliver()
        lab.kill(dead, noticed=False)
        lab.loop.settle()
        lab.heal()
        assert pushing.result()["epoch"] == dead + 1
        assert lab.serving() == {(dead + 1, f"push {dead}", 7 + dead, False)}


def test_all_engines_die_between_prepare_and_commit(make: Make) -> None:
    lab = make()
    pushing = lab.begin(lab.push(7, "seven"))
    for rank in range(2):
        deliver_until(lab, rank, "finish_weight_update")
    for rank in range(2):
        lab.engines[rank].deliver()
    for rank in range(2):
        lab.kill(rank)
    lab.heal()
    with pytest.raises(EngineError, match="is being restarted"):
        pushing.result()


def test_figures_are_those_of_the_engine_that_states_them(make: Make) -> None:
    lab = make()
    stats, info = lab.begin(lab.fleet.stats(60)), lab.begin(lab.call("weight_info"))
    lab.kill(0)
    lab.heal()
    assert stats.result() == {1: {"rank": 1}}
    assert [each["rank"] for each in info.result()["ranks"]] == [1]


def test_an_update_in_place_that_fails_costs_no_restarts(make: Make) -> None:
    """Nobody has weights to give then: who comes back waits for the next push as the others do."""
    lab = make(restarts=1)
    lab.run(lab.push(7, "seven"))
    lab.run(lab.call("pause", mode="keep"))
    pushing = lab.begin(lab.push(8, "eight", weight_staging="in_place"))
    deliver_until(lab, 1, "finish_weight_update")
    lab.kill(1)
    lab.heal()
    with pytest.raises(EngineError, match="engine 1"):
        pushing.result()
    assert [client.error for client in lab.fleet.ranks] == [None, None]
    assert [engine.valid for engine in lab.engines.values()] == [False, False]
    lab.run(lab.push(9, "nine"))
    lab.run(lab.call("resume"))
    assert lab.serving() == {(2, "nine", 9, False)}


def test_a_source_that_dies_mid_copy_costs_no_restart(make: Make) -> None:
    """The receiver's failure comes before the source's death is known."""
    lab = make(3, restarts=1)
    lab.run(lab.push(7, "seven"))
    lab.kill(2)
    deliver_until(lab, 2, "update_weights")
    (source,) = [e for e in lab.engines.values() if "offer_weights" in e.calls]
    lab.kill(source.rank, noticed=False)
    lab.engines[2].deliver()
    lab.loop.settle(0.3)
    lab.heal()
    assert lab.serving() == {(1, "seven", 7, False)}
    assert [client.error for client in lab.fleet.ranks] == [None] * 3


def test_who_has_the_weights_of_the_last_one_serves_them(make: Make) -> None:
    lab = killed_and_updating(make)
    for _ in range(20):
        lab.turn()
    lab.kill(0)
    deliver_until(lab, 1, "restore").deliver()  # before the other one has loaded
    lab.heal()
    assert lab.serving() == {(1, "seven", 7, False)}
    assert all(client.refusal is None for client in lab.fleet.ranks)


@pytest.mark.parametrize("method", ["pause", "resume"])
def test_a_pause_or_its_end_while_an_engine_is_admitted(make: Make, method: str) -> None:
    lab = make()
    if method == "resume":
        lab.run(lab.call("pause", mode="keep"))
    lab.kill(1)
    deliver_until(lab, 1, "restore")
    call = lab.begin(lab.call(method, mode="keep"))
    lab.engines[0].deliver()
    lab.loop.settle()
    assert call.done()
    lab.heal()
    assert {e.paused for e in lab.engines.values()} == {method == "pause"}
    lab.run(lab.call("resume"))


def test_those_that_leave_take_no_epoch_along(make: Make) -> None:
    """The one that stays comes back when nobody has the weights any more: they are lost, and known by their epoch."""
    lab = make()
    lab.run(lab.push(7, "seven"))
    lab.kill(0)
    scaling = lab.begin(lab.fleet.scale(1, drain_timeout_s=0))
    lab.heal(until=scaling.done)
    lab.heal()
    (left,) = lab.fleet.ranks
    assert (left.state.epoch, left.state.version) == (1, "seven")
    assert left.refusal is not None
    assert lab.run(lab.push(8, "eight"))["epoch"] == 2


def test_what_an_engine_said_before_it_died_is_not_its_successors(make: Make) -> None:
    """Engine 0 dies with a copy of its own epoch 1 in it, paused; then nobody is left to copy from."""
    lab = make()
    lab.kill(0)
    deliver_until(lab, 0, "restore")
    for rank in range(2):
        lab.kill(rank)
    lab.heal()
    assert [(c.state.epoch, c.state.paused) for c in lab.fleet.ranks] == [(0, False)] * 2
    scaling = lab.begin(lab.fleet.scale(3, drain_timeout_s=0))
    lab.heal(until=scaling.done)
    assert len(lab.fleet.living) == 3


@pytest.mark.parametrize("method", ["update_weight_version", "update_weights"])
def test_what_changes_while_an_engine_joins_reaches_it(make: Make, method: str) -> None:
    """The call waits until the engine is admitted, and comes then before anything else."""
    lab = make()
    lab.run(lab.push(7, "seven"))
    scaling = lab.begin(lab.fleet.scale(3, drain_timeout_s=0))
    deliver_until(lab, 2, "restore")
    params = {"new_version": "renamed"} if method == "update_weight_version" else {"weight_dir": "8"}
    change = lab.begin(lab.call(method, **params))
    lab.heal(until=lambda: scaling.done() and change.done())
    assert len({(epoch, label, weights) for epoch, label, weights, _ in lab.serving()}) == 1
    assert len(lab.fleet.living) == 3
    assert lab.fleet.ranks[2].restarts == 0


def test_all_engines_get_one_owner_and_one_update_id(make: Make) -> None:
    """Also of a client that brings none: else their commits could not be told to be of one update."""
    lab = make()
    lab.run(lab.push(7, "seven"))
    lab.run(lab.call("update_weights", weight_dir=8))
    one, other = (lab.engines[rank].ids for rank in range(2))
    assert one == other
    assert all(owner for method, owner, _ in one if method == "init_weight_transfer_engine")
    assert all(update for method, _, update in one if method == "start_weight_update")
    assert one[-1] == ("finish_weight_update", None, one[-2][2])  # the commit of the folder that was prepared
    assert one[-1][2] is not None


def test_what_one_engine_refuses_is_undone_with_the_ids_of_the_call(make: Make) -> None:
    """An undo without them would be a stray call, which an engine refuses, and its update would stay open."""
    lab = make()
    lab.run(lab.call("init_weight_transfer_engine", init_info={"backend": "disk"}, owner="me"))
    lab.run(lab.call("start_weight_update", owner="me", update_id="mine"))
    lab.engines[1].refuses.add("update_weights")
    with pytest.raises(EngineError, match="scripted"):
        lab.run(lab.call("update_weights", update_info={"weights": 7}, owner="me", update_id="mine"))
    assert lab.engines[0].ids[-1] == ("abort_weight_update", "me", "mine")
    assert lab.engines[0].session is None


def test_the_last_engine_to_serve_is_about_to_leave(make: Make) -> None:
    lab = make()
    streams = [lab.fleet.submit(lab.request()), lab.fleet.submit(lab.request(), 1)]
    assert [stream.client.rank for stream in streams] == [0, 1]
    scaling = lab.begin(lab.fleet.scale(1, drain_timeout_s=1e6))
    lab.kill(0)
    assert {stream.client.rank for stream in streams} == {1}
    with pytest.raises(EngineError, match="Engine 1 leaves"):
        lab.fleet.submit(lab.request(), 1)
    for stream in streams:
        stream.__exit__(None, None, None)
    lab.heal(until=scaling.done)
    with pytest.raises(EngineError, match="out of range"):
        lab.fleet.submit(lab.request(), 1)


def test_work_of_a_stream_that_its_engine_left_is_not_counted(make: Make) -> None:
    lab = make()
    stream = lab.fleet.submit(lab.request(max_tokens=9), 1)
    assert lab.fleet.ranks[1].work == 9
    lab.kill(1)
    stream.end_choice(0)
    stream.__exit__(None, None, None)
    assert lab.fleet.ranks[1].work == 0


def test_an_answer_that_is_whole_is_not_begun_again(make: Make) -> None:
    lab = make()
    stream = lab.fleet.submit(lab.request(max_tokens=1))
    rank = stream.client.rank
    lab.engines[rank].deliver()
    lab.engines[rank].generate()
    assert stream.finished
    lab.kill(rank)
    assert stream.restarts == 0
    assert len(lab.loop.run_until_complete(anext(stream))) == 1
    stream.__exit__(None, None, None)


def test_an_engine_that_can_not_be_started_again_says_so(make: Make) -> None:
    lab = make()
    lab.fails_to_start = True
    lab.kill(1)
    lab.heal()
    with pytest.raises(EngineError, match=r"Engine 1 is not running.*no more processes"):
        lab.fleet.submit(lab.request(), 1)


def test_an_old_trainers_failure_leaves_its_successor_alone(make: Make) -> None:
    """Two joins: the first fails on one engine long before the other, when the second trainer's update is open."""
    lab = make()
    first = lab.begin(lab.call("init_weight_transfer_engine", init_info={"backend": "disk"}))
    stuck = [engine.inbox.popleft() for engine in lab.engines.values()]
    open_update(lab)
    engine = lab.engines[0]
    engine.refuses.add("init_weight_transfer_engine")
    engine.inbox.append(stuck[0])
    engine.deliver()
    lab.loop.settle()
    lab.loop.settle(1)
    lab.heal(until=first.done)
    with pytest.raises(EngineError, match="scripted"):
        first.result()
    lab.run(lab.call("update_weights", update_info={"weights": 7}))
    assert lab.run(lab.call("finish_weight_update"))["epoch"] == 1


def test_a_whole_update_in_one_call_can_be_aborted(make: Make) -> None:
    lab = make()
    update = lab.begin(lab.call("update_weights", weight_dir=7))
    abort = lab.begin(lab.call("abort_weight_update"))
    assert [[call.method for call in engine.inbox] for engine in lab.engines.values()] == [
        ["update_weights", "abort_weight_update"]
    ] * 2
    lab.heal()
    assert abort.done()
    with pytest.raises(EngineError):
        update.result()
    assert lab.serving() == {(0, "default", 0, False)}


def test_weights_that_nobody_takes_are_gathered_to_the_end() -> None:
    """Else the followers of a sharded source would wait for the leader, and die of it."""
    over = threading.Event()

    class Store(WeightStore):
        def gather(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
            yield from super().gather(tensors)
            over.set()

    offer_weights(Store(ModelParameters(tiny_models.model("llama", 0))), 0.2, 2, "127.0.0.1")
    assert over.wait(30)
