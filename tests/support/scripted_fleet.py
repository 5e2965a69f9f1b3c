"""A fleet whose engines are scripts, on a clock of its own: what is sent waits until the test delivers it."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from rollout.config import EngineConfig
from rollout.fleet.connection import OnFailure, OnMessage
from rollout.fleet.fleet import Fleet
from rollout.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallError,
    EngineReady,
    EngineState,
    FromEngine,
    Outputs,
    Reply,
    ToEngine,
)
from rollout.outputs import FinishReason, TokenOutput
from rollout.sampling.params import SamplingParams

Params = dict[str, Any]


class Refused(Exception):
    """An engine's answer of this status."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when it is told to."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def settle(self, seconds: float = 0.0) -> None:
        """Let so much time pass, and run all that can run."""
        self.now += seconds
        for idle in range(1, 1000):
            self.stop()
            self.run_forever()  # one turn
            if idle > 2 and not self._ready:  # type: ignore[attr-defined]
                return
        raise AssertionError("it never rests")


@dataclass
class Session:
    """An update: the weights that it has received, and whether it is in place."""

    in_place: bool = False
    weights: int | None = None
    ready: bool = False
    label: str | None = None


@dataclass
class Script:
    """One life of an engine, and the connection to it: weights are a number, and so is every token that they sample.

    `dead`: it takes nothing and says nothing, and the server may not know yet. `refuses` are the calls that fail next;
    `ids` are the owner tokens and update ids that came with each call.
    """

    rank: int
    on_message: OnMessage
    on_failure: OnFailure
    offers: list[tuple[Script, int]]
    ended: bool = False
    dead: bool = False
    ready: bool = False
    address: str = "127.0.0.1"
    last_message_at: float = 1e9
    pid: int | None = None
    inbox: deque[ToEngine] = field(default_factory=deque)
    epoch: int = 0
    label: str = "default"
    weights: int = 0
    valid: bool = True
    paused: bool = False
    asleep: set[str] = field(default_factory=set)
    session: Session | None = None
    joined: Any = None
    running: dict[str, tuple[AddRequest, int]] = field(default_factory=dict)
    refuses: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    ids: list[tuple[str, str | None, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._said = self._state()

    # -- the connection

    def send(self, message: ToEngine) -> None:
        if not self.dead:  # else nobody will read it
            self.inbox.append(message)

    def end(self) -> None:
        self.ended = self.dead = True

    async def close(self, timeout_s: float) -> None:
        self.end()

    # -- what the test has it do

    def boot(self) -> None:
        """Be ready."""
        if not (self.ready or self.dead):
            self.ready = True
            facts: Params = {"vocab_size": 99, "max_model_len": 99, "max_num_seqs": 9, "num_blocks": 9, "block_size": 9}
            self.on_message(EngineReady(dtype="float32", device="cpu", model_type="script", seconds={}, **facts))

    def deliver(self) -> None:
        """Take the next message, and answer it."""
        if not self.inbox or not self.ready or self.dead:
            return
        match self.inbox.popleft():
            case AddRequest() as request:
                self.running[request.request_id] = (request, 0)
            case AbortRequests(request_ids, _, silent):
                for request_id in list(self.running) if request_ids is None else request_ids:
                    if self.running.pop(request_id, None) is not None and not silent:
                        self._say(Outputs([TokenOutput(request_id, 0, finish_reason=FinishReason.ABORT)]))
            case Call(call_id, method, params):
                self.calls.append(method)
                self.ids.append((method, params.get("owner"), params.get("update_id")))
                try:
                    prepares = method != "finish_weight_update" or params.get("prepare")
                    if (asked := method if prepares else "commit") in self.refuses:
                        self.refuses.discard(asked)
                        if method in ("update_weights", "finish_weight_update"):
                            self._drop()
                        raise Refused(500, "scripted")
                    result = getattr(self, f"_{method}")(params) or {}
                except Refused as error:
                    self._say(Reply(call_id, error=CallError(error.status, str(error))))
                else:
                    self._say(Reply(call_id, result))

    def generate(self) -> None:
        """Sample one token of every request."""
        if self.paused or self.asleep or not self.valid or self.dead:
            return
        outputs = []
        for request_id, (request, count) in list(self.running.items()):
            last = count + 1 == request.sampling_params.max_tokens
            reason = FinishReason.LENGTH if last else None
            outputs.append(
                TokenOutput(
                    request_id, 0, token_id=self.weights, epoch=self.epoch, version=self.label, finish_reason=reason
                )
            )
            self.running[request_id] = (request, count + 1)
            if last:
                del self.running[request_id]
        if outputs:
            self._say(Outputs(outputs))

    def notice(self) -> None:
        """Let the server know of its death."""
        if self.dead and not self.ended:
            self.on_failure("it was killed")

    # -- the engine

    def _state(self) -> EngineState:
        return EngineState(epoch=self.epoch, version=self.label, paused=self.paused)

    def _say(self, message: FromEngine) -> None:
        if self.ended:
            return
        if (state := self._state()) != self._said:
            self._said = state
            self.on_message(state)
        self.on_message(message)

    def _drop(self) -> None:
        self.session = None

    def _open(self) -> Session:
        if self.session is None:
            raise Refused(409, "no update is open")
        return self.session

    def _stats(self, params: Params) -> Params:
        return {"rank": self.rank}

    def _pause(self, params: Params) -> None:
        self.paused = True

    def _resume(self, params: Params) -> None:
        if not self.valid:
            raise Refused(409, "the weights are invalid")
        self.paused = False

    def _sleep(self, params: Params) -> None:
        self.valid &= params["level"] == 1
        self.asleep = {"weights", "kv_cache"}

    def _wake_up(self, params: Params) -> None:
        self.asleep -= set(params["tags"])

    def _init_weight_transfer_engine(self, params: Params) -> None:
        self._drop()
        self.joined = params["init_info"]

    def _shutdown_weight_transfer_engine(self, params: Params) -> None:
        self._drop()
        self.joined = None

    def _start_weight_update(self, params: Params) -> None:
        if self.joined is None:
            raise Refused(400, "call init_weight_transfer_engine first")
        in_place = params.get("weight_staging") == "in_place"
        if "weights" in self.asleep:
            raise Refused(409, "the weights are asleep")
        if self.session is not None or (in_place and not self.paused):
            raise Refused(409, "not now")
        self.session = Session(in_place)

    def _update_weights(self, params: Params) -> None:
        if "weight_dir" in params:
            if self.session is not None:
                raise Refused(409, "an update is open")
            self.session = Session(weights=params["weight_dir"], ready=True)
            return
        session = self._open()
        self.valid &= not session.in_place
        if "master_port" in self.joined:
            source, session.weights = self.offers[self.joined["master_port"]]
            if source.dead:
                self._drop()
                raise Refused(503, "Connection closed by peer")
        else:
            session.weights = params["update_info"]["weights"]

    def _finish_weight_update(self, params: Params) -> Params:
        session = self._open()
        if session.weights is None:
            raise Refused(409, "nothing was received")
        session.label = params.get("weight_version", session.label)
        session.ready = True
        if params.get("prepare"):
            return {}
        self.weights, self.valid, self.epoch = session.weights, True, self.epoch + 1
        self.label = session.label or self.label
        self.session = None
        return {"epoch": self.epoch, "weight_version": self.label}

    def _abort_weight_update(self, params: Params) -> None:
        self._open()
        self._drop()

    def _update_weight_version(self, params: Params) -> None:
        self.label = params["new_version"]

    def _weight_info(self, params: Params) -> Params:
        session = self.session
        state = "idle" if session is None else "ready" if session.ready else "open"
        info = {"weight_version": self.label, "epoch": self.epoch, "state": state}
        return info | {"weights": "valid" if self.valid else "invalid"}

    def _offer_weights(self, params: Params) -> Params:
        if not self.valid:
            raise Refused(409, "the weights are invalid")
        self.offers.append((self, self.weights))
        names: Params = {"names": [], "dtype_names": [], "shapes": []}
        return names | {"port": len(self.offers) - 1, "epoch": self.epoch, "version": self.label}

    def _restore(self, params: Params) -> Params:
        state = EngineState(**params["state"])
        self.epoch, self.label, self.paused = state.epoch, state.version, state.paused
        if params["source"] is None:
            self.valid = state.epoch == 0
        return {"weights": "valid" if self.valid else "invalid", "restarted": "restored"}


class ScriptedFleet:
    """A Fleet over scripts, on its own loop. `engines` are the lives that are now, by rank."""

    def __init__(self, size: int, *, restarts: int = 10**6) -> None:
        self.loop = Clock()
        self.engines: dict[int, Script] = {}
        self.fails_to_start = False
        self._offers: list[tuple[Script, int]] = []
        self._ids = itertools.count()
        self.fleet = Fleet(EngineConfig(model="script"), size=size, start_engine=self._start_engine, restarts=restarts)
        self.call_now(self.fleet.start)
        self.run(self.fleet.wait_ready(60))

    def _start_engine(
        self,
        rank: int,
        config: EngineConfig,
        on_message: OnMessage,
        on_failure: OnFailure,
    ) -> Script:
        if self.fails_to_start:
            self.fails_to_start = False
            raise OSError("no more processes")
        self.engines[rank] = Script(rank, on_message, on_failure, self._offers)
        return self.engines[rank]

    def call_now(self, work: Callable[[], object]) -> None:
        """Call it on the loop."""
        self.loop.call_soon(work)
        self.loop.settle()

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start it."""
        task = self.loop.create_task(work)
        self.loop.settle()
        return task

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Its result, with all engines well."""
        task = self.begin(work)
        self.heal(until=task.done)
        return task.result()

    def heal(self, until: Callable[[], bool] = lambda: False, rounds: int = 60) -> None:
        """Let everything come to its end: deaths are noticed, engines come back, messages are answered."""
        for _ in range(rounds):
            if until():
                return
            self.turn()

    def turn(self, seconds: float = 1.0) -> None:
        """All that waits to be delivered, and so much time."""

        def work() -> None:
            for engine in list(self.engines.values()):
                engine.notice()
                engine.boot()
                for _ in range(len(engine.inbox)):
                    engine.deliver()

        self.call_now(work)
        self.loop.settle(seconds)

    def kill(self, rank: int, *, noticed: bool = True) -> None:
        """End an engine; `noticed`: the server knows."""
        self.call_now(lambda: self.kill_now(rank, noticed=noticed))

    def kill_now(self, rank: int, *, noticed: bool = True) -> None:
        """The same, on the loop."""
        self.engines[rank].dead = True
        if noticed:
            self.engines[rank].notice()

    def request(self, max_tokens: int = 3) -> AddRequest:
        """Some request."""
        params = SamplingParams(max_tokens=max_tokens)
        return AddRequest(request_id=f"r{next(self._ids)}", prompt_token_ids=[1, 2], sampling_params=params)

    def push(self, weights: int, label: str, **start: Any) -> Coroutine[Any, Any, Any]:
        """What a trainer does."""

        async def work() -> Any:
            await self.call("init_weight_transfer_engine", init_info={"backend": "disk"})
            await self.call("start_weight_update", **start)
            await self.call("update_weights", update_info={"weights": weights})
            return await self.call("finish_weight_update", weight_version=label)

        return work()

    def call(self, method: str, **params: Any) -> Coroutine[Any, Any, Any]:
        """A control call."""
        return self.fleet.call(method, params, timeout_s=1e5)

    def serving(self) -> set[tuple[int, str, int, bool]]:
        """Epoch, label, weights and pause of the engines that would generate."""
        found = [self.engines[client.rank] for client in self.fleet.ranks if client.refusal is None]
        return {(e.epoch, e.label, e.weights, e.paused) for e in found if not e.dead}

    def close(self) -> None:
        """End everything."""
        self.run(self.fleet.stop())
        self.loop.close()
