"""Rounds of a load against one server or two in turn, and what their figures are."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.bench.llama_server import LlamaServer
from rollout.bench.loads import Load, ServerInfo
from trainer_bridge.client import AsyncRolloutClient

TIMEOUT_S = 3600.0
"""Longest wait for bytes of one answer: one that isn't streamed comes when its last token is sampled."""


class ShortAnswerError(RuntimeError):
    """A server did not sample what it was asked for."""


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some measurements."""

    median: float
    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Round:
    """One run of a load. Times in seconds; `first_tokens`: from the start to each request's first token, if streamed.

    `client_cpu_seconds` is what this process took of the machine meanwhile.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    client_cpu_seconds: float
    first_tokens: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


@dataclass(frozen=True)
class Result:
    """The rounds of a load against one server."""

    server: ServerInfo
    rounds: list[Round]

    @property
    def tokens_per_second(self) -> Spread:
        return Spread.of([r.tokens_per_second for r in self.rounds])

    @property
    def all_tokens_per_second(self) -> Spread:
        """Those of the prompts included; a group's prompt counts once."""
        return Spread.of([(r.prompt_tokens + r.output_tokens) / r.seconds for r in self.rounds])

    @property
    def first_token(self) -> Spread | None:
        """Over the requests of all rounds, in seconds; None where nothing was streamed."""
        times = [when for r in self.rounds for when in r.first_tokens]
        return Spread.of(times) if times else None


@dataclass(frozen=True)
class Comparison:
    """A load's results, one a server, in the order the servers were given."""

    load: Load
    results: list[Result]

    @property
    def ratio(self) -> Spread | None:
        """The first server's tokens/s over the second's: of the medians, and the extremes of single rounds in turn."""
        if len(self.results) < 2:
            return None
        first, second = self.results
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(first.rounds, second.rounds, strict=True)]
        return Spread(first.tokens_per_second.median / second.tokens_per_second.median, min(ratios), max(ratios))


def compare(
    load: Load,
    servers: Sequence[ServerInfo],
    *,
    rounds: int,
    warmup: int,
    seed: int,
    pause: float,
    on_answer: Callable[[], None],
) -> Comparison:
    """Warm up each server, then run `rounds` against them in turn; the one that begins alternates.

    `pause`: seconds before each turn where there are several servers, since one may go on spinning after its last
    answer (vLLM does for about a second), at the expense of the next. All servers get prompts of the same lengths, and
    none gets a prompt twice, so that no prefix cache helps. `on_answer` is called at each finished request.

    Raises ValueError for a context that a server doesn't take, RolloutError, and ShortAnswerError where an answer lacks
    tokens.
    """
    for server in servers:
        if server.max_model_len is not None and load.context > server.max_model_len:
            raise ValueError(
                f"load {load.name!r} has contexts of up to {load.context} tokens, but {server.url} takes "
                f"{server.max_model_len}: serve with a larger --max-model-len, or leave the load out"
            )
    measured: list[list[Round]] = [[] for _ in servers]
    for number in range(warmup + rounds):
        order = list(enumerate(servers))
        for index, server in order if number % 2 == 0 else reversed(order):
            if len(servers) > 1:
                time.sleep(pause)
            prompts = load.prompts(seed, number, server.vocab_size, copy=index)
            measurement = asyncio.run(run_round(load, server, prompts, on_answer))
            if number >= warmup:
                measured[index].append(measurement)
    return Comparison(load, [Result(server, r) for server, r in zip(servers, measured, strict=True)])


async def run_round(
    load: Load, server: ServerInfo, prompts: Sequence[Sequence[int]], on_answer: Callable[[], None] = lambda: None
) -> Round:
    """Send all prompts at once and wait for the last answer."""
    kind: type[LlamaServer | _Generate] = LlamaServer if server.completion else _Generate
    async with kind(server.url, server.api_key, TIMEOUT_S) as client:
        cpu, began = time.process_time(), time.perf_counter()

        async def one(prompt: Sequence[int]) -> float | None:
            counts, first = await client.ask(load, prompt)
            if counts != [load.max_tokens] * load.n:
                raise ShortAnswerError(
                    f"{server.url} was asked for {load.n} x {load.max_tokens} tokens (load {load.name!r}, ignore_eos) "
                    f"and sampled {counts}: its throughput can't be compared"
                )
            on_answer()
            return None if first is None else first - began

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            first_tokens = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return Round(
        seconds,
        prompt_tokens=sum(map(len, prompts)),
        output_tokens=load.output_tokens,
        client_cpu_seconds=cpu,
        first_tokens=[when for when in first_tokens if when is not None],
    )


class _Generate(AsyncRolloutClient):
    """A client of token-in/token-out, which vLLM's server speaks, too."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        super().__init__(url, api_key=api_key, timeout_s=timeout_s)

    async def ask(self, load: Load, prompt: Sequence[int]) -> tuple[list[int], float | None]:
        """As `LlamaServer.ask`. Raises RolloutError."""
        lasting = {"ignore_eos": True} if load.schema is None else {"structured_outputs": {"json": load.schema}}
        params: dict[str, Any] = {"max_tokens": load.max_tokens, "n": load.n, "temperature": 1.0, **lasting}
        if not load.stream:
            answer = await self.generate(prompt, params)
            return [len(choice.token_ids) for choice in answer.choices], None
        first, counts = None, [0] * load.n
        async for event in self.stream(prompt, params):
            for choice in event.choices:
                if choice.token_ids:
                    first = first or time.perf_counter()
                counts[choice.index] += len(choice.token_ids)
        return counts, first
