"""The order of calls, against a small model of the state machine; the disk transport; labels and policies."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors.torch import save_file

from rollout.model.parameters import ModelParameters
from rollout.weights import staging
from rollout.weights.bodies import InitBody, parse
from rollout.weights.errors import WeightUpdateError
from rollout.weights.store import WeightStore
from rollout.weights.updater import WeightUpdater
from tests.support.weight_updates import UpdaterServer, llama, mixtral, same_weights, saved_tensors, sha256

SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def tiny(seed):
    return llama(seed, num_key_value_heads=1, **SIZES)


class Folders:
    """Checkpoints on disk: whole (by seed), in halves, and broken."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for seed in (1, 2):
            whole = {n: p.detach().clone() for n, p in tiny(seed).named_parameters()}
            names = list(whole)
            self._save(f"whole-{seed}", whole)
            self._save(f"first-{seed}", {n: whole[n] for n in names[:5]})
            self._save(f"rest-{seed}", {n: whole[n] for n in names[5:]})
        self._save("unknown", {"nope": torch.zeros(2)})
        self._save("nan", {n: torch.full_like(p, float("nan")) for n, p in tiny(1).named_parameters()})

    def _save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        (self.root / name).mkdir()
        save_file(tensors, self.root / name / "model.safetensors")

    def __getitem__(self, name: str) -> str:
        return str(self.root / name)


class UpdateOrder(RuleBasedStateMachine):
    """`state`, `received`, `serving`, `valid` and so on are the model; the updater must agree after every call."""

    @initialize(method=st.sampled_from(["flip", "copy"]))
    def start_up(self, method):
        self.root = Path(tempfile.mkdtemp())
        self.folders = Folders(self.root)
        self.model = tiny(0)
        self.paused = False
        self.updater = WeightUpdater(
            WeightStore(ModelParameters(self.model)), timeout_s=30.0, paused=lambda: self.paused
        )
        self.joined = False
        self.state, self.received, self.partial, self.label_wished = "idle", [], False, None
        self.in_place, self.replaces_invalid, self.valid = False, False, True
        self.serving = {n: 0 for n, _ in tiny(0).named_parameters()}
        self.epoch, self.label = 0, "default"
        self.references = {seed: dict(tiny(seed).named_parameters()) for seed in (0, 1, 2)}

    def teardown(self) -> None:
        self.updater.close()
        shutil.rmtree(self.root)

    def call(self, method, *, commits=False, **params):
        answer = self.updater.call(method, params)
        if commits:  # the engine's next step, once the check is through
            while not answer.done():
                self.updater.commit_if_ready()
        return answer.result(30)

    def refused(self, status, method, **params):
        with pytest.raises(WeightUpdateError) as caught:
            self.call(method, commits=True, **params)
        assert caught.value.status == status, caught.value.message

    @property
    def active(self):
        return self.state in ("open", "receiving", "ready")

    @property
    def out_of_order(self):
        return 409 if self.joined else 400

    def drop(self, state="aborted"):
        if self.active and self.in_place and not self.received:
            self.valid = not self.replaces_invalid
        self.state, self.received = state, []

    def commit(self, received, label):
        self.serving |= dict(received)
        self.epoch += 1
        self.label = label or self.label
        self.state, self.received, self.valid = "committed", [], True

    @rule()
    def pause(self):
        self.paused = True

    @rule()
    def resume(self):
        self.paused = self.paused and not self.valid  # the engine refuses it

    @rule(force=st.booleans())
    def init(self, force):
        info = {"backend": "disk", "force": force}
        if self.active and not force:
            self.refused(409, "init_weight_transfer_engine", init_info=info)
            return
        self.call("init_weight_transfer_engine", init_info=info)
        self.joined = True
        if self.active:
            self.drop()

    @rule(partial=st.booleans(), staging=st.sampled_from([None, "full", "in_place", "in_place"]))
    def start(self, partial, staging):
        body = {"partial": partial, "weight_staging": staging}
        if self.active or not self.joined:
            self.refused(409 if self.active else 400, "start_weight_update", **body)
        elif (partial and not self.valid) or (staging == "in_place" and not self.paused):
            self.refused(409, "start_weight_update", **body)
        else:
            self.call("start_weight_update", **body)
            self.state, self.received, self.partial, self.label_wished = "open", [], partial, None
            self.in_place, self.replaces_invalid = staging == "in_place", not self.valid
            self.valid = self.valid and not self.in_place

    @rule(part=st.sampled_from(["whole", "whole", "first", "rest"]), seed=st.sampled_from([1, 2]))
    def update(self, part, seed):
        info = {"path": self.folders[f"{part}-{seed}"]}
        names = list(self.serving)
        names = {"whole": names, "first": names[:5], "rest": names[5:]}[part]
        if not self.active:
            self.refused(self.out_of_order, "update_weights", update_info=info)
        elif self.state == "ready":
            self.refused(409, "update_weights", update_info=info)
            self.drop()
        elif any(n in names for n, _ in self.received):
            self.refused(400, "update_weights", update_info=info)
            self.drop()
        else:
            self.call("update_weights", update_info=info)
            self.state = "receiving"
            self.received += [(n, seed) for n in names]

    @rule(bad=st.sampled_from(["unknown", "nan", "missing-folder"]), prepare=st.booleans())
    def bad_update(self, bad, prepare):
        info = {"path": self.folders[bad]}
        if not self.active:
            self.refused(self.out_of_order, "update_weights", update_info=info)
        elif self.state == "ready":
            self.refused(409, "update_weights", update_info=info)
            self.drop()
        elif bad == "nan" and not self.received:
            self.call("update_weights", update_info=info)
            self.received = [("nan", 0)]
            self.refused(400, "finish_weight_update", prepare=prepare)
            self.drop()
        else:
            self.refused(400, "update_weights", update_info=info)
            self.drop()

    @rule(label=st.sampled_from([None, "a", "b"]), prepare=st.booleans())
    def finish(self, label, prepare):
        body = {"weight_version": label, "prepare": prepare}
        if not self.active or self.state == "open":
            self.refused(self.out_of_order if not self.active else 409, "finish_weight_update", **body)
            return
        if (self.replaces_invalid or not self.partial) and len(self.received) < len(self.serving):
            self.refused(400, "finish_weight_update", **body)
            self.drop()
            return
        answer = self.call("finish_weight_update", commits=True, **body)
        self.label_wished = label or self.label_wished
        if prepare:
            self.state = "ready"
        else:
            self.commit(self.received, self.label_wished)
            assert (answer["epoch"], answer["weight_version"]) == (self.epoch, self.label)

    @rule(seed=st.sampled_from([1, 2]))
    def single_call(self, seed):
        body = {"weight_dir": self.folders[f"whole-{seed}"], "skip_prefix_cache_reset": True}
        if self.active:
            self.refused(409, "update_weights", **body)
            return
        answer = self.call("update_weights", commits=True, **body)
        assert (answer["status"], answer["epoch"]) == ("ok", self.epoch + 1)
        self.commit(dict.fromkeys(self.serving, seed), None)

    @rule()
    def abort(self):
        if self.active:
            self.call("abort_weight_update")
            self.drop()
        else:
            self.refused(409, "abort_weight_update")

    @rule(label=st.sampled_from(["a", "c"]))
    def relabel(self, label):
        assert self.call("update_weight_version", new_version=label) == {"success": True, "new_version": label}
        self.label = label

    @rule()
    def shutdown(self):
        self.call("shutdown_weight_transfer_engine")
        self.drop("idle")
        self.joined = False

    @invariant()
    def what_serves_is_a_whole_version(self):
        info = self.call("weight_info")
        assert (info["state"], info["epoch"], info["weight_version"]) == (self.state, self.epoch, self.label)
        assert info["weights"] == ("valid" if self.valid else "invalid")
        assert self.updater.commit_if_ready() is None
        if self.valid:
            for name, parameter in self.model.named_parameters():
                assert torch.equal(parameter, self.references[self.serving[name]][name])


