"""Requests without end on a thread of the trainer's process: what samplers and rollout workers have in common."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.sampling.params import check_names
from trainer_bridge.client import AsyncRolloutClient, Choice, RolloutClient, RolloutError
from trainer_bridge.rollouts import Prompt
from trainer_bridge.wire import Patience

logger = logging.getLogger(__name__)

SEED_BITS = 63
STOP_TIMEOUT_S = 15.0
_TURN_S = 0.2


@dataclass
class SamplerStats:
    """What was sampled so far. Gaps are seconds between two tokens of one answer, as they arrived here."""

    requests: int = 0
    tokens: int = 0
    requests_with_two_versions: int = 0
    longest_token_gap_s: float = 0.0
    dropped_groups: int = 0
    failed_requests: int = 0


class GroupGenerator:
    """A thread that keeps `in_flight` groups of `group_size` answers generating, until it is stopped or fails, or there
    are no more `prompts`; these are drawn on that thread.

    `finish(prompt, sampling_params, choices, seconds)` is awaited on its event loop for each group; an error that it
    raises ends the generator. `on_retry` is called there before a request is sent again, `on_end` as the last of all.
    A request carries a seed of its own and asks for logprobs. It is sent again, with the same seed, where its answer
    was aborted, and for `outage_s` where the server is away, busy or without weights (no answer, 429, or a 5xx).
    A choice that ends with an error ends the generator. `error` is what ended it, None otherwise.
    """

    def __init__(
        self,
        client: RolloutClient,
        prompts: Iterator[Prompt],
        finish: Callable[[Prompt, dict[str, Any], list[Choice], float], Awaitable[None]],
        sampling_params: Mapping[str, Any],
        *,
        group_size: int,
        in_flight: int,
        seed: int,
        outage_s: float,
        on_retry: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        check_names(sampling_params)
        for name, value in (("group_size", group_size), ("in_flight", in_flight)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.stats = SamplerStats()
        self.error: BaseException | None = None
        self.last_turn = time.monotonic()
        """When the event loop last had time for anything."""
        self.ended = False
        """Whether it was started and generates no more."""
        self.room: asyncio.Semaphore | None = None
        """Where there is one, each group takes a place of it before it begins; `make_room` gives places back."""
        self._client, self._prompts, self._finish = client, prompts, finish
        self._on_retry, self._on_end = on_retry, on_end
        self._params = {**sampling_params, "logprobs": sampling_params.get("logprobs") or 0}
        self._group_size, self._in_flight, self._outage_s = group_size, in_flight, outage_s
        self._rng = random.Random(seed)
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        self.last_turn = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Abort what is running and end the thread."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def make_room(self, places: int) -> None:
        """So many groups are done with: as many may begin."""
        if self.room is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                for _ in range(places):
                    self._loop.call_soon_threadsafe(self.room.release)

    def _run(self) -> None:
        try:
            asyncio.run(self._generate())
        except BaseException as error:
            self.error = error
        self.ended = True
        self._on_end()

    async def _generate(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncRolloutClient(
            self._client.base_url,
            api_key=self._client.api_key,
            timeout_s=self._client.timeout_s,
            headers=self._client.headers,
        ) as client:
            tasks = [asyncio.create_task(self._keep_generating(client)) for _ in range(self._in_flight)]
            everything = asyncio.gather(*tasks)
            stop: asyncio.Future[Any] = asyncio.create_task(self._stop.wait())
            while not stop.done() and not everything.done():
                self.last_turn = time.monotonic()
                await asyncio.wait([everything, stop], timeout=_TURN_S, return_when=asyncio.FIRST_COMPLETED)
            for task in (*tasks, stop):
                task.cancel()  # closes its stream, which aborts the request
            ended = await asyncio.gather(everything, *tasks, stop, return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):  # not a cancellation
                    raise error

    async def _keep_generating(self, client: AsyncRolloutClient) -> None:
        while True:
            if self.room is not None:
                await self.room.acquire()
            prompt = next(self._prompts, None)
            if prompt is None:
                self.make_room(1)  # for those that wait to hear the same
                return
            params = {**self._params, "seed": self._rng.getrandbits(SEED_BITS)}
            began = time.monotonic()
            choices = await self._choices(client, prompt, params)
            self.stats.requests += 1
            self.stats.tokens += sum(len(choice.token_ids) for choice in choices)
            crossed = any(len({span.version for span in choice.spans}) > 1 for choice in choices)
            self.stats.requests_with_two_versions += crossed
            await self._finish(prompt, params, choices, time.monotonic() - began)

    async def _choices(self, client: AsyncRolloutClient, prompt: Prompt, params: dict[str, Any]) -> list[Choice]:
        """The answers of one group, sampled again until nobody aborts one."""
        patience = Patience(self._outage_s, lambda error: 0 < error.status < 500 and error.status != 429)
        while True:
            answers = [_Answer() for _ in range(self._group_size)]
            try:
                async for event in client.stream(prompt.token_ids, params, n=self._group_size):
                    now = time.monotonic()
                    for piece in event.choices:
                        gap = answers[piece.index].add(piece, now)
                        self.stats.longest_token_gap_s = max(self.stats.longest_token_gap_s, gap)
            except RolloutError as error:
                pause = patience.pause_s(error)
                logger.warning("%s; sent again in %.1f s", error, pause)
                self.stats.failed_requests += 1
                self._on_retry()
                await asyncio.sleep(pause)
                continue
            choices = [answer.choice() for answer in answers]
            for choice in choices:
                if choice.finish_reason == "error":  # the same request would end so again
                    raise RolloutError(
                        0, "", f"choice {choice.index} of a group ended with an error: {choice.stop_reason}"
                    )
            if all(choice.finish_reason != "abort" for choice in choices):
                return choices
            self.stats.dropped_groups += 1
            self._on_retry()
            await asyncio.sleep(_TURN_S)


@dataclass
class _Answer:
    pieces: list[Choice] = field(default_factory=list)
    last_token_at: float | None = None

    def add(self, piece: Choice, now: float) -> float:
        """Take a piece; the seconds since the last token, 0 for the first one or where no token came."""
        self.pieces.append(piece)
        if not piece.token_ids:
            return 0.0
        last, self.last_token_at = self.last_token_at, now
        return 0.0 if last is None else now - last

    def choice(self) -> Choice:
        """The whole answer: the last piece carries what is said once, such as the spans."""
        masks: list[list[int] | None] = []
        for piece in self.pieces:
            masks += piece.sampling_mask or [None] * len(piece.token_ids)
        return replace(
            self.pieces[-1],
            token_ids=[token for piece in self.pieces for token in piece.token_ids],
            logprobs=[logprob for piece in self.pieces for logprob in piece.logprobs or ()],
            sampling_mask=masks if any(piece.sampling_mask is not None for piece in self.pieces) else None,
        )
