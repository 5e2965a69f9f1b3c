"""The trainer's side of an asynchronous loop: a server that is kept on the right weights."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.launch import serve
from tests.support import tiny_models
from trainer_bridge import RolloutClient, WeightPushError
from trainer_bridge.client import Choice, Span
from trainer_bridge.loop import checkpoint, dashboard
from trainer_bridge.push.control import DisplacedError, RefusedError
from trainer_bridge.push.publisher import Publisher

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    folder = tmp_path_factory.mktemp("publisher")
    model = tiny_models.build("llama", folder / "model")
    with serve(model, folder / "log", *FLAGS) as url, RolloutClient(url) as client:
        yield client


def test_lags_count_this_publishers_own_versions(client: RolloutClient) -> None:
    spans = [Span("default", 0, 2), Span("step-7", 2, 3), Span("step-9", 3, 5)]
    answer = Choice(0, [1, 2, 3, 4, 5], [-1.0] * 5, None, spans, "stop", None)
    with Publisher(client, tiny_models.model("llama")) as publisher:
        for step in (7, 8, 9, 10):
            assert publisher.publish(step).version == f"step-{step}"
        assert publisher.lags(answer).tolist() == [math.inf, math.inf, 3, 1, 1]


def test_a_server_with_other_weights_is_given_the_published_ones(client: RolloutClient, tmp_path: Path) -> None:
    others = tiny_models.build("llama", tmp_path / "others", 2)
    with Publisher(client, tiny_models.model("llama", 1)) as publisher:
        publisher.publish(3)
        checksums = client.post("/weight_checker", {"action": "checksum"})
        assert not publisher.restore()
        client.post("/update_weights", {"weight_dir": str(others)})
        assert client.post("/weight_checker", {"action": "checksum"}) != checksums
        assert publisher.restore()
        assert publisher.lost == 1
        assert client.post("/weight_checker", {"action": "checksum"}) == checksums
        assert client.weight_info()["weight_version"] == "step-3"
        assert not publisher.restore()


def test_a_publisher_that_another_trainer_has_displaced_takes_nothing_back(client: RolloutClient) -> None:
    with (
        Publisher(client, tiny_models.model("llama", 1)) as first,
        Publisher(client, tiny_models.model("llama", 2)) as second,
    ):
        first.publish(3)
        second.publish(8)
        with pytest.raises(DisplacedError):
            first.restore()
        assert client.weight_info()["weight_version"] == "step-8"


def test_a_refused_push_is_not_tried_again_and_an_absent_server_not_for_ever(client: RolloutClient) -> None:
    with Publisher(client, tiny_models.model("qwen2")) as publisher, pytest.raises(RefusedError) as refused:
        publisher.publish(1)
    assert refused.value.status == 400
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with RolloutClient(f"http://127.0.0.1:{port}") as nobody:
        publisher = Publisher(nobody, tiny_models.model("llama"), outage_s=0.2)
        assert not publisher.restore()
        with pytest.raises(WeightPushError, match="got no answer"):
            publisher.publish(1)


def test_a_checkpoint_is_the_last_one_that_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    assert checkpoint.load(path) is None
    checkpoint.save(path, {"step": 1, "weights": {"a": torch.arange(3.0)}})

    def die(state: object, file: Any) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, {"step": 2})
    state = checkpoint.load(path)
    assert state is not None
    assert state["step"] == 1
    assert state["weights"]["a"].tolist() == [0, 1, 2]


def test_a_history_goes_on_after_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = dashboard.History(path)
    for step in (1, 2, 3):
        history.log({dashboard.STEP: step, "reward/mean": step / 10})
    with open(path, "a") as file:
        file.write('{"trainer/step": 4, "rew')  # killed in the middle of a line
    again = dashboard.History(path, resume_at=2)
    again.log({dashboard.STEP: 3, "gap/current_max": 0.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == again.steps
    assert [(line[dashboard.STEP], line.get("reward/mean")) for line in lines] == [(1, 0.1), (2, 0.2), (3, None)]
    dashboard.plot(lines, tmp_path / "dashboard.png")
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")
