"""The engine process: messages in, steps, messages out. One thread owns the engine; a weight update has its own."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import zmq
from tqdm import tqdm

from rollout import logs
from rollout.config import EngineConfig
from rollout.engine.adapters import without_adapter
from rollout.engine.engine import Engine
from rollout.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallError,
    EngineDied,
    EngineReady,
    EngineState,
    Outputs,
    Progress,
    Reply,
    ToEngine,
)
from rollout.outputs import TokenOutput
from rollout.weights.errors import WeightUpdateError, as_update_error
from rollout.weights.offer import offer_weights

logger = logging.getLogger(__name__)
PROGRESS_S = 1.0  # a step that takes longer is reported on as often
COLLECTED_AFTER = (10_000, 20, 20)  # a look at the prompts of a thousand requests takes 0.2 s: seldom
MESSAGES_S = 0.05  # what has come in is read for so long before a step: there may be thousands of long prompts


def run_engine(config: EngineConfig, to_engine: str, from_engine: str) -> None:
    """Load the model, say EngineReady on `from_engine`, then serve messages of `to_engine` until the process is ended.

    Both are ZeroMQ addresses that the server has bound (a PUSH and a PULL socket). A fatal error is sent as EngineDied.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the server says when to go
    logs.configure(config)
    tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which SIGTERM would leave behind
    context = zmq.Context()
    outbox = context.socket(zmq.PUSH)
    outbox.connect(from_engine)
    try:
        inbox = context.socket(zmq.PULL)
        inbox.connect(to_engine)
        try:
            engine = EngineProcess(config, inbox, outbox, partial(end, context, from_engine))
        except ValueError as error:  # what was asked for can't be served: the message says so, a traceback wouldn't
            outbox.send(_encode(EngineDied(str(error))))
            return
        threading.Thread(
            target=_report_progress, args=(engine.engine, context, from_engine), name="progress", daemon=True
        ).start()
        engine.serve()
    except Exception as error:
        logger.exception("the engine ends")
        outbox.send(_encode(EngineDied(f"{type(error).__name__}: {error}")))
        raise
    finally:
        outbox.close(linger=2000)
        context.destroy(linger=2000)


def _report_progress(engine: Engine, context: zmq.Context[zmq.Socket[bytes]], from_engine: str) -> None:
    """Send a Progress while a step is under way, as long as it gets on: one that hangs is not reported."""
    outbox = context.socket(zmq.PUSH)
    outbox.connect(from_engine)
    seen = (0, 0)
    with contextlib.suppress(zmq.ContextTerminated, zmq.ZMQError):  # the process ends
        while True:
            time.sleep(PROGRESS_S)
            before, seen = seen, (engine.steps, engine.layers)
            since = engine.step_since
            if since is not None and seen != before and time.monotonic() - since > PROGRESS_S:
                outbox.send(_encode(Progress(engine.steps, time.monotonic() - since)))


def end(context: zmq.Context[zmq.Socket[bytes]], from_engine: str, reason: str) -> None:
    """Say why and exit, on any thread: the engine's own is stuck."""
    outbox = context.socket(zmq.PUSH)
    outbox.connect(from_engine)
    outbox.send(_encode(EngineDied(reason)))
    outbox.close(linger=2000)
    time.sleep(1)
    os._exit(1)


def ready(engine: Engine) -> EngineReady:
    """The facts about an engine that its requests are validated by."""
    runner, config = engine.runner, engine.config
    return EngineReady(
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=config.max_num_seqs,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        model_type=runner.model.config.model_type,
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        seconds=runner.seconds,
        eos_token_ids=runner.eos_token_ids,
        routing=runner.routing.shape if runner.routing is not None else None,
        world_size=config.tensor_parallel_size,
    )


_encode = msgspec.msgpack.Encoder().encode


