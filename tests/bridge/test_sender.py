"""WeightSender against a live updater over HTTP and gloo: contents, refusals, and faults with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.support.wait import eventually
from tests.support.weight_updates import MOE, UpdaterServer, llama, same_weights, saved_tensors
from trainer_bridge.client import RolloutClient
from trainer_bridge.push import control, transaction
from trainer_bridge.push.control import DisplacedError, WeightPushError
from trainer_bridge.push.group import TrainerGroup
from trainer_bridge.push.sender import WeightSender
from trainer_bridge.push.sources import ModuleSource, StateDictSource


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_every_push_is_what_the_server_then_holds(packed, tied, monkeypatch):
    monkeypatch.setattr(transaction, "PACKED_BUFFER_BYTES", 20_000)
    with UpdaterServer(llama(0, tied=tied)) as server:
        trained = llama(1, tied=tied)
        with WeightSender.connect(server.url, trained, packed=packed, timeout_s=20) as sender:
            for step in range(3):
                with torch.no_grad():
                    for parameter in trained.parameters():
                        parameter.add_(0.01)
                result = sender.push(f"step-{step}", kv_policy="recompute")
                assert same_weights(server.model, trained)
                assert (result.version, result.epoch) == (f"step-{step}", step + 1)
                assert result.bytes == sum(p.nbytes for p in trained.parameters())
                assert result.seconds > 0
            assert sender.push().version == "step-2"
        assert [c.kv_policy for c in server.commits] == ["recompute"] * 3 + [None]


@pytest.mark.parametrize(("trained_in", "served_in"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_dtypes_are_cast_by_the_server(trained_in, served_in):
    served, trained = llama(0, dtype=getattr(torch, served_in)), llama(1, dtype=getattr(torch, trained_in))
    with UpdaterServer(served) as server, WeightSender.connect(server.url, trained, timeout_s=20) as sender:
        sender.push()
        assert same_weights(served, trained.to(getattr(torch, served_in)))


@pytest.mark.parametrize("build", MOE.values(), ids=MOE)
def test_a_moe_under_either_kind_of_name(build, tmp_path):
    trained = build(1)
    sums = []
    for source in (trained, saved_tensors(trained, tmp_path)):
        with UpdaterServer(build(0)) as server, WeightSender.connect(server.url, source, timeout_s=20) as sender:
            sender.push()
            assert same_weights(server.model, trained)
            sums.append(server.call("weight_checker", action="checksum")["checksums"])
    assert sums[0] == sums[1]


def test_a_client_lends_its_address_and_a_default_group_is_left_alone(server, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        trained = llama(1)
        client = RolloutClient(server.url, api_key="key")
        with WeightSender.connect(client, trained, timeout_s=20) as sender:
            dist.all_reduce(torch.ones(1))
            sender.push("v1")
            dist.all_reduce(torch.ones(1))
        assert same_weights(server.model, trained)
    finally:
        dist.destroy_process_group()


def test_sources_skip_ties_and_wrapper_names():
    model = llama(1, tied=True)
    names = [i.name for i in ModuleSource(model).infos()]
    assert names == [n for n, _ in model.named_parameters()]
    assert "lm_head.weight" not in names
    compiled = torch.nn.Module()
    compiled.add_module("_orig_mod", model)  # what torch.compile makes of it
    assert [i.name for i in ModuleSource(compiled).infos()] == names
    buffered = torch.nn.BatchNorm1d(2)
    assert [i.name for i in ModuleSource(buffered).infos()] == ["weight", "bias", "running_mean", "running_var"]
    with pytest.raises(ValueError, match="at least one floating tensor"):
        StateDictSource({"steps": torch.zeros(1, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda t: t | {"nope": torch.zeros(3)}, "nope: the model has no such parameter"),
        (lambda t: {n: x for n, x in t.items() if n != "model.norm.weight"}, "model.norm.weight"),
        (lambda t: t | {"model.norm.weight": torch.zeros(31)}, "model.norm.weight: shape [31]"),
        (lambda t: t | {"model.norm.weight": torch.full((32,), float("nan"))}, "model.norm.weight"),
    ],
)
def test_a_refused_push_says_why_and_the_next_one_works(server, spoil, named):
    good = {n: p.detach() for n, p in llama(1).named_parameters()}
    tensors = dict(spoil(good))
    sender = WeightSender.connect(server.url, tensors, timeout_s=20)
    with pytest.raises(WeightPushError) as caught:
        sender.push("bad")
    assert named in str(caught.value)
    assert same_weights(server.model, llama(0))
    assert server.call("weight_info")["weight_version"] == "default"
    sender._source = StateDictSource(good)
    assert sender.push("good").epoch == 1
    assert same_weights(server.model, llama(1))
    sender.close()


def test_a_refusal_ends_a_broadcast_that_is_too_big_for_the_sockets(server):
    """The server refuses before it joins; the sender is then blocked in a send that nobody takes."""
    tensors = {n: p.detach() for n, p in llama(1).named_parameters()} | {"huge": torch.zeros(1 << 25)}
    sender = WeightSender.connect(server.url, tensors, timeout_s=60)
    with pytest.raises(WeightPushError, match="huge: the model has no such parameter"):
        sender.push()
    sender.close()


def test_a_subset_is_pushed_as_partial(server):
    some = {"model.norm.weight": torch.full((32,), 3.0)}
    with WeightSender.connect(server.url, some, timeout_s=20) as sender:
        with pytest.raises(WeightPushError, match="partial"):
            sender.push()
        sender.push(partial=True)
    expected = llama(0)
    expected.model.norm.weight.data.fill_(3.0)
    assert same_weights(server.model, expected)


def test_a_lost_answer_to_finish_is_looked_up_not_repeated(server):
    trained = llama(1)
    with WeightSender.connect(server.url, trained, timeout_s=20) as sender:
        server.lose_answer_of = "finish_weight_update"
        result = sender.push("v1")
    assert (result.version, result.epoch) == ("v1", 1)
    assert len(server.commits) == 1
    assert [m for m, _ in server.bodies].count("finish_weight_update") == 1


def test_a_lost_answer_to_update_fails_the_push_and_frees_the_server(server):
    trained = llama(1)
    with WeightSender.connect(server.url, trained, timeout_s=20) as sender:
        server.lose_answer_of = "update_weights"
        with pytest.raises(WeightPushError, match="/update_weights got no answer"):
            sender.push("v1")
        assert server.call("weight_info")["state"] == "aborted"
        assert sender.push("v2").epoch == 1
    assert same_weights(server.model, trained)


def test_nobody_at_the_address():
    with pytest.raises(WeightPushError, match="/weight_info got no answer"):
        WeightSender.connect("http://127.0.0.1:9", llama(1), timeout_s=2)


def test_a_second_trainer_needs_force_while_the_first_is_at_work(server, monkeypatch):
    monkeypatch.setattr(control, "TURN_S", 0.0)
    first = WeightSender.connect(server.url, llama(1), timeout_s=20)
    first._servers.start({}, None)
    with pytest.raises(WeightPushError, match='"force": true'):
        WeightSender.connect(server.url, llama(2), timeout_s=20)
    with WeightSender.connect(server.url, llama(2), timeout_s=20, force=True) as second:
        second.push("second")
    assert same_weights(server.model, llama(2))
    with pytest.raises(DisplacedError):
        first.push("first")
    first.close()
    with WeightSender.connect(server.url, llama(1), timeout_s=20) as again:
        assert again.push("first, by a fresh group").epoch == 2


def test_an_error_of_the_trainers_own_source_frees_the_server(server):
    class Breaking(StateDictSource):
        def tensors(self):
            yield from list(super().tensors())[:3]
            raise ArithmeticError("the optimizer is on fire")

    sender = WeightSender.connect(
        server.url, Breaking({n: p.detach() for n, p in llama(1).named_parameters()}), packed=False, timeout_s=2
    )
    with pytest.raises(WeightPushError, match="the optimizer is on fire"):
        sender.push()
    eventually(lambda: server.call("weight_info")["state"] == "aborted")
    sender.close()
    assert same_weights(server.model, llama(0))


# The trainers of their own process import no transformers, which takes seconds: they send a file of tensors.
KILLED_TRAINER = """
    import sys
    from safetensors.torch import load_file
    from trainer_bridge.push.sender import WeightSender
    from trainer_bridge.push.sources import StateDictSource

    url, file, dying, packed = sys.argv[1:]

    class Dying(StateDictSource):
        def tensors(self):
            for i, tensor in enumerate(super().tensors()):
                if i == int(dying):
                    print("dying", flush=True)
                    sys.stdin.readline()
                yield tensor

    WeightSender.connect(url, Dying(load_file(file)), packed=packed == "packed", timeout_s=20).push("half")
