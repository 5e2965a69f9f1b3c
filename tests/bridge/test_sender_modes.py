"""Pushes that are checked, sparse, on disk, or to several servers at once, against whole pushes to one."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.weights.staging import Staging
from tests.support.weight_updates import UpdaterServer, llama, mixtral, same_weights
from trainer_bridge.push import folder as folder_module
from trainer_bridge.push import transaction
from trainer_bridge.push.control import DisplacedError, WeightPushError
from trainer_bridge.push.sender import WeightSender
from trainer_bridge.push.sources import StateDictSource


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(UpdaterServer(llama(seed))) for seed in (0, 10, 20)]


def nudge(model, share=0.01):
    """Change that share of every parameter's elements, as a step in bf16 does."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            flat[torch.randperm(flat.numel())[: max(1, int(share * flat.numel()))]] += 0.5


def parameter_bytes(model):
    return sum(p.nbytes for p in model.parameters())


def sums(server):
    return server.call("weight_checker", action="checksum")["checksums"]


def methods(server):
    return [method for method, _ in server.bodies]


@pytest.mark.parametrize("packed", [True, False])
def test_a_verified_push_is_refused_when_one_bit_changes_on_the_way(server, packed, monkeypatch):
    trained = llama(1, dtype=torch.bfloat16)
    with WeightSender.connect(server.url, trained, packed=packed, timeout_s=20) as sender:
        sender.push("good", verify=True)
        assert same_weights(server.model, llama(1, dtype=torch.bfloat16).float())
        place = Staging.place

        def flip(staging, item, received):
            if item.target.name == "model.layers.1.mlp.up_proj.weight":
                received.view(torch.int16).view(-1)[7] ^= 1
            place(staging, item, received)

        monkeypatch.setattr(Staging, "place", flip)
        nudge(trained)
        with pytest.raises(WeightPushError, match=r"checksums say in: model\.layers\.1\.mlp\.up_proj\.weight\."):
            sender.push("flipped", verify=True)
        assert server.store.label == "good"
        sender.push("unverified")
        assert server.store.label == "unverified"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("verify", [True, False])
def test_sparse_pushes_are_whole_pushes_in_fewer_bytes(dtype, verify, monkeypatch):
    monkeypatch.setattr(transaction, "PACKED_BUFFER_BYTES", 300)  # several broadcasts
    trained = llama(1, dtype=dtype, tied=True)
    with (
        UpdaterServer(llama(0, tied=True)) as server,
        UpdaterServer(llama(0, tied=True)) as whole,
        ExitStack() as stack,
    ):
        sender = stack.enter_context(WeightSender.connect(server.url, trained, packed=False, timeout_s=20))
        reference = stack.enter_context(WeightSender.connect(whole.url, trained, timeout_s=20))
        first = sender.push("0", sparse=True, verify=verify)  # no base is known
        assert (first.bytes, first.bytes_saved) == (parameter_bytes(trained), 0)
        for step in range(1, 4):
            nudge(trained)
            result = sender.push(str(step), sparse=True, verify=verify)
            reference.push(str(step))
            assert sums(server) == sums(whole)
            assert result.bytes + result.bytes_saved == parameter_bytes(trained)
            assert result.bytes < parameter_bytes(trained) * (4 + dtype.itemsize) / dtype.itemsize * 0.02
            assert result.bytes == server.call("weight_info")["bytes"]
        starts = [body.get("base_epoch") for method, body in server.bodies if method == "start_weight_update"]
        assert starts == [None, 1, 2, 3]


def test_bits_are_compared_not_values_and_an_unchanged_set_sends_nothing(server):
    tensors = {n: p.detach().clone() for n, p in llama(1).named_parameters()}
    tensors["model.norm.weight"][:2] = 0.0
    with WeightSender.connect(server.url, tensors, timeout_s=20) as sender:
        sender.push(sparse=True)
        assert sender.push("same", sparse=True).bytes == 0
        assert (server.store.epoch, server.store.label) == (2, "same")
        tensors["model.norm.weight"][1] = -0.0
        assert sender.push(sparse=True).bytes == 8
    norm = server.model.model.norm.weight
    assert torch.signbit(norm[:2]).tolist() == [False, True]
    assert all(torch.equal(p, tensors[n]) for n, p in server.model.named_parameters())


