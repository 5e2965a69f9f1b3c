"""The server's end of one engine: hand its outputs to whoever waits for them, and replace it where it dies.

Imports neither torch nor the HTTP stack, so that the engine process starts before anything slow is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

import msgspec

from rollout.config import EngineConfig
from rollout.fleet.connection import EngineConnection, EngineStarter, processes, run_engine
from rollout.fleet.errors import EngineError
from rollout.fleet.stream import RequestStream
from rollout.messages import (
    AbortRequests,
    Call,
    EngineDied,
    EngineReady,
    EngineState,
    FromEngine,
    Outputs,
    Progress,
    Reply,
    ToEngine,
)

logger = logging.getLogger(__name__)

# An engine that dies more often than it may within this time is not restarted any more.
RESTART_WINDOW_S = 600.0
# A step of which nothing was heard for so long no longer gets on (an engine reports each second of a long one).
PROGRESS_TIMEOUT_S = 15.0
_CLOSE_S = 3.0
# What an engine that has just started serves.
_FRESH = EngineState(epoch=0, version="default", paused=False)


class EngineClient:
    """One engine, its successors, and the requests and calls in flight in it. Lives on one event loop.

    `start_engine` starts it. An engine that is silent for `stall_timeout_s` and then leaves a probe unanswered as long
    is declared dead. Once it was ready, a dead engine is restarted, at most `restarts` times in RESTART_WINDOW_S: the
    calls in flight fail, `on_lost_request` is given each request that was in flight, and `restore` prepares the
    successor before it serves: it returns why that can't generate, None where it can. `error` is set while there is no
    engine to talk to, `refusal` while there is none that can generate: also where a successor waits for the weights to
    be pushed again. `work` is what the requests in flight have left to compute, in output tokens at most. `starts`
    counts the engines, `state` is what the last one that served was known to serve.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank: int = 0,
        name: str = "The engine",
        start_engine: EngineStarter | None = None,
        stall_timeout_s: float = 300.0,
        start_timeout_s: float = 600.0,
        restarts: int = 0,
        on_lost_request: Callable[[RequestStream, EngineError], None] = RequestStream.fail,
        restore: Callable[[EngineClient, str], Awaitable[EngineError | None]] | None = None,
    ) -> None:
        self.config, self.rank, self.name = config, rank, name
        self._start_engine = start_engine or processes(run_engine)
        self._stall_timeout_s = stall_timeout_s
        self._start_timeout_s = start_timeout_s
        self._restarts = restarts
        self._restarted: deque[float] = deque()
        self._on_lost_request, self._restore = on_lost_request, restore
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._info: EngineReady | None = None
        self._weights_error: EngineError | None = None
        self._recovering: asyncio.Task[Any] | None = None
        self._stopping = False
        self.state = self._reported = _FRESH
        self.error: EngineError | None = None
        self.work = 0
        self._progress_at = self._step_since = -math.inf
        self.starts = 0

    def start(self) -> None:
        """Start the engine; returns at once. Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._spawn()
        self._create_task(self._watch(self._connection))

    def _spawn(self) -> None:
        self.starts += 1
        self._reported = _FRESH  # it says what has changed since
        self._ready: asyncio.Future[EngineReady] = self._loop.create_future()
        try:
            self._connection = self._start_engine(self.rank, self.config, self._dispatch, self.fail)
        except OSError as error:
            raise EngineError(f"{self.name} is not running: it can't be started: {error}.") from error

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_ready(self, timeout_s: float) -> EngineReady:
        """The engine's facts once it serves. Raises EngineError where it dies first or takes longer than this."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise EngineError(
                f"{self.name} was not ready after {timeout_s:g} s; a large model may need more: engine_start_timeout_s."
            ) from None

    @property
    def info(self) -> EngineReady:
        assert self._info is not None, "the engine has not been ready yet"
        return self._info

    @property
    def pid(self) -> int | None:
        """The process that runs, or ran last."""
        return self._connection.pid

    @property
    def address(self) -> str:
        """The host name or IP under which other engines reach it."""
        return self._connection.address

    @property
    def restarts(self) -> int:
        """How many engines have died and were replaced."""
        return self.starts - 1

    @property
    def refusal(self) -> EngineError | None:
        """Why nothing can be generated now; None where it can."""
        return self.error or self._weights_error

    @property
    def in_flight(self) -> int:
        """How many choices run or wait."""
        return sum(stream.num_open for stream in self._streams.values())

    @property
    def adapters(self) -> set[str | None]:
        """The labels of those that requests in flight run on."""
        return {stream.request.adapter for stream in self._streams.values()}

    def submit(self, stream: RequestStream) -> None:
        """Send the stream's request, which begins with this. Raises EngineError where the engine can't serve it.

        Ids may repeat between clients: the engine gets a short unique one, `abort` knows the caller's.
        """
        if self.refusal is not None:  # it may have come since the request was admitted
            raise self.refusal
        engine_id = str(next(self._ids))
        self._send(msgspec.structs.replace(stream.request, request_id=engine_id))
        stream.begin(self, engine_id)
        self._streams[engine_id] = stream
        self.work += stream.work

    def close_stream(self, stream: RequestStream) -> None:
        """Forget a request, and abort it in the engine if it still runs there."""
        if self._streams.pop(stream.engine_id, None) is None:
            return
        self.work -= stream.work
        if not stream.finished and self.error is None:
            with contextlib.suppress(EngineError):
                self._send(AbortRequests([stream.engine_id], silent=True))

    def abort_choice(self, stream: RequestStream, index: int, work: int) -> None:
        """End one choice of a request in the engine, with so much work left; it says nothing more of it."""
        if stream.engine_id not in self._streams:  # the engine died with it
            return
        self.work -= work
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
        return await self.send_call(method, params, timeout_s=timeout_s)

    def send_call(
        self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float
    ) -> Coroutine[Any, Any, dict[str, Any]]:
        """The same, of an engine that may not serve yet. It is sent at once; await the rest for the answer, also to
        learn that it could not be sent: of several engines that are asked, each is. While a step that began before the
        call gets on, the engine can't have read it, and the wait goes on."""
        call_id = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._calls[call_id] = future
        sent_at = self._loop.time()
        try:
            self._send(Call(call_id, method, params or {}))
        except EngineError as error:
            future.set_exception(error)

        async def answer() -> dict[str, Any]:
            left = timeout_s
            try:
                while not future.done():
                    await asyncio.wait([future], timeout=left)
                    if not future.done() and not self._in_step_since(sent_at):
                        raise EngineError(f"{self.name} did not answer {method!r} within {timeout_s:g} s.")
                    left = PROGRESS_TIMEOUT_S
                return future.result()
            finally:
                self._calls.pop(call_id, None)

        return answer()

    def _in_step_since(self, moment: float) -> bool:
        """Whether a step that was under way at this time of the event loop still is, and gets on."""
        return self._step_since < moment and self._loop.time() - self._progress_at < PROGRESS_TIMEOUT_S

    async def stop(self, reason: str = "the server is shutting down", *, timeout_s: float = _CLOSE_S) -> None:
        """End the process (SIGTERM, then SIGKILL after the timeout) and whatever still waits for it."""
        self._stopping = True
        self.fail(reason)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.close(timeout_s)

    def _send(self, message: ToEngine) -> None:
        if self._connection.ended:
            assert self.error is not None
            raise self.error
        try:
            self._connection.send(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            # Only free-form JSON of a control call gets here: integers beyond 64 bits, lone surrogates, deep nesting.
            raise EngineError(f"The body can't be passed to the engine: {error}", status=400) from None

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:  # else: its client has gone
                        self.work -= stream.put(output)
            case Reply(call_id, result, error):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    if error is None:
                        future.set_result(result)
                    else:
                        future.set_exception(EngineError(error.message, status=error.status, param=error.param))
            case EngineState():
                self._reported = message
                if self.error is None:  # else it is being prepared, and serves nothing yet
                    if message.epoch > self.state.epoch:
                        self._weights_error = None
                    self.state = message
            case EngineReady():
                self._info = message
                if not self._ready.done():
                    self._ready.set_result(message)
            case Progress(_, seconds):
                self._progress_at, self._step_since = self._loop.time(), self._loop.time() - seconds
            case EngineDied(reason):
                self.fail(reason)

    async def _watch(self, connection: EngineConnection) -> None:
        """Probe an engine that has said nothing for a while: if it hangs, its requests would wait for ever."""
        with contextlib.suppress(EngineError):  # where it dies first, the connection has ended
            await asyncio.shield(self._ready)
        while not connection.ended:
            quiet_until = connection.last_message_at + self._stall_timeout_s
            if quiet_until > self._loop.time():
                await asyncio.sleep(quiet_until - self._loop.time())
                continue
            try:
                await self.send_call("is_paused", timeout_s=self._stall_timeout_s)
            except EngineError as error:
                if not connection.ended:
                    self.fail(f"it hangs: {error}")

    def lose_weights(self, error: EngineError) -> None:
        """Refuse new requests with this, until weights are committed."""
        self._weights_error = error

    def fail(self, reason: str) -> None:
        """It is dead, or as good as dead: fail everything that waits for it, and see to a successor."""
        if self._connection.ended:
            return
        self._connection.end()
        again = self._may_restart()
        outlook = (
            f"is being restarted ({len(self._restarted)} of {self._restarts}), retry" if again else "is not running"
        )
        self.error = EngineError(f"{self.name} {outlook}: {reason}.")
        lost, self._streams, self.work = self._streams, {}, 0
        for stream in lost.values():
            if not stream.finished:  # else its reader has all of it, or will
                self._on_lost_request(stream, self.error)
        waiting: list[asyncio.Future[Any]] = [*self._calls.values(), self._ready]
        for future in waiting:
            if not future.done():
                future.set_exception(self.error)
                future.exception()  # retrieved: nobody may be waiting
        if self._info is not None and not self._stopping:  # else whoever started or stops it says so
            logger.warning("%s", self.error)
        recovering, self._recovering = self._recovering, None
        if recovering is not None and recovering is not asyncio.current_task():
            recovering.cancel()  # nothing of it may reach the next engine
        if again:
            self._create_task(self._restart(self._connection, reason))

    def _may_restart(self) -> bool:
        """Take one of the restarts left in the window. An engine that was never ready would fail again."""
        now = self._loop.time()
        while self._restarted and self._restarted[0] < now - RESTART_WINDOW_S:
            self._restarted.popleft()
        if self._stopping or self._info is None or len(self._restarted) >= self._restarts:
            return False
        self._restarted.append(now)
        return True

    async def _restart(self, dead: EngineConnection, reason: str) -> None:
        """Start a successor that goes on from what the dead engine was known to serve."""
        await dead.close(_CLOSE_S)
        try:
            self._spawn()
        except EngineError as error:
            self.error = error
            logger.error("%s", error)
            return
        with contextlib.suppress(EngineError):
            await self._recover(reason)

    async def _recover(self, reason: str) -> None:
        """Have the engine serve, once it is ready and restored. Where that fails it is dead: raises EngineError.

        In a task of its own, which `fail` cancels.
        """
        connection, self._recovering = self._connection, asyncio.current_task()
        try:
            await self.wait_ready(self._start_timeout_s)
            restore = self._restore or EngineClient.restore
            self._weights_error = await restore(self, reason)
        except (Exception, asyncio.CancelledError) as error:
            if not connection.ended:  # else its death has been seen to
                if isinstance(error, asyncio.CancelledError):
                    raise
                if not isinstance(error, EngineError):
                    logger.exception("%s can't be brought back", self.name)
                self.fail(f"its restart failed: {error}")
            assert self.error is not None
            raise self.error from error
        self._recovering = None
        self.error, self.state = None, self._reported
        self._create_task(self._watch(connection))

    async def join(self) -> None:
        """Start an engine for a fleet that serves already. Raises EngineError where it does not come to serve."""
        self._loop = asyncio.get_running_loop()
        self.error = EngineError(f"{self.name} is being started.")
        self._spawn()
        try:
            await self._loop.create_task(self._recover("it joins"))
        except (EngineError, asyncio.CancelledError):
            await self.stop()
            raise

    async def restore(
        self, reason: str, state: EngineState | None = None, *, source: str | None = None
    ) -> EngineError | None:
        """Have an engine that has just loaded go on from `state`, else from the last one of the engine before it.

        `source` has given it the weights of `state`; else they may be lost. Returns why it can't generate, None where
        it can.
        """
        known = {"state": msgspec.structs.asdict(state or self.state), "reason": reason, "source": source}
        restored = await self.send_call("restore", known, timeout_s=self._start_timeout_s)
        logger.warning("%s: %s", self.name, restored["restarted"])
        return None if restored["weights"] == "valid" else EngineError(restored["restarted"])
