"""The server's end of the engine process: start it, send it messages, hand its outputs to whoever waits for them.

Imports neither torch nor the HTTP stack, so that the engine process starts before anything slow is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from rollout.config import EngineConfig
from rollout.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallError,
    EngineDied,
    EngineReady,
    FromEngine,
    Outputs,
    Reply,
    ToEngine,
)
from rollout.outputs import TokenOutput

EngineTarget = Callable[[EngineConfig, str, str], None]

# Between an engine's exit and the report of it: time to read what it sent last, its reason above all.
_LAST_WORDS_S = 0.3


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


def _child(target: EngineTarget, config: EngineConfig, to_engine: str, from_engine: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server ends its engine itself
    target(config, to_engine, from_engine)


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
        self._unfinished = request.sampling_params.n
        self._pending: list[TokenOutput] = []
        self._wake = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        """Take one output from the engine."""
        self._pending.append(output)
        self._unfinished -= output.finish_reason is not None
        self._wake.set()

    def fail(self, error: EngineError) -> None:
        """End the stream with this error, after what came before it."""
        self.error = error
        self._wake.set()

    @property
    def finished(self) -> bool:
        """True once every choice has ended."""
        return self._unfinished <= 0

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
    """One engine process and the requests and calls in flight in it. Lives on one event loop.

    `target` is what the process runs, a picklable function of (config, address to receive from, address to send to).
    An engine that is silent for `stall_timeout_s` and then leaves a probe unanswered for as long is declared dead.
    """

    def __init__(
        self, config: EngineConfig, *, target: EngineTarget = run_engine, stall_timeout_s: float = 300.0
    ) -> None:
        self._config = config
        self._target = target
        self._stall_timeout_s = stall_timeout_s
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()
        self._tasks: list[asyncio.Task[None]] = []
        self.error: EngineError | None = None

    def start(self) -> None:
        """Bind the sockets and spawn the process; returns at once. Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineReady] = self._loop.create_future()
        self._last_heard = self._loop.time()
        self._folder = tempfile.mkdtemp(prefix="rollout-")  # mode 0700: no one else may speak to the engine
        addresses = [f"ipc://{self._folder}/{name}" for name in ("to_engine", "from_engine")]
        self._context = zmq.asyncio.Context()
        # Sending never waits (NOBLOCK, no high-water mark), so it is a plain call that keeps the order of its callers.
        self._to_engine = zmq.Context(self._context).socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket, address in zip((self._to_engine, self._from_engine), addresses, strict=True):
            socket.set_hwm(0)
            socket.bind(address)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_child, args=(self._target, self._config, *addresses), name="rollout-engine", daemon=True
        )
        self._process.start()
        self._loop.add_reader(self._process.sentinel, self._on_exit)
        self._tasks = [self._loop.create_task(self._receive()), self._loop.create_task(self._watch())]

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
        return self._ready.result()

    def submit(self, request: AddRequest) -> RequestStream:
        """Send a request; use the stream as a context manager. Raises EngineError where the engine is dead.

        Ids may repeat between clients: the engine gets a short unique one, `abort` knows the caller's.
        """
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
        call_id = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._send(Call(call_id, method, params or {}))
        self._calls[call_id] = future
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise EngineError(f"The engine did not answer {method!r} within {timeout_s:g} s.") from None
        finally:
            self._calls.pop(call_id, None)

    async def stop(self, timeout_s: float = 3.0) -> None:
        """End the process (SIGTERM, then SIGKILL after the timeout) and whatever still waits for it."""
        self._die("the server is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._process.join, timeout_s)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, timeout_s)
        self._to_engine.close(linger=0)
        self._from_engine.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: ToEngine) -> None:
        if self.error is not None:
            raise self.error
        try:
            data = self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            # Only free-form JSON of a control call gets here: integers beyond 64 bits, lone surrogates, deep nesting.
            raise EngineError(f"The body can't be passed to the engine: {error}", status=400) from None
        try:
            self._to_engine.send(data, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineError("The engine is not connected.") from None

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        try:
            while True:
                data = await self._from_engine.recv()
                self._last_heard = self._loop.time()
                self._dispatch(decoder.decode(data))
        except msgspec.MsgspecError as error:
            self._die(f"the engine sent a message of the wrong form: {error}")

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
            case EngineReady():
                if not self._ready.done():
                    self._ready.set_result(message)
            case EngineDied(reason):
                self._die(reason)

    async def _watch(self) -> None:
        """Probe an engine that has said nothing for a while: if it hangs, its requests would wait for ever."""
        await asyncio.shield(self._ready)
        while self.error is None:
            quiet_until = self._last_heard + self._stall_timeout_s
            if quiet_until > self._loop.time():
                await asyncio.sleep(quiet_until - self._loop.time())
                continue
            try:
                await self.call("is_paused", timeout_s=self._stall_timeout_s)
            except EngineError as error:
                self._die(f"it hangs: {error}")

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._loop.call_later(_LAST_WORDS_S, lambda: self._die(f"it exited with code {self._process.exitcode}"))

    def _die(self, reason: str) -> None:
        if self.error is not None:
            return
        self.error = EngineError(f"The engine is not running: {reason}.")
        self._loop.remove_reader(self._process.sentinel)
        self._process.terminate()
        for stream in self._streams.values():
            stream.fail(self.error)
        waiting: list[asyncio.Future[Any]] = [*self._calls.values(), self._ready]
        for future in waiting:
            if not future.done():
                future.set_exception(self.error)
                future.exception()  # retrieved: nobody may be waiting


def _resolve(future: asyncio.Future[dict[str, Any]], result: dict[str, Any], error: CallError | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(EngineError(error.message, status=error.status, param=error.param))
