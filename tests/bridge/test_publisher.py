"""The trainer's side of an asynchronous loop: sampling through outages, a server that is kept on the right weights."""

from __future__ import annotations

import itertools
import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.launch import serve
from tests.support import tiny_models
from tests.support.wait import eventually
from trainer_bridge import RolloutClient, RolloutError, WeightPushError
from trainer_bridge.client import Choice, Span
from trainer_bridge.loop import checkpoint, dashboard
from trainer_bridge.loop.sampler import RolloutSampler
from trainer_bridge.push.control import RefusedError
from trainer_bridge.push.publisher import Publisher
from trainer_bridge.rollouts import Prompt

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]


class Scripted:
    """A server that does with each request what the script says, and answers when it has ended."""

    def __init__(self, *script: str) -> None:
        self.script = list(script)
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def next(self, body: dict[str, Any]) -> str:
        with self.lock:
            self.bodies.append(body)
            return self.script.pop(0) if self.script else "answer"


@contextmanager
def scripted(*script: str) -> Iterator[tuple[Scripted, str]]:
    script_of = Scripted(*script)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            what = script_of.next(body)
            if what.isdigit():
                error = {"message": "no", "type": "t", "param": None, "code": int(what)}
                self.reply(int(what), json.dumps({"error": error}).encode())
            else:
                n = body["sampling_params"]["n"]
                events = [
                    *(piece(index, 1, None) for index in range(n)),
                    *(piece(index, 2, what) for index in range(n)),
                ]
                if what == "cut":
                    events = events[: n // 2]
                data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
                self.reply(200, data if what == "cut" else data + b"data: [DONE]\n\n")

        def reply(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield script_of, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def piece(index: int, token: int, what: str | None) -> dict[str, Any]:
    """The first of two tokens of a choice, or the second, which ends it; only the second was filtered."""
    choice = {
        "index": index,
        "token_ids": [10 * index + token],
        "logprobs": {"content": [{"logprob": -0.5 * token}]},
        "sampling_mask": [[10 * index + token, 3]] if what else None,
        "weight_versions": [{"version": "v", "start": 0, "end": 2, "epoch": 4}] if what else None,
        "finish_reason": {"answer": "stop"}.get(what, what) if what else None,
    }
    return {"request_id": "r", "choices": [choice]}


def sampler(url: str, *, in_flight: int = 1, capacity: int = 100, outage_s: float = 30.0) -> RolloutSampler:
    prompts = (Prompt([number], f"task {number}") for number in itertools.count())
    return RolloutSampler(
        url,
        prompts,
        lambda prompt, choice: float(choice.token_ids[0] + prompt.token_ids[0]),
        {"max_tokens": 2, "logprobs": 0},
        group_size=3,
        in_flight=in_flight,
        capacity=capacity,
        seed=0,
        outage_s=outage_s,
    )


def test_a_group_is_put_together_from_its_pieces_and_carries_its_seed() -> None:
    with scripted() as (script, url), sampler(url) as running:
        first, second = running.take_groups(2, usable=lambda _: True, timeout_s=20)
    assert first.prompt == Prompt([0], "task 0")
    assert [choice.token_ids for choice in first.choices] == [[1, 2], [11, 12], [21, 22]]
    assert first.choices[1].sampling_mask == [None, [12, 3]]
    assert first.choices[2].spans == [Span("v", 0, 2, 4)]
    assert first.logprobs == [-0.5, -1.0] * 3
    assert (first.lengths, first.tokens) == ([2, 2, 2], 6)
    assert first.rewards == [1.0, 11.0, 21.0]
    assert second.rewards == [2.0, 12.0, 22.0]
    for body, group in zip(script.bodies, (first, second), strict=False):
        assert body["sampling_params"] == {**group.sampling_params, "n": 3}
    assert 0 <= first.sampling_params["seed"] < 1 << 63
    assert first.sampling_params["seed"] != second.sampling_params["seed"]


def test_an_outage_is_waited_out_with_the_same_request() -> None:
    with scripted("503", "cut", "500") as (script, url), sampler(url) as running:
        (group,) = running.take_groups(1, usable=lambda _: True, timeout_s=20)
        assert running.stats.failed_requests == 3
    assert group.prompt.token_ids == [0]
    assert [choice.token_ids for choice in group.choices] == [[1, 2], [11, 12], [21, 22]]  # none of the cut stream
    assert script.bodies[0] == script.bodies[1] == script.bodies[2] == script.bodies[3]


def test_a_refusal_and_an_outage_that_lasts_are_the_takers_to_see() -> None:
    for status, outage_s in (("400", 30.0), ("503", 0.0)):
        with (
            scripted(status) as (_, url),
            sampler(url, outage_s=outage_s) as running,
            pytest.raises(RolloutError, match=f"t \\({status}\\): no"),
        ):
            running.take_groups(1, usable=lambda _: True, timeout_s=20)


def test_aborted_unusable_and_too_many_groups_are_dropped() -> None:
    with scripted("abort") as (_, url), sampler(url) as running:
        (group,) = running.take_groups(1, usable=lambda group: group.prompt.token_ids[0] >= 2, timeout_s=20)
        assert group.prompt.token_ids == [2]
        assert running.stats.dropped_groups >= 2
    with scripted() as (script, url), sampler(url, capacity=2) as running:
        waited = []

        def until_many_are_done() -> None:
            waited.append(True)
            deadline = threading.Event()
            while len(script.bodies) < 9:
                deadline.wait(0.01)

        one, two = running.take_groups(2, usable=lambda _: True, timeout_s=20, while_waiting=until_many_are_done)
        assert waited
        assert two.prompt.token_ids[0] == one.prompt.token_ids[0] + 1
        assert one.prompt.token_ids[0] >= 5  # the oldest went


def test_the_newest_group_can_be_looked_at_and_stays() -> None:
    with scripted() as (_, url), sampler(url) as running:
        eventually(lambda: (newest := running.newest()) is not None and newest.prompt.token_ids[0] >= 3)
        (oldest,) = running.take_groups(1, usable=lambda _: True, timeout_s=20)
        assert oldest.prompt.token_ids == [0]
        assert running.newest() is not None


def test_a_server_that_finishes_nothing_is_a_timeout() -> None:
    with (
        scripted(*["503"] * 50) as (_, url),
        sampler(url) as running,
        pytest.raises(TimeoutError, match=r"fewer than 4"),
    ):
        running.take_groups(4, usable=lambda _: True, timeout_s=0.1)


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


def test_a_server_with_other_weights_is_given_the_published_ones(client: RolloutClient) -> None:
    ours, theirs = tiny_models.model("llama", 1), tiny_models.model("llama", 2)
    with Publisher(client, ours) as publisher:
        publisher.publish(3)
        checksums = client.post("/weight_checker", {"action": "checksum"})
        assert not publisher.restore()
        with Publisher(client, theirs) as other:
            other.publish(8)
        assert client.post("/weight_checker", {"action": "checksum"}) != checksums
        assert publisher.restore()
        assert publisher.lost == 1
        assert client.post("/weight_checker", {"action": "checksum"}) == checksums
        assert client.weight_info()["weight_version"] == "step-3"
        assert not publisher.restore()


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
