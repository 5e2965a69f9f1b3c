"""What must be true of a server in a run of random faults, and the figures of such a run."""

from __future__ import annotations

import itertools
import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.engine_utils import TOLERANCE
from tests.support.faulty_trainer import Spec

COMMITTED = re.compile(r"weight_update state=committed epoch=(\d+) weight_version='([^']*)'")


class Truth:
    """Which weights a label and an epoch name, by what the trainers meant and what they were told; thread-safe.

    `violations` is what contradicts it.
    """

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.epochs: dict[int, str] = {}
        self._pushed = {"default": Spec(0)}
        self._folders: dict[int, Spec] = {}
        self._sampled: set[int] = set()
        self._successes: dict[int, str] = {}
        self._failures: dict[str, str] = {}
        self._lock = threading.RLock()

    def violated(self, what: str) -> None:
        with self._lock:
            self.violations.append(what)

    def pushes(self, label: str, spec: Spec) -> None:
        with self._lock:
            self._pushed[label] = spec

    def succeeded(self, label: str, epoch: int) -> None:
        with self._lock:
            if epoch in self._successes or epoch in self._folders:
                self.violated(f"epoch {epoch} is that of the push {label!r} and of another one")
            self._successes[epoch] = label
            self.serves(label, epoch)

    def failed(self, label: str, why: str) -> None:
        """This push must never serve."""
        with self._lock:
            self._failures[label] = why

    def committed_folder(self, epoch: int, spec: Spec) -> None:
        """A folder, which keeps the label that served before."""
        with self._lock:
            if epoch in self._successes:
                self.violated(f"epoch {epoch} is that of a folder and of {self._successes[epoch]!r}")
            self._folders[epoch] = spec

    def resumed(self, kept: int, now: int) -> None:
        """An engine serves its snapshot of epoch `kept` as epoch `now`."""
        with self._lock:
            if kept in self._folders:
                self._folders[now] = self._folders[kept]

    def serves(self, label: str, epoch: int) -> None:
        """Somebody was told that this epoch has this label."""
        with self._lock:
            if label not in self._pushed:
                self.violated(f"nobody has pushed the label {label!r} of epoch {epoch}")
            if (known := self.epochs.setdefault(epoch, label)) != label:
                self.violated(f"epoch {epoch} has two labels: {known!r} and {label!r}")

    def sampled(self, label: str, epoch: int) -> Spec:
        """The weights that a span of this label and epoch names."""
        with self._lock:
            self._sampled.add(epoch)
            self.serves(label, epoch)
            return self._folders.get(epoch, self._pushed[label])

    def end(self, log: str) -> None:
        """All is over: what can be said only now. `log` is what the server printed."""
        logged = {(int(epoch), label) for epoch, label in COMMITTED.findall(log)}
        for epoch, label in self._successes.items():
            if (epoch, label) not in logged and epoch not in self._sampled:
                self.violated(f"the push {label!r} succeeded, but nothing shows that epoch {epoch} has served")
        served = {*self.epochs.values(), *(label for _, label in logged)}
        for label, why in self._failures.items():
            if label in served:
                self.violated(f"the push {label!r} was told that it has failed, but it has served: {why}")

    @property
    def sampled_successes(self) -> int:
        return len(self._sampled & set(self._successes))


@dataclass
class Figures:
    """What a run has done; `text` is its table."""

    tokens: int = 0
    choices: int = 0
    spans: int = 0
    mixed_spans: int = 0
    largest_deviation: float = 0.0
    pushes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    sampled_successes: int = 0

    def text(self) -> str:
        def counts(counter: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))

        return (
            f"tokens checked {self.tokens} of {self.choices} choices, {self.spans} spans ({self.mixed_spans} mixed)\n"
            f"largest deviation {self.largest_deviation:.2e} (limit {TOLERANCE:g})\n"
            f"pushes: {counts(self.pushes)}; of the committed ones {self.sampled_successes} were sampled from\n"
            f"faults: {counts(self.faults)}\nrequests: {counts(self.requests)}"
        )


class Account:
    """What a run knows of itself, for all of its threads: the truth, the figures, and what was done when.

    `over` is set when its time is, or when a thread has failed. `new_seed` is of weights that nobody has seen yet.
    """

    def __init__(self, seed: int, engines: int, seconds: float) -> None:
        self.seed, self.engines, self.seconds = seed, engines, seconds
        self.truth, self.figures = Truth(), Figures()
        self.over = threading.Event()
        self.engine_kills: list[float] = []
        self.operations: list[str] = []
        self._seeds = itertools.count(1)
        self._began = time.monotonic()

    def new_seed(self) -> int:
        return next(self._seeds)

    def did(self, who: str, what: str, *, fault: str | None = None) -> None:
        """Note an operation, which may be a fault of a kind."""
        self.operations.append(f"{time.monotonic() - self._began:8.2f} {who}: {what}")
        if fault is not None:
            self.figures.faults[fault] += 1

    def thread(self, work: Callable[[], None]) -> threading.Thread:
        """Started; an exception in it is a violation."""
        thread = threading.Thread(target=self.guard, args=(work,), daemon=True)
        thread.start()
        return thread

    def guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            self.truth.violated(traceback.format_exc())
            self.over.set()

    def text(self) -> str:
        """The seed, the violations, the figures and the operations."""
        violations = self.truth.violations
        head = f"seed {self.seed}, {self.engines} engine(s), {self.seconds:g} s: {len(violations)} violation(s)"
        found = "".join(f"- {violation}\n" for violation in violations)
        return f"{head}\n{found}{self.figures.text()}\noperations:\n" + "\n".join(self.operations)
