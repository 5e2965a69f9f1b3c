"""What a name stands for, what is refused, and the flip, against transformers' own checkpoints."""

from __future__ import annotations

import pytest
import torch

from rollout.model.parameters import ModelParameters
from rollout.weights.errors import WeightUpdateError
from rollout.weights.store import WeightStore
from rollout.weights.updater import WeightUpdater
from tests.support.weight_updates import MOE, fill, llama, mixtral, qwen3_moe, same_weights, saved_tensors, sha256


def commit(store, tensors, *, partial=False, label=None):
    staging = fill(store, tensors)
    staging.check(partial=partial, progress=lambda: None)
    store.commit(staging, label)


def refusal(store, tensors, **options):
    with pytest.raises(WeightUpdateError) as caught:
        commit(store, tensors, **options)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_whole_set_replaces_every_weight(tied, dtype):
    served, trained = llama(0, tied=tied), llama(1, tied=tied, dtype=dtype)
    store = WeightStore(ModelParameters(served))
    commit(store, dict(trained.named_parameters()), label="v1")
    assert (store.epoch, store.label) == (1, "v1")
    assert same_weights(served, trained.to(torch.float32))
    commit(store, dict(llama(2, tied=tied).named_parameters()))
    assert (store.epoch, store.label) == (2, "v1")
    assert same_weights(served, llama(2, tied=tied))


@pytest.mark.parametrize("build", MOE.values(), ids=MOE)
def test_module_and_checkpoint_names_give_the_same_moe(build, tmp_path):
    trained = build(1)
    by_checkpoint = saved_tensors(trained, tmp_path)
    by_module = dict(trained.named_parameters())
    assert by_checkpoint.keys() != by_module.keys()
    sums = []
    for tensors in (by_module, by_checkpoint):
        served = build(0)
        store = WeightStore(ModelParameters(served))
        commit(store, tensors)
        assert same_weights(served, trained)
        sums.append(store.checksums())
    assert sums[0] == sums[1] == {name: sha256(t) for name, t in by_checkpoint.items()}


@pytest.mark.parametrize("build", [lambda s: llama(s, tied=True), qwen3_moe, mixtral])
def test_a_loaded_model_has_the_names_of_its_checkpoint(build, tmp_path):
    written = saved_tensors(build(3), tmp_path)
    loaded = type(build(0)).from_pretrained(tmp_path)
    assert WeightStore(ModelParameters(loaded)).checksums() == {name: sha256(t) for name, t in written.items()}


@pytest.mark.parametrize("build", MOE.values(), ids=MOE)
def test_one_missing_expert_is_named(build, tmp_path):
    tensors = saved_tensors(build(1), tmp_path)
    name = next(n for n in tensors if ".experts.2." in n)
    del tensors[name]
    assert name in refusal(WeightStore(ModelParameters(build(0))), tensors)


def test_mixed_names_are_refused(tmp_path):
    model = qwen3_moe(1)
    tensors = dict(model.named_parameters())
    checkpoint = saved_tensors(model, tmp_path)
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    del tensors[fused]
    tensors |= {n: t for n, t in checkpoint.items() if n.startswith("model.layers.0.mlp.experts.") and "down" not in n}
    message = refusal(WeightStore(ModelParameters(qwen3_moe(0))), tensors)
    assert "one kind of name" in message
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in message


def test_each_misfit_is_named_before_anything_is_received():
    store = WeightStore(ModelParameters(llama(0)))
    staging = store.stage()
    norm, embed = "model.norm.weight", "model.embed_tokens.weight"
    with pytest.raises(WeightUpdateError) as caught:
        staging.resolve(
            ["nope", norm, norm, embed, "lm_head.weight"],
            ["float32", "float32", "float32", "float32", "int64"],
            [[1], [32], [32], [96, 31], [96, 32]],
        )
    message = caught.value.message
    assert caught.value.status == 400
    assert "nope: the model has no such parameter" in message
    assert f"{norm}: named twice" in message
    assert f"{embed}: shape [96, 31], the model has [96, 32]" in message
    assert "lm_head.weight: dtype 'int64'" in message
    with pytest.raises(WeightUpdateError, match="1 names, 2 dtype_names and 1 shapes"):
        staging.resolve([norm], ["float32", "float32"], [[32]])


