"""Rollouts without end: a thread of the trainer that always has some groups generating."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rollout.demo import task
from trainer_bridge import AsyncRolloutClient
from trainer_bridge.client import Choice, Generation


@dataclass(frozen=True)
class Group:
    """One question, the answers sampled for it, and what each is worth."""

    question: str
    prompt_token_ids: list[int]
    choices: list[Choice]
    rewards: list[float]

    @property
    def oldest_epoch(self) -> int:
        """The oldest weights that sampled a token of it."""
        return min(span.epoch or 0 for choice in self.choices for span in choice.spans)


@dataclass
class SamplerStats:
    """What the sampler saw so far. Gaps are seconds between two tokens of one answer, as they arrived here."""

    requests: int = 0
    tokens: int = 0
    requests_with_two_versions: int = 0
    longest_token_gap_s: float = 0.0
    dropped_groups: int = 0


class Sampler:
    """Keeps `in_flight` groups of `group_size` answers generating, whatever the trainer does; use it as a context.

    Finished groups wait for `take`, at most `capacity` of them: when there are more, the oldest goes, so what the
    trainer gets is fresh. `sampling_params` are those of every request.
    """

    def __init__(
        self,
        base_url: str,
        tokenizer: PreTrainedTokenizerBase,
        sampling_params: Mapping[str, Any],
        *,
        group_size: int,
        in_flight: int,
        capacity: int,
        seed: int,
    ) -> None:
        self.stats = SamplerStats()
        self._base_url = base_url
        self._tokenizer = tokenizer
        self._sampling_params = sampling_params
        self._group_size = group_size
        self._in_flight = in_flight
        self._capacity = capacity
        self._questions = _endlessly_shuffled(task.QUESTIONS, random.Random(seed))
        self._groups: deque[Group] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)

    def take(self, count: int, *, oldest_epoch: int, timeout_s: float) -> list[Group]:
        """`count` finished groups, oldest first, none with a token older than `oldest_epoch`: those are dropped.

        Raises the error that ended the sampler, or TimeoutError.
        """

        def enough() -> bool:
            fresh = [group for group in self._groups if group.oldest_epoch >= oldest_epoch]
            self.stats.dropped_groups += len(self._groups) - len(fresh)
            self._groups = deque(fresh)
            return len(fresh) >= count or self._error is not None

        with self._changed:
            if not self._changed.wait_for(enough, timeout_s):
                raise TimeoutError(f"the server finished fewer than {count} groups in {timeout_s:g} s")
            if self._error is not None:
                raise self._error
            return [self._groups.popleft() for _ in range(count)]

    def _run(self) -> None:
        try:
            asyncio.run(self._sample_until_told())
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    async def _sample_until_told(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncRolloutClient(self._base_url) as client:
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
            question = next(self._questions)
            prompt = task.prompt_token_ids(self._tokenizer, question)
            answers = [_Answer() for _ in range(self._group_size)]
            async for event in client.stream(prompt, self._sampling_params, n=self._group_size):
                self._receive(event, answers)
            choices = [answer.choice() for answer in answers]
            self._keep(Group(question, prompt, choices, [self._reward(choice) for choice in choices]))

    def _receive(self, event: Generation, answers: list[_Answer]) -> None:
        now = time.monotonic()
        for piece in event.choices:
            gap = answers[piece.index].add(piece, now)
            self.stats.longest_token_gap_s = max(self.stats.longest_token_gap_s, gap)

    def _reward(self, choice: Choice) -> float:
        text = self._tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        return task.reward(str(text), choice.finish_reason == "stop")

    def _keep(self, group: Group) -> None:
        with self._changed:
            self.stats.requests += 1
            self.stats.tokens += sum(len(choice.token_ids) for choice in group.choices)
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
        return replace(
            self.pieces[-1],
            token_ids=[token for piece in self.pieces for token in piece.token_ids],
            logprobs=[logprob for piece in self.pieces for logprob in piece.logprobs or ()],
            sampling_mask=None,  # the demo samples unfiltered
        )


def _endlessly_shuffled(items: tuple[str, ...], rng: random.Random) -> Iterator[str]:
    while True:
        yield from rng.sample(items, len(items))
