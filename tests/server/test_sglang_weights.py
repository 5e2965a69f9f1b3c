"""Weights by SGLang's calls: what is one update there, what commits it, what drops it, and what requests see of it."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from rollout.config import ServerConfig
from rollout.fleet.connection import run_engine
from rollout.outputs import WeightVersionSpan
from tests.support import tiny_models
from tests.support.engine_utils import TOLERANCE, prompt
from tests.support.push_reference import as_stamped
from tests.support.server_harness import RunningServer, running_server
from tests.support.sglang_trainer import SglangTrainer, lengthen, parts
from tests.support.wait import eventually

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "num_gpu_blocks_override": 1200,
    "enable_sleep_mode": True,
}
LAST = "model.norm.weight"
JSON = {"Content-Type": "application/json"}


class World:
    """A server, and which model each of its epochs serves."""

    def __init__(self, server: RunningServer, trainer: SglangTrainer) -> None:
        self.server, self.trainer = server, trainer
        self.models = {0: tiny_models.model("llama", 0)}

    @property
    def http(self) -> httpx.Client:
        return self.trainer.http

    def fresh(self) -> PreTrainedModel:
        """Weights unrelated to all that served; they are expected to be committed next."""
        return tiny_models.model("llama", 1 + len(self.models))

    def committed(self, model: PreTrainedModel) -> None:
        """This is what must serve now, as the next epoch."""
        self.models[self.info["epoch"]] = model
        assert sorted(self.models) == list(range(len(self.models)))

    @property
    def sampled(self) -> int:
        """Tokens so far, of all engines."""
        asked = asyncio.run_coroutine_threadsafe(self.server.engine.stats(10), self.server.loop)
        return sum(counted.get("sampled_tokens", 0) for counted in asked.result(10).values())

    @property
    def info(self) -> dict[str, Any]:
        return self.http.get("/weight_info").json()

    def generate(self, ids: list[int], count: int = 6, **more: Any) -> dict[str, Any]:
        params = {"max_new_tokens": count, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, **more}
        return self.http.post("/generate", json=body).raise_for_status().json()["meta_info"]

    def check(self, ids: list[int], meta: dict[str, Any]) -> list[int]:
        """Each token's logprob is that of the weights it is stamped with; returns the epochs."""
        told = meta["output_token_logprobs"]
        spans = [WeightVersionSpan(**span) for span in meta["weight_versions"]]
        expected = as_stamped(self.models, ids, [token_id for _, token_id, _ in told], spans)
        torch.testing.assert_close(torch.tensor([lp for lp, _, _ in told]), expected, atol=TOLERANCE, rtol=0)
        return [span.epoch for span in spans]

    def serves(self, version: str) -> None:
        """The newest weights alone, under this label."""
        meta = self.generate(prompt(9))
        assert self.check(prompt(9), meta) == [max(self.models)]
        assert meta["weight_version"] == version == self.http.get("/get_weight_version").json()["weight_version"]


