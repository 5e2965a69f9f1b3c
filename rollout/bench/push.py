"""`rollout bench push`: what the streams of a server see while weights are pushed into it.

Streams and sender share this process, so that a gap includes what the sender takes of it; on one machine the server's
own threads compete with both.
"""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

from rollout.bench import report
from rollout.config import KVPolicy
from trainer_bridge.client import RolloutClient
from trainer_bridge.push.sender import WeightSender

POLICIES: tuple[KVPolicy, ...] = ("keep", "recompute")
_LONGEST_WAIT_S = 120.0
_AFTER = 4  # events of each stream after the push, so that the gap of the commit is over

Arrivals = list[tuple[float, int]]
"""(time in seconds, tokens) of each event of a choice."""


@dataclass(frozen=True)
class Result:
    """Times in seconds, throughput in tokens/s of all streams. `bound`: 3 median gaps and a tenth of the push."""

    kv_policy: KVPolicy
    push_bytes: int
    push_seconds: float
    commit_seconds: float | None
    median_gap: float
    longest_gap: float
    bound: float
    within_bound: bool
    throughput_before: float
    throughput_during: float


class Stream:
    """A request of `n` choices that generates until it is aborted, read on a thread of its own."""

    def __init__(self, client: RolloutClient, prompt: list[int], n: int) -> None:
        self.choices: list[Arrivals] = [[] for _ in range(n)]
        self.request_id: str | None = None
        self.error: Exception | None = None
        self._events = client.stream(prompt, {"ignore_eos": True}, n=n)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for event in self._events:
                self.request_id = event.request_id
                for choice in event.choices:
                    self.choices[choice.index].append((time.monotonic(), len(choice.token_ids)))
        except Exception as error:
            self.error = error

    def wait_for(self, events: int) -> None:
        """Return once so many more events of each choice have come. Raises RuntimeError where the stream ends or stalls
        first."""
        wanted = [len(arrivals) + events for arrivals in self.choices]
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while any(len(arrivals) < count for arrivals, count in zip(self.choices, wanted, strict=True)):
            if not self.thread.is_alive():
                raise RuntimeError(f"a stream ended too early ({self.error}): serve with a larger --max-model-len")
            if time.monotonic() > deadline:
                raise RuntimeError(f"a stream got no token for {_LONGEST_WAIT_S:g} s")
            time.sleep(0.002)


def summarize(
    choices: Sequence[Arrivals], opened: float, began: float, ended: float
) -> tuple[float, float, float, float]:
    """Median gap in [opened, began), longest gap that reaches into [began, …), and tokens/s of [opened, began) and
    [began, ended)."""

    def throughput(start: float, end: float) -> float:
        return sum(count for arrivals in choices for when, count in arrivals if start <= when < end) / (end - start)

    gaps = [(a, b) for arrivals in choices for (a, _), (b, _) in itertools.pairwise(arrivals)]
    median = statistics.median(b - a for a, b in gaps if opened <= a and b < began)
    longest = max(b - a for a, b in gaps if b >= began)
    return median, longest, throughput(opened, began), throughput(began, ended)


def measure(
    client: RolloutClient, sender: WeightSender, policy: KVPolicy, prompts: list[list[int]], n: int, seconds: float
) -> Result:
    """Open the streams, let them run for `seconds`, push, let them run on a little, and end them."""
    streams = [Stream(client, prompt, n) for prompt in prompts]
    try:
        for stream in streams:
            stream.wait_for(3)
        opened = time.monotonic()
        time.sleep(seconds)
        for stream in streams:
            stream.wait_for(3)
        began = time.monotonic()
        pushed = sender.push("bench", kv_policy=policy)
        ended = time.monotonic()
        for stream in streams:
            stream.wait_for(_AFTER)
    finally:
        client.abort([stream.request_id for stream in streams if stream.request_id])
        for stream in streams:
            stream.thread.join(_LONGEST_WAIT_S)
    choices = [arrivals for stream in streams for arrivals in stream.choices]
    median, longest, before, during = summarize(choices, opened, began, ended)
    bound = 3 * median + (ended - began) / 10
    commit_seconds = client.weight_info().get("commit_seconds")
    return Result(
        policy, pushed.bytes, ended - began, commit_seconds, median, longest, bound, longest <= bound, before, during
    )


def run(
    client: RolloutClient, model_path: Path, *, streams: int, n: int, prompt_len: int, seconds: float
) -> list[Result]:
    """Measure under both policies. Raises RolloutError, WeightPushError, and RuntimeError where a stream stalls."""
    dtype = getattr(torch, client.weight_info()["dtype"])
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    draw = random.Random(0)
    prompts = [draw.choices(range(model.config.vocab_size), k=prompt_len) for _ in range(streams)]
    with WeightSender.connect(client, model) as sender:
        sender.push("bench")  # the first one makes the server allocate its second set
        return [measure(client, sender, policy, prompts, n, seconds) for policy in POLICIES]


def table(results: list[Result]) -> Table:
    """A column for each policy."""
    rows: list[tuple[str, Callable[[Result], str]]] = [
        ("pushed", lambda r: f"{r.push_bytes / 1e6:.1f} MB in {r.push_seconds:.2f} s"),
        ("commit", lambda r: "?" if r.commit_seconds is None else f"{r.commit_seconds * 1e3:.2f} ms"),
        ("median token gap", lambda r: f"{r.median_gap * 1e3:.1f} ms"),
        ("longest gap", lambda r: f"{r.longest_gap * 1e3:.1f} ms"),
        ("3 medians + push / 10", lambda r: f"{r.bound * 1e3:.1f} ms"),
        ("within that", lambda r: "yes" if r.within_bound else "no"),
        ("throughput before", lambda r: f"{r.throughput_before:.1f} tokens/s"),
        ("throughput during", lambda r: f"{r.throughput_during:.1f} tokens/s"),
        ("during / before", lambda r: f"{r.throughput_during / r.throughput_before:.2f}"),
    ]
    columns = ("", *(result.kv_policy for result in results))
    return report.table("A push into open streams", columns, [(name, *map(text, results)) for name, text in rows])
