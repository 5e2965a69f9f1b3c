"""An asynchronous loop of reinforcement learning on a fleet, event by event: what `rollout bench --simulate` runs.

All engines are equal and share the work evenly, so every open answer grows at one speed. `work` is the clock of that
speed: an answer of 100 tokens that begins at work 7 ends at work 107, however often the speed changes in between.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout.bench.fleet_model import FleetModel, lognormal


@dataclass
class Totals:
    """Sums of tokens and seconds, and counts. `lags`: trained tokens by how many steps old they were."""

    seconds: float = 0.0
    generated: float = 0.0
    trained: float = 0.0
    dropped: float = 0.0
    lost: float = 0.0
    training: float = 0.0
    receiving: float = 0.0
    pushes: int = 0
    failures: int = 0
    lags: dict[int, float] = field(default_factory=dict)


@dataclass
class Group:
    """Answers to one prompt: how many are missing, and (work at begin, at end, version at begin) of the others."""

    missing: int
    oldest: int
    answers: list[tuple[float, float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> float:
        return sum(end - begin for begin, end, _ in self.answers)


class Loop:
    """Engines, trainer and pushes. `advance` goes on to the next event; the other methods are the events.

    `totals` may be replaced by new ones at any time, to measure from then on.
    """

    def __init__(self, fleet: FleetModel, engines: int, seed: int) -> None:
        if engines < 1:
            raise ValueError(f"engines is {engines}, but there must be at least 1")
        self.fleet, self.engines, self.alive = fleet, engines, engines
        self.rng = random.Random(f"{seed} {engines}")
        self.totals = Totals()
        self.now = self.work = 0.0
        self.steps = self.version = 0
        self.commits = [0.0]  # the work at which each version began
        self._length = lognormal(fleet.mean_tokens, fleet.tokens_cv)
        self._check = lognormal(fleet.check_seconds, fleet.check_cv)
        self._open: list[tuple[float, int, float, int, Group]] = []  # heap: end, number, begin, version, group
        self._again: list[tuple[float, Group]] = []  # length, group: lost with an engine
        self._ready: deque[Group] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._filling: Group | None = None
        self._begun = self._too_old = 0  # groups
        self._training = self._pushing = self._push_waits = False
        self._attempt = 0
        self._stalled_until = 0.0
        if fleet.mtbf_hours is not None:
            self._after(self._to_failure(), self._fail)
        self._begin()

    def run(self, steps: int) -> None:
        """Until so many steps in all were trained and pushed."""
        while self.version * self.fleet.push_every < steps:
            self.advance()

    def advance(self) -> None:
        """Go on to the next event: an answer's last token, or a timer."""
        speed = self._speed()
        ends = self.now + max(0.0, self._open[0][0] - self.work) / speed if speed else math.inf
        rings = self._timers[0][0] if self._timers else math.inf
        then = min(ends, rings)
        seconds = then - self.now
        totals = self.totals
        totals.seconds += seconds
        totals.training += seconds * self._training
        totals.receiving += seconds * self._pushing
        totals.generated += seconds * speed * len(self._open)
        self.now = then
        if ends <= rings:
            self.work = self._open[0][0]
            self._end()
        else:
            self.work += seconds * speed
            heapq.heappop(self._timers)[2]()

    def _speed(self) -> float:
        """Tokens/s of each open answer."""
        streams = len(self._open)
        if not streams or not self.alive or self.now < self._stalled_until:
            return 0.0
        speed = 1 / self.fleet.token_seconds(streams / self.alive)
        if self._pushing:
            speed *= self.fleet.receive_speed
        return min(speed, self.fleet.ingress_tokens_per_second / streams)

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), event))

    # -- engines

    def _begin(self) -> None:
        """Fill the engines: first what was lost, then new answers, as far as the lag allows."""
        while len(self._open) < self.fleet.streams * self.alive:
            answer = self._again.pop() if self._again else self._next_answer()
            if answer is None:
                return
            length, group = answer
            group.oldest = min(group.oldest, self.version)
            entry = (self.work + length, next(self._numbers), self.work, self.version, group)
            heapq.heappush(self._open, entry)

    def _next_answer(self) -> tuple[float, Group] | None:
        """Its length, and the group that it belongs to; None where it must wait for a push."""
        group = self._filling
        if group is None:
            pushed = self.version * self.fleet.push_every * self.fleet.prompts_per_step
            allowed = self.fleet.most_begun // self.fleet.n + pushed + self._too_old
            if self._begun >= allowed:
                return None
            self._begun += 1
            self._left = self.fleet.n
            group = self._filling = Group(self.fleet.n, self.version)
        self._left -= 1
        if not self._left:
            self._filling = None
        length = math.exp(self.rng.gauss(*self._length)) if self.fleet.tokens_cv else self.fleet.mean_tokens
        return length, group

    def _end(self) -> None:
        """The answer that ends first does."""
        end, _, begin, version, group = heapq.heappop(self._open)
        group.answers.append((begin, end, version))
        group.missing -= 1
        if not group.missing:
            self._ready.append(group)
            self._train()
        self._begin()

    # -- trainer

    def _train(self) -> None:
        """Take the groups that finished first, unless the trainer is busy; drop what is older than the lag allows."""
        busy = self._training or self._push_waits or (self._pushing and not self.fleet.overlap_push)
        if busy or len(self._ready) < self.fleet.prompts_per_step:
            return
        oldest = self.steps - (self.fleet.max_lag + 1) * self.fleet.push_every + 1
        old = [group for group in self._ready if group.oldest * self.fleet.push_every < oldest]
        if old:
            self._ready = deque(g for g in self._ready if g.oldest * self.fleet.push_every >= oldest)
            self._too_old += len(old)
            self.totals.dropped += sum(group.tokens for group in old)
            self._begin()
        if len(self._ready) >= self.fleet.prompts_per_step:
            groups = [self._ready.popleft() for _ in range(self.fleet.prompts_per_step)]
            tokens = sum(group.tokens for group in groups)
            self.totals.trained += tokens
            for group in groups:
                self._count_lags(group)
            self._training = True
            self._after(self.fleet.batch_seconds(tokens), self._trained)

    def _count_lags(self, group: Group) -> None:
        for begin, end, version in group.answers:
            while begin < end:
                until = min(end, self.commits[version + 1]) if version < self.version else end
                lag = self.steps - version * self.fleet.push_every
                self.totals.lags[lag] = self.totals.lags.get(lag, 0.0) + until - begin
                begin, version = until, version + 1

    def _trained(self) -> None:
        self._training = False
        self.steps += 1
        if self.steps % self.fleet.push_every:
            self._train()
        elif self._pushing:
            self._push_waits = True
        else:
            self._push()
            self._train()

    def _push(self) -> None:
        """Prepare everywhere, then commit: the slowest check counts. A failure meanwhile begins it anew."""
        self._pushing = True
        self._attempt += 1
        checks = [self.rng.lognormvariate(*self._check) for _ in range(max(1, self.alive))]
        slowest = max(checks) if self.fleet.check_cv else self.fleet.check_seconds
        self._after(self.fleet.push_seconds(len(checks), slowest), functools.partial(self._commit, self._attempt))

    def _commit(self, attempt: int) -> None:
        if attempt != self._attempt:
            return
        self._pushing = False
        self.totals.pushes += 1
        self.commits.append(self.work)
        self.version += 1
        if self.fleet.recompute_seconds:
            self._stalled_until = self.now + self.fleet.recompute_seconds
            self._after(self.fleet.recompute_seconds, lambda: None)
        if self._push_waits:
            self._push_waits = False
            self._push()
        self._begin()
        self._train()

    # -- failures

    def _to_failure(self) -> float:
        assert self.fleet.mtbf_hours is not None
        return self.rng.expovariate(self.engines / (self.fleet.mtbf_hours * 3600))

    def _fail(self) -> None:
        """One of the engines, if it lives, loses its share of the open answers; they begin again elsewhere.

        `_push_waits` stays: it is a push that comes after the one that begins anew.
        """
        self._after(self._to_failure(), self._fail)
        if self.rng.randrange(self.engines) >= self.alive:
            return
        kept = []
        for entry in self._open:
            if self.rng.randrange(self.alive):
                kept.append(entry)
            else:
                end, _, begin, _, group = entry
                self.totals.lost += self.work - begin
                self._again.append((end - begin, group))
        heapq.heapify(kept)
        self._open = kept
        self.alive -= 1
        self.totals.failures += 1
        self._after(self.fleet.restart_seconds, self._recover)
        if self._pushing:
            self._push()
        self._begin()

    def _recover(self) -> None:
        self.alive += 1
        self._begin()
