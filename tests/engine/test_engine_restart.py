"""The engine process killed: what was in flight fails, and its successor serves known weights or none."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import EngineConfig
from rollout.fleet.client import EngineClient
from rollout.fleet.connection import processes
from rollout.fleet.errors import EngineError
from rollout.fleet.stream import RequestStream
from rollout.launch import serve
from rollout.messages import AddRequest
from rollout.model.parameters import ModelParameters
from rollout.sampling.params import SamplingParams
from rollout.weights.receiver import beside_decoding
from rollout.weights.snapshot import SnapshotKeeper, resume
from rollout.weights.store import WeightStore
from tests.support import crashing_engine, tiny_models
from tests.support.engine_utils import TOLERANCE, prompt, teacher_forced
from tests.support.push_reference import single
from tests.support.server_harness import children
from tests.support.wait import eventually
from tests.support.weight_updates import fill, llama, mixtral, same_weights
from trainer_bridge.client import RolloutClient, RolloutError
from trainer_bridge.push.sender import WeightPushError, WeightSender
from trainer_bridge.push.sources import ModuleSource

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
RESTART_S = 240.0


def engine_of(model: Path) -> int:
    """The engine process of the `rollout serve` of this folder that this process has started."""
    (server,) = [c for c in children(os.getpid()) if str(model).encode() in Path(f"/proc/{c}/cmdline").read_bytes()]
    (engine,) = [c for c in children(server) if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return engine


class Server:
    def __init__(self, path: Path, client: RolloutClient) -> None:
        self.path, self.client = path, client

    def kill_engine(self) -> None:
        os.kill(engine_of(self.path), signal.SIGKILL)

    def wait_restarted(self) -> None:
        eventually(lambda: not self.client.health(), RESTART_S)
        eventually(self.client.health, RESTART_S)

    def check_serves(self, seed: int, epoch: int, version: str) -> None:
        """Greedy ids and their logprobs are those of the tiny model of this seed, under this name."""
        (choice,) = self.client.generate(prompt(50), {"temperature": 0, "max_tokens": 8, "logprobs": 0}).choices
        model = tiny_models.model("llama", seed)
        assert choice.token_ids == teacher_forced(model, prompt(50), choice.token_ids).argmax(-1).tolist()
        expected = single(model, prompt(50), choice.token_ids)
        torch.testing.assert_close(torch.tensor(choice.logprobs), expected, atol=TOLERANCE, rtol=0)
        assert [(span.epoch, span.version) for span in choice.spans] == [(epoch, version)]
        info = self.client.weight_info()
        assert (info["epoch"], info["weight_version"], info["weights"]) == (epoch, version, "valid")

    @property
    def epoch(self) -> int:
        epoch: int = self.client.weight_info()["epoch"]
        return epoch

    def refusal(self) -> str:
        """Why it can't generate."""
        try:
            self.client.generate(prompt(50), {"max_tokens": 1})
        except RolloutError as error:
            return str(error)
        return ""

    def push(self, seed: int, version: str) -> int:
        with WeightSender.connect(self.client, tiny_models.model("llama", seed), timeout_s=60) as sender:
            return sender.push(version).epoch

    def kill_mid_generation(self) -> None:
        """The stream in flight ends with an error that says what happened, and so does what comes next."""
        stream = self.client.stream(prompt(20), {"max_tokens": 900, "ignore_eos": True})
        next(stream)
        self.kill_engine()
        with pytest.raises(RolloutError, match=r"being restarted.*exited with code -9") as failed:
            list(stream)
        assert failed.value.status == 503
        with pytest.raises(RolloutError, match="being restarted"):
            self.client.generate(prompt(20), {"max_tokens": 1})
        self.wait_restarted()

    def check_lost(self, epoch: int, version: str) -> None:
        """Alive, and generating nothing until a whole push."""
        with pytest.raises(RolloutError, match=f"epoch {epoch} .'{version}'. are lost.*push the weights") as refused:
            self.client.generate(prompt(50), {"max_tokens": 1})
        assert refused.value.status == 503
        info = self.client.weight_info()
        assert (info["epoch"], info["weight_version"], info["weights"]) == (epoch, version, "invalid")
        assert "exited with code -9" in info["restarted"]
        model = tiny_models.model("llama", 9)
        sender = WeightSender.connect(self.client, model, timeout_s=60)
        with sender, pytest.raises(WeightPushError, match="push them whole"):
            sender.push("some of it", partial=True)
        assert self.client.health()


