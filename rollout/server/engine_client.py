"""The server's end of the engine: hand its outputs to whoever waits for them, and replace it where it dies.

Imports neither torch nor the HTTP stack, so that the engine process starts before anything slow is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Collection, Coroutine
from types import TracebackType
from typing import Any

import msgspec
import zmq

from rollout.config import EngineConfig
from rollout.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallError,
    EngineDied,
    EngineReady,
    EngineState,
    FromEngine,
    Outputs,
    Reply,
    ToEngine,
)
from rollout.outputs import TokenOutput
from rollout.server.engine_link import Connect, Link, processes

logger = logging.getLogger(__name__)

# An engine that dies more often than it may within this time is not restarted any more.
RESTART_WINDOW_S = 600.0
_CLOSE_S = 3.0


class EngineError(Exception):
    """The engine refused a call, did not answer in time, or is dead. `status` is the HTTP status to pass on."""

    def __init__(self, message: str, *, status: int = 503, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def run_engine(config: EngineConfig, to_engine: str, from_engine: str) -> None:
    """The real engine process; imported in the child only, since it imports torch."""
    from rollout.engine.process import run_engine as run

    run(config, to_engine, from_engine)


class RequestStream:
    """The outputs of one request: iterate for batches of TokenOutput; leaving the `with` block aborts the rest.

    A batch holds everything that came since the last one, so a slow reader costs one wake-up, not one a token.
    Raises EngineError where the engine dies first (found by the process's exit or the watchdog: no wait is endless).
    """

    def __init__(self, client: EngineClient, request: AddRequest, engine_id: str) -> None:
        self.request_id = request.request_id
        self.engine_id = engine_id
        self.error: EngineError | None = None
        self._client = client
        self._open = set(range(request.sampling_params.n))
        self._pending: list[TokenOutput] = []
        self._wake = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        """Take one output from the engine. Of a choice that has ended, nothing is taken any more."""
        if output.index not in self._open:
            return
        self._pending.append(output)
        if output.finish_reason is not None:
            self._open.discard(output.index)
        self._wake.set()

    def end_choice(self, index: int) -> None:
        """End this choice here and in the engine, where that hasn't: its text has completed a stop string."""
        if index in self._open:
            self._open.discard(index)
            self._client.abort_choice(self, index)

    def fail(self, error: EngineError) -> None:
        """End the stream with this error, after what came before it."""
        self.error = error
        self._wake.set()

    @property
    def num_open(self) -> int:
        """How many choices have not ended."""
        return len(self._open)

    @property
    def finished(self) -> bool:
        """True once every choice has ended."""
        return not self._open

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenOutput]:
        while not self._pending:
            if self.finished:
                raise StopAsyncIteration
            if self.error is not None:
                raise self.error
            self._wake.clear()
            await self._wake.wait()
        batch, self._pending = self._pending, []
        return batch

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close_stream(self)


