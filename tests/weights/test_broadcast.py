"""Updates over gloo from a trainer that is plain torch.distributed, as the protocol words it."""

from __future__ import annotations

import base64
import ctypes
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rollout.weights.bodies import InitInfo
from rollout.weights.errors import WeightUpdateError
from rollout.weights.transport.broadcast import _unique_id, unpickled_bytes
from tests.support.wait import eventually
from tests.support.weight_updates import UpdaterServer, llama, same_weights, update_info


class PlainTrainer:
    """The trainer's side in torch alone: rank 0 of a hand-made gloo group."""

    def __init__(self, server, *, timeout_s=10.0, **init_info):
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", 0, 2, True, timeout, wait_for_workers=False)
        self.answer = server.updater.call(
            "init_weight_transfer_engine",
            {
                "init_info": {
                    "backend": "gloo",
                    "master_address": "127.0.0.1",
                    "master_port": store.port,
                    "world_size": 2,
                    "timeout_s": timeout_s,
                    **init_info,
                }
            },
        )
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("rollout", store), 0, 2, timeout)
        self.answer.result(timeout_s)

    def broadcast(self, tensor):
        self.group.broadcast(tensor.detach().contiguous(), 0).wait()


def packed(tensors, limit):
    """The buffers, by the protocol's own words: grow until the size exceeds the limit, then send."""
    buffers, now = [], torch.empty(0, dtype=torch.uint8)
    for tensor in tensors:
        now = torch.cat([now, tensor.detach().contiguous().view(-1).view(torch.uint8)])
        if now.numel() > limit:
            buffers.append(now)
            now = torch.empty(0, dtype=torch.uint8)
    return [*buffers, now] if now.numel() else buffers


@pytest.fixture
def server():
    with UpdaterServer(llama(0), timeout_s=10.0) as running:
        yield running


def update(server, info, broadcasts, **body):
    answer = server.updater.call("update_weights", {"update_info": info, **body})
    for send in broadcasts:
        send()
    return answer.result(20)


@pytest.mark.parametrize("limit", [1, 5000, 40_000, 1 << 30])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_packed_buffers_of_any_size(server, limit, wire):
    trained = llama(1, dtype=wire)
    tensors = {n: p.detach() for n, p in trained.named_parameters()}
    trainer = PlainTrainer(server, packed=True, packed_buffer_size_bytes=limit)
    server.call("start_weight_update", is_checkpoint_format=True)
    sends = [lambda b=b: trainer.broadcast(b) for b in packed(tensors.values(), limit)]
    update(server, update_info(tensors), sends)
    assert server.call("weight_info")["state"] == "receiving"
    assert not server.commits
    server.call("finish_weight_update", weight_version="v8")
    assert same_weights(server.model, trained.to(torch.float32))
    info = server.call("weight_info")
    assert (info["weight_version"], info["epoch"], info["state"]) == ("v8", 1, "committed")
    assert info["bytes"] == sum(t.nbytes for t in tensors.values())


def test_a_packed_buffer_of_mixed_dtypes_at_odd_offsets():
    with UpdaterServer(llama(0, vocab_size=97, hidden_size=33, num_attention_heads=3, num_key_value_heads=3)) as server:
        trained = llama(1, vocab_size=97, hidden_size=33, num_attention_heads=3, num_key_value_heads=3)
        tensors = {
            n: p.to(torch.bfloat16 if i % 2 == 0 else torch.float32)
            for i, (n, p) in enumerate(trained.named_parameters())
        }
        assert any(t.nbytes % 4 for t in tensors.values())
        trainer = PlainTrainer(server, packed=True)
        server.call("start_weight_update")
        update(server, update_info(tensors), [lambda: trainer.broadcast(packed(tensors.values(), 1 << 30)[0])])
        server.call("finish_weight_update")
        assert all(torch.equal(p, tensors[n].float()) for n, p in server.model.named_parameters())


def test_one_broadcast_a_parameter_in_two_calls_then_the_names_again(server):
    trainer = PlainTrainer(server, packed=True)  # update_info's packed wins
    trained = llama(1)
    tensors = dict(trained.named_parameters())
    server.call("start_weight_update")
    half = len(tensors) // 2
    for part in (dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])):
        update(server, update_info(part) | {"packed": False}, [lambda t=t: trainer.broadcast(t) for t in part.values()])
    server.call("finish_weight_update")
    assert same_weights(server.model, trained)

    again = llama(2)
    for empty in (False, True):
        server.call("start_weight_update")
        info = {"names": [], "dtype_names": [], "shapes": []} if empty else update_info(dict(again.named_parameters()))
        sends = [lambda p=p: trainer.broadcast(p) for p in again.parameters()]
        update(server, info | {"packed": False}, sends)
        server.call("finish_weight_update")
        assert same_weights(server.model, again)
        again = llama(3) if not empty else again