class EngineKiller(ModuleSource):
    """Weights whose fifth tensor is never sent: the engine is killed first, once."""

    def __init__(self, model: torch.nn.Module, server: Server) -> None:
        super().__init__(model)
        self._server, self._armed = server, True

    def tensors(self) -> Iterator[torch.Tensor]:
        for index, tensor in enumerate(super().tensors()):
            if index == 5 and self._armed:
                self._armed = False
                self._server.kill_engine()
            yield tensor


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[Server]:
    path = tiny_models.build("llama", folder / "model")
    with serve(path, folder / "log", *FLAGS, *flags) as url, RolloutClient(url, timeout_s=60) as client:
        yield Server(path, client)


def test_without_a_snapshot_it_serves_the_first_model_or_waits_for_a_push(tmp_path: Path) -> None:
    with server(tmp_path, "--engine-restarts", "2") as running:
        killer = EngineKiller(tiny_models.model("llama", 1), running)
        with WeightSender.connect(running.client, killer, packed=False, timeout_s=60) as sender:
            with pytest.raises(WeightPushError):
                sender.push("one")
            running.wait_restarted()
            running.check_serves(0, 0, "default")
            assert sender.push("one").epoch == 1
        running.check_serves(1, 1, "one")
        running.kill_mid_generation()
        running.check_lost(1, "one")
        assert running.push(2, "two") == 2
        running.check_serves(2, 2, "two")
        # That was the last restart it had.
        running.kill_engine()
        eventually(lambda: not running.client.health(), 20)
        with pytest.raises(RolloutError, match=r"not running: it exited with code -9"):
            running.client.generate(prompt(50), {"max_tokens": 1})


def test_with_a_snapshot_it_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    with server(tmp_path, "--keep-weight-snapshot", str(folder), "--engine-restarts", "2") as running:
        for seed, version in ((1, "one"), (2, "two")):
            assert running.push(seed, version) == seed
            eventually(
                lambda: [f.name for f in folder.glob("rollout-*/epoch-*")] == [f"epoch-00000000{running.epoch}"], 30
            )
        before = running.client.post("/weight_checker", {"action": "checksum"})
        running.client.post("/update_weight_version", {"new_version": "renamed"})
        running.client.pause("keep")
        running.kill_engine()
        running.wait_restarted()
        assert running.client.is_paused()
        running.client.resume()
        running.check_serves(2, 2, "renamed")
        assert running.client.post("/weight_checker", {"action": "checksum"}) == before
        assert running.push(3, "three") == 3
        running.check_serves(3, 3, "three")
        # Nor does a restart that fails end in anything but a dead engine, after the last one allowed.
        for file in running.path.glob("*.safetensors"):
            file.unlink()
        running.kill_engine()
        eventually(lambda: "not running" in running.refusal(), RESTART_S)
    assert not list(folder.iterdir())


def test_what_a_successor_is_told_and_how_many_there_are(tmp_path: Path) -> None:
    async def lives() -> None:
        client = EngineClient(
            EngineConfig(model=str(tmp_path)), start_engine=processes(crashing_engine.run_engine), restarts=3
        )
        client.start()
        try:
            await client.wait_ready(60)
            five = {"epoch": 5, "version": "five", "paused": True}
            await client.call("commit", five, timeout_s=30)
            await dies(client, r"being restarted \(1 of 3\), retry: it exited with code 7")
            await lived(client)
            # The second life ended before it was told anything, and changed nothing of what is known.
            assert json.loads((tmp_path / "3").read_text())["state"] == five
            with pytest.raises(EngineError, match="life 3: push the weights"):
                client.submit(
                    RequestStream(AddRequest(request_id="", prompt_token_ids=[1], sampling_params=SamplingParams()))
                )
            six = {"epoch": 6, "version": "six", "paused": False}
            await client.call("commit", six, timeout_s=30)
            assert client.refusal is None
            await dies(client, r"being restarted \(3 of 3\)")
            await lived(client)
            assert json.loads((tmp_path / "4").read_text())["state"] == six
            await dies(client, "not running")
            assert len(list(tmp_path.iterdir())) == 4
        finally:
            await client.stop()

    async def dies(client: EngineClient, message: str) -> None:
        with pytest.raises(EngineError, match=message):
            await client.call("die", timeout_s=30)
        assert client.error is not None

    async def lived(client: EngineClient) -> None:
        async with asyncio.timeout(60):
            while client.error is not None:
                await asyncio.sleep(0.02)

    asyncio.run(lives())


