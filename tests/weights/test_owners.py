"""Whose update is it? Late, stray and lost calls of several trainers: none of another's has an effect."""

from __future__ import annotations

import socket
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rollout.model.parameters import ModelParameters, ParameterSet
from rollout.weights.bodies import InitBody, InitInfo
from rollout.weights.errors import WeightUpdateError
from rollout.weights.ownership import Ownership
from rollout.weights.receiver import MOST_RECEIVERS
from rollout.weights.store import WeightStore
from rollout.weights.updater import WeightUpdater
from tests.support.update_machine import Wire
from tests.support.wait import eventually
from tests.support.weight_updates import UpdaterServer, llama, same_weights, saved_tensors, update_info
from trainer_bridge.push.control import DisplacedError, RefusedError, WeightPushError
from trainer_bridge.push.sender import WeightSender
from trainer_bridge.push.transaction import Load


@pytest.fixture
def server():
    with UpdaterServer(llama(0)) as running:
        yield running


class HandPush:
    """A sender's push in single steps."""

    def __init__(self, server: UpdaterServer, seed: int, **options: Any) -> None:
        self.model = llama(seed)
        self.sender = WeightSender.connect(server.url, self.model, timeout_s=20, **options)
        self.group = self.sender._servers

    def start(self) -> None:
        self.group.start({}, None)

    def send(self) -> None:
        assert self.sender._source is not None
        self.group.send(Load(self.sender._source.infos(), self.sender._source.tensors()))

    def finish(self, label: str) -> Any:
        return self.group.finish(label, None)


def refused(server: UpdaterServer, method: str, **params: Any) -> str:
    with pytest.raises(WeightUpdateError) as caught:
        server.call(method, **params)
    assert caught.value.status == 409
    return caught.value.message


def test_a_late_finish_of_a_trainer_that_was_taken_over_commits_nothing(server):
    stalled = HandPush(server, 1)
    stalled.start()
    stalled.send()
    successor = HandPush(server, 2, force=True)
    successor.start()
    successor.send()
    with pytest.raises(DisplacedError, match=r"another trainer took over .*at \d{4}-.* s ago"):
        stalled.finish("the stalled one's")
    assert server.commits == []
    assert successor.finish("the successor's")[0].epoch == 1
    assert same_weights(server.model, llama(2))
    assert server.store.label == "the successor's"
    for pushing in (stalled, successor):
        pushing.sender.close()


@pytest.mark.parametrize("method", ["finish_weight_update", "abort_weight_update", "shutdown_weight_transfer_engine"])
def test_a_stray_call_has_no_effect(server, method):
    push = HandPush(server, 1)
    push.start()
    push.send()
    body = {"weight_version": "evil"} if method == "finish_weight_update" else {}
    assert "without an owner token" in refused(server, method, **body)
    assert "took over" in refused(server, method, **body, owner="somebody")
    assert push.finish("v1")[0].epoch == 1
    assert (server.store.label, len(server.commits)) == ("v1", 1)
    assert same_weights(server.model, llama(1))
    push.sender.close()


def test_a_stray_update_spends_nobodys_group(server):
    with WeightSender.connect(server.url, llama(1), timeout_s=20) as sender:
        refused(server, "update_weights", update_info={"names": []})
        assert sender.push("v1").epoch == 1
        joined = [method for method, _ in server.bodies].count("init_weight_transfer_engine")
        assert joined == 1


def test_a_call_of_an_earlier_update_of_the_same_trainer_is_refused(server):
    push = HandPush(server, 1)
    push.start()
    late = dict(push.group.servers[0]._ids)
    push.group.abort_quietly()
    push.start()
    push.send()
    assert "the update that is open is" in refused(server, "finish_weight_update", **late)
    assert push.finish("second")[0].version == "second"
    push.sender.close()


def test_of_two_senders_the_displaced_one_is_told_and_takes_nothing_back(server):
    first = WeightSender.connect(server.url, llama(1), timeout_s=20)
    second = WeightSender.connect(server.url, llama(2), timeout_s=20)
    for step in range(2):
        with pytest.raises(DisplacedError, match="took over"):
            first.push(f"first {step}")
        assert second.push(f"second {step}").epoch == step + 1
        assert same_weights(server.model, llama(2))
    with WeightSender.connect(server.url, llama(1), timeout_s=20) as again:  # when it is asked to
        assert again.push("again").epoch == 3
    with pytest.raises(DisplacedError):
        second.push()
    first.close()
    second.close()


def test_a_sender_that_is_taken_over_while_it_broadcasts_is_told_so(server):
    stalled = HandPush(server, 1, packed=False)
    stalled.start()
    stop = threading.Event()

    def tensors():
        source = list(stalled.sender._source.tensors())
        yield source[0]
        stop.wait(30)
        yield from source[1:]

    outcome: Future[None] = Future()

    def send() -> None:
        try:
            stalled.group.send(Load(stalled.sender._source.infos(), tensors()))
        except WeightPushError as error:
            outcome.set_exception(error)

    sending = threading.Thread(target=send)
    sending.start()
    eventually(lambda: server.call("weight_info")["state"] == "receiving")
    with WeightSender.connect(server.url, llama(2), timeout_s=20, force=True) as successor:
        stop.set()
        with pytest.raises(DisplacedError):
            outcome.result(30)
        sending.join(30)
        assert successor.push("successor").epoch == 1
    assert same_weights(server.model, llama(2))
    stalled.sender.close()


