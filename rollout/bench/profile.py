"""`rollout bench profile`: where the time of an engine's step goes, by timers set around its parts from outside."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from rich.table import Table
from torch import nn

from rollout.bench import bare, report
from rollout.bench.loads import Load
from rollout.config import EngineConfig
from rollout.engine.engine import Engine

Kind = Literal["decode", "prefill"]
"""A step that computes one token a sequence, or one with a longer chunk of a prompt in it."""

REST = "step: rest"
MODULES = (("Linear", "linear"), ("Norm", "norm"), ("Rotary", "rotary"), ("SiLU", "activation"), ("GELU", "activation"))
"""Phases of the model's modules, by a part of the class's name. What matches none counts as "forward: rest"."""


@dataclass
class Phase:
    """What one part of the steps of a kind took: seconds of its own (parts inside it excluded), and calls."""

    seconds: float = 0.0
    calls: int = 0


@dataclass
class Steps:
    """The steps of one kind: how many, the tokens that they computed, and what each of their parts took."""

    steps: int = 0
    tokens: int = 0
    phases: dict[str, Phase] = field(default_factory=lambda: defaultdict(Phase))

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())


Profile = dict[Kind, Steps]


class StepTimer:
    """Times the parts of an engine's steps. On CUDA it waits for the device at every boundary, which costs time.

    A part's own time leaves out the parts inside it, so that the phases of a step add up to the step.
    """

    def __init__(self, engine: Engine) -> None:
        self.profile: Profile = {"decode": Steps(), "prefill": Steps()}
        self._engine = engine
        self._sync: Callable[[], None] = torch.cuda.synchronize if engine.runner.device.type == "cuda" else lambda: None
        self._open: list[tuple[str, float]] = []
        self._step: dict[str, Phase] = defaultdict(Phase)
        self._kind: Kind = "decode"
        self._tokens = 0
        runner = engine.runner
        self._wrap(engine.scheduler, "schedule", "schedule")
        self._wrap(runner, "forward", "forward: rest", self._look_at_batch)
        self._wrap(runner, "copy_blocks", "copy blocks")
        self._wrap(runner.backend, "prepare", "attention: plan")
        self._wrap(runner.backend, "forward", "attention")
        self._wrap(engine.sampler, "launch", "sample")
        head = runner.model.get_output_embeddings()
        for module in runner.model.modules():
            names = (phase for part, phase in MODULES if part in type(module).__name__)
            phase = "head" if module is head else next(names, None)
            if phase is not None:
                self._hook(module, phase)

    def step(self) -> None:
        self._step = defaultdict(Phase)
        self._kind, self._tokens = "decode", 0
        self._enter(REST)
        self._engine.step()
        self._leave()
        kind = self.profile[self._kind]
        kind.steps += 1
        kind.tokens += self._tokens
        for name, phase in self._step.items():
            total = kind.phases[name]
            total.seconds += phase.seconds
            total.calls += phase.calls

    def _look_at_batch(self, _: Any, batch: Any, *__: Any) -> None:
        self._tokens = batch.num_tokens
        self._kind = "decode" if batch.num_tokens == batch.num_seqs else "prefill"

    def _enter(self, name: str) -> None:
        now = self._now()
        if self._open:
            outer, since = self._open[-1]
            self._step[outer].seconds += now - since
        self._step[name].calls += 1
        self._open.append((name, now))

    def _leave(self) -> None:
        now = self._now()
        name, since = self._open.pop()
        self._step[name].seconds += now - since
        if self._open:
            self._open[-1] = (self._open[-1][0], now)

    def _now(self) -> float:
        self._sync()
        return time.perf_counter()

    def _wrap(self, owner: Any, method: str, phase: str, look: Callable[..., None] | None = None) -> None:
        inner = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            if look is not None:
                look(*arguments, **keywords)
            self._enter(phase)
            try:
                return inner(*arguments, **keywords)
            finally:
                self._leave()

        setattr(owner, method, timed)

    def _hook(self, module: nn.Module, phase: str) -> None:
        module.register_forward_pre_hook(lambda *_: self._enter(phase))
        module.register_forward_hook(lambda *_: self._leave(), always_call=True)


@dataclass(frozen=True)
class Operator:
    """One of torch's operators: milliseconds of its own time, on the device where there is one, and calls."""

    name: str
    milliseconds: float
    calls: int


def measure(config: EngineConfig, load: Load, seed: int, *, operators: int) -> tuple[Profile, list[Operator]]:
    """Run a load three times on an engine of its own: to warm up, with timers, and under torch's profiler.

    Returns the timers' profile and the `operators` that took most time (none, and no third run, for 0). Native code
    that is no operator of torch shows in the first only, inside the part that calls it.
    """
    engine = Engine(config)
    vocab_size = engine.runner.vocab_size
    prompts = [load.prompts(seed, number, vocab_size) for number in range(3)]
    bare.run(engine, load, prompts[0])
    top = _operators(engine, load, prompts[1], operators) if operators else []
    timer = StepTimer(engine)
    bare.run(engine, load, prompts[2], timer.step)
    return timer.profile, top


def _operators(engine: Engine, load: Load, prompts: Sequence[list[int]], count: int) -> list[Operator]:
    cuda = engine.runner.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        bare.run(engine, load, prompts)
    events = [
        Operator(e.key, (e.self_device_time_total if cuda else e.self_cpu_time_total) / 1e3, e.count)
        for e in profiler.key_averages()
    ]
    return sorted(events, key=lambda event: -event.milliseconds)[:count]


def tables(profile: Profile, operators: Sequence[Operator]) -> list[Table]:
    """For each kind of step, milliseconds, share and calls of each phase, the largest first; then the operators."""
    made = []
    for kind, found in profile.items():
        steps, total = found.steps, found.seconds
        title = f"no {kind} steps"
        if steps:
            title = f"{steps} {kind} steps, {found.tokens / steps:.1f} tokens and {total / steps * 1e3:.2f} ms each"
        rows = [
            (name, f"{p.seconds / steps * 1e3:.2f}", f"{p.seconds / total:.1%}", f"{p.calls / steps:g}")
            for name, p in sorted(found.phases.items(), key=lambda item: -item[1].seconds)
        ]
        made.append(report.table(title, ("phase", "ms a step", "share", "calls a step"), rows))
    if operators:
        title = "torch operators, own time over the whole load"
        slowest = [(operator.name, f"{operator.milliseconds:.1f}", str(operator.calls)) for operator in operators]
        made.append(report.table(title, ("operator", "ms", "calls"), slowest))
    return made


def as_json(profile: Profile, operators: Sequence[Operator]) -> dict[str, Any]:
    """Both; times in seconds, of all steps of a kind together."""
    kinds = {kind: {**vars(found), "seconds": found.seconds} for kind, found in profile.items()}
    return {"kinds": kinds, "operators": operators}