"""


def trainer_process(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(("tensor", "packed"), [(5, "packed"), (1, "unpacked"), (19, "unpacked")])
def test_a_trainer_killed_in_the_middle(server, tensor, packed, tmp_path):
    save_file({n: p.detach() for n, p in llama(1).named_parameters()}, tmp_path / "tensors")
    trainer = trainer_process(KILLED_TRAINER, server.url, tmp_path / "tensors", tensor, packed)
    with trainer:
        assert trainer.stdout.readline() == "dying\n"
        eventually(lambda: server.call("weight_info")["state"] == "receiving")
        trainer.kill()
        eventually(lambda: server.call("weight_info")["state"] == "aborted")
    assert "broadcast" in server.call("weight_info")["last_error"]
    assert same_weights(server.model, llama(0))
    with WeightSender.connect(server.url, llama(2), timeout_s=20) as successor:
        assert successor.push("whole").epoch == 1
    assert same_weights(server.model, llama(2))


SHARDED_TRAINER = """
    import sys
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from trainer_bridge.push.control import WeightPushError
    from trainer_bridge.push.sender import WeightSender

    url, file, rank, rendezvous = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=2)
    model = torch.nn.Module()
    for name, tensor in load_file(file).items():
        parent, *path, leaf = model, *name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.register_parameter(leaf, torch.nn.Parameter(tensor))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with WeightSender.connect(url, model, timeout_s=20) as sender:
        result = sender.push("sharded")
        print(result.version, result.epoch, result.bytes, flush=True)
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        try:
            sender.push("broken")
        except WeightPushError as error:
            print(error, flush=True)
        with torch.no_grad():
            model.model.norm.weight.fill_(2.0)
        print(sender.push("healed").epoch, flush=True)
    dist.destroy_process_group()
