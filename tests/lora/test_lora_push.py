"""A PEFT model's adapter pushed from memory: a transaction like any other, beside requests that run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model

from rollout.config import ServerConfig
from rollout.fleet.connection import run_engine
from tests.lora.test_lora_server import OPTIONS, check, generate, label, names
from tests.support import adapters, tiny_models
from tests.support.server_harness import RunningServer, running_server
from trainer_bridge.push.sender import WeightPushError, WeightSender


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    base = tiny_models.build("llama", tmp_path_factory.mktemp("base"))
    config = ServerConfig(served_model_name="tiny", enable_scale_out=True, skip_tokenizer_init=True)
    with running_server(config, model=str(base), target=run_engine, stall_timeout_s=300, **OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        yield http


@torch.no_grad()
def move(model: Any, seed: int) -> None:
    """An optimizer's step, as far as anybody can tell."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))


def info(client: httpx.Client) -> dict[str, Any]:
    told: dict[str, Any] = client.get("/weight_info").json()
    return told


def test_pushes_of_an_adapter_serve_at_once(server: RunningServer, client: httpx.Client) -> None:
    """Checked by checksums; the base's epoch and label stay, a push of the base leaves the adapter."""
    model = adapters.model("llama", 2)  # with the head, whose base weight isn't sent along
    epoch = info(client)["epoch"]
    with WeightSender.connect(server.url, model, adapter="policy", timeout_s=60) as sender:
        for step in (1, 2):
            move(model, step)
            pushed = sender.push(verify=step == 1)
            assert (pushed.version, pushed.epoch) == (f"policy@{step}", epoch)
            assert pushed.bytes < 30_000
            answer = generate(client, "policy")
            assert label(answer) == f"policy@{step}"
            check(answer, model)
    assert names(client)["policy"]["root"] == "pushed"
    check(generate(client, "tiny"), tiny_models.model("llama"))
    base = tiny_models.model("llama", seed=3)
    with WeightSender.connect(server.url, base, timeout_s=60) as whole:
        assert whole.push("step-1").epoch == epoch + 1
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            target = name.replace("lm_head.weight", "lm_head.base_layer.weight")
            state = dict(model.get_base_model().named_parameters(remove_duplicate=False))
            wrapped = target.replace(".weight", ".base_layer.weight")
            state.get(wrapped, state.get(target, state.get(name))).copy_(parameter)  # type: ignore[union-attr]
    check(generate(client, "policy"), model)
    with WeightSender.connect(server.url, tiny_models.model("llama"), timeout_s=60) as whole:
        whole.push("default")  # what the other tests expect


def test_a_push_by_files(server: RunningServer, client: httpx.Client, tmp_path: Path) -> None:
    model = adapters.model("llama", 1, seed=4)
    with WeightSender.connect(server.url, model, adapter="disk", backend="disk", disk_path=tmp_path) as sender:
        assert sender.push().version == "disk@1"
    assert label(generate(client, "disk")) == "disk@1"
    check(generate(client, "disk"), model)


def test_a_push_that_fails_leaves_the_old_version(server: RunningServer, client: httpx.Client) -> None:
    model = adapters.model("llama", 1, seed=5)
    with WeightSender.connect(server.url, model, adapter="kept", timeout_s=60) as sender:
        sender.push()
        before = generate(client, "kept")["choices"][0]["token_ids"]
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "lora_B" in n)[0, 0] = torch.nan
        with pytest.raises(WeightPushError, match="not every value is finite"):
            sender.push()
        assert generate(client, "kept")["choices"][0]["token_ids"] == before
        assert label(generate(client, "kept")) == "kept@1"
        assert info(client)["state"] == "aborted"
        move(model, 6)
        assert sender.push().version == "kept@3"  # the second number was the failed one's
        assert label(generate(client, "kept")) == "kept@3"


def test_what_cannot_be_pushed_is_refused(server: RunningServer, client: httpx.Client) -> None:
    with pytest.raises(ValueError, match="no PEFT model"):
        WeightSender.connect(server.url, tiny_models.model("llama"), adapter="x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dora = get_peft_model(tiny_models.model("llama"), LoraConfig(use_dora=True, target_modules=["q_proj"]))
    with WeightSender.connect(server.url, dora, adapter="x", timeout_s=60) as sender:
        with pytest.raises(WeightPushError, match="use_dora"):
            sender.push()
        with pytest.raises(ValueError, match="its version is its name and number"):
            sender.push("step-1")
    assert "x" not in names(client)
    start = {"adapter": "y" * 300, "lora_config": {}}
    assert client.post("/start_weight_update", json=start).status_code == 400


def test_a_trainer_that_leaves_leaves_nothing(server: RunningServer, client: httpx.Client) -> None:
    """An update that was opened, and that another one takes the place of, has no version."""
    model = adapters.model("llama", 0, seed=7)
    with WeightSender.connect(server.url, model, adapter="left", timeout_s=60) as sender:
        body = {"adapter": "left", "lora_config": {"peft_type": "LORA", "r": 4}}
        sender._servers.start(body, None)
    assert "left" not in names(client)
    with WeightSender.connect(server.url, model, adapter="left", timeout_s=60) as again:
        assert again.push().version == "left@2"
    check_copies(server)


def check_copies(server: RunningServer) -> None:
    """There is one for each version that serves."""
    known = server.engine.adapters
    assert known._folder is not None
    there = {str(entry) for entry in known._folder.path.iterdir() if entry.is_dir()}
    assert there == {version.copy for version in known._versions.values()}