def test_a_sparse_push_falls_back_to_a_whole_one(server):
    trained = llama(1)
    total = parameter_bytes(trained)

    def pushed(sparse=True):
        nudge(trained)
        result = sender.push(sparse=sparse)
        assert same_weights(server.model, trained)
        return result.bytes_saved > 0

    with WeightSender.connect(server.url, trained, timeout_s=20) as sender:
        assert [pushed(), pushed()] == [False, True]
        assert not pushed(sparse=False)
        assert [pushed(), pushed()] == [False, True]  # the copy was given up in between
        with WeightSender.connect(server.url, llama(5), timeout_s=20) as other:  # the epoch moves
            other.push("another trainer's")
        with pytest.raises(DisplacedError):  # whose group it is now
            sender.push(sparse=True)
    with WeightSender.connect(server.url, trained, timeout_s=20) as sender:
        assert [pushed(), pushed()] == [False, True]
        nudge(trained, share=0.9)  # too dense to pay
        assert sender.push(sparse=True).bytes == total
        assert same_weights(server.model, trained)
        assert pushed()
        server.store.epoch += 1  # whatever else may have happened to it
        assert [pushed(), pushed()] == [False, True]


def test_a_failed_sparse_push_is_followed_by_a_whole_one(server):
    trained = llama(1)
    with WeightSender.connect(server.url, trained, timeout_s=20) as sender:
        sender.push(sparse=True)
        norm = trained.model.norm.weight.data
        norm[4] = float("nan")
        with pytest.raises(WeightPushError, match=r"model\.norm\.weight"):
            sender.push(sparse=True)
        norm[4] = 4.0
        assert sender.push(sparse=True).bytes == parameter_bytes(trained)
        assert same_weights(server.model, trained)


def test_a_server_that_was_away_gets_a_whole_push_though_its_epoch_is_the_same(server):
    """It may have been restarted meanwhile, and have come to this epoch by other weights."""
    trained = llama(1)
    with WeightSender.connect(server.url, trained, timeout_s=20) as sender:
        sender.push(sparse=True)
        server.lose_answer_of = "weight_info"
        with pytest.raises(WeightPushError, match="/weight_info got no answer"):
            sender.push(sparse=True)
        server.model.load_state_dict(llama(2).state_dict())
        assert sender.push(sparse=True).bytes_saved == 0
        assert same_weights(server.model, trained)


@pytest.mark.parametrize("way", ["whole", "sparse", "disk"])
def test_a_push_in_place(server, way, tmp_path):
    trained = llama(1)
    where = {"backend": "disk", "disk_path": tmp_path} if way == "disk" else {}
    options = {"sparse": True} if way == "sparse" else {}
    with WeightSender.connect(server.url, trained, timeout_s=20, **where) as sender:
        with pytest.raises(WeightPushError, match=r"/pause\?mode=keep"):
            sender.push(weight_staging="in_place", **options)
        server.paused = True
        for _ in range(3):
            nudge(trained)
            result = sender.push(weight_staging="in_place", verify=True, **options)
            assert same_weights(server.model, trained)
        assert server.store.valid
        assert (result.bytes_saved > 0) == (way == "sparse")


def test_a_failed_push_in_place_is_healed_by_the_next(server):
    trained = llama(1)
    server.paused = True
    with WeightSender.connect(server.url, trained, timeout_s=20) as sender:
        trained.model.norm.weight.data[0] = float("inf")
        with pytest.raises(WeightPushError, match=r"model\.norm\.weight"):
            sender.push(weight_staging="in_place")
        assert server.call("weight_info")["weights"] == "invalid"
        trained.model.norm.weight.data[0] = 1.0
        sender.push(weight_staging="in_place")
        assert server.call("weight_info")["weights"] == "valid"
        assert same_weights(server.model, trained)


def test_on_disk_each_push_is_a_new_folder_and_the_last_two_stay(server, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "SHARD_BYTES", 20_000)
    trained = llama(1)
    (tmp_path / "writing-00000007").mkdir()  # of a sender that died
    with WeightSender.connect(server.url, trained, backend="disk", disk_path=tmp_path, timeout_s=20) as sender:
        for step in range(4):
            nudge(trained)
            result = sender.push(f"step-{step}", verify=True)
            assert same_weights(server.model, trained)
            assert (result.version, result.bytes) == (f"step-{step}", parameter_bytes(trained))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000002", "00000003"]
    shards = sorted((tmp_path / "00000003").iterdir())
    assert len(shards) > 1
    written = {n: t for shard in shards for n, t in load_file(shard).items()}
    assert written.keys() == dict(trained.named_parameters()).keys()
    with WeightSender.connect(server.url, trained, backend="disk", disk_path=tmp_path, timeout_s=20) as successor:
        successor.push()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000003", "00000004"]


