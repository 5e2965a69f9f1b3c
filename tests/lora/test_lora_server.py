"""Adapters over HTTP: loaded, named in every dialect, replaced, asked for by version, and gone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.connection import run_engine
from rollout.fleet.errors import EngineError
from rollout.server.api.adapters import load_modules
from rollout.server.app import create_app
from tests.support import adapters, tiny_models
from tests.support.engine_utils import TOLERANCE, prompt
from tests.support.push_reference import single
from tests.support.server_harness import RunningServer, running_server
from tests.support.wait import eventually

OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "max_cpu_loras": 4,
    "dtype": "float32",
    "max_model_len": 128,
    "num_threads": 1,
    "num_gpu_blocks_override": 200,
    "block_size": 4,
}


class Folders:
    """The base's folder, and PEFT's models by the folder that they are in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = tiny_models.build("llama", root / "base")
        self.models: dict[str, Any] = {}

    def adapter(self, name: str, kind: int = 0, seed: int = 0) -> str:
        """A folder with this adapter; what it held before is gone."""
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        self.models[str(path)] = adapters.model("llama", kind, seed)
        adapters.save(self.models[str(path)], path)
        return str(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def server(folders: Folders) -> Iterator[RunningServer]:
    config = ServerConfig(served_model_name="tiny", enable_scale_out=True, skip_tokenizer_init=True)
    with running_server(
        config, model=str(folders.base), target=run_engine, stall_timeout_s=300, restarts=2, **OPTIONS
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        yield http


def load(client: httpx.Client, name: str, path: str, **more: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def generate(client: httpx.Client, model: str, *, seed: int = 0, tokens: int = 6) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "temperature": 1.0, "seed": seed, "logprobs": 0, "ignore_eos": True}
    body = {"model": model, "token_ids": prompt(12), "sampling_params": sampling}
    answer = client.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    assert told["model"] == model
    return told


def label(answer: dict[str, Any]) -> str:
    (span,) = answer["choices"][0]["weight_versions"]
    found: str = span["version"]
    return found


def check(answer: dict[str, Any], model: Any) -> None:
    """It was sampled from this model."""
    choice = answer["choices"][0]
    got = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    torch.testing.assert_close(got, single(model, prompt(12), choice["token_ids"]), atol=TOLERANCE, rtol=0)


def names(client: httpx.Client) -> dict[str, Any]:
    return {card["id"]: card for card in client.get("/v1/models").json()["data"]}


def test_an_adapter_serves_under_its_name_until_it_is_unloaded(client: httpx.Client, folders: Folders) -> None:
    path = folders.adapter("first", kind=1)
    assert load(client, "first", path).text == "Success: LoRA adapter 'first' added successfully."
    answer = generate(client, "first")
    assert label(answer) == "first@1"
    check(answer, folders.models[path])
    check(generate(client, "tiny"), tiny_models.model("llama"))
    card = names(client)["first"]
    assert (card["parent"], card["root"], card["weight_version"]) == ("tiny", path, "first@1")
    assert names(client)["tiny"]["parent"] is None
    again = load(client, "first", path)
    assert again.status_code == 400
    assert "'first' has already been loaded. If you want" in again.json()["error"]["message"]
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "first"})
    assert gone.text == "Success: LoRA adapter 'first' removed successfully."
    for model in ("first", "first@1"):
        refused = client.post("/inference/v1/generate", json={"model": model, "token_ids": [2], "sampling_params": {}})
        assert refused.status_code == 404
        assert f"The model `{model}` does not exist." in refused.json()["error"]["message"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "first"}).status_code == 404
    load(client, "first", path)
    assert label(generate(client, "first")) == "first@2"  # a label never names two things
    client.post("/v1/unload_lora_adapter", json={"lora_name": "first"})


def test_a_new_version_serves_beside_the_old_one(client: httpx.Client, folders: Folders) -> None:
    """What runs ends on the version it began on; later requests may ask for an old one by its number."""
    old = folders.adapter("old", kind=1, seed=1)
    new = folders.adapter("new", kind=1, seed=2)
    load(client, "policy", old)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, client, "policy", tokens=100)
        eventually(lambda: _running(client), 60)
        assert load(client, "policy", new, load_inplace=True).status_code == 200
        check(generate(client, "policy"), folders.models[new])
        first = running.result(120)
    assert label(first) == "policy@1"
    check(first, folders.models[old])
    check(generate(client, "policy@1"), folders.models[old])
    assert label(generate(client, "policy")) == "policy@2"


