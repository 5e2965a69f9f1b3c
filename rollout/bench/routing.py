"""What choosing among engines costs the server process, in CPU time a request and a token. No engine is needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from rollout.bench import report
from rollout.bench.loads import Load
from rollout.bench.measure import Spread
from rollout.bench.report import spread
from rollout.config import EngineConfig
from rollout.fleet.fleet import Fleet
from rollout.fleet.stream import RequestStream
from rollout.messages import AddRequest
from rollout.outputs import TokenOutput
from rollout.sampling.params import SamplingParams

RANKS = (2, 8, 64)


@dataclass(frozen=True)
class RoutingCost:
    """CPU microseconds of one choice (a request), and of noting one token; `per_output_token`: of both, a token."""

    ranks: int
    per_request: Spread
    per_token: Spread
    per_output_token: float


def measure(call: Callable[[Any], object], items: Sequence[Any], rounds: int) -> Spread:
    """CPU microseconds of this thread for `call(item)`, over all items in order; a first round warms up."""
    costs = []
    for _ in range(1 + rounds):
        began = time.thread_time()
        for item in items:
            call(item)
        costs.append((time.thread_time() - began) / len(items) * 1e6)
    return Spread.of(costs[1:])


def fleet_cost(load: Load, ranks: int, seed: int, vocab_size: int, rounds: int) -> RoutingCost:
    """The server's own router under the requests of a load, and its account of the work left."""
    fleet = Fleet(EngineConfig(), size=ranks)
    params = SamplingParams(n=load.n, max_tokens=load.max_tokens)
    endless = AddRequest(request_id="", prompt_token_ids=[0], sampling_params=SamplingParams(max_tokens=1 << 62))
    streams = [RequestStream(endless) for _ in fleet.ranks]
    for stream, client in zip(streams, fleet.ranks, strict=True):
        stream.begin(client, "")
    token = TokenOutput("", 0, token_id=0)

    def choose(prompt: list[int]) -> int:
        return fleet.choose(AddRequest(request_id="", prompt_token_ids=prompt, sampling_params=params)).rank

    def account(rank: int) -> None:
        fleet.ranks[rank].work -= streams[rank].put(token)

    prompts, tokens = load.prompts(seed, 0, vocab_size), load.n * load.max_tokens
    per_request = measure(choose, prompts, rounds)
    per_token = measure(account, [number % ranks for number in range(len(prompts) * tokens)], rounds)
    return RoutingCost(ranks, per_request, per_token, per_request.median / tokens + per_token.median)


def table(costs: Sequence[RoutingCost]) -> Table:
    """A row for each number of ranks."""
    rows = [
        (str(c.ranks), spread(c.per_request), spread(c.per_token, digits=2), f"{c.per_output_token:.2f}") for c in costs
    ]
    columns = ("ranks", "a request", "a token", "both, a token of the answers")
    return report.table("CPU µs of routing: median (min–max)", columns, rows)
