"""A follower: the process of one rank beside the leader's, started by `python -m rollout.tensor_parallel.follower FD`.

FD is its end of a socket pair. It obeys the leader's commands in their order, and goes when the leader is gone.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from rollout import logs
from rollout.kernels.attention.base import RaggedBatch
from rollout.messages import CallError, EngineDied, Reply
from rollout.model.runner import ModelRunner
from rollout.tensor_parallel import group
from rollout.tensor_parallel.commands import (
    CommitWeights,
    CopyBlocks,
    Forward,
    FromFollower,
    GatherWeights,
    Join,
    Joined,
    Started,
    ToFollower,
    WeightCall,
)
from rollout.weights.errors import as_update_error
from rollout.weights.store import WeightStore
from rollout.weights.updater import WeightUpdater

logger = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


class Follower:
    """A rank's share of the model and of its weight updates, and the obedience to commands. `send` talks back."""

    def __init__(self, order: Join, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self.send(Started())
        config = order.config
        store = group.find_store(order.port, config.tensor_parallel_size)
        mesh = group.join(config, store, order.rank)
        self.runner = ModelRunner(config)
        self.store = WeightStore(
            self.runner.parameters,
            allow_partial=config.allow_partial_updates,
            prepare=self.runner.packed.pack,
            mesh=mesh,
        )
        self.weights = WeightUpdater(self.store, timeout_s=config.weight_update_timeout_s, device=self.runner.device)

    def send(self, message: FromFollower) -> None:
        """Tell the leader; any thread may."""
        with self._lock:
            self._connection.send_bytes(_encode(message))

    def obey(self, command: ToFollower) -> None:
        """Do what the leader does, or did. Whatever it raises ends this process, and the engine with it."""
        match command:
            case Forward():
                self._forward(command)
            case CopyBlocks(pairs):
                self.runner.copy_blocks(pairs)
            case WeightCall(call_id, method, params):
                self.weights.call(method, params).add_done_callback(partial(self._answer, call_id))
            case GatherWeights(call_id):
                self._gather(call_id)
            case CommitWeights():
                self.weights.call("finish_weight_update", {})
                if self.weights.commit_if_ready(timeout_s=group.COLLECTIVE_TIMEOUT_S) is None:
                    raise RuntimeError("the leader has committed weights that are not prepared here")

    def _forward(self, step: Forward) -> None:
        token_ids, head_rows = (np.frombuffer(row, np.int64).copy() for row in (step.token_ids, step.head_rows))
        batch = (np.frombuffer(part, np.int32) for part in (step.query_start, step.context_lens, step.block_tables))
        query_start, context_lens, block_tables = batch
        ragged = RaggedBatch(query_start, context_lens, block_tables.reshape(len(context_lens), -1))
        self.runner.forward(token_ids, ragged, head_rows)

    def _gather(self, call_id: int) -> None:
        done: Future[dict[str, Any]] = Future()
        done.add_done_callback(partial(self._answer, call_id))
        pinned = ExitStack()
        tensors = pinned.enter_context(self.store.snapshot())

        def gather() -> None:
            try:
                with pinned:
                    for _ in self.store.gather(tensors):
                        pass
            except RuntimeError as error:
                done.set_exception(error)
            else:
                done.set_result({})

        threading.Thread(target=gather, name="weights-gather", daemon=True).start()

    def _answer(self, call_id: int, done: Future[dict[str, Any]]) -> None:
        error = done.exception()
        if isinstance(error, Exception):
            failure = as_update_error(error)
            self.send(Reply(call_id, error=CallError(failure.status, failure.message)))
        else:
            self.send(Reply(call_id, {}))


def main(descriptor: int) -> None:
    """Follow the leader at the other end of the socket `descriptor` until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the leader says when to go
    connection = Connection(descriptor)
    commands: queue.SimpleQueue[ToFollower] = queue.SimpleQueue()

    def listen() -> None:
        decode = msgspec.msgpack.Decoder(ToFollower).decode
        try:
            while True:
                commands.put(decode(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)  # however busy the other threads are

    threading.Thread(target=listen, name="leader", daemon=True).start()
    order = commands.get()
    assert isinstance(order, Join)
    multiprocessing.current_process().name = f"engine, rank {order.rank}"
    logs.configure(order.config, force=True)
    try:
        follower = Follower(order, connection)
        follower.send(Joined())
        while True:
            follower.obey(commands.get())
    except Exception as error:
        logger.exception("this rank ends")
        connection.send_bytes(_encode(EngineDied(f"{type(error).__name__}: {error}")))
        os._exit(1)  # threads of a trainer's group may be stuck


if __name__ == "__main__":
    main(int(sys.argv[1]))