@pytest.mark.parametrize("make", [llama, mixtral, lambda seed: llama(seed, tied=True, dtype=torch.bfloat16)])
def test_a_snapshot_is_bit_exact_and_only_the_newest_is_kept(make, tmp_path):
    store = WeightStore(ModelParameters(make(0)))
    keeper = SnapshotKeeper(store, str(tmp_path))
    for epoch in (1, 2):
        staging = fill(store, {n: p.detach().clone() for n, p in make(epoch).named_parameters()})
        staging.check(partial=False, progress=lambda: None)
        store.commit(staging, f"v{epoch}")
        keeper.request()
        eventually(lambda e=epoch: [p.name for p in tmp_path.iterdir()] == [f"epoch-00000000{e}"])
    for known, served, label in ((1, 2, "v2"), (2, 2, "told"), (5, 6, "v2")):
        model = make(7)
        successor = WeightStore(ModelParameters(model))
        outcome = resume(successor, str(tmp_path), known, "told")
        assert (successor.epoch, successor.label, successor.valid) == (served, label, True), outcome
        assert same_weights(model, make(2))
    assert "as epoch 6" in outcome


def test_a_rank_of_several_makes_the_folder_of_its_snapshots(tmp_path):
    """It used to write none: nobody had made `rank-1` in the server's folder."""
    store = WeightStore(ModelParameters(llama(1)))
    store.epoch = 1
    folder = tmp_path / "rank-1"
    SnapshotKeeper(store, str(folder)).request()
    eventually(lambda: (folder / "epoch-000000001").exists())
    model = llama(0)
    resume(WeightStore(ModelParameters(model)), str(folder), 1, "v1")
    assert same_weights(model, llama(1))


def test_a_snapshot_that_failed_is_tried_again(tmp_path, caplog):
    """It used to be written after the next commit only: an engine that died before that lost the weights."""
    store = WeightStore(ModelParameters(llama(1)))
    store.epoch = 1
    folder = tmp_path / "full"
    folder.write_text("in the way, as no room is")
    keeper = SnapshotKeeper(store, str(folder), retry_s=0.01)
    keeper.request()
    eventually(lambda: caplog.text.count("could not be written") >= 2)
    folder.unlink()
    eventually(lambda: (folder / "epoch-000000001").exists())
    model = llama(0)
    resume(WeightStore(ModelParameters(model)), str(folder), 1, "v1")
    assert same_weights(model, llama(1))


def test_snapshots_and_offers_are_copied_beside_decoding(monkeypatch):
    """On a stream that waits for the default one but keeps it free. Stands in for CUDA's streams and device guard."""
    log = []

    class Stream:
        def __init__(self, device):
            log.append(f"made on {device}")

        def wait_stream(self, other):
            log.append(f"waits for {other}")

        def synchronize(self):
            log.append("done")

    @contextmanager
    def current(what):
        log.append("current" if isinstance(what, Stream) else str(what))
        yield

    for name, stand_in in (("Stream", Stream), ("stream", current), ("device", current)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the default")
    with beside_decoding({"a": SimpleNamespace(device=torch.device("cuda", 1))}):
        log.append("copies")
    assert log == ["made on cuda:1", "waits for the default", "cuda:1", "current", "copies", "done"]


@pytest.mark.parametrize("damage", ["cut", "other model", "lacks one", "gone", "not whole"])
def test_a_snapshot_that_can_not_be_used_is_no_weights(damage, tmp_path):
    store = WeightStore(ModelParameters(llama(1)))
    store.epoch = 1
    SnapshotKeeper(store, str(tmp_path)).request()
    eventually(lambda: (tmp_path / "epoch-000000001").exists())
    (file,) = tmp_path.glob("*/*.safetensors")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif damage == "lacks one":
        tensors = load_file(file)
        del tensors["lm_head.weight"]
        save_file(tensors, file)
    elif damage == "gone":
        file.unlink()
    elif damage == "not whole":
        (file.parent / "snapshot.json").unlink()
    successor = WeightStore(ModelParameters(llama(0, vocab_size=97) if damage == "other model" else llama(0)))
    assert "push the weights" in resume(successor, str(tmp_path), 1, "v1")
    assert (successor.epoch, successor.label, successor.valid) == (1, "v1", False)
    # A commit that nobody heard of is none: the model of the start is what served.
    model = llama(0)
    successor = WeightStore(ModelParameters(model))
    resume(successor, str(tmp_path), 0, "default")
    assert (successor.epoch, successor.valid) == (0, True)
    assert same_weights(model, llama(0))