@contextmanager
def world(tmp_path_factory: pytest.TempPathFactory, size: int = 1, **config: Any) -> Iterator[World]:
    path = lengthen(tiny_models.build("llama", tmp_path_factory.mktemp("served")))
    settings = ServerConfig(served_model_name="tiny", tokens_only=True, **config)
    policy: Any = {"kv_policy": "recompute"}
    with running_server(settings, model=str(path), target=run_engine, size=size, **OPTIONS, **policy) as server:
        trainer = SglangTrainer(server.url)
        trainer.join()
        made = World(server, trainer)
        yield made
        made.trainer.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory) as made:
        yield made


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two engines, which abort nothing."""
    with world(tmp_path_factory, size=2, pause_generation_aborts=False) as made:
        yield made


@contextmanager
def running(world: World, ids: list[int], **more: Any) -> Iterator[Future[dict[str, Any]]]:
    """A long request, of which something has been sampled."""
    sampled = world.sampled
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(world.generate, ids, 15_000, **more)
        eventually(lambda: world.sampled > sampled + 3, 60)
        yield made
        world.http.post("/abort_request", json={"abort_all": True})


def test_chunks_under_a_pause_are_one_update(served: World) -> None:
    ids = prompt(12)
    model, before = served.fresh(), served.info["epoch"]
    with running(served, ids) as request:
        served.trainer.post("/pause_generation")
        meta = request.result(30)
        assert meta["finish_reason"]["type"] == "abort"
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] > 0
        assert set(served.check(ids, meta)) == {before}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(served.generate, prompt(9))
            for tensors in parts(model):
                served.trainer.send(tensors, "step-1")
                assert served.info["epoch"] == before
            assert not waiting.done()
            served.trainer.post("/continue_generation")
            served.committed(model)
            assert served.check(prompt(9), waiting.result(30)) == [before + 1]
    served.serves("step-1")


def test_an_update_between_begin_and_end(served: World) -> None:
    model, before = served.fresh(), served.info["epoch"]
    served.trainer.post("/begin_weight_update")
    for tensors in parts(model):
        served.trainer.send(tensors, "bracket")
    assert served.info["epoch"] == before
    assert served.trainer.post("/end_weight_update")["success"]
    served.committed(model)
    served.serves("bracket")
    answer = served.http.post("/end_weight_update", json={})
    assert (answer.status_code, answer.json()["success"]) == (400, False)


def test_without_a_bracket_each_call_is_an_update_of_its_own(served: World) -> None:
    newest = served.models[max(served.models)]
    for seed in (91, 92):
        model = tiny_models.model("llama", seed)
        model.load_state_dict(newest.state_dict())
        changed = {LAST: torch.full_like(newest.state_dict()[LAST], 0.5 + seed / 100)}
        model.load_state_dict(changed, strict=False)
        served.trainer.send(changed, f"alone-{seed}")
        served.committed(model)
        served.serves(f"alone-{seed}")
        newest = model


@pytest.mark.parametrize("spoilt", ["name", "shape", "value", "missing", "format"])
def test_what_fails_drops_all_of_it(served: World, spoilt: str) -> None:
    before, label = served.info["epoch"], served.info["weight_version"]
    first, second, third = parts(tiny_models.model("llama", 77))
    served.trainer.post("/pause_generation")
    served.trainer.send(first, "spoilt")
    name = next(iter(second))
    if spoilt in ("name", "shape", "format"):
        tensor = second[name]
        wrong = {"name": {"no.such": tensor}, "shape": {name: tensor.detach()[:1]}, "format": {name: tensor}}[spoilt]
        with pytest.raises(httpx.HTTPStatusError) as refused:
            served.trainer.send(wrong, "spoilt", **({"load_format": "flattened_bucket"} if spoilt == "format" else {}))
        answer = refused.value.response.json()
        assert not answer["success"]
        assert {"name": "no.such", "shape": name, "format": "flattened_bucket"}[spoilt] in answer["message"]
        with pytest.raises(httpx.HTTPStatusError, match="400"):  # the rest of it is none
            served.trainer.send(third, "spoilt")
        served.trainer.post("/continue_generation")
        served.trainer.join_again()
    else:
        if spoilt == "value":
            second = {**second, name: torch.full_like(second[name], float("nan"))}
            served.trainer.send(second, "spoilt")
            served.trainer.send(third, "spoilt")
        with pytest.raises(httpx.HTTPStatusError) as refused:
            served.trainer.post("/continue_generation")
        answer = refused.value.response.json()
        assert not answer["success"]
        assert (name if spoilt == "value" else "lacks") in answer["message"]
    assert served.info["epoch"] == before
    served.serves(label)
    model = served.fresh()
    served.trainer.push(model, f"after {spoilt}")
    served.committed(model)
    served.serves(f"after {spoilt}")


@pytest.mark.parametrize(("mode", "kv"), [("retract", "current"), ("in_place", "mixed")])
def test_modes_that_abort_nothing_go_on_with_a_cache_as_they_say(served: World, mode: str, kv: str) -> None:
    ids, model = prompt(12, 1), served.fresh()
    with running(served, ids, rid=mode) as request:
        served.trainer.post("/pause_generation", {"mode": mode})
        for tensors in parts(model):
            served.trainer.send(tensors, mode)
        served.trainer.post("/continue_generation")
        served.committed(model)
        sampled = served.sampled
        eventually(lambda: served.sampled > sampled + 3, 30)
        served.trainer.http.post("/abort_request", json={"rid": mode})
        meta = request.result(30)
    assert [(s["epoch"], s["kv"]) for s in meta["weight_versions"]][-1] == (max(served.models), kv)
    assert len(served.check(ids, meta)) == 2


def test_a_folder_is_an_update_that_commits_itself(served: World, tmp_path: Path) -> None:
    path = tiny_models.build("llama", tmp_path / "folder", 55)
    served.trainer.post("/pause_generation")
    answer = served.trainer.post("/update_weights_from_disk", {"model_path": str(path), "weight_version": "disk"})
    assert answer["success"]
    served.committed(tiny_models.model("llama", 55))
    served.trainer.post("/continue_generation")
    served.serves("disk")
    answer = served.http.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "none")})
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert "none" in answer.json()["message"]
    served.serves("disk")


def test_whose_group_was_taken_over_has_no_effect(served: World) -> None:
    old, new = served.trainer, SglangTrainer(served.server.url)
    first = parts(tiny_models.model("llama", 66))[0]
    model = served.fresh()
    old.post("/pause_generation")
    new.join()
    with pytest.raises(httpx.HTTPStatusError) as refused:
        old.send(first, "old")
    assert "took over" in refused.value.response.json()["message"]
    for tensors in parts(model):
        new.send(tensors, "new")
    new.post("/continue_generation")
    served.committed(model)
    served.serves("new")
    answer = new.http.post("/destroy_weights_update_group", json={"group_name": old.name})
    assert answer.status_code == 400
    served.trainer = new
    old.close()


@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/update_weights_from_ipc"])
def test_pickles_are_refused_by_name(served: World, path: str) -> None:
    answer = served.http.post(path, json={"serialized_named_tensors": ["gASVDQAAAAAAAAA="]})
    assert answer.status_code == 400
    assert not answer.json()["success"]
    assert "pickles" in answer.json()["message"]


def test_checksums_and_labels(served: World) -> None:
    assert served.http.post("/weights_checker", json={"action": "compare"}).status_code == 400
    served.trainer.post("/weights_checker", {"action": "snapshot"})
    assert served.trainer.post("/weights_checker", {"action": "compare"})["success"]
    served.trainer.post("/update_weight_version", {"new_version": "renamed", "abort_all_requests": True})
    served.serves("renamed")
    model = served.fresh()
    served.trainer.push(model, "checked")
    served.committed(model)
    answer = served.http.post("/weights_checker", json={"action": "compare"}).json()
    assert not answer["success"]
    checksums = served.trainer.post("/weights_checker")["checksums"]
    assert checksums == served.trainer.post("/weight_checker", {"action": "checksum"})["checksums"]


def test_what_it_says_of_itself(served: World) -> None:
    info = served.http.get("/server_info").json()
    assert info == served.http.get("/get_server_info").json()
    told = {name: info[name] for name in ("tp_size", "pp_size", "dp_size", "num_gpus", "disaggregation_mode", "dtype")}
    assert told == {
        "tp_size": 1, "pp_size": 1, "dp_size": 1, "num_gpus": 1, "disaggregation_mode": "null", "dtype": "float32",
    }  # fmt: skip
    assert (info["enable_memory_saver"], info["enable_return_routed_experts"]) == (True, False)
    assert served.http.get("/health_generate").status_code == 200
    assert served.http.get("/model_info").json()["weight_version"] == served.info["weight_version"]
    with running(served, prompt(12)) as request:
        (load,) = served.http.get("/v1/loads?include=core").json()["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (1, 0)
        assert served.http.post("/flush_cache").status_code == 400
        served.trainer.http.post("/abort_request", json={"abort_all": True})
        request.result(30)
    eventually(lambda: served.http.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0, 30)
    assert served.http.post("/flush_cache").status_code == 200


def test_memory_is_given_back_in_parts(served: World) -> None:
    label = served.info["weight_version"]
    served.http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).raise_for_status()
    assert served.server.engine.sleeping.asleep == {"kv_cache"}
    served.http.post("/resume_memory_occupation", json={"tags": None}).raise_for_status()
    served.http.post("/release_memory_occupation", json={}).raise_for_status()
    assert served.server.engine.sleeping.asleep == {"kv_cache", "weights"}
    served.http.post("/resume_memory_occupation", json={"tags": ["weights"]}).raise_for_status()
    served.http.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).raise_for_status()
    served.serves(label)


def test_with_the_flag_nothing_is_aborted(unstopped: World) -> None:
    ids = prompt(12)
    with running(unstopped, ids, rid="long") as request:
        for step in range(3):
            model = unstopped.fresh()
            unstopped.trainer.post("/pause_generation")
            assert unstopped.http.get("/flush_cache").status_code == 200
            for tensors in parts(model):
                unstopped.trainer.send(tensors, f"step-{step}", abort_all_requests=True)
            unstopped.serves(f"step-{step - 1}" if step else "default")
            unstopped.trainer.post("/continue_generation")
            unstopped.committed(model)
            unstopped.serves(f"step-{step}")
        assert not request.done()
        unstopped.http.post("/abort_request", json={"rid": "long"})
        meta = request.result(30)
    assert unstopped.check(ids, meta) == [0, 1, 2, 3]


def test_a_trainer_that_dies_amid_a_chunk_leaves_the_old_weights(served: World) -> None:
    before, label = served.info["epoch"], served.info["weight_version"]
    first, second, _ = parts(tiny_models.model("llama", 78))
    dying, served.trainer = served.trainer, SglangTrainer(served.server.url)
    dying.post("/pause_generation")
    dying.send(first, "dead")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(served.generate, prompt(9))
        described = {"names": list(second), "shapes": [list(tensor.shape) for tensor in second.values()]}
        body = described | {"dtypes": ["float32"] * len(second), "group_name": dying.name, "weight_version": "dead"}
        announced = pool.submit(dying.http.post, "/update_weights_from_distributed", json=body)
        eventually(lambda: served.info["state"] == "receiving", 30)
        torch.distributed.destroy_process_group(dying.group)
        dying.group = None  # closes its connections, as the kernel does for a process that has died
        gc.collect()
        answer = announced.result(60)
        assert (answer.status_code, answer.json()["success"]) == (400, False)
        assert not waiting.done()
        served.trainer.post("/continue_generation")
        assert served.check(prompt(9), waiting.result(60)) == [before]
    dying.http.close()
    assert served.info["epoch"] == before
    served.serves(label)
    served.trainer.join()
    model = served.fresh()
    served.trainer.push(model, "after a death")
    served.committed(model)
    served.serves("after a death")


STRANGE: list[Any] = [[], {}, {"a": [1]}, "", "x", -1, 2**70, 1.5, True, [["x"]], "\u2028", 10**400]
CALLS: dict[str, list[str]] = {
    "/pause_generation": ["mode"],
    "/abort_request": ["rid", "abort_all"],
    "/init_weights_update_group": [
        *("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend", "pp_rank"),
    ],
    "/destroy_weights_update_group": ["group_name"],
    "/update_weights_from_distributed": [
        *("names", "dtypes", "shapes", "group_name", "weight_version", "load_format", "selector", "abort_all_requests"),
    ],
    "/update_weights_from_disk": ["model_path", "weight_version", "load_format", "abort_all_requests"],
    "/pull_weights": ["local_checkpoint_dir", "source_dir", "target_version"],
    "/weights_checker": ["action"],
    "/resume_memory_occupation": ["tags"],
    "/collective_rpc": ["method", "kwargs"],
    "/generate": [
        *("text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"),
        *("token_ids_logprob", "stream", "data_parallel_rank", "return_sampling_mask", "routed_experts_start_len"),
    ],
}


@pytest.mark.parametrize("path", CALLS)
def test_values_of_other_types_are_no_server_error(
    served: World, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where /pull_weights makes the folders that it is told
    before = served.info["epoch"]
    named = {
        "/init_weights_update_group": {"master_address": "127.0.0.1", "rank_offset": -1, "world_size": 0},
        "/update_weights_from_distributed": {"names": [LAST], "dtypes": ["float32"], "shapes": [[64]]},
        "/pull_weights": {"local_checkpoint_dir": "x\0y", "source_dir": str(tmp_path), "target_version": 1},
        "/collective_rpc": {"method": "update_weights_nccl"},
        "/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}},
    }.get(path, {})
    for field in CALLS[path]:
        for value in STRANGE:
            answer = served.http.post(path, content=json.dumps(named | {field: value}), headers=JSON)
            assert answer.status_code < 500, (field, value, answer.text)
            if answer.status_code >= 400:
                assert answer.status_code in (400, 409), (field, value, answer.text)  # 409: no owner's token
                assert set(answer.json()) in ({"success", "message"}, {"error"})
    for body in ([], "x", None, 7):
        answer = served.http.post(path, content=json.dumps(body), headers=JSON)
        assert answer.status_code < 500, (body, answer.text)
    served.http.post("/continue_generation", json={})
    assert served.info["epoch"] == before
    served.serves(served.info["weight_version"])
