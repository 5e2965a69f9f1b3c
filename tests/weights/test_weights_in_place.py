"""Updates received into the live weights: only when paused, nothing generated meanwhile, healed by a whole one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from rollout.model.parameters import ModelParameters
from rollout.weights.errors import AbandonedError, WeightUpdateError
from rollout.weights.store import WeightStore
from tests.support.wait import eventually
from tests.support.weight_updates import UpdaterServer, fill, llama, same_weights, saved_tensors


@pytest.fixture
def server():
    with UpdaterServer(llama(0)) as running:
        running.call("init_weight_transfer_engine", init_info={"backend": "disk"})
        running.paused = True
        yield running


@pytest.fixture
def checkpoint(tmp_path):
    saved_tensors(llama(1), tmp_path / "whole")
    return {"path": str(tmp_path / "whole")}


@pytest.fixture
def broken(tmp_path):
    model = llama(2)
    model.model.norm.weight.data[3] = float("nan")
    saved_tensors(model, tmp_path / "broken")
    return {"path": str(tmp_path / "broken")}


def refused(status, match, call, *args, **params):
    with pytest.raises(WeightUpdateError, match=match) as caught:
        call(*args, **params)
    assert caught.value.status == status


def weights(server):
    return server.call("weight_info")["weights"]


def test_a_whole_update_lands_in_the_live_tensors_and_holds_no_second_set(server, checkpoint):
    addresses = {n: p.data_ptr() for n, p in server.model.named_parameters()}
    server.call("start_weight_update", weight_staging="in_place")
    assert weights(server) == "invalid"
    server.call("update_weights", update_info=checkpoint)
    server.call("finish_weight_update", weight_version="v1")
    assert same_weights(server.model, llama(1))
    assert {n: p.data_ptr() for n, p in server.model.named_parameters()} == addresses
    assert server.store._spare is None
    info = server.call("weight_info")
    assert (info["weights"], info["epoch"], info["weight_version"]) == ("valid", 1, "v1")


def test_it_is_refused_unless_paused_by_server_setting_and_by_update(checkpoint):
    with UpdaterServer(llama(0), weight_staging="in_place") as server:
        server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
        refused(409, r"/pause\?mode=keep", server.call, "start_weight_update")
        refused(409, r"/pause\?mode=keep", server.call, "update_weights", weight_dir=checkpoint["path"])
        server.call("start_weight_update", weight_staging="full")  # the update's own word wins
        server.call("abort_weight_update")
        refused(409, "weight_staging", server.call, "start_weight_update", weight_staging="in_place")
        assert weights(server) == "valid"
        server.paused = True
        server.call("update_weights", weight_dir=checkpoint["path"])
        assert same_weights(server.model, llama(1))


@pytest.mark.parametrize("end", ["abort", "unknown name", "shutdown"])
def test_an_update_that_wrote_nothing_leaves_valid_weights(server, tmp_path, end):
    server.call("start_weight_update", weight_staging="in_place")
    if end == "abort":
        server.call("abort_weight_update")
    elif end == "shutdown":
        server.call("shutdown_weight_transfer_engine")
    else:
        refused(400, "no .safetensors", server.call, "update_weights", update_info={"path": str(tmp_path)})
    assert weights(server) == "valid"
    assert same_weights(server.model, llama(0))


def test_a_failed_one_stays_invalid_until_a_whole_update_whatever_its_staging(server, checkpoint, broken):
    for staging in ("full", "in_place"):
        server.call("start_weight_update", weight_staging="in_place")
        server.call("update_weights", update_info=broken)
        refused(400, r"model\.norm\.weight", server.call, "finish_weight_update")
        assert weights(server) == "invalid"
        refused(409, "push them whole", server.call, "start_weight_update", partial=True)
        refused(409, "invalid", server.call, "weight_checker", action="checksum")
        server.call("start_weight_update", weight_staging=staging)
        server.call("abort_weight_update")
        assert weights(server) == "invalid"  # nothing of it was healed
        server.call("start_weight_update", weight_staging=staging)
        server.call("update_weights", update_info=checkpoint)
        server.call("finish_weight_update")
        assert weights(server) == "valid"
        assert same_weights(server.model, llama(1))


def test_a_server_that_allows_partial_updates_is_healed_only_by_a_whole_one(broken, tmp_path):
    with UpdaterServer(llama(0), allow_partial=True) as server:
        server.paused = True
        server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
        server.call("start_weight_update", weight_staging="in_place")
        server.call("update_weights", update_info=broken)
        refused(400, "finite", server.call, "finish_weight_update")
        some = llama(3)
        del some.lm_head
        save_file({n: p.detach() for n, p in some.named_parameters()}, tmp_path / "some.safetensors")
        server.call("start_weight_update")
        server.call("update_weights", update_info={"path": str(tmp_path)})
        refused(400, r"lacks 1 of .*lm_head\.weight.*invalid", server.call, "finish_weight_update")


def test_nothing_is_written_once_an_update_is_over():
    """A receive that outlives its update (a blocked broadcast) must not reach what serves by then."""
    model = llama(0)
    store = WeightStore(ModelParameters(model))
    staging = store.stage(in_place=True)
    name = "model.norm.weight"
    (item,) = staging.resolve([name], ["float32"], [[32]])
    assert staging.direct(item, torch.device("cpu")) is None
    staging.close()
    store.release(staging)
    with pytest.raises(AbandonedError):
        staging.place(item, torch.ones(32) * 7)
    assert same_weights(model, llama(0))
    assert store.valid


def test_checksums_under_way_keep_the_live_set_from_being_given_away():
    store = WeightStore(ModelParameters(llama(0)))
    with store.snapshot():
        refused(409, "weight_checker", store.stage, in_place=True)
    assert store.valid
    staging = store.stage(in_place=True)
    refused(409, "invalid", store.checksums)
    store.release(staging)
    assert len(store.checksums()) == len(list(llama(0).named_parameters()))


def test_a_subset_in_place_keeps_the_rest():
    model = llama(0)
    store = WeightStore(ModelParameters(model))
    staging = store.stage(in_place=True)
    (item,) = staging.resolve(["model.norm.weight"], ["float32"], [[32]])
    staging.place(item, torch.full((32,), 3.0))
    staging.check(partial=True, progress=lambda: None)
    store.commit(staging, "v1")
    expected = llama(0)
    expected.model.norm.weight.data.fill_(3.0)
    assert same_weights(model, expected)


def test_a_stalled_trainer_leaves_it_invalid_and_the_next_one_heals(checkpoint):
    with UpdaterServer(llama(0), timeout_s=0.3) as server:
        server.paused = True
        server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
        server.call("start_weight_update", weight_staging="in_place")
        server.call("update_weights", update_info=checkpoint)
        eventually(lambda: server.call("weight_info")["state"] == "aborted")
        assert weights(server) == "invalid"
        server.call("update_weights", weight_dir=checkpoint["path"])
        assert weights(server) == "valid"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_and_in_place_give_the_same_bits(dtype):
    tensors = {n: p.detach() for n, p in llama(1, tied=True, dtype=dtype).named_parameters()}
    sums = []
    for in_place in (False, True):
        store = WeightStore(ModelParameters(llama(0, tied=True)))
        staging = fill(store, tensors, in_place=in_place)
        staging.check(partial=False, progress=lambda: None)
        store.commit(staging, None)
        sums.append(store.checksums())
    assert sums[0] == sums[1]


def test_a_buffer_that_an_update_may_leave_out_is_needed_to_heal():
    def buffered(seed):
        model = llama(seed)
        model.register_buffer("scale", torch.full((2,), float(seed)))
        return model

    served = buffered(0)
    store = WeightStore(ModelParameters(served))
    parameters = dict(llama(1).named_parameters())
    staging = fill(store, parameters)
    staging.check(partial=False, progress=lambda: None)
    store.commit(staging, None)
    assert served.scale.tolist() == [0.0, 0.0]
    staging = fill(store, {"scale": torch.tensor([5.0, 5.0])}, in_place=True)
    staging.close()
    store.release(staging)  # dropped after it had written: what serves can't be trusted
    assert not store.valid
    with pytest.raises(WeightUpdateError, match=r"lacks 1 of .*: scale\. .*invalid"):
        fill(store, parameters).check(partial=False, progress=lambda: None)
    staging = fill(store, parameters | {"scale": torch.tensor([1.0, 1.0])})
    staging.check(partial=False, progress=lambda: None)
    store.commit(staging, None)
    assert store.valid
    assert same_weights(served, buffered(1))