def _running(client: httpx.Client) -> bool:
    lines = client.get("/metrics").text.splitlines()
    return any(line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0 for line in lines)


def test_a_load_that_fails_leaves_what_serves(client: httpx.Client, folders: Folders) -> None:
    good = folders.adapter("good", kind=0)
    load(client, "kept", good)
    bad = Path(folders.adapter("bad", kind=0))
    (bad / "adapter_model.safetensors").write_bytes(b"\0" * 64)
    refused = load(client, "kept", str(bad), load_inplace=True)
    assert refused.status_code == 400, refused.text
    assert load(client, "kept", "/nowhere", load_inplace=True).status_code == 404
    for body in ({}, {"lora_name": "x"}, {"lora_path": "x"}, {"lora_name": "x" * 300, "lora_path": "x"}):
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 400
    assert load(client, "tiny", good).status_code == 400
    check(generate(client, "kept"), folders.models[good])
    assert label(generate(client, "kept")) == "kept@1"


def test_sglangs_calls_and_prime_rls(
    client: httpx.Client, server: RunningServer, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prime-rl loads each step's folder under one name, by the path that is SGLang's too."""
    for step in range(2):
        path = folders.adapter(f"step_{step}", kind=3, seed=step)
        answer = client.post("/load_lora_adapter", json={"lora_name": "rl", "lora_path": path})
        assert answer.status_code == 200
        assert (answer.json()["success"], answer.json()["loaded_adapters"]["rl"]) == (True, path)
    body = {
        "input_ids": [prompt(12), prompt(12)],
        "lora_path": ["rl", None],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        "return_logprob": True,
    }
    adapted, plain = client.post("/generate", json=body).json()
    for answer, model in ((adapted, folders.models[path]), (plain, tiny_models.model("llama"))):
        got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(got, single(model, prompt(12), answer["output_ids"]), atol=TOLERANCE, rtol=0)
    assert adapted["meta_info"]["weight_version"] == "rl@2"
    assert client.post("/generate", json=body | {"lora_path": ["rl"]}).status_code == 400
    assert client.post("/generate", json=body | {"lora_path": "nobody"}).status_code == 400
    refused = client.post("/load_lora_adapter", json={"lora_name": "rl", "lora_path": "/nowhere"})
    assert refused.status_code == 400
    assert "No adapter found for /nowhere" in refused.json()["error_message"]
    known = server.engine.adapters
    monkeypatch.setattr(known, "_most", 1)
    monkeypatch.setattr(known, "_in_use", lambda: set(known._versions))  # requests run on all
    busy = client.post("/load_lora_adapter", json={"lora_name": "rl", "lora_path": path})
    assert (busy.status_code, busy.json()["success"]) == (503, False)  # which a trainer tries again
    monkeypatch.undo()
    gone = client.post("/unload_lora_adapter", json={"lora_name": "rl"}).json()
    assert (gone["success"], "rl" in gone["loaded_adapters"]) == (True, False)


def test_many_versions_leave_the_newest_ones(client: httpx.Client, server: RunningServer, folders: Folders) -> None:
    """ART and AReaL name each step's adapter anew; what was replaced, and then what is oldest, makes room."""
    path = folders.adapter("art", kind=0)
    for step in range(9):
        assert load(client, f"art@{step}", path, load_inplace=True).status_code == 200
    left = [name for name in names(client) if name != "tiny"]
    assert left == ["art@5", "art@6", "art@7", "art@8"]
    assert label(generate(client, "art@8")) == "art@8@1"
    copies = server.engine.adapters._folder
    assert copies is not None
    assert len([entry for entry in copies.path.iterdir() if entry.is_dir()]) == 4


@pytest.mark.long
def test_an_engine_that_comes_back_has_every_version(
    client: httpx.Client, server: RunningServer, folders: Folders
) -> None:
    """Also where the trainer's folder holds another adapter by now."""
    path = folders.adapter("again", kind=1, seed=5)
    load(client, "again", path, load_inplace=True)
    model = folders.models[path]
    folders.adapter("again", kind=1, seed=6)
    os.kill(server.engine_pid, signal.SIGKILL)
    eventually(lambda: client.get("/health").status_code == 503, 60)
    eventually(lambda: client.get("/health").status_code == 200, 240)
    answer = generate(client, "again")
    check(answer, model)
    assert label(answer).startswith("again@")


@pytest.mark.long
def test_two_engines_load_together(folders: Folders) -> None:
    config = ServerConfig(served_model_name="tiny", enable_scale_out=True, skip_tokenizer_init=True)
    path = folders.adapter("both", kind=1)
    with (
        running_server(
            config, model=str(folders.base), target=run_engine, size=2, restarts=2, stall_timeout_s=300, **OPTIONS
        ) as running,
        httpx.Client(base_url=running.url, timeout=120) as http,
    ):
        assert load(http, "both", path).status_code == 200
        for rank in "01":
            http.headers["X-Data-Parallel-Rank"] = rank
            check(generate(http, "both"), folders.models[path])
        pid = running.engine.ranks[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: running.engine.ranks[1].error is not None, 60)
        other = folders.adapter("other", kind=1, seed=9)
        assert load(http, "both", other, load_inplace=True).status_code == 200  # while one engine is away
        eventually(lambda: running.engine.ranks[1].refusal is None, 240)
        for rank in "01":
            http.headers["X-Data-Parallel-Rank"] = rank
            check(generate(http, "both"), folders.models[other])
            check(generate(http, "both@1"), folders.models[path])


def test_without_the_flag_the_answer_says_so() -> None:
    with running_server() as running, httpx.Client(base_url=running.url, timeout=60) as http:
        refused = load(http, "x", "/x")
        assert refused.status_code == 403
        assert "--enable-lora" in refused.json()["error"]["message"]


def test_what_trainers_send_is_understood(server: RunningServer, client: httpx.Client, folders: Folders) -> None:
    """TRL's own client; the bodies of ART (`art/vllm`), which names steps, and of AReaL's SGLang backend."""
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    path = folders.adapter("trainers", kind=1, seed=8)
    trl = VLLMClient(server.url, server_timeout=60)
    config = trl.get_server_info()["lora_config"]
    assert (config["max_loras"], config["max_lora_rank"]) == (16, 256)  # TRL compares both with what it needs
    trl.load_lora_adapter("trl-policy-1", path)
    check(generate(client, "trl-policy-1"), folders.models[path])
    trl.unload_lora_adapter("trl-policy-1")
    trl.unload_lora_adapter("trl-policy-1")  # "missing names are not an error"
    assert load(client, "model@7", path, load_inplace=True).status_code == 200
    check(generate(client, "model@7"), folders.models[path])
    body = {"lora_name": "lora-v3", "lora_path": path}
    assert client.post("/load_lora_adapter", json=body).json()["success"]
    sampling = {"max_new_tokens": 4, "temperature": 1.0}
    asked = {"input_ids": prompt(12), "sampling_params": sampling, "return_logprob": True, "lora_path": "lora-v3"}
    answer = client.post("/generate", json=asked).json()
    assert answer["meta_info"]["weight_version"] == "lora-v3@1"
    got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    expected = single(folders.models[path], prompt(12), answer["output_ids"])
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_what_the_command_line_names_is_loaded_or_says_why(server: RunningServer, folders: Folders) -> None:
    path = folders.adapter("flag", kind=1)
    context = create_app(
        server.engine, EngineConfig(model=str(folders.base)), ServerConfig(served_model_name="tiny")
    ).state.server
    for modules, wrong in (
        ((json.dumps({"name": "flag", "path": str(path)}),), None),
        ((f"flag={path}",), "--lora-modules flag=.*already been loaded"),
        ((f"{folders.base}={path}",), "is the base model's name"),
        (("nobody=/nowhere",), "--lora-modules nobody=/nowhere: No adapter found for /nowhere"),
    ):
        context.config = replace(context.config, lora_modules=modules)
        loading = asyncio.run_coroutine_threadsafe(load_modules(context), server.loop)
        if wrong is None:
            loading.result(60)
        else:
            with pytest.raises(EngineError, match=wrong):
                loading.result(60)
    with httpx.Client(base_url=server.url, timeout=120) as http:
        check(generate(http, "flag"), folders.models[path])
