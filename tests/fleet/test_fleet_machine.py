"""Whatever the order of pushes, deaths, refusals and scaling: one epoch, one set of weights, and every request ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollout.fleet.errors import EngineError
from rollout.fleet.stream import RequestStream
from rollout.outputs import FinishReason, TokenOutput
from tests.support.scripted_fleet import ScriptedFleet

RANKS = st.integers(0, 3)
REFUSED = ["start_weight_update", "update_weights", "finish_weight_update", "commit", "offer_weights", "restore"]


class FleetMachine(RuleBasedStateMachine):
    """Two to four scripted engines; what is sent to them waits until a rule delivers it."""

    @initialize(size=st.integers(2, 3))
    def start(self, size: int) -> None:
        self.lab = ScriptedFleet(size)
        self.fleet = self.lab.fleet
        self.numbers = itertools.count(1)
        self.calls: list[asyncio.Task[Any]] = []
        self.streams: list[tuple[RequestStream, list[TokenOutput]]] = []
        self.named: dict[int, int] = {}

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        self.calls.append(self.lab.begin(work))

    # -- the engines

    @rule(rank=RANKS, count=st.integers(1, 4))
    def deliver(self, rank: int, count: int) -> None:
        if (engine := self.lab.engines.get(rank)) is not None:
            engine.boot()
            for _ in range(count):
                engine.deliver()
            self.lab.loop.settle()

    @rule(count=st.integers(1, 3))
    def deliver_all(self, count: int) -> None:
        for _ in range(count):
            for rank in list(self.lab.engines):
                self.deliver(rank, 1)

    @rule(times=st.integers(1, 6))
    def turn(self, times: int) -> None:
        """All gets on, a little."""
        for _ in range(times):
            self.lab.turn(0.2)

    @rule(rank=RANKS)
    def generate(self, rank: int) -> None:
        if (engine := self.lab.engines.get(rank)) is not None:
            self.lab.call_now(engine.generate)

    @rule(rank=RANKS, noticed=st.booleans())
    def kill(self, rank: int, noticed: bool) -> None:
        if rank in self.lab.engines:
            self.lab.kill(rank, noticed=noticed)

    @rule(rank=RANKS)
    def answer_and_die(self, rank: int) -> None:
        if (engine := self.lab.engines.get(rank)) is not None:
            self.lab.call_now(lambda: (engine.deliver(), self.lab.kill_now(rank)))

    @rule(rank=RANKS, method=st.sampled_from(REFUSED))
    def refuse(self, rank: int, method: str) -> None:
        if (engine := self.lab.engines.get(rank)) is not None:
            engine.refuses.add(method)

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.5]))
    def wait(self, seconds: float) -> None:
        for engine in list(self.lab.engines.values()):
            if seconds > 1:
                self.lab.call_now(engine.notice)
        self.lab.loop.settle(seconds)

    # -- trainers

    @rule(in_place=st.booleans())
    def push(self, in_place: bool) -> None:
        number = next(self.numbers)
        self.begin(self.lab.push(number, f"push {number}", **{"weight_staging": "in_place"} if in_place else {}))

    @rule()
    def push_folder(self) -> None:
        self.begin(self.lab.call("update_weights", weight_dir=next(self.numbers)))

    @rule(method=st.sampled_from(["abort_weight_update", "shutdown_weight_transfer_engine", "weight_info"]))
    def call(self, method: str) -> None:
        self.begin(self.lab.call(method))

    @rule(method=st.sampled_from(["pause", "resume"]))
    def hold(self, method: str) -> None:
        self.begin(self.lab.call(method, mode="keep"))

    @rule(size=st.integers(1, 3))
    def scale(self, size: int) -> None:
        self.begin(self.fleet.scale(size, drain_timeout_s=0))

    # -- clients

    @rule(pinned=st.none() | st.integers(0, 2), max_tokens=st.integers(1, 4))
    def submit(self, pinned: int | None, max_tokens: int) -> None:
        def work() -> None:
            with contextlib.suppress(EngineError):
                self.streams.append((self.fleet.submit(self.lab.request(max_tokens), pinned), []))

        self.lab.call_now(work)

    @rule(index=st.integers(0, 5))
    def read(self, index: int) -> None:
        if index < len(self.streams):
            stream, read = self.streams[index]
            if stream._pending:
                read += self.lab.loop.run_until_complete(anext(stream))
                stream.passed_on = True

    @rule(index=st.integers(0, 5))
    def leave(self, index: int) -> None:
        if index < len(self.streams):
            self.streams.pop(index)[0].__exit__(None, None, None)

    @invariant()
    def an_epoch_names_one_set_of_weights(self) -> None:
        for epoch, _, weights, _ in self.lab.serving():
            assert self.named.setdefault(epoch, weights) == weights
        for client in self.fleet.ranks:
            assert client.work == sum(stream.work for stream in client._streams.values())

    # -- the end

    def teardown(self) -> None:
        if not hasattr(self, "lab"):
            return
        try:
            self.settle()
        finally:
            self.lab.close()

    def settle(self) -> None:
        """No more faults: all calls end, one more push brings all to one version, and every request ends."""
        for engine in self.lab.engines.values():
            engine.refuses.clear()
        self.lab.heal(until=lambda: all(call.done() for call in self.calls), rounds=300)
        for call in self.calls:
            assert call.done()
            if (error := call.exception()) is not None and not isinstance(error, EngineError):
                raise error
        self.lab.heal(rounds=20)
        self.an_epoch_names_one_set_of_weights()
        number = next(self.numbers)
        self.lab.run(self.lab.push(number, "last"))
        self.lab.run(self.lab.call("resume"))
        self.lab.heal(rounds=20)
        (found,) = self.lab.serving()
        assert found[1:] == ("last", number, False)
        assert [client.refusal for client in self.fleet.ranks] == [None] * len(self.fleet.ranks)
        for _ in range(6):
            for engine in list(self.lab.engines.values()):
                engine.generate()
            self.lab.turn()
        for stream, read in self.streams:
            assert stream.finished or stream.error is not None
            outputs = read + stream._pending
            if stream.finished and outputs[-1].finish_reason is not FinishReason.ABORT:
                assert len(outputs) == stream.request.sampling_params.max_tokens
            stream.__exit__(None, None, None)
        assert self.fleet.in_flight == sum(client.work for client in self.fleet.ranks) == 0


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
