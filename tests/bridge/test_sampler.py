"""The sampler of an asynchronous loop against a server that does what a script says."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import tiny_trl
from tests.support.wait import eventually
from trainer_bridge import RolloutError
from trainer_bridge.client import Choice, Span
from trainer_bridge.loop.sampler import RolloutSampler
from trainer_bridge.rollouts import Prompt, RolloutGroup, prompts_of_rows, text_reward


class Scripted:
    """A server that does with each request what the script says, and answers when it has ended."""

    logprobs_mode = "raw_logprobs"

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

        def do_GET(self) -> None:
            self.reply(200, json.dumps({"logprobs_mode": script_of.logprobs_mode}).encode())

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
        "stop_reason": "no token is left" if what == "error" else None,
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
        assert running.stats.dropped_groups == 3  # aborted, and the prompts 0 and 1
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


def sampled(url: str, prompts: Any, reward: Any, count: int, **changes: Any) -> list[RolloutGroup]:
    """The first `count` groups of two answers each."""
    settings = {"group_size": 2, "in_flight": 2, "capacity": 10, **changes}
    with RolloutSampler(url, prompts, reward, {"max_tokens": 2}, **settings) as running:
        return running.take_groups(count, timeout_s=60)


def first_id(_: Prompt, choice: Choice) -> float:
    return float(choice.token_ids[0])


@pytest.mark.parametrize(
    "prompts", [[[5], [6], [7]], [np.array([5]), torch.tensor([6]), Prompt([7])], iter([[5], (6,), Prompt([7])])]
)
def test_a_finite_list_of_prompts_crashed_the_sampler(prompts: Any) -> None:
    with scripted() as (script, url):
        groups = sampled(url, prompts, first_id, 10)
        assert sorted(group.prompt.token_ids[0] for group in groups) == [5, 6, 7]
        assert len(script.bodies) == 3
        assert all(body["sampling_params"]["logprobs"] == 0 for body in script.bodies)  # implied
    with pytest.raises(TypeError, match="a prompt is a Prompt or token ids, got 'hello'"), scripted() as (_, url):
        sampled(url, ["hello"], first_id, 1)


def test_the_end_of_the_prompts_is_an_empty_list() -> None:
    with (
        scripted() as (_, url),
        RolloutSampler(url, [[5], [6], [7]], first_id, {}, group_size=1, in_flight=1, capacity=2) as running,
    ):
        taken = [running.take_groups(1)[0].prompt.token_ids[0]]
        while groups := running.take_groups(2):
            taken += [group.prompt.token_ids[0] for group in groups]
        assert taken == sorted(taken)
        assert running.take_groups(2) == []
        assert len(taken) + running.stats.dropped_groups == 3


def test_no_more_is_sampled_than_is_taken_where_that_is_asked_for() -> None:
    settings = {"group_size": 1, "in_flight": 3, "capacity": 4, "wait_when_full": True}
    prompts, dropped = [[number] for number in range(18)], list[RolloutGroup]()

    def usable(group: RolloutGroup) -> bool:
        if len(dropped) < 2:
            dropped.append(group)
        return group not in dropped

    with scripted() as (script, url), RolloutSampler(url, prompts, first_id, {}, **settings) as running:
        groups = []
        for begun in (4, 6, 8):
            eventually(lambda begun=begun: running.stats.requests == begun)
            assert len(script.bodies) == begun
            groups += running.take_groups(2, timeout_s=60, make_room=begun == 4)
            if begun == 6:
                running.make_room()
                running.make_room()
        assert len(script.bodies) == 8
        running.make_room(2)
        groups += running.take_groups(2, usable=usable, timeout_s=60)
        while more := running.take_groups(3, timeout_s=60):
            groups += more
        assert running.stats.dropped_groups == 2
    assert sorted(group.prompt.token_ids[0] for group in groups + dropped) == list(range(18))


def test_more_groups_than_are_kept_were_waited_for_in_vain() -> None:
    with scripted() as (_, url), pytest.raises(ValueError, match="3 groups were asked for, and capacity=2"):
        sampled(url, itertools.repeat([5]), first_id, 3, capacity=2)


async def later(_: Prompt, choice: Choice) -> float:
    await asyncio.sleep(0.01)
    return float(choice.token_ids[0])


def test_an_async_reward_gave_coroutines_as_rewards() -> None:
    with scripted() as (_, url):
        assert sampled(url, [[5]], later, 1)[0].rewards == [1.0, 11.0]
        rewards = [(first_id, 0.5), (later, 2.0), lambda _, choice: torch.tensor(100.0)]
        assert sampled(url, [[5]], rewards, 1)[0].rewards == [102.5, 127.5]


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_reward_that_is_no_number_passed(value: Any) -> None:
    def forgetful(_: Prompt, choice: Choice) -> Any:
        return value

    with scripted() as (_, url), pytest.raises(ValueError, match=f"reward forgetful gave {value} for Prompt"):
        sampled(url, [[5]], forgetful, 1)


def test_a_slow_reward_stalled_all_streams() -> None:
    """Other groups finish while one's reward is computed; on the event loop it would hold up every stream."""
    release = threading.Event()

    def slow(prompt: Prompt, choice: Choice) -> float:
        assert prompt.token_ids != [0] or release.wait(60)
        return 1.0

    with (
        scripted() as (_, url),
        RolloutSampler(
            url, ([number] for number in itertools.count()), slow, {}, group_size=2, in_flight=2, capacity=5
        ) as running,
    ):
        others = running.take_groups(4, timeout_s=60)
        release.set()
    assert all(group.prompt.token_ids != [0] for group in others)