def test_a_refused_update_does_not_join_and_its_group_is_not_used_again(server):
    trainer = PlainTrainer(server)
    server.call("start_weight_update")
    bad = {"names": ["nope"], "dtype_names": ["float32"], "shapes": [[4]]}
    with pytest.raises(WeightUpdateError, match="nope: the model has no such parameter") as caught:
        server.call("update_weights", update_info=bad)
    assert caught.value.status == 400
    # A broadcast that was on its way ends, instead of being taken for the next update's values.
    with pytest.raises(RuntimeError):
        trainer.broadcast(torch.zeros(1 << 24))
    with pytest.raises(WeightUpdateError, match=r"init_weight_transfer_engine again") as caught:
        server.call("start_weight_update")
    assert caught.value.status == 409
    assert same_weights(server.model, llama(0))


def test_an_update_without_start_costs_the_group_since_its_broadcasts_may_be_on_their_way(server):
    """A small one fits into the sockets: it would be taken for the next update's first tensor."""
    trainer = PlainTrainer(server)
    trained = llama(1)
    pending = trainer.group.broadcast(torch.full((96, 32), 7.0), 0)
    with pytest.raises(WeightUpdateError, match="state idle: call start_weight_update first"):
        server.call("update_weights", update_info=update_info(dict(trained.named_parameters())))
    with pytest.raises(WeightUpdateError, match=r"came in state idle.*init_weight_transfer_engine again"):
        server.call("start_weight_update")
    del pending
    again = PlainTrainer(server)
    server.call("start_weight_update")
    sends = [lambda p=p: again.broadcast(p) for p in trained.parameters()]
    update(server, update_info(dict(trained.named_parameters())), sends)
    server.call("finish_weight_update")
    assert same_weights(server.model, trained)


def test_a_malformed_update_ends_the_session_too(server):
    PlainTrainer(server)
    server.call("start_weight_update")
    with pytest.raises(WeightUpdateError, match="names"):
        server.call("update_weights", update_info={"names": "all of them"})
    assert server.call("weight_info")["state"] == "aborted"


def test_a_stalled_trainer_is_given_up_and_the_next_one_served(server):
    trainer = PlainTrainer(server, timeout_s=1.0)
    trained = llama(1)
    tensors = dict(trained.named_parameters())
    server.call("start_weight_update")
    with pytest.raises(WeightUpdateError, match="broadcast") as caught:
        update(server, update_info(tensors), [lambda: trainer.broadcast(next(iter(tensors.values())))])
    assert caught.value.status == 503
    assert same_weights(server.model, llama(0))
    successor = PlainTrainer(server)
    server.call("start_weight_update")
    update(server, update_info(tensors), [lambda t=t: successor.broadcast(t) for t in tensors.values()])
    server.call("finish_weight_update")
    assert same_weights(server.model, trained)


def test_a_trainer_that_falls_silent_between_calls_times_out(server):
    PlainTrainer(server, timeout_s=0.4)
    server.call("start_weight_update")
    for _ in range(200):
        info = server.call("weight_info")
        if info["state"] != "open":
            break
        threading.Event().wait(0.02)
    assert info["state"] == "aborted"
    assert "no call of the trainer for 0.4 s (open)" in info["last_error"]
    server.call("start_weight_update")  # nothing was in flight: the group is as good as before


def test_a_zombie_never_writes_into_the_next_updates_staging(server):
    """The first trainer's update is taken over while its receive is blocked; then its values arrive after all."""
    first = PlainTrainer(server, timeout_s=20.0)
    tensors = {n: torch.full_like(p, 7.0) for n, p in server.model.named_parameters()}
    server.call("start_weight_update")
    stuck = server.updater.call("update_weights", {"update_info": update_info(tensors)})
    values = list(tensors.values())
    first.broadcast(values[0])
    eventually(lambda: server.call("weight_info")["bytes"] > 0)
    with pytest.raises(WeightUpdateError, match='"force": true'):
        server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
    second = PlainTrainer(server, force=True)
    with pytest.raises(WeightUpdateError, match="took over"):
        stuck.result(5)
    trained = llama(1)
    server.call("start_weight_update")
    pending = server.updater.call("update_weights", {"update_info": update_info(dict(trained.named_parameters()))})
    parameters = list(trained.parameters())
    for parameter in parameters[:-1]:
        second.broadcast(parameter)
    first.broadcast(values[1])  # the zombie's receive completes now, between the second's broadcasts
    second.broadcast(parameters[-1])
    pending.result(10)
    server.call("finish_weight_update")
    assert same_weights(server.model, trained)


