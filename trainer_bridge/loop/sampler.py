"""Rollouts without end: a thread of the trainer that always has some groups generating."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainer_bridge.client import AsyncRolloutClient, Choice, Generation, RolloutError
from trainer_bridge.rollouts import Prompt, RolloutGroup

SEED_BITS = 63
_RETRY_S = 0.5
_IDLE_S = 2.0


@dataclass
class SamplerStats:
    """What the sampler saw so far. Gaps are seconds between two tokens of one answer, as they arrived here."""

    requests: int = 0
    tokens: int = 0
    requests_with_two_versions: int = 0
    longest_token_gap_s: float = 0.0
    dropped_groups: int = 0
    failed_requests: int = 0


class RolloutSampler:
    """Keeps `in_flight` groups of `group_size` answers generating, whatever the trainer does; use it as a context.

    `prompts` is drawn from and `reward` called on the sampler's thread. Every request gets a seed of its own, by `seed`
    in the order of the requests, so that it can be recorded (`records`) and replayed. Finished groups wait for
    `take_groups`, at most `capacity` of them: when there are more, the oldest goes, so what the trainer gets is fresh.
    Groups with an aborted answer are dropped. Where the server is away or without weights (no answer, or a 5xx),
    requests are tried again for `outage_s`; any other error, and an outage beyond that, ends the sampler, and
    `take_groups` raises it.
    """

    def __init__(
        self,
        base_url: str,
        prompts: Iterator[Prompt],
        reward: Callable[[Prompt, Choice], float],
        sampling_params: Mapping[str, Any],
        *,
        group_size: int,
        in_flight: int,
        capacity: int,
        seed: int,
        outage_s: float = 0.0,
        api_key: str | None = None,
    ) -> None:
        self.stats = SamplerStats()
        self._base_url, self._api_key = base_url, api_key
        self._prompts, self._reward = prompts, reward
        self._sampling_params = dict(sampling_params)
        self._group_size = group_size
        self._in_flight = in_flight
        self._capacity = capacity
        self._outage_s = outage_s
        self._last_success = time.monotonic()
        self._rng = random.Random(seed)
        self._groups: deque[RolloutGroup] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> RolloutSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)

    def take_groups(
        self,
        count: int,
        *,
        usable: Callable[[RolloutGroup], bool],
        timeout_s: float,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> list[RolloutGroup]:
        """`count` finished groups, oldest first, all of them `usable`: others are dropped.

        `while_waiting` is called on this thread at first and then every other second, to look after the server.
        Raises the error that ended the sampler, or TimeoutError.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            while_waiting()
            longest = min(_IDLE_S, deadline - time.monotonic())
            with self._changed:
                if self._changed.wait_for(lambda: self._enough(count, usable), longest):
                    if self._error is not None:
                        raise self._error
                    return [self._groups.popleft() for _ in range(count)]
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server finished fewer than {count} usable groups in {timeout_s:g} s")

    def newest(self) -> RolloutGroup | None:
        """The group that finished last, if one waits; `take_groups` will still give it."""
        with self._changed:
            return self._groups[-1] if self._groups else None

    def _enough(self, count: int, usable: Callable[[RolloutGroup], bool]) -> bool:
        kept = [group for group in self._groups if usable(group)]
        self.stats.dropped_groups += len(self._groups) - len(kept)
        self._groups = deque(kept)
        return len(kept) >= count or self._error is not None

    def _run(self) -> None:
        try:
            asyncio.run(self._sample_until_told())
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    async def _sample_until_told(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncRolloutClient(self._base_url, api_key=self._api_key) as client:
            workers = [asyncio.create_task(self._sample(client)) for _ in range(self._in_flight)]
            told = asyncio.create_task(self._stop.wait())
            done, rest = await asyncio.wait([*workers, told], return_when=asyncio.FIRST_COMPLETED)
            for running in rest:
                running.cancel()  # closes its stream, which aborts the request
            await asyncio.gather(*rest, return_exceptions=True)
            for finished in done:
                finished.result()

    async def _sample(self, client: AsyncRolloutClient) -> None:
        while True:
            prompt = next(self._prompts)
            params = {**self._sampling_params, "seed": self._rng.getrandbits(SEED_BITS)}
            while (answers := await self._answers(client, prompt, params)) is None:
                await asyncio.sleep(_RETRY_S)
            choices = [answer.choice() for answer in answers]
            if any(choice.finish_reason == "abort" for choice in choices):
                self.stats.dropped_groups += 1
                continue
            self._keep(RolloutGroup(prompt, params, choices, [self._reward(prompt, choice) for choice in choices]))

    async def _answers(
        self, client: AsyncRolloutClient, prompt: Prompt, params: dict[str, Any]
    ) -> list[_Answer] | None:
        """One request to its end; None where it should be tried again."""
        answers = [_Answer() for _ in range(self._group_size)]
        try:
            async for event in client.stream(prompt.token_ids, params, n=self._group_size):
                self._receive(event, answers)
        except RolloutError as error:
            lasting = error.status and error.status < 500
            if lasting or time.monotonic() > self._last_success + self._outage_s:
                raise
            self.stats.failed_requests += 1
            return None
        self._last_success = time.monotonic()
        return answers

    def _receive(self, event: Generation, answers: list[_Answer]) -> None:
        now = self._last_success = time.monotonic()
        for piece in event.choices:
            gap = answers[piece.index].add(piece, now)
            self.stats.longest_token_gap_s = max(self.stats.longest_token_gap_s, gap)

    def _keep(self, group: RolloutGroup) -> None:
        with self._changed:
            self.stats.requests += 1
            self.stats.tokens += group.tokens
            crossed = any(len({span.version for span in choice.spans}) > 1 for choice in group.choices)
            self.stats.requests_with_two_versions += crossed
            self._groups.append(group)
            if len(self._groups) > self._capacity:
                self._groups.popleft()
                self.stats.dropped_groups += 1
            self._changed.notify_all()


@dataclass
class _Answer:
    """An answer as its pieces arrive."""

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
