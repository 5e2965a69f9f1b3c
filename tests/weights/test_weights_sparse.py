"""Changes against a base epoch, checksums, and sets held for a joint commit: the receiver, against whole updates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.model.parameters import ModelParameters
from rollout.weights.errors import WeightUpdateError
from rollout.weights.staging import DTYPES
from rollout.weights.store import WeightStore
from rollout.weights.transport.broadcast import unpack
from tests.support.wait import eventually
from tests.support.weight_updates import (
    UpdaterServer,
    fill,
    llama,
    qwen3_moe,
    same_weights,
    saved_tensors,
    sha256,
    update_info,
)

SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def small(seed, dtype=torch.float32, **options):
    return llama(seed, dtype=dtype, num_key_value_heads=1, **SIZES, **options)


def apply(staging, changes, shapes, dtype):
    """Place {name: (indices, values)} as a packed buffer that starts at an odd offset."""
    plan = staging.resolve(
        list(changes), [str(dtype)] * len(changes), [list(shapes[n]) for n in changes],
        [len(i) for i, _ in changes.values()],
    )  # fmt: skip
    parts = [p.contiguous().view(torch.uint8) for pair in changes.values() for p in pair]
    buffer = torch.cat([torch.zeros(1, dtype=torch.uint8), *parts])[1:]
    assert buffer.numel() == sum(item.nbytes for item in plan)
    unpack(buffer, plan, staging)


@settings(max_examples=25)
@given(
    data=st.data(),
    wire=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    served=st.sampled_from([torch.float32, torch.bfloat16]),
    tied=st.booleans(),
    in_place=st.booleans(),
)
def test_base_and_changes_are_the_whole_update_bit_for_bit(data, wire, served, tied, in_place):
    base = {n: p.detach().clone() for n, p in small(1, wire, tied=tied).named_parameters()}
    changed = {n: t.clone() for n, t in base.items()}
    changes = {}
    for name, tensor in changed.items():
        indices = sorted(data.draw(st.sets(st.integers(0, tensor.numel() - 1), max_size=4)))
        values = torch.tensor([data.draw(st.sampled_from([-0.0, 0.0, 1.5, -3e-3])) for _ in indices], dtype=wire)
        tensor.view(-1)[indices] = values
        changes[name] = (torch.tensor(indices, dtype=torch.int32), values)
    whole, sparse = (
        WeightStore(ModelParameters(small(0, served, tied=tied))),
        WeightStore(ModelParameters(small(0, served, tied=tied))),
    )
    for store in (whole, sparse):
        staging = fill(store, base)
        staging.check(partial=False, progress=lambda: None)
        store.commit(staging, None)
    staging = fill(whole, changed)
    staging.check(partial=False, progress=lambda: None)
    whole.commit(staging, None)
    staging = sparse.stage(in_place=in_place)
    apply(staging, changes, {n: t.shape for n, t in base.items()}, wire)
    staging.check(partial=False, progress=lambda: None)
    sparse.commit(staging, None)
    assert sparse.checksums() == whole.checksums()


def test_changes_of_a_checkpoint_name_reach_their_slice(tmp_path):
    tensors = saved_tensors(qwen3_moe(1), tmp_path)
    served = qwen3_moe(1)
    store = WeightStore(ModelParameters(served))
    name = next(n for n in tensors if ".experts.2.up_proj" in n)
    changes = {n: (torch.zeros(0, dtype=torch.int32), torch.zeros(0)) for n in tensors}
    changes[name] = (torch.tensor([5, 40], dtype=torch.int32), torch.tensor([7.0, -7.0]))
    staging = store.stage()
    apply(staging, changes, {n: t.shape for n, t in tensors.items()}, torch.float32)
    staging.check(partial=False, progress=lambda: None)
    store.commit(staging, None)
    tensors[name].view(-1)[[5, 40]] = torch.tensor([7.0, -7.0])
    assert store.checksums() == {n: sha256(t) for n, t in tensors.items()}


@pytest.mark.parametrize("indices", [[3, 3], [4, 2], [-1, 2], [0, 32]])
def test_indices_that_do_not_ascend_within_the_tensor_are_refused(indices):
    staging = WeightStore(ModelParameters(llama(0))).stage()
    changes = {"model.norm.weight": (torch.tensor(indices, dtype=torch.int32), torch.ones(2))}
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight: .*ascend within \[0, 32\)"):
        apply(staging, changes, {"model.norm.weight": [32]}, torch.float32)


def test_counts_that_can_not_be_are_refused_before_anything_is_received():
    staging = WeightStore(ModelParameters(llama(0))).stage()
    for count in (-1, 33):
        with pytest.raises(WeightUpdateError, match=rf"count {count} is not in \[0, 32\]"):
            staging.resolve(["model.norm.weight"], ["float32"], [[32]], [count])
    with pytest.raises(WeightUpdateError, match="1 names and 2 counts"):
        staging.resolve(["model.norm.weight"], ["float32"], [[32]], [1, 2])
    verifying = WeightStore(ModelParameters(llama(0, dtype=torch.bfloat16))).stage(verify=True)
    with pytest.raises(WeightUpdateError, match="wider than the server's dtype"):
        verifying.resolve(["model.norm.weight"], ["float32"], [[32]], [1])


def test_a_tied_name_whose_changes_differ_is_refused():
    base = llama(1, tied=True)
    store = WeightStore(ModelParameters(base))
    shapes = {n: t.shape for n, t in base.state_dict().items()}
    changes = {n: (torch.zeros(0, dtype=torch.int32), torch.zeros(0)) for n in shapes}
    changes["model.embed_tokens.weight"] = (torch.tensor([1], dtype=torch.int32), torch.tensor([2.0]))
    staging = store.stage()
    apply(staging, changes, shapes, torch.float32)
    with pytest.raises(WeightUpdateError, match=r"lm_head\.weight is tied"):
        staging.check(partial=False, progress=lambda: None)
    with pytest.raises(WeightUpdateError, match=r"lm_head\.weight: a sparse update in place must leave out"):
        store.stage(in_place=True).resolve(["lm_head.weight"], ["float32"], [[96, 32]], [1])


@pytest.fixture
def server(tmp_path):
    with UpdaterServer(llama(0)) as running:
        running.call("init_weight_transfer_engine", init_info={"backend": "disk"})
        running.tensors = saved_tensors(llama(1), tmp_path / "checkpoint")
        running.folder = {"path": str(tmp_path / "checkpoint")}
        yield running


def refused(status, match, call, *args, **params):
    with pytest.raises(WeightUpdateError, match=match) as caught:
        call(*args, **params)
    assert caught.value.status == status


def test_changes_are_refused_on_any_other_base(server):
    for epoch in (1, -1):
        refused(409, rf"against epoch {epoch}, epoch 0 serves", server.call, "start_weight_update", base_epoch=epoch)
    server.call("start_weight_update")
    counts = update_info(server.tensors) | {"counts": [0] * len(server.tensors)}
    refused(400, "base_epoch", server.call, "update_weights", update_info=counts)
    assert server.call("weight_info")["state"] == "aborted"


def test_checksums_are_of_the_bytes_on_the_wire(tmp_path):
    trained = llama(1, dtype=torch.bfloat16)
    sums = {n: sha256(t) for n, t in saved_tensors(trained, tmp_path).items()}
    with UpdaterServer(llama(0)) as server:
        server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
        for right in (False, True):
            server.call("start_weight_update", verify=True)
            server.call("update_weights", update_info={"path": str(tmp_path)})
            refused(400, "finish it with its checksums", server.call, "finish_weight_update")
            sent = sums if right else sums | {"lm_head.weight": "0" * 64}
            if right:
                server.call("finish_weight_update", checksums=sent)
            else:
                refused(400, r"sender's checksums say in: lm_head\.weight\.", server.call, "finish_weight_update",
                        checksums=sent)  # fmt: skip
                assert same_weights(server.model, llama(0))
        assert same_weights(server.model, trained.float())


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_checksums_must_name_exactly_what_was_received(server, change):
    sums = {n: sha256(t) for n, t in server.tensors.items()} | ({"extra": ""} if change == "extra" else {})
    if change == "missing":
        del sums["model.norm.weight"]
    server.call("start_weight_update", verify=True)
    server.call("update_weights", update_info=server.folder)
    named = "extra" if change == "extra" else r"model\.norm\.weight"
    refused(400, named, server.call, "finish_weight_update", checksums=sums)


def test_checksums_without_verify_are_refused(server):
    server.call("start_weight_update")
    server.call("update_weights", update_info=server.folder)
    refused(400, '"verify": true', server.call, "finish_weight_update", checksums={})


def test_a_prepared_update_waits_for_its_second_finish(server):
    server.call("start_weight_update")
    server.call("update_weights", update_info=server.folder)
    for _ in range(2):
        server.call("finish_weight_update", prepare=True, weight_version="v1")
        assert server.call("weight_info")["state"] == "ready"
        assert server.updater.commit_if_ready() is None
    refused(409, "already ready", server.call, "start_weight_update")
    assert same_weights(server.model, llama(0))
    assert server.call("finish_weight_update")["weight_version"] == "v1"
    assert same_weights(server.model, llama(1))


def test_more_after_prepare_aborts_the_update(server):
    server.call("start_weight_update")
    server.call("update_weights", update_info=server.folder)
    server.call("finish_weight_update", prepare=True)
    refused(409, "already checked", server.call, "update_weights", update_info=server.folder)
    assert server.call("weight_info")["state"] == "aborted"
    assert same_weights(server.model, llama(0))


def test_a_prepared_update_can_be_aborted_and_fails_its_checks_when_prepared(server):
    server.call("start_weight_update")
    server.call("update_weights", update_info=server.folder)
    server.call("finish_weight_update", prepare=True)
    server.call("abort_weight_update")
    refused(409, "state aborted", server.call, "finish_weight_update")
    server.call("start_weight_update", verify=True)
    server.call("update_weights", update_info=server.folder)
    refused(400, "checksums", server.call, "finish_weight_update", prepare=True, checksums={})
    assert server.call("weight_info")["state"] == "aborted"
    assert same_weights(server.model, llama(0))


def test_a_prepared_update_that_nobody_finishes_is_given_up(tmp_path):
    saved_tensors(llama(1), tmp_path)
    with UpdaterServer(llama(0), timeout_s=0.3) as server:
        server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
        server.call("start_weight_update")
        server.call("update_weights", update_info={"path": str(tmp_path)})
        server.call("finish_weight_update", prepare=True)
        eventually(lambda: server.call("weight_info")["state"] == "aborted")
        assert "(ready)" in server.call("weight_info")["last_error"]
        assert same_weights(server.model, llama(0))


@pytest.mark.parametrize("partial", [True, False])
def test_memory_that_nothing_filled_is_never_committed(partial, monkeypatch):
    """Fresh staging is full of NaN here; an announced tensor that did not come must not become live."""
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t, **o: real(t, **o).fill_(float("nan")))
    served = llama(0)
    store = WeightStore(ModelParameters(served))
    staging = store.stage()
    tensors = dict(llama(1).named_parameters())
    plan = staging.resolve(list(tensors), ["float32"] * len(tensors), [list(t.shape) for t in tensors.values()])
    for item in plan[:-2]:
        staging.place(item, tensors[item.target.name].detach())
    if partial:  # then what did not come is what serves
        staging.check(partial=True, progress=lambda: None)
        store.commit(staging, None)
        kept = [item.target.name for item in plan[-2:]]
        expected = {n: t for n, t in tensors.items() if n not in kept}
        expected |= {n: t for n, t in llama(0).named_parameters() if n in kept}
        assert all(torch.equal(p, expected[n]) for n, p in served.named_parameters())
    else:
        with pytest.raises(WeightUpdateError, match=f"lacks 2 of {len(plan)} parameters"):
            staging.check(partial=False, progress=lambda: None)


def test_every_wire_dtype_can_be_sparse():
    for name, dtype in DTYPES.items():
        store = WeightStore(ModelParameters(llama(0)))
        staging = store.stage(verify=dtype != torch.float64)
        values = torch.tensor([0.5, -2.0]).to(dtype)
        changes = {"model.norm.weight": (torch.tensor([0, 9], dtype=torch.int32), values)}
        apply(staging, changes, {"model.norm.weight": [32]}, dtype)
        assert staging.into.tensors["model.norm.weight"][[0, 9]].tolist() == [0.5, -2.0], name