def commits_after_finish(server: UpdaterServer, folder: Path) -> None:
    """Somebody's folder is committed after the next finish, before its answer is on its way."""
    call = server.updater.call

    def calling(method, params):
        answer = call(method, params)
        if method == "finish_weight_update":
            answer.result(20)
            server.updater.call = call
            call("update_weights", {"weight_dir": str(folder)}).result(20)
        return answer

    server.updater.call = calling


def test_a_sparse_push_after_somebody_elses_commit_is_a_whole_one(server, tmp_path):
    saved_tensors(llama(5), tmp_path)
    trained = llama(1)
    with WeightSender.connect(server.url, trained, timeout_s=20) as sender:
        commits_after_finish(server, tmp_path)
        assert sender.push("v1", sparse=True).epoch == 1
        assert server.store.epoch == 2
        trained.model.norm.weight.data[0] = 3.0
        result = sender.push("v2", sparse=True)
        assert (result.epoch, result.bytes_saved) == (3, 0)
    assert same_weights(server.model, trained)


def test_a_lost_answer_to_a_commit_before_somebody_elses_is_still_a_success(server, tmp_path):
    saved_tensors(llama(5), tmp_path)
    with WeightSender.connect(server.url, llama(1), timeout_s=20) as sender:
        server.lose_answer_of = "finish_weight_update"
        commits_after_finish(server, tmp_path)
        pushed = sender.push("v1")
    assert (pushed.version, pushed.epoch) == ("v1", 1)
    assert (server.store.epoch, [commit.label for commit in server.commits]) == (2, ["v1", "v1"])


def test_a_lost_answer_is_no_success_where_somebody_else_has_committed(server, tmp_path):
    saved_tensors(llama(5), tmp_path)
    call = server.updater.call

    def calling(method, params):
        if method == "finish_weight_update":  # it does not arrive: the update is dropped, and another one committed
            server.updater.call = call
            ids = {key: params[key] for key in ("owner", "update_id") if key in params}
            call("abort_weight_update", ids).result(20)
            call("update_weights", {"weight_dir": str(tmp_path)}).result(20)
        return call(method, params)

    with WeightSender.connect(server.url, llama(1), timeout_s=20) as sender:
        server.updater.call = calling
        server.lose_answer_of = "finish_weight_update"
        with pytest.raises(WeightPushError, match="finish_weight_update got no answer"):
            sender.push("ours")
    assert server.store.epoch == 1
    assert same_weights(server.model, llama(5))


def test_a_trainer_that_died_may_come_back_at_once(server):
    """Its update counts as alive for 10 s more, but its store has closed the connection."""
    died = HandPush(server, 1)
    died.start()
    died.group.leave()
    eventually(lambda: server.call("weight_info")["takeover_s"] == 0)
    with WeightSender.connect(server.url, llama(2), timeout_s=20) as back:
        assert back.push("back").epoch == 1
    died.sender.close()


def test_connect_waits_while_a_trainer_that_hangs_counts_as_alive():
    with UpdaterServer(llama(0), progress_s=1.0) as server:
        hanging = HandPush(server, 1)
        hanging.start()
        assert server.call("weight_info")["takeover_s"] > 0
        with WeightSender.connect(server.url, llama(2), timeout_s=20) as successor:
            assert successor.push("successor").epoch == 1
        hanging.sender.close()


def test_a_client_without_tokens_is_told_from_one_that_has_taken_over_with_them(server):
    server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
    server.call("start_weight_update")
    with WeightSender.connect(server.url, llama(1), timeout_s=20, force=True) as sender:
        for method in ("start_weight_update", "update_weights", "finish_weight_update", "abort_weight_update"):
            assert "without an owner token" in refused(server, method, update_info={"path": "/nowhere"}) or method == (
                "abort_weight_update"  # there is no update to abort
            )
        assert sender.push("v1").epoch == 1
    answer = server.call("init_weight_transfer_engine", init_info={"backend": "disk"})  # it takes over by its join
    assert server.call("start_weight_update")["update_id"]
    with pytest.raises(WeightUpdateError, match="took over"):
        server.call("abort_weight_update", owner="another", update_id="x")
    assert server.call("abort_weight_update", owner=answer["owner"])


def test_an_owner_token_is_handed_out_and_may_be_used(server, tmp_path):
    saved_tensors(llama(1), tmp_path)
    ids = {"owner": server.call("init_weight_transfer_engine", init_info={"backend": "disk"})["owner"]}
    ids["update_id"] = server.call("start_weight_update", **ids)["update_id"]
    server.call("update_weights", update_info={"path": str(tmp_path)}, **ids)
    committed = server.call("finish_weight_update", **ids)
    assert committed["update_id"] == ids["update_id"]
    assert server.call("weight_info")["committed_updates"] == {ids["update_id"]: 1}