def test_a_write_that_fails_leaves_no_folder_that_counts(server, tmp_path):
    class Breaking(StateDictSource):
        def tensors(self):
            yield from list(super().tensors())[:3]
            raise ArithmeticError("the optimizer is on fire")

    source = Breaking({n: p.detach() for n, p in llama(1).named_parameters()})
    with WeightSender.connect(server.url, source, backend="disk", disk_path=tmp_path, timeout_s=20) as sender:
        with pytest.raises(WeightPushError, match="on fire"):
            sender.push()
        assert not [p for p in tmp_path.iterdir() if p.name.isdecimal()]
        assert "start_weight_update" not in methods(server)
        sender._source = StateDictSource({n: p.detach() for n, p in llama(1).named_parameters()})
        sender.push()
    assert same_weights(server.model, llama(1))
    assert [p.name for p in tmp_path.iterdir()] == ["00000000"]


def test_a_sharded_transformers_checkpoint_is_pushed_by_its_path(tmp_path):
    trained = mixtral(1)
    trained.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    # Not of the checkpoint: some folders hold the same weights once more in another format.
    save_file({"tok_embeddings.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    with (
        UpdaterServer(mixtral(0)) as server,
        WeightSender.connect(server.url, None, backend="disk", timeout_s=20) as sender,
    ):
        result = sender.push_folder(tmp_path, "checkpoint")
        assert same_weights(server.model, trained)
        assert (result.version, result.bytes) == ("checkpoint", parameter_bytes(trained))
        with pytest.raises(ValueError, match="push_folder"):
            sender.push()
        shard = sorted(set(index["weight_map"].values()))[0]
        (tmp_path / shard).unlink()
        with pytest.raises(WeightPushError, match=shard):
            sender.push_folder(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text("[]")
        with pytest.raises(WeightPushError, match="not a checkpoint's index"):
            sender.push_folder(tmp_path)
    assert server.store.label == "checkpoint"


def test_what_does_not_go_together_is_said_at_once(server, tmp_path):
    with pytest.raises(ValueError, match="'disk'"):
        WeightSender.connect(server.url, None)
    with pytest.raises(ValueError, match="'disk'"):
        WeightSender.connect(server.url, llama(1), disk_path=tmp_path)
    with pytest.raises(ValueError, match="at least one server"):
        WeightSender.connect([], llama(1))
    sender = WeightSender.connect(server.url, llama(1), backend="disk", disk_path=tmp_path, timeout_s=20)
    with sender, pytest.raises(ValueError, match="sparse"):
        sender.push(sparse=True)
    sender = WeightSender.connect(server.url, llama(1), timeout_s=20)
    with sender, pytest.raises(ValueError, match="push_folder"):
        sender.push_folder(tmp_path)


def test_several_servers_get_one_push(servers):
    trained = llama(1)
    servers[1].store.epoch = 7
    with WeightSender.connect([s.url for s in servers], trained, timeout_s=20) as sender:
        for step, sparse in enumerate([False, True, True]):
            nudge(trained)
            result = sender.push(f"step-{step}", sparse=sparse, verify=True)
            assert all(same_weights(s.model, trained) for s in servers)
            assert result.epochs == (step + 1, step + 8, step + 1)
            assert {s.store.label for s in servers} == {f"step-{step}"}
        assert result.bytes_saved > 0
        servers[2].store.epoch += 1  # one other base is enough for a whole push to all
        assert sender.push(sparse=True).bytes_saved == 0
    groups = [body["init_info"] for s in servers for m, body in s.bodies if m == "init_weight_transfer_engine"]
    assert [g["rank_offset"] for g in groups] == [1, 2, 3]
    assert {g["world_size"] for g in groups} == {4}


@pytest.mark.parametrize("backend", ["gloo", "disk"])
def test_one_server_that_refuses_keeps_all_from_committing(servers, backend, tmp_path, monkeypatch):
    trained = llama(1)
    where = {"backend": "disk", "disk_path": tmp_path} if backend == "disk" else {}
    with WeightSender.connect([s.url for s in servers], trained, timeout_s=20, **where) as sender:
        check = Staging.check

        def failing(staging, **options):
            check(staging, **options)
            if staging._live is servers[1].store.parameters.live:
                raise ArithmeticError("a cosmic ray")

        monkeypatch.setattr(Staging, "check", failing)
        with pytest.raises(WeightPushError, match=f"{servers[1].url}: .*a cosmic ray"):
            sender.push("half")
        assert all(same_weights(s.model, llama(seed)) for s, seed in zip(servers, (0, 10, 20), strict=True))
        assert [s.call("weight_info")["state"] for s in servers] == ["aborted"] * 3
        monkeypatch.setattr(Staging, "check", check)
        assert sender.push("whole").epochs == (1, 1, 1)
    assert all(same_weights(s.model, trained) for s in servers)


def test_one_server_with_another_model_keeps_all_from_committing(servers):
    with UpdaterServer(llama(3, vocab_size=64)) as other:
        urls = [servers[0].url, other.url]
        sender = WeightSender.connect(urls, llama(1), timeout_s=20)
        with pytest.raises(WeightPushError, match=f"{other.url}: .*embed_tokens.*shape"):
            sender.push()
        assert servers[0].store.epoch == other.store.epoch == 0
        sender.close()


def test_a_server_lost_between_ready_and_commit_is_named_beside_those_that_committed(servers):
    trained = llama(1)
    with WeightSender.connect([s.url for s in servers], trained, timeout_s=20) as sender:
        call = servers[1].updater.call

        def dying(method, params):
            if method == "finish_weight_update" and not params.get("prepare"):
                servers[1].updater.close()
            return call(method, params)

        servers[1].updater.call = dying
        with pytest.raises(WeightPushError, match=f"{servers[1].url}: ") as caught:
            sender.push("v1")
        assert str(caught.value).endswith(f"(committed already: {servers[0].url}, {servers[2].url})")
        assert same_weights(servers[1].model, llama(10))
        servers[1].updater.call = call
        assert sender.push("v2").epochs == (2, 1, 2)
    assert all(same_weights(s.model, trained) for s in servers)


def test_a_lost_answer_to_a_joint_commit_is_looked_up(servers):
    trained = llama(1)
    with WeightSender.connect([s.url for s in servers], trained, timeout_s=20) as sender:
        call = servers[1].updater.call

        def losing(method, params):
            if method == "finish_weight_update" and not params.get("prepare"):
                servers[1].lose_answer_of = method
            return call(method, params)

        servers[1].updater.call = losing
        assert sender.push("v1").epochs == (1, 1, 1)
    assert all(same_weights(s.model, trained) for s in servers)
    assert methods(servers[1]).count("finish_weight_update") == 2


def test_a_trainer_resumed_from_a_checkpoint_takes_over_and_goes_back(server):
    """The first one crashed after step 2 (its group stands); the second restarts from step 1's checkpoint."""
    trained = llama(1)
    first = WeightSender.connect(server.url, trained, timeout_s=20)
    first.push("step-1")
    checkpoint = {n: p.detach().clone() for n, p in trained.named_parameters()}
    nudge(trained)
    first.push("step-2", sparse=True)
    with WeightSender.connect(server.url, checkpoint, timeout_s=20) as resumed:
        result = resumed.push("step-1")
        assert (result.version, result.epoch) == ("step-1", 3)
        assert all(torch.equal(p, checkpoint[n]) for n, p in server.model.named_parameters())
        assert resumed.push("step-2", sparse=True).epoch == 4
    first.close()


def test_layers_are_pushed_as_a_part_that_the_server_completes(server):
    layer = {n: p.detach() for n, p in llama(1).named_parameters() if ".layers.1." in n}
    with WeightSender.connect(server.url, layer, timeout_s=20) as sender:
        with pytest.raises(WeightPushError, match=r'lacks 12 of 21 .*\{"partial": true\}.*--allow-partial-updates'):
            sender.push(verify=True)
        result = sender.push(partial=True, verify=True)
        assert result.bytes == sum(t.nbytes for t in layer.values())
        layer["model.layers.1.mlp.up_proj.weight"][0, 0] = 9.0
        sender.push(partial=True, sparse=True)
        layer["model.layers.1.mlp.up_proj.weight"][0, 1] = 9.0
        assert sender.push(partial=True, sparse=True, verify=True).bytes == 8
    expected = {n: layer.get(n, p.detach()) for n, p in llama(0).named_parameters()}
    assert all(torch.equal(p, expected[n]) for n, p in server.model.named_parameters())
