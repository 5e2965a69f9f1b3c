"""Rollouts without end: a thread of the trainer that always has some groups generating."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from trainer_bridge.client import Choice, RolloutClient, RolloutError
from trainer_bridge.loop.generator import GroupGenerator, SamplerStats
from trainer_bridge.rollouts import Prompt, RolloutGroup, prompts_of
from trainer_bridge.score.replay import check_logprobs_mode
from trainer_bridge.wire import Patience

__all__ = ["Reward", "RolloutSampler", "SamplerStats"]

Reward: TypeAlias = Callable[[Prompt, Choice], float | Awaitable[float]]
"""What an answer is worth, a finite number. It is called in a pool of threads; an `async def` is awaited."""

_IDLE_S = 2.0
_REWARD_THREADS = 32


class RolloutSampler:
    """Keeps `in_flight` groups of `group_size` answers generating, whatever the trainer does; use it as a context.

    `prompts` are `Prompt`s or token ids, drawn as they are needed; with the last of a finite list or data set sampling
    ends. `reward` is one function or several, each alone or as (function, weight): an answer's reward is their weighted
    sum. Logprobs are always asked for. Every request gets a seed of its own, by `seed` in the order of the requests, so
    that it can be recorded (`records`) and replayed.

    Finished groups wait for `take_groups`, at most `capacity` of them: when there are more, the oldest goes, so what
    the trainer gets is fresh. With `wait_when_full` none goes: no group begins while there are `capacity` of them,
    finished or not, so no more is sampled than is trained on (and, at the end, `capacity` groups). A group with an
    aborted answer is sampled again. Where the server is away or without weights (no answer, 429 or a 5xx), requests are
    tried again for `outage_s`. Any other error (an answer that ends with one included), an outage beyond that, a reward
    that raises or isn't a finite number, and a server whose logprobs aren't those of the sampled distribution
    (`replay.check_logprobs_mode`) end the sampler, and `take_groups` raises what did.

    Raises ValueError for a name that no sampling parameter has.
    """

    def __init__(
        self,
        server: RolloutClient | str,
        prompts: Iterable[Prompt | Sequence[int]],
        reward: Reward | Sequence[Reward | tuple[Reward, float]],
        sampling_params: Mapping[str, Any],
        *,
        group_size: int,
        in_flight: int,
        capacity: int,
        seed: int = 0,
        outage_s: float = 0.0,
        wait_when_full: bool = False,
    ) -> None:
        listed = [reward] if callable(reward) else list(reward)
        self._rewards = [item if isinstance(item, tuple) else (item, 1.0) for item in listed]
        if not self._rewards:
            raise ValueError("there is no reward function")
        self._client = RolloutClient(server) if isinstance(server, str) else server
        self._generator = GroupGenerator(
            self._client,
            prompts_of(prompts),
            self._finish,
            sampling_params,
            group_size=group_size,
            in_flight=in_flight,
            seed=seed,
            outage_s=outage_s,
            on_end=self._notify,
        )
        if wait_when_full:
            self._generator.room = asyncio.Semaphore(capacity)
        self._outage_s = outage_s
        self._capacity = capacity
        self._logprobs_mode: str | None = None
        self._asked = False
        self._groups: deque[RolloutGroup] = deque()
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(min(_REWARD_THREADS, group_size * in_flight), "reward")

    @property
    def stats(self) -> SamplerStats:
        """What was sampled so far."""
        return self._generator.stats

    def __enter__(self) -> RolloutSampler:
        self._generator.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._generator.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def take_groups(
        self,
        count: int,
        *,
        usable: Callable[[RolloutGroup], bool] = lambda _: True,
        timeout_s: float = 600.0,
        while_waiting: Callable[[], object] = lambda: None,
        make_room: bool = True,
    ) -> list[RolloutGroup]:
        """`count` finished groups, oldest first, all of them `usable`: others are dropped. Fewer, and then none, where
        the prompts have come to their end.

        `while_waiting` is called on this thread at first and then every other second, to look after the server.
        Without `make_room` a sampler that waits when full begins no other groups for these until `make_room` is called.
        Raises the error that ended the sampler, TimeoutError, or ValueError for more groups than it holds.
        """
        if not 1 <= count <= self._capacity:
            raise ValueError(f"{count} groups were asked for, and capacity={self._capacity} is how many are kept")
        deadline = time.monotonic() + timeout_s
        while True:
            while_waiting()
            longest = min(_IDLE_S, deadline - time.monotonic())
            with self._changed:
                if self._changed.wait_for(lambda: self._enough(count, usable), longest):
                    if self._generator.error is not None:
                        raise self._generator.error
                    taken = [self._groups.popleft() for _ in range(min(count, len(self._groups)))]
                    if make_room:
                        self.make_room(len(taken))
                    return taken
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server finished fewer than {count} usable groups in {timeout_s:g} s")

    def make_room(self, groups: int = 1) -> None:
        """Let a sampler that waits when full begin so many groups: right before a push, for example, so that it finds
        some in flight."""
        self._generator.make_room(groups)

    def newest(self) -> RolloutGroup | None:
        """The group that finished last, if one waits; `take_groups` will still give it."""
        with self._changed:
            return self._groups[-1] if self._groups else None

    def _enough(self, count: int, usable: Callable[[RolloutGroup], bool]) -> bool:
        kept = [group for group in self._groups if usable(group)]
        dropped = len(self._groups) - len(kept)
        self.stats.dropped_groups += dropped
        self.make_room(dropped)
        self._groups = deque(kept)
        return len(kept) >= count or self._generator.ended

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _finish(self, prompt: Prompt, params: dict[str, Any], choices: list[Choice], seconds: float) -> None:
        if not self._asked:
            self._logprobs_mode, self._asked = await asyncio.to_thread(self._ask_logprobs_mode), True
        check_logprobs_mode(self._logprobs_mode, params)
        rewards = await asyncio.gather(*(self._reward(prompt, choice) for choice in choices))
        with self._changed:
            self._groups.append(RolloutGroup(prompt, params, choices, rewards, self._logprobs_mode))
            if len(self._groups) > self._capacity:
                self._groups.popleft()
                self.stats.dropped_groups += 1
            self._changed.notify_all()

    def _ask_logprobs_mode(self) -> str | None:
        """What the server says its logprobs are; None of one that has no /weight_info."""
        patience = Patience(self._outage_s, lambda error: 0 < error.status < 500 or error.status == 501)
        while True:
            try:
                return self._client.weight_info().get("logprobs_mode")
            except RolloutError as error:
                if error.status in (404, 405, 501):
                    return None
                time.sleep(patience.pause_s(error))

    async def _reward(self, prompt: Prompt, choice: Choice) -> float:
        total = 0.0
        for function, weight in self._rewards:
            value: Any = await asyncio.get_running_loop().run_in_executor(self._pool, function, prompt, choice)
            if inspect.isawaitable(value):
                value = await value
            if value is None or not math.isfinite(value):
                name = getattr(function, "__name__", type(function).__name__)
                raise ValueError(f"the reward {name} gave {value} for {prompt!r}: it must be a finite number")
            total += weight * float(value)
        return total