@pytest.mark.parametrize(
    ("info", "where"),
    [({"backend": "disk"}, "by files"), ({"master_address": "10.0.0.7", "master_port": 5000}, "at 10.0.0.7:5000")],
)
def test_a_displaced_trainer_is_told_where_its_successor_is(info, where):
    ownership = Ownership()
    ownership.hand_to(InitBody(init_info=InitInfo(**info), owner="successor"))
    with pytest.raises(WeightUpdateError, match=rf"took over the weight transfer \({where}, at 20\d\d-"):
        ownership.check("finish_weight_update", "displaced")


def test_a_timeout_that_a_trainer_asks_for_has_a_cap(server):
    for timeout_s in (3601, 0, -1.5):
        with pytest.raises(WeightUpdateError, match=f"at most 3600, got {timeout_s}"):
            server.call("init_weight_transfer_engine", init_info={"backend": "disk", "timeout_s": timeout_s})
    server.call("init_weight_transfer_engine", init_info={"backend": "disk", "timeout_s": 3600})


def test_a_join_has_the_time_of_both_its_handshakes(server, monkeypatch):
    """The store's and the group's; each may take as long as the trainer said."""
    seconds = []

    class Timer(threading.Timer):
        def __init__(self, interval, *arguments):
            super().__init__(interval, *arguments)
            seconds.append(interval)

    monkeypatch.setattr(threading, "Timer", Timer)
    server.call("init_weight_transfer_engine", init_info={"backend": "disk", "timeout_s": 70})
    assert 140 <= seconds[0] < 150


def test_joins_that_never_end_hold_a_bounded_number_of_threads(server):
    def threads() -> int:
        return sum(thread.name.startswith("weights-") for thread in threading.enumerate())

    with socket.create_server(("127.0.0.1", 0)) as silent:
        info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": silent.getsockname()[1]}
        before = threads()
        answers = [
            server.updater.call("init_weight_transfer_engine", {"init_info": info | {"timeout_s": 1}})
            for _ in range(3 * MOST_RECEIVERS)
        ]
        assert threads() - before <= MOST_RECEIVERS
        with pytest.raises(WeightUpdateError, match="have not ended yet") as caught:
            answers[-1].result(10)
        assert caught.value.status == 503
    eventually(lambda: threads() <= before, 60)  # a process that ends while they connect is aborted


def test_trainers_that_are_taken_over_in_a_receive_hold_one_set_of_weights_at_most(monkeypatch):
    """Beside the one that serves and the one for the next update, counted by their buffers."""
    made: list[weakref.ref[ParameterSet]] = []
    new_set = ModelParameters.new_set

    def counting(parameters: ModelParameters, **options: Any) -> ParameterSet:
        fresh = new_set(parameters, **options)
        made.append(weakref.ref(fresh))
        return fresh

    monkeypatch.setattr(ModelParameters, "new_set", counting)
    tensors = {name: p.detach() for name, p in llama(1).named_parameters()}
    served = llama(0)
    updater = WeightUpdater(WeightStore(ModelParameters(served)), timeout_s=30)

    def call(method: str, **params: Any) -> dict[str, Any]:
        answer = updater.call(method, params)
        eventually(lambda: updater.commit_if_ready() is not None or answer.done())
        return answer.result(10)

    def stalled() -> Wire:
        wire = join()
        wire.pieces, wire.stalls_at = list(tensors.values()), 3
        call("start_weight_update")
        updater.call("update_weights", {"update_info": update_info(tensors)})
        assert wire.stalled.wait(10)
        return wire

    def join() -> Wire:
        wire = Wire()
        wire.timeout_s = 30.0
        monkeypatch.setattr(updater._trainer, "transport_for", lambda info: wire)
        call("init_weight_transfer_engine", init_info={"force": True})
        return wire

    abandoned = [stalled() for _ in range(2)]
    for _ in range(3):
        join()
        with pytest.raises(WeightUpdateError, match="2 sets of weights are held") as caught:
            call("start_weight_update")
        assert caught.value.status == 503
    assert len([ref for ref in made if ref() is not None]) == 2
    for wire in abandoned:
        wire.go.set()
    eventually(lambda: not updater._store._lent)
    wire = join()
    wire.pieces = list(tensors.values())
    call("start_weight_update")
    call("update_weights", update_info=update_info(tensors))
    assert call("finish_weight_update")["epoch"] == 1
    assert same_weights(served, llama(1))
    assert len(made) == 2
    updater.close()


def test_a_takeover_tells_the_one_that_it_took_over_from(server):
    push = HandPush(server, 1)
    push.start()
    with WeightSender.connect(server.url, llama(2), timeout_s=20, force=True):
        assert "another trainer took over" in server.call("weight_info")["last_error"]
    with pytest.raises(RefusedError):
        push.send()
    push.sender.close()