def test_a_name_may_not_come_again_in_a_later_call_of_the_same_update():
    staging = fill(WeightStore(ModelParameters(llama(0))), {"model.norm.weight": torch.ones(32)})
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight: named twice"):
        staging.resolve(["model.norm.weight"], ["float32"], [[32]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused(value):
    tensors = {n: p.detach().clone() for n, p in llama(1).named_parameters()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    served = llama(0)
    assert "model.layers.1.mlp.down_proj.weight" in refusal(WeightStore(ModelParameters(served)), tensors)
    assert same_weights(served, llama(0))


@pytest.mark.parametrize("style", ["module", "checkpoint"])
@pytest.mark.parametrize("build", MOE.values(), ids=MOE)
def test_a_value_that_is_not_finite_in_one_expert_is_refused(build, style, tmp_path):
    trained = build(1)
    expert = next(n for n, p in trained.named_parameters() if p.ndim == 3 and "down_proj" in n)
    with torch.no_grad():
        trained.get_parameter(expert)[-1, 2, 3] = float("nan")
    tensors = saved_tensors(trained, tmp_path) if style == "checkpoint" else dict(trained.named_parameters())
    broken = next(n for n, tensor in tensors.items() if tensor.isnan().any())
    served = build(0)
    assert broken in refusal(WeightStore(ModelParameters(served)), tensors)
    assert same_weights(served, build(0))


def test_an_overflow_of_the_cast_is_not_finite():
    tensors = {n: p.detach().clone() for n, p in llama(1).named_parameters()}
    tensors["model.norm.weight"][0] = 1e6
    message = refusal(WeightStore(ModelParameters(llama(0, dtype=torch.float16))), tensors)
    assert "model.norm.weight" in message


def test_a_tied_alias_may_come_along_with_the_same_bits_only():
    trained = llama(1, tied=True)
    served = llama(0, tied=True)
    store = WeightStore(ModelParameters(served))
    tensors = dict(trained.state_dict())
    assert "lm_head.weight" in tensors
    commit(store, tensors)
    assert same_weights(served, trained)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    assert "lm_head.weight is tied to model.embed_tokens.weight" in refusal(store, tensors)


def test_a_subset_needs_partial_and_leaves_the_rest(tmp_path):
    trained, served = qwen3_moe(1), qwen3_moe(0)
    before = saved_tensors(served, tmp_path / "before")
    some = {n: t for n, t in saved_tensors(trained, tmp_path / "after").items() if ".experts.1." in n}
    store = WeightStore(ModelParameters(served))
    message = refusal(store, some)
    assert "partial" in message
    assert "model.embed_tokens.weight" in message
    for _ in range(2):  # the second time, staging holds the set before last
        commit(store, some, partial=True)
        assert store.checksums() == {name: sha256(t) for name, t in (before | some).items()}
    allowing = WeightStore(ModelParameters(qwen3_moe(0)), allow_partial=True)
    commit(allowing, some)
    assert allowing.checksums() == store.checksums()


def test_received_buffers_become_the_weights_and_the_old_ones_the_next_staging():
    served = llama(0)
    store = WeightStore(ModelParameters(served, "flip"))
    old = {n: p.data_ptr() for n, p in served.named_parameters()}
    staging = fill(store, dict(llama(1).named_parameters()))
    staged = {n: t.data_ptr() for n, t in staging.into.tensors.items()}
    store.commit(staging, None)
    assert {n: p.data_ptr() for n, p in served.named_parameters()} == staged
    assert {n: t.data_ptr() for n, t in store.stage().into.tensors.items()} == old


def test_a_commit_by_copy_moves_no_parameter_and_keeps_the_live_sets_graphs():
    served = llama(0)
    store = WeightStore(ModelParameters(served, "copy"))
    live = store.parameters.live
    old = {n: p.data_ptr() for n, p in served.named_parameters()}
    live.graphs[1] = graph = object()
    for seed in (1, 2):
        commit(store, dict(llama(seed).named_parameters()))
        assert same_weights(served, llama(seed))
        assert {n: p.data_ptr() for n, p in served.named_parameters()} == old
        assert store.parameters.live is live
        assert live.graphs == {1: graph}


def test_a_checksum_under_way_keeps_its_set_from_being_overwritten():
    served = llama(0)
    store = WeightStore(ModelParameters(served, "flip"))
    with store.snapshot() as seen:
        commit(store, dict(llama(1).named_parameters()))
        commit(store, dict(llama(2).named_parameters()))
        assert all(torch.equal(seen[n], p) for n, p in llama(0).named_parameters())


def test_a_commit_by_copy_waits_for_a_checksum_under_way():
    served = llama(0)
    store = WeightStore(ModelParameters(served, "copy"))
    woken = []
    updater = WeightUpdater(store, wake=lambda: woken.append(store.can_commit(staging)))
    staging = fill(store, dict(llama(1).named_parameters()))
    with store.snapshot() as seen:
        assert not store.can_commit(staging)
        with pytest.raises(TimeoutError, match="being read"):
            store.commit(staging, None)
        assert all(torch.equal(seen[n], p) for n, p in llama(0).named_parameters())
    assert woken == [True]  # the engine, which may sleep
    store.commit(staging, None)
    assert same_weights(served, llama(1))
    updater.close()


def test_a_checkpoint_form_that_is_no_slice_is_refused_by_name(tmp_path):
    from transformers.core_model_loading import Concatenate, WeightConverter

    model = llama(1)
    # A checkpoint that keeps q split in two and scaled: the saved halves are no slices of the parameter.
    halves = [r"self_attn.q_a.weight", r"self_attn.q_b.weight"]

    class Scaled(Concatenate):
        @property
        def reverse_op(self):
            chunk = super().reverse_op

            class Reverse(type(chunk)):
                def convert(self, *args, **kwargs):
                    return {n: t * 2 for n, t in super().convert(*args, **kwargs).items()}

            return Reverse(0)

    model._weight_conversions = [WeightConverter(halves, "self_attn.q_proj.weight", [Scaled(0)])]
    store = WeightStore(ModelParameters(model))
    with pytest.raises(WeightUpdateError, match=r"q_a\.weight: its checkpoint form is not a slice"):
        store.stage().resolve(["model.layers.0.self_attn.q_a.weight"], ["float32"], [[16, 32]])
    commit(store, dict(llama(2).named_parameters()))
    assert same_weights(model, llama(2))


def test_a_check_gives_a_sign_of_life_for_every_tensor():
    """Else a trainer whose large set is being checked counts as gone, and another may take over."""
    tensors = dict(llama(1).named_parameters())
    staging = fill(WeightStore(ModelParameters(llama(0))), tensors)
    signs = []
    staging.check(partial=False, progress=lambda: signs.append(True))
    assert len(signs) >= len(tensors)