def test_an_update_without_progress_is_taken_over_without_force():
    with UpdaterServer(llama(0), timeout_s=20.0, progress_s=0.1) as server:
        PlainTrainer(server)
        server.call("start_weight_update")
        threading.Event().wait(0.2)
        PlainTrainer(server)
        assert server.call("weight_info")["state"] == "aborted"
        assert "took over" in server.call("weight_info")["last_error"]


def test_nobody_at_the_rendezvous_is_a_503_within_the_timeout(server):
    closed = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=1), wait_for_workers=False)
    port = closed.port
    del closed
    info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": port, "timeout_s": 1.0}
    with pytest.raises(WeightUpdateError, match=f"127.0.0.1:{port}") as caught:
        server.call("init_weight_transfer_engine", init_info=info)
    assert caught.value.status == 503
    with pytest.raises(WeightUpdateError, match="init_weight_transfer_engine first") as caught:
        server.call("start_weight_update")
    assert caught.value.status == 400


def test_a_rendezvous_that_never_speaks_is_a_503_and_the_next_trainer_is_served(server):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and says nothing
        info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": listener.getsockname()[1]}
        with pytest.raises(WeightUpdateError, match="no trainer's store answered") as caught:
            server.call("init_weight_transfer_engine", init_info={**info, "timeout_s": 0.5})
        assert caught.value.status == 503
        PlainTrainer(server)
        assert server.call("start_weight_update")["epoch"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("world_size", 2**40), ("rank_offset", 0), ("packed_buffer_size_bytes", -1), ("timeout_s", 1e308)],
)
def test_numbers_that_no_group_can_have_are_refused_by_name(server, field, value):
    info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": 1, field: value}
    with pytest.raises(WeightUpdateError, match=field) as caught:
        server.call("init_weight_transfer_engine", init_info=info)
    assert caught.value.status == 400


def test_a_label_of_a_megabyte_is_refused(server):
    with pytest.raises(WeightUpdateError, match="new_version") as caught:
        server.call("update_weight_version", new_version="x" * 2**20)
    assert caught.value.status == 400


def test_two_updates_of_two_trainers_at_once_are_one_winner(server):
    """Whoever joins last owns the transfer; the other is told, and no update mixes the two."""
    models = {seed: llama(seed) for seed in (0, 1, 2)}
    with ThreadPoolExecutor(2) as pool:

        def push(seed):
            trained = models[seed]
            try:
                trainer = PlainTrainer(server, timeout_s=3.0)
                server.call("start_weight_update")
                sends = [lambda p=p: trainer.broadcast(p) for p in trained.parameters()]
                update(server, update_info(dict(trained.named_parameters())), sends)
                server.call("finish_weight_update", weight_version=f"seed-{seed}")
            except (WeightUpdateError, RuntimeError):
                return False
            return True

        list(pool.map(push, (1, 2)))
    label = server.store.label
    assert same_weights(server.model, models[0 if label == "default" else int(label.removeprefix("seed-"))])


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_unique_id_is_read_from_its_pickle_without_unpickling(protocol):
    class UniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_byte * 128),)

    UniqueId.__qualname__ = "UniqueId"
    globals()["UniqueId"] = UniqueId
    raw = bytes(range(128))
    if protocol >= 3:  # protocol 2 spells bytes as text
        assert unpickled_bytes(pickle.dumps(UniqueId.from_buffer_copy(raw), protocol)) == raw

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    with pytest.raises(ValueError, match="128-byte string"):
        unpickled_bytes(pickle.dumps(Bomb(), protocol))


def test_the_unique_id_comes_from_the_store_or_from_base64():
    raw = bytes(range(128))
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=5), wait_for_workers=False)
    store.set("broadcast_from/0/0", pickle.dumps(raw))
    assert _unique_id(InitInfo(master_address="127.0.0.1", master_port=store.port), 5.0) == raw
    assert _unique_id(InitInfo(nccl_unique_id_b64=base64.b64encode(raw).decode()), 5.0) == raw
    with pytest.raises(WeightUpdateError, match="holds 3 bytes"):
        _unique_id(InitInfo(nccl_unique_id_b64="YWJj"), 5.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backend": "nccl"}, "needs a CUDA engine"),
        ({"backend": "carrier-pigeon"}, "init_info.backend"),
        ({"master_address": None}, "master_address"),
        ({"master_port": 70_000}, "master_port"),
        ({"rank_offset": 2}, "rank_offset"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes"),
        ({"world_size": "two"}, "init_info.world_size"),
    ],
)
def test_bad_init_info_is_a_400_that_names_the_field(server, change, named):
    good = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": 1234, "world_size": 2}
    with pytest.raises(WeightUpdateError, match=named) as caught:
        server.call("init_weight_transfer_engine", init_info=good | change)
    assert caught.value.status == 400
