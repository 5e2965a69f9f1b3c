"""What choosing among engines costs the server process, in CPU time a request and a token. No engine is needed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

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
    per_token: Spread | None
    per_output_token: float


def measure(call: Callable[[Any], object], items: Sequence[Any], rounds: int) -> Spread:
    """CPU microseconds of this thread for `call(item)`, over all items in order; a first round warms up."""
    costs = []
    for number in range(1 + rounds):
        began = time.thread_time()
        for item in items:
            call(item)
        if number:
            costs.append((time.thread_time() - began) / len(items) * 1e6)
    return Spread.of(costs)


def routing_cost(
    choose: Callable[[list[int]], int],
    prompts: Sequence[list[int]],
    *,
    ranks: int,
    tokens_per_request: int,
    took_token: Callable[[int], object] | None = None,
    rounds: int = 5,
) -> RoutingCost:
    """What `choose(prompt)` (the rank of a request) and `took_token(rank)` (one of its tokens came) cost.

    `tokens_per_request`: of all of a request's answers. `choose` keeps its own account of open work: give it a router
    that ends a request for each that it takes, or every round will find it fuller. Raises ValueError for a rank that
    there is not.
    """
    wrong = [rank for rank in map(choose, prompts) if not 0 <= rank < ranks]
    if wrong:
        raise ValueError(f"the router chose rank {wrong[0]}, but there are {ranks}")
    per_request, per_token = measure(choose, prompts, rounds), None
    total = per_request.median / tokens_per_request
    if took_token is not None:
        tokens = list(itertools.islice(itertools.cycle(range(ranks)), len(prompts) * tokens_per_request))
        per_token = measure(took_token, tokens, rounds)
        total += per_token.median
    return RoutingCost(ranks, per_request, per_token, total)


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

    def take(rank: int) -> None:
        fleet.ranks[rank].work -= streams[rank].put(token)

    prompts, tokens = load.prompts(seed, 0, vocab_size), load.n * load.max_tokens
    return routing_cost(choose, prompts, ranks=ranks, tokens_per_request=tokens, took_token=take, rounds=rounds)


def table(costs: Sequence[RoutingCost]) -> Table:
    """A row for each number of ranks."""
    table = Table("ranks", title="CPU µs of routing: median (min–max)")
    for column in ("a request", "a token", "both, a token of the answers"):
        table.add_column(column, justify="right")
    for cost in costs:
        row = (spread(cost.per_request), spread(cost.per_token, digits=2), f"{cost.per_output_token:.2f}")
        table.add_row(str(cost.ranks), *row)
    return table