UpdateOrder.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestUpdateOrder = UpdateOrder.TestCase


@pytest.fixture
def server():
    with UpdaterServer(llama(0), info=lambda: {"logprobs_mode": "raw_logprobs"}) as running:
        yield running


@pytest.mark.parametrize(
    ("method", "params", "named"),
    [
        ("update_weight_version", {}, "new_version"),
        ("update_weight_version", {"new_version": 8}, "new_version"),
        ("finish_weight_update", {"weight_version": 8}, "weight_version"),
        ("start_weight_update", {"kv_policy": "forget"}, "kv_policy"),
        ("start_weight_update", {"partial": "yes"}, "partial"),
        ("weight_checker", {"action": "guess"}, "action"),
        ("weight_checker", {"action": "compare"}, "baseline"),
        ("init_weight_transfer_engine", {}, "init_info"),
    ],
)
def test_a_wrong_body_is_a_400_that_names_the_field(server, method, params, named):
    with pytest.raises(WeightUpdateError, match=named) as caught:
        server.call(method, **params)
    assert caught.value.status == 400


def test_a_shutdown_leaves_nothing_of_an_earlier_update(server):
    server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
    server.call("start_weight_update")
    server.call("abort_weight_update")
    assert server.call("weight_info")["state"] == "aborted"
    server.call("shutdown_weight_transfer_engine")
    assert server.call("weight_info")["state"] == "idle"


def test_order_errors_name_the_state_and_the_remedy(server):
    server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
    for method, remedy in (
        ("update_weights", "state idle: call start_weight_update first"),
        ("finish_weight_update", "state idle: call start_weight_update first"),
    ):
        with pytest.raises(WeightUpdateError, match=remedy):
            server.call(method, update_info={"path": "/"})
    server.call("start_weight_update")
    with pytest.raises(WeightUpdateError, match="already open: finish_weight_update or abort_weight_update"):
        server.call("start_weight_update")
    with pytest.raises(WeightUpdateError, match="open and has received nothing: call update_weights"):
        server.call("finish_weight_update")