"""


def test_two_sharded_ranks_gather_together_and_fail_together(server, tmp_path):
    expected = llama(1)
    save_file({n: p.detach() for n, p in expected.named_parameters()}, tmp_path / "tensors")
    ranks = [
        trainer_process(SHARDED_TRAINER, server.url, tmp_path / "tensors", rank, tmp_path / "rendezvous")
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [s[0] for s in said] == [f"sharded 1 {sum(p.nbytes for p in expected.parameters())}"] * 2
    assert "model.norm.weight" in said[0][1]
    assert "rank 0" in said[1][1]
    assert [s[2] for s in said] == ["2", "2"]
    expected.model.norm.weight.data.fill_(2.0)
    assert same_weights(server.model, expected)


def test_a_peer_that_takes_no_broadcast_is_noticed_within_the_timeout():
    """The group is there, but the server's side never receives: a push must not wait for ever."""
    timeout = timedelta(seconds=10)
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timeout, wait_for_workers=False)

    def join():
        own = dist.PrefixStore("rollout", dist.TCPStore("127.0.0.1", store.port, 2, False, timeout))
        return dist.ProcessGroupGloo(own, 1, 2, timeout)

    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(join)
        group = TrainerGroup("gloo", store, 2, timeout_s=2.0, device=torch.device("cpu"))
        peer.result(10)
    with pytest.raises((TimeoutError, RuntimeError)):
        group.broadcast(torch.zeros(1 << 26, dtype=torch.uint8), [Future()])
    group.leave()
