"""`rollout bench --simulate`: an asynchronous loop of reinforcement learning on a fleet, event by event.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from rollout.bench.fleet import Fleet, lognormal

DEFAULT_ENGINES = (8, 16, 32, 64, 128, 256, 512, 1024)
WALLS = ("engines", "lag", "ingress", "trainer", "broadcast")


@dataclass(frozen=True)
class Result:
    """A fleet's figures over the measured steps. Rates in tokens/s, shares of 1, times in seconds, lags in steps.

    `generated` is sampled by the engines, `trained` reaches the trainer; what lies between was too old (`dropped`, a
    share of the tokens of finished groups), lost with an engine, or is still open. `engines_busy` is `generated` over
    what full engines do. `walls`: what each part would allow by itself; `wall`: the lowest, `wall_tokens_per_second`.
    """

    engines: int
    generated: float
    trained: float
    trainer_busy: float
    engines_busy: float
    push_seconds: float
    receiving: float
    lag_mean: float
    lag_p99: int
    dropped: float
    failure_loss: float
    wall: str
    wall_tokens_per_second: float
    walls: dict[str, float]
    totals: Totals


@dataclass
class Totals:
    """Sums since the start: tokens, seconds, and counts. `lags`: trained tokens by how many steps old they were."""

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

    def since(self, before: Totals) -> Totals:
        """What was added."""
        names = [f.name for f in fields(self) if f.name != "lags"]
        sums = {name: getattr(self, name) - getattr(before, name) for name in names}
        return Totals(**sums, lags={lag: tokens - before.lags.get(lag, 0.0) for lag, tokens in self.lags.items()})

    def copy(self) -> Totals:
        """As they are now."""
        return replace(self, lags=dict(self.lags))


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
    """Engines, trainer and pushes. `advance` goes on to the next event; the other methods are the events."""

    def __init__(self, fleet: Fleet, engines: int, seed: int) -> None:
        if engines < 1:
            raise ValueError(f"engines is {engines}, but there must be at least 1")
        self.fleet, self.engines, self.alive = fleet, engines, engines
        self.rng = random.Random(f"{seed} {engines}")
        self.totals = Totals()
        self.now = self.work = 0.0
        self.steps = 0
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

    @property
    def version(self) -> int:
        return len(self.commits) - 1

    def run(self, steps: int) -> None:
        """Until so many steps in all were trained and pushed."""
        while self.version * self.fleet.push_every < steps:
            self.advance()

    def advance(self) -> None:
        """Go on to the next event: an answer's last token, or a timer."""
        speed = self._speed()
        ends = self.now + max(0.0, self._open[0][0] - self.work) / speed if speed else math.inf
        rings = self._timers[0][0] if self._timers else math.inf
        seconds = min(ends, rings) - self.now
        self.totals.seconds += seconds
        self.totals.training += seconds * self._training
        self.totals.receiving += seconds * self._pushing
        self.totals.generated += seconds * speed * len(self._open)
        self.now += seconds
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
            allowed = self.fleet.most_begun // self.fleet.n + self.version * self._groups_a_push + self._too_old
            if self._begun >= allowed:
                return None
            self._begun += 1
            self._left = self.fleet.n
            group = self._filling = Group(self.fleet.n, self.version)
        self._left -= 1
        if not self._left:
            self._filling = None
        length = self.rng.lognormvariate(*self._length) if self.fleet.tokens_cv else self.fleet.mean_tokens
        return length, group

    @property
    def _groups_a_push(self) -> int:
        return self.fleet.push_every * self.fleet.prompts_per_step

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
            self._count_lags(groups)
            self._training = True
            self._after(self.fleet.batch_seconds(tokens), self._trained)

    def _count_lags(self, groups: Sequence[Group]) -> None:
        for begin, end, version in itertools.chain.from_iterable(group.answers for group in groups):
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