def test_weight_info_says_what_the_last_update_was(server, tmp_path):
    tensors = saved_tensors(llama(1), tmp_path)
    server.call("update_weights", weight_dir=str(tmp_path))
    info = server.call("weight_info")
    assert info["seconds"] >= 0
    assert info.pop("seconds") is not None
    assert list(info.pop("committed_updates").values()) == [1]
    assert info == {
        "weight_version": "default",
        "epoch": 1,
        "state": "committed",
        "weights": "valid",
        "update_id": None,
        "takeover_s": 0.0,
        "last_error": None,
        "bytes": sum(t.nbytes for t in tensors.values()),
        "transport": "disk",
        "logprobs_mode": "raw_logprobs",
    }


def test_the_policy_of_an_update_reaches_the_engine(server, tmp_path):
    saved_tensors(llama(1), tmp_path)
    server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
    for policy in ("recompute", "keep", None):
        server.call("start_weight_update", kv_policy=policy)
        server.call("update_weights", update_info={"path": str(tmp_path)})
        server.call("finish_weight_update", weight_version=f"after-{policy}")
    assert [(c.epoch, c.label, c.kv_policy) for c in server.commits] == [
        (1, "after-recompute", "recompute"),
        (2, "after-keep", "keep"),
        (3, "after-None", None),
    ]


def test_a_check_ends_with_the_update_that_it_is_of(server, tmp_path, monkeypatch):
    """It holds up the next update's: they are checked on one thread."""
    saved_tensors(llama(1), tmp_path)
    server.call("init_weight_transfer_engine", init_info={"backend": "disk"})
    server.call("start_weight_update")
    server.call("update_weights", update_info={"path": str(tmp_path)})
    checked = []

    def finite(tensor):
        if not checked:
            server.call("abort_weight_update")
        checked.append(tensor.shape)
        return True

    monkeypatch.setattr(staging, "_finite", finite)
    with pytest.raises(WeightUpdateError, match="aborted by abort_weight_update"):
        server.call("finish_weight_update")
    server.call("start_weight_update")
    server.call("update_weights", update_info={"path": str(tmp_path)})
    assert len(checked) == 1


def test_the_weight_checker_compares_by_checkpoint_name(tmp_path):
    with UpdaterServer(mixtral(0)) as server:
        before = server.call("weight_checker", action="checksum")["checksums"]
        tensors = saved_tensors(mixtral(1), tmp_path)
        server.call("update_weights", weight_dir=str(tmp_path))
        expected = {name: sha256(t) for name, t in tensors.items()}
        assert server.call("weight_checker", action="compare", baseline=expected) == {"match": True, "mismatches": []}
        compared = server.call("weight_checker", action="compare", baseline=before)
        assert not compared["match"]
        assert compared["mismatches"] == sorted(n for n in expected if before[n] != expected[n])


def test_nothing_is_live_before_the_engines_own_step(tmp_path):
    saved_tensors(llama(1), tmp_path)
    model = llama(0)
    woken = []
    updater = WeightUpdater(
        WeightStore(ModelParameters(model)), timeout_s=10.0, wake=lambda: woken.append(updater.ready is not None)
    )
    answer = updater.call("update_weights", {"weight_dir": str(tmp_path)})
    while not woken:
        assert not answer.done()
    assert woken == [True]
    assert same_weights(model, llama(0))
    assert updater.call("weight_info", {}).result()["state"] == "ready"
    with pytest.raises(WeightUpdateError, match="committing"):
        updater.call("finish_weight_update", {}).result(5)
    assert updater.commit_if_ready().epoch == 1
    assert same_weights(model, llama(1))
    assert answer.result(0)["status"] == "ok"


def test_a_commit_that_the_engine_never_makes_is_given_up(tmp_path):
    saved_tensors(llama(1), tmp_path)
    updater = WeightUpdater(WeightStore(ModelParameters(llama(0))), timeout_s=0.3)
    with pytest.raises(WeightUpdateError, match=r"0\.3 s \(ready\)"):
        updater.call("update_weights", {"weight_dir": str(tmp_path)}).result(10)
    assert updater.commit_if_ready() is None


@pytest.mark.parametrize("content", [None, b"not safetensors"])
def test_an_unreadable_folder_is_a_400(server, tmp_path, content):
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightUpdateError, match=str(tmp_path)) as caught:
        server.call("update_weights", weight_dir=str(tmp_path))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "init_info"),
        ({"init_info": 3}, "init_info"),
        ({"init_info": {"world_size": 1}}, "init_info.world_size"),
        ({"init_info": {"backend": "mpi"}}, "init_info.backend"),
    ],
)
def test_the_refusal_of_an_init_named_no_field(body, field):
    with pytest.raises(WeightUpdateError, match=f"`{field}`") as refused:
        parse(body, InitBody)
    assert (refused.value.status, refused.value.param) == (400, field)