def test_the_error_of_many_requests_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each of them failed, and asyncio said for each but one that its exception was never retrieved."""

    def broken(_: Prompt, choice: Choice) -> float:
        raise KeyError("no such column")

    with scripted() as (_, url), pytest.raises(KeyError, match="no such column"):
        sampled(url, itertools.repeat([5]), broken, 1, in_flight=8, group_size=4)
    gc.collect()
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


@pytest.mark.parametrize("params", [{"temperature": 0.5}, {"top_p": 0.9}, {"repetition_penalty": 1.1}])
def test_raw_logprobs_of_a_filtered_distribution_were_taken_silently(params: dict[str, float]) -> None:
    def sample() -> RolloutGroup:
        with RolloutSampler(url, [[5]], first_id, params, group_size=2, in_flight=1, capacity=1) as running:
            return running.take_groups(1, timeout_s=60)[0]

    with scripted() as (script, url):
        (name,) = params
        with pytest.raises(ValueError, match=f"{name}=.*its logprobs are raw_logprobs.*--logprobs-mode processed"):
            sample()
        script.logprobs_mode = "processed_logprobs"
        assert sample().logprobs_mode == "processed_logprobs"


def test_a_misspelt_parameter_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="'top_P' is no sampling parameter: did you mean top_p"):
        RolloutSampler("http://127.0.0.1:9", [], first_id, {"top_P": 0.5}, group_size=1, in_flight=1, capacity=1)


def test_rows_of_a_data_set_become_prompts() -> None:
    tokenizer = tiny_trl.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ mood }}>"
    rows = [{"question": "hi", "answer": 4}, {"question": [{"role": "user", "content": "ho"}], "answer": 5}]
    text, chat = prompts_of_rows(rows, tokenizer, column="question", mood="glad")
    assert (bytes(text.token_ids), text.task) == (b"hi", rows[0])
    assert (bytes(chat.token_ids), chat.task["answer"]) == (b"user:ho;glad>", 5)


def test_a_reward_may_see_the_row_and_the_text() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return f"{ids} {skip_special_tokens}"

    seen = []

    def reward(row: dict[str, int], text: str) -> float:
        seen.append(text)
        return row["worth"]

    async def slow(row: dict[str, int], text: str) -> float:
        await asyncio.sleep(0.01)
        return reward(row, text)

    for function in (reward, slow):
        with scripted() as (_, url):
            (group,) = sampled(url, [Prompt([5], {"worth": 7})], text_reward(function, Tokenizer()), 1)
        assert group.rewards == [7, 7]
    assert sorted(seen) == ["[1, 2] True"] * 2 + ["[11, 12] True"] * 2
    assert text_reward(reward, Tokenizer()).__name__ == "reward"


def test_answers_that_ended_with_an_error_were_trained_on() -> None:
    with (
        scripted("error") as (_, url),
        sampler(url) as running,
        pytest.raises(RolloutError, match="choice 0 of a group ended with an error: no token is left"),
    ):
        running.take_groups(1, timeout_s=20)
    broken = Choice(2, [1], [-0.5], None, [Span("v", 0, 1)], "error", "the logits hold NaN")
    with pytest.raises(ValueError, match="choice 2 ended with an error: the logits hold NaN"):
        RolloutGroup(Prompt([0]), {}, [broken], [1.0])