def simulate(fleet: Fleet, engines: int, *, steps: int, seed: int) -> Result:
    """Run to a steady state (twice as long as the oldest answer lives, and two pushes), then measure `steps` steps.

    Raises ValueError for fewer than one engine or step, and where engines fail too often for a push to get through.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}, but there must be at least 1")
    if fleet.mtbf_hours is not None and fleet.push_seconds(engines) * engines > 3 * fleet.mtbf_hours * 3600:
        raise ValueError(
            f"mtbf_hours is {fleet.mtbf_hours:g}: one of {engines} engines fails every "
            f"{fleet.mtbf_hours * 3600 / engines:.3g} s, but a push takes {fleet.push_seconds(engines):.3g} s, so "
            "hardly any would get through"
        )
    loop, warmup = Loop(fleet, engines, seed), (2 * fleet.max_lag + 4) * fleet.push_every
    loop.run(warmup)
    before = loop.totals.copy()
    loop.run(warmup + steps)
    t = loop.totals.since(before)
    wall, wall_tokens_per_second = fleet.wall(engines)
    return Result(
        engines=engines,
        generated=t.generated / t.seconds,
        trained=t.trained / t.seconds,
        trainer_busy=t.training / t.seconds,
        engines_busy=t.generated / t.seconds / fleet.tokens_per_second(engines, engines * fleet.streams),
        push_seconds=t.receiving / t.pushes,
        receiving=t.receiving / t.seconds,
        lag_mean=sum(lag * tokens for lag, tokens in t.lags.items()) / t.trained,
        lag_p99=quantile(t.lags, 0.99),
        dropped=t.dropped / (t.dropped + t.trained),
        failure_loss=fleet.failure_loss(engines),
        wall=wall,
        wall_tokens_per_second=wall_tokens_per_second,
        walls=fleet.walls(engines),
        totals=t,
    )


def quantile(counts: dict[int, float], share: float) -> int:
    """The smallest value that at least this share of the counts does not exceed."""
    total, reached = sum(counts.values()), 0.0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= share * total:
            return value
    return max(counts)


COLUMNS = ("engines", "sampled", "trained", "busy", "trainer", "push", "receive", "lag", "p99", "dropped", "wall")
CAPTION = (
    "sampled, trained: tokens/s. busy: of what full engines sample. trainer: its time in steps. push: seconds. "
    "receive: share of the time in which engines do. lag: mean and 99th percentile over trained tokens, in steps of "
    "the trainer. dropped: share of finished tokens that were too old. wall: the lowest of the second table's."
)


def cells(result: Result) -> list[str]:
    """A row of the first table."""
    return [
        str(result.engines),
        f"{result.generated:,.0f}",
        f"{result.trained:,.0f}",
        f"{result.engines_busy:.0%}",
        f"{result.trainer_busy:.0%}",
        f"{result.push_seconds:.1f}",
        f"{result.receiving:.0%}",
        f"{result.lag_mean:.1f}",
        str(result.lag_p99),
        f"{result.dropped:.0%}",
        result.wall,
    ]


def wall_cells(result: Result) -> list[str]:
    """A row of the second table: tokens/s at which each wall stands."""
    figures = [result.walls[name] for name in WALLS]
    return [str(result.engines), *("–" if math.isinf(figure) else f"{figure:,.0f}" for figure in figures)]


REMEDIES = {
    "engines": "more engines",
    "lag": "larger batches (--prompts-per-step) or a larger --max-lag; more engines would only hold fewer answers each",
    "ingress": "more server processes (--servers); whole answers rather than events; --tokens-only",
    "trainer": "a faster trainer (--train-us-per-token); more engines add nothing but old answers",
    "broadcast": "--topology chain or relays, sparse pushes (--pushed-share), --overlap-push, --push-every",
}
"""What moves each wall. docs/scaling.md says what each costs."""


def remedies(results: Sequence[Result]) -> list[str]:
    """A line for each wall that binds somewhere, in the order of the fleets."""
    return [f"{wall}: {REMEDIES[wall]}" for wall in dict.fromkeys(result.wall for result in results)]


def as_json(fleet: Fleet, results: Sequence[Result], **settings: Any) -> dict[str, Any]:
    """Every assumption and every figure; a wall that there is not is null."""
    figures = [asdict(result) for result in results]
    for row in figures:
        row["walls"] = {name: None if math.isinf(figure) else figure for name, figure in row["walls"].items()}
        row["totals"]["lags"] = {str(lag): tokens for lag, tokens in sorted(row["totals"]["lags"].items())}
    return {**settings, "fleet": asdict(fleet), "results": figures}


def tables(results: Sequence[Result]) -> list[Table]:
    """What the fleet does, and where its walls stand."""
    looks: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    first = Table(title="A simulated fleet in steady state", caption=CAPTION, caption_justify="left", **looks)
    second = Table(title="Walls: tokens/s that each part would allow by itself", **looks)
    for table, columns in ((first, COLUMNS), (second, ("engines", *(f"{name} wall" for name in WALLS)))):
        for column in columns:
            table.add_column(column, justify="left" if column == "wall" else "right", no_wrap=True)
    for result in results:
        first.add_row(*cells(result))
        second.add_row(*wall_cells(result))
    return [first, second]