class EngineClient:
    """The engine process, its successors, and the requests and calls in flight in it. Lives on one event loop.

    `connect` starts an engine, and is asked again for its successors.
    An engine that is silent for `stall_timeout_s` and then leaves a probe unanswered for as long is declared dead.
    Once it was ready, a dead engine is restarted, at most `restarts` times in RESTART_WINDOW_S: what was in flight
    fails, and the successor goes on from the last EngineState. `error` is set while there is no engine to talk to,
    `refusal` while there is none that can generate: also where a successor waits for the weights to be pushed again.
    `max_in_flight` bounds the choices in flight.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        connect: Connect = processes(run_engine),
        rank: int = 0,
        stall_timeout_s: float = 300.0,
        start_timeout_s: float = 600.0,
        restarts: int = 0,
    ) -> None:
        self._config = config
        self._connect, self._rank = connect, rank
        self._stall_timeout_s = stall_timeout_s
        self._start_timeout_s = start_timeout_s
        self._restarts = restarts
        self._restarted: deque[float] = deque()
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._state = EngineState(epoch=0, version="default", paused=False)
        self._info: EngineReady | None = None
        self._lost: EngineError | None = None
        self._stopping = False
        self.error: EngineError | None = None
        self.max_in_flight: int | None = None

    def start(self) -> None:
        """Bind the sockets and spawn the process; returns at once. Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._spawn()
        self._go(self._watch(self._link))

    def _spawn(self) -> None:
        self._ready: asyncio.Future[EngineReady] = self._loop.create_future()
        self._link: Link = self._connect(self._rank, self._config, self._dispatch, self._die)

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_ready(self, timeout_s: float) -> EngineReady:
        """The engine's facts once it serves. Raises EngineError where it dies first or takes longer than this."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise EngineError(
                f"The engine was not ready after {timeout_s:g} s; a large model may need more: engine_start_timeout_s."
            ) from None

    @property
    def info(self) -> EngineReady:
        """The facts that the ready engine stated."""
        assert self._info is not None, "the engine has not been ready yet"
        return self._info

    @property
    def pid(self) -> int | None:
        """The process that runs, or ran last."""
        return self._link.pid

    @property
    def refusal(self) -> EngineError | None:
        """Why nothing can be generated now; None where it can."""
        return self.error or self._lost

    @property
    def in_flight(self) -> int:
        """How many choices run or wait."""
        return sum(stream.num_open for stream in self._streams.values())

    def check_room(self, n: int) -> None:
        """Raise a 503 where a request of `n` choices would be too much."""
        if self.max_in_flight is not None and (now := self.in_flight) + n > self.max_in_flight:
            raise EngineError(
                f"The queue is full: {now} choices run or wait, and with {n} more there would be over "
                f"{self.max_in_flight} (max_num_seqs + --max-queued-requests). Retry later."
            )

    def submit(self, request: AddRequest) -> RequestStream:
        """Send a request; use the stream as a context manager. Raises EngineError where the engine can't serve it.

        Ids may repeat between clients: the engine gets a short unique one, `abort` knows the caller's.
        """
        if self.refusal is not None:  # it may have come since the request was admitted
            raise self.refusal
        self.check_room(request.sampling_params.n)
        engine_id = str(next(self._ids))
        stream = RequestStream(self, request, engine_id)
        self._send(msgspec.structs.replace(request, request_id=engine_id))
        self._streams[engine_id] = stream
        return stream

    def close_stream(self, stream: RequestStream) -> None:
        """Forget a request, and abort it in the engine if it still runs there."""
        self._streams.pop(stream.engine_id, None)
        if not stream.finished and self.error is None:
            with contextlib.suppress(EngineError):
                self._send(AbortRequests([stream.engine_id], silent=True))

    def abort_choice(self, stream: RequestStream, index: int) -> None:
        """End one choice of a request in the engine; it says nothing more of it."""
        if self.error is None:
            with contextlib.suppress(EngineError):
                self._send(AbortRequests([stream.engine_id], index=index, silent=True))

    def abort(self, request_ids: Collection[str] | None) -> int:
        """End these requests (all, where None) with finish_reason "abort". Returns how many were in flight."""
        wanted = None if request_ids is None else set(request_ids)
        engine_ids = [
            stream.engine_id
            for stream in self._streams.values()
            if not stream.finished and (wanted is None or stream.request_id in wanted)
        ]
        if engine_ids:
            self._send(AbortRequests(engine_ids))
        return len(engine_ids)

    async def call(self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        """The engine's answer to a control call. Raises EngineError: the engine's own, or a 503 after the timeout."""
        if self.error is not None:
            raise self.error
        return await self._call(method, params or {}, timeout_s)

    async def _call(self, method: str, params: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        call_id = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._send(Call(call_id, method, params))
        self._calls[call_id] = future
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise EngineError(f"The engine did not answer {method!r} within {timeout_s:g} s.") from None
        finally:
            self._calls.pop(call_id, None)

    async def stop(self, timeout_s: float = _CLOSE_S) -> None:
        """End the process (SIGTERM, then SIGKILL after the timeout) and whatever still waits for it."""
        self._stopping = True
        self._die("the server is shutting down")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close(timeout_s)

    def _send(self, message: ToEngine) -> None:
        if self._link.over:
            assert self.error is not None
            raise self.error
        try:
            self._link.send(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            # Only free-form JSON of a control call gets here: integers beyond 64 bits, lone surrogates, deep nesting.
            raise EngineError(f"The body can't be passed to the engine: {error}", status=400) from None
        except zmq.Again:
            raise EngineError("The engine is not connected.") from None

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:  # else: its client has gone
                        stream.put(output)
            case Reply(call_id, result, error):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    _resolve(future, result, error)
            case EngineState():
                if message.epoch > self._state.epoch:
                    self._lost = None
                self._state = message
            case EngineReady():
                self._info = message
                if not self._ready.done():
                    self._ready.set_result(message)
            case EngineDied(reason):
                self._die(reason)

    async def _watch(self, link: Link) -> None:
        """Probe an engine that has said nothing for a while: if it hangs, its requests would wait for ever."""
        with contextlib.suppress(EngineError):  # where it dies first, the link is over
            await asyncio.shield(self._ready)
        while not link.over:
            quiet_until = link.last_heard + self._stall_timeout_s
            if quiet_until > self._loop.time():
                await asyncio.sleep(quiet_until - self._loop.time())
                continue
            try:
                await self._call("is_paused", {}, self._stall_timeout_s)
            except EngineError as error:
                if not link.over:
                    self._die(f"it hangs: {error}")

    def _die(self, reason: str) -> None:
        """Fail everything that waits for the engine, and see to a successor."""
        if self._link.over:
            return
        self._link.end()
        again = self._may_restart()
        outlook = (
            f"is being restarted ({len(self._restarted)} of {self._restarts}), retry" if again else "is not running"
        )
        self.error = EngineError(f"The engine {outlook}: {reason}.")
        for stream in self._streams.values():
            stream.fail(self.error)
        waiting: list[asyncio.Future[Any]] = [*self._calls.values(), self._ready]
        for future in waiting:
            if not future.done():
                future.set_exception(self.error)
                future.exception()  # retrieved: nobody may be waiting
        if self._info is not None and not self._stopping:  # else whoever started or stops it says so
            logger.warning("%s", self.error)
        if again:
            self._go(self._restart(self._link, reason))

    def _may_restart(self) -> bool:
        """Take one of the restarts left in the window. An engine that was never ready would fail again."""
        now = self._loop.time()
        while self._restarted and self._restarted[0] < now - RESTART_WINDOW_S:
            self._restarted.popleft()
        if self._stopping or self._info is None or len(self._restarted) >= self._restarts:
            return False
        self._restarted.append(now)
        return True

    async def _restart(self, dead: Link, reason: str) -> None:
        """Start a successor that goes on from what the dead engine was known to serve."""
        await dead.close(_CLOSE_S)
        state = self._state
        self._spawn()
        link = self._link
        try:
            await self.wait_ready(self._start_timeout_s)
            known = {"state": msgspec.structs.asdict(state), "reason": reason}
            restored = await self._call("restore", known, self._start_timeout_s)
        except EngineError as error:
            if not link.over:  # else its death has been seen to
                self._die(f"its restart failed: {error}")
            return
        self._lost = None if restored["weights"] == "valid" else EngineError(restored["restarted"])
        self.error = None
        logger.warning("%s", restored["restarted"])
        self._go(self._watch(link))


def _resolve(future: asyncio.Future[dict[str, Any]], result: dict[str, Any], error: CallError | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(EngineError(error.message, status=error.status, param=error.param))
