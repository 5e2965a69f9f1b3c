"""What the page at `/` shows: made once a second for all who look at it, and only while somebody does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout.fleet.errors import EngineError
from rollout.fleet.fleet import Fleet
from rollout.outputs import WeightVersionSpan
from rollout.server.errors import ApiError
from rollout.server.text.tokenizer import BackgroundTokenizer

MAX_VIEWERS = 16
PERIOD_S = 1.0
_SOON_S = 0.1  # after a commit, so that each is seen
_ASK_S = 60.0  # an engine answers between two steps; a step may be a long one
_MAX_TOKENS, _MAX_SPANS, _MAX_LABEL = 512, 64, 128


@dataclass(frozen=True)
class ShownAnswer:
    """A choice that has ended: how many tokens, the spans, and its ids where the server may show them."""

    spans: Sequence[WeightVersionSpan]
    token_ids: Sequence[int] | None


class LivePage:
    """One event a second, the same bytes for every viewer. Lives on one event loop.

    Without a viewer nothing is asked of the engines and nothing is kept; with some, the last answer alone is. `told`
    says what the server knows beside its engines. Its text goes out only where `shows_answers`.
    """

    def __init__(
        self,
        engine: Fleet,
        tokenizer: BackgroundTokenizer,
        told: Callable[[], dict[str, Any]],
        *,
        shows_answers: bool,
    ) -> None:
        self._engine, self._tokenizer, self._told = engine, tokenizer, told
        self.shows_answers = shows_answers
        self.answer: ShownAnswer | None = None
        self.viewers = 0
        self._ticking: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes]
        self._latest: bytes | None = None
        self._committed = asyncio.Event()
        self._before: tuple[float, dict[int, int]] = (0.0, {})

    def commit(self) -> None:
        """A weight call was answered: tell of it soon."""
        self._committed.set()

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """The place of one more viewer, who may read `events`. Raises a 503 where there are as many as may be."""
        if self.viewers >= MAX_VIEWERS:
            message = f"{self.viewers} viewers look at this page already, and no more may: close one."
            raise ApiError(503, message, headers={"Retry-After": "10"})
        self.viewers += 1
        if self._ticking is None:
            self._next = asyncio.get_running_loop().create_future()
            self._ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._ticking.cancel()
                self._ticking = self._latest = self.answer = None
                self._before = (0.0, {})

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events for a viewer, until the server stops; one who reads slowly misses some."""
        if self._latest is not None:
            yield self._latest
        while not self._told()["stopping"]:
            yield await asyncio.shield(self._next)

    async def _tick(self) -> None:
        while True:
            event = b"data: " + msgspec.json.encode(await self._snapshot()) + b"\n\n"
            due, self._next = self._next, asyncio.get_running_loop().create_future()
            due.set_result(event)
            self._latest = event
            await asyncio.sleep(_SOON_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._committed.wait(), PERIOD_S - _SOON_S)
            self._committed.clear()

    async def _snapshot(self) -> dict[str, Any]:
        shown: dict[str, Any] = {**self._told(), "time": time.time(), "error": None, "engines": [], "weights": {}}
        try:
            stats = await self._engine.stats(_ASK_S)
            weights = await self._engine.call("weight_info", timeout_s=_ASK_S)
        except EngineError as error:
            return shown | {"error": str(error)[:_MAX_LABEL]}
        of_rank = {one["rank"]: one for one in weights.get("ranks", ())}
        now, (then, before) = time.monotonic(), self._before
        totals = {rank: counted.get("sampled_tokens", 0) for rank, counted in stats.items()}
        self._before = now, totals
        for client in self._engine.ranks:
            counted, own = stats.get(client.rank), of_rank.get(client.rank, {})
            engine: dict[str, Any] = {"rank": client.rank, "up": counted is not None, "restarts": client.restarts}
            if counted is not None:
                engine |= {name: counted.get(name, 0) for name in ("epoch", "running", "waiting", "sleep_level")}
                engine["version"] = str(own.get("weight_version", ""))[:_MAX_LABEL]
                engine["cache"] = 1 - counted["free_blocks"] / counted["num_blocks"]
                if client.rank in before and now > then:
                    engine["tokens_per_s"] = (totals[client.rank] - before[client.rank]) / (now - then)
            shown["engines"].append(engine)
        names = ("epoch", "state", "bytes", "seconds", "transport", "commit_seconds", "weights")
        shown["weights"] = {name: weights.get(name) for name in names}
        shown["weights"]["version"] = str(weights.get("weight_version", ""))[:_MAX_LABEL]
        shown["weights"]["last_error"] = None if weights.get("last_error") is None else str(weights["last_error"])[:500]
        stale: dict[str, int] = {}
        for counted in stats.values():
            for behind, count in counted.get("staleness", {}).items():
                stale[behind] = stale.get(behind, 0) + count
        shown["staleness"] = [sum(int(b) * n for b, n in stale.items()), sum(stale.values())]
        shown["answer"] = await self._shown_answer()
        return shown

    async def _shown_answer(self) -> list[dict[str, Any]] | None:
        """The last answer's spans, cut to a bounded number, each with its text where that may be shown."""
        answer = self.answer
        if answer is None:
            return None
        pieces: list[dict[str, Any]] = []
        vocabulary = await self._tokenizer.vocabulary() if answer.token_ids is not None else None
        for span in answer.spans[:_MAX_SPANS]:
            piece: dict[str, Any] = {"version": span.version[:_MAX_LABEL], "epoch": span.epoch, "kv": span.kv}
            piece["tokens"] = span.end - span.start
            if answer.token_ids is not None:
                ids = list(answer.token_ids[span.start : min(span.end, _MAX_TOKENS)])
                piece["text"] = " ".join(map(str, ids)) if vocabulary is None else vocabulary.decode(ids)
            pieces.append(piece)
        return pieces