class EngineProcess:
    """The loop around an Engine: answer what has come in, run a step, send what it produced."""

    def __init__(
        self,
        config: EngineConfig,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        died: Callable[[str], None] | None = None,
    ) -> None:
        self.inbox, self.outbox = inbox, outbox
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._draining: list[Call] = []
        self._answers: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self.engine = Engine(config, self.wake, died)
        self._sent_state = self._state()  # the server takes it for granted of an engine that has just started

    def serve(self) -> None:
        """Serve for ever."""
        gc.collect()
        gc.freeze()  # what was loaded stays: no collection between two steps need look at it
        gc.set_threshold(*COLLECTED_AFTER)
        self._send(ready(self.engine))
        while True:
            self.turn()

    def turn(self) -> None:
        """One turn of the loop; blocks while there is nothing to do."""
        busy = self.engine.has_work and not self.engine.halted
        ready = dict(self._poller.poll(0 if busy else None))
        if self._wake.fileno() in ready:
            self._wake.recv(4096)
        until = time.monotonic() + MESSAGES_S
        while self.inbox.poll(0):
            self._handle(self._decode(self.inbox.recv()))
            if time.monotonic() > until:
                break
        self._emit(self.engine.commit_weights())  # the step would, but the trainer need not wait for the rest of it
        while not self._answers.empty():
            self._send(self._answers.get())
        self._emit(self.engine.step())
        if self._draining and not self.engine.has_work:
            drained, self._draining = self._draining, []
            for call in drained:
                self._call(call)

    def wake(self) -> None:
        """Let the loop turn once more; any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            self._waker.send(b"\0")

    # -- messages

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                known = self.engine.adapters
                if message.adapter is None or (known is not None and message.adapter in known):
                    self.engine.add_request(message)
                else:
                    self._emit(without_adapter(message))
            case AbortRequests():
                self._emit(self.engine.abort(message))
            case Call():
                self._call(message)

    def _call(self, call: Call) -> None:
        for calls in (self.engine.weights, self.engine.adapters):
            if calls is not None and call.method in calls.methods:
                future = calls.call(call.method, call.params)
                future.add_done_callback(lambda done: self._answer(call.call_id, done))
                return
        handler: Callable[[Call], dict[str, Any] | None] | None = getattr(self, f"_call_{call.method}", None)
        if handler is None:
            error = CallError(400, f"the engine has no method {call.method!r}")
            self._send(Reply(call.call_id, error=error))
            return
        result = handler(call)
        if result is not None:
            self._send(Reply(call.call_id, result))

    def _answer(self, call_id: int, done: Future[dict[str, Any]]) -> None:
        """A weight call has ended, on whatever thread: queue its answer, which this loop's own thread sends."""
        error = done.exception()
        if error is None:
            self._answers.put(Reply(call_id, done.result()))
        else:
            refusal = as_update_error(error)
            self._answers.put(Reply(call_id, error=CallError(refusal.status, refusal.message, refusal.param)))
        self.wake()

    def _stopped(self, call: Call) -> bool:
        """Stop what runs in the call's mode. abort: end all requests now. wait: let them finish first, False until
        then. keep: freeze them where they are."""
        mode = call.params.get("mode", "abort")
        if mode == "wait" and self.engine.has_work and not self.engine.halted:
            self._draining.append(call)
            return False
        if mode == "abort":
            self._emit(self.engine.abort(AbortRequests(None)))
        self._emit(self.engine.land())
        return True

    def _end_wait(self, method: str, done: str) -> None:
        """Answer the calls of this method that wait for running requests: they were taken back."""
        error = CallError(409, f"{done} while waiting for running requests to finish")
        for call in [call for call in self._draining if call.method == method]:
            self._draining.remove(call)
            self._send(Reply(call.call_id, error=error))

    def _call_pause(self, call: Call) -> dict[str, Any] | None:
        if not self._stopped(call):
            return None
        self.engine.paused = True
        return {"status": "paused"}

    def _call_sleep(self, call: Call) -> dict[str, Any] | None:
        if not self._stopped(call):
            return None
        return self._moved(call, lambda: self.engine.sleeper.sleep(call.params["level"]))

    def _call_wake_up(self, call: Call) -> dict[str, Any] | None:
        self._end_wait("sleep", "woken up")
        return self._moved(call, lambda: self.engine.sleeper.wake_up(call.params["tags"]))

    def _moved(self, call: Call, move: Callable[[], None]) -> dict[str, Any] | None:
        try:
            move()
        except RuntimeError as error:  # torch's, of a device or host without memory
            message = f"{call.method} found no memory: free some, then call it again ({error})"
            self._send(Reply(call.call_id, error=CallError(503, message)))
            return None
        return {"asleep": sorted(self.engine.sleeper.asleep)}

    def _call_resume(self, call: Call) -> dict[str, Any] | None:
        if not self.engine.store.valid:
            message = (
                "the weights are invalid (an update in place is open or failed, or they slept at level 2): complete an "
                "update, then resume"
            )
            self._send(Reply(call.call_id, error=CallError(409, message)))
            return None
        self.engine.paused = False
        self._end_wait("pause", "resumed")
        return {"status": "resumed"}

    def _call_is_paused(self, call: Call) -> dict[str, Any]:
        return {"is_paused": self.engine.paused}

    def _call_restore(self, call: Call) -> dict[str, Any]:
        """Take the place of an engine that has died; its last EngineState says where to go on from."""
        self.engine.restore(EngineState(**call.params["state"]), call.params["reason"], call.params.get("source"))
        return {"weights": self.engine.store.validity, "restarted": self.engine.restarted}

    def _call_offer_weights(self, call: Call) -> dict[str, Any] | None:
        try:
            with self.engine.weights.gathering():
                return offer_weights(self.engine.store, **call.params)
        except WeightUpdateError as error:
            self._send(Reply(call.call_id, error=CallError(error.status, str(error))))
            return None

    def _call_stats(self, call: Call) -> dict[str, Any]:
        engine = self.engine
        return {
            **engine.stats,
            "staleness": {str(behind): count for behind, count in engine.staleness.items()},
            "weight_updates": engine.weights.totals,
            "waits": engine.scheduler.waits,
            "waited_s": engine.scheduler.waited_s,
            "halted": engine.halted,
        }

    def _call_reset_prefix_cache(self, call: Call) -> dict[str, Any]:
        self.engine.scheduler.kv.reset_prefixes()
        return {"success": True}

    def _state(self) -> EngineState:
        store = self.engine.store
        return EngineState(epoch=store.epoch, version=store.label, paused=self.engine.paused)

    def _emit(self, outputs: list[TokenOutput]) -> None:
        if outputs:
            self._send(Outputs(outputs))

    def _send(self, message: Outputs | Reply | EngineReady) -> None:
        if (state := self._state()) != self._sent_state:
            self._sent_state = state
            self.outbox.send(_encode(state))
        self.outbox.send(_encode(message))
