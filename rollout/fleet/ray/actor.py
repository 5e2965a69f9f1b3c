"""An engine process on whatever node Ray put it, and the actor that passes its messages on."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import ray.util

from rollout.config import EngineConfig
from rollout.fleet.connection import EngineTarget, processes
from rollout.messages import EngineDied, FromEngine, ToEngine


class EngineActor:
    """The parent of an engine process. Messages come and go as lists of msgpack: one call carries all there are.

    The engine is a child, as it is of a server without Ray: its loop shares no interpreter lock with Ray's, and a crash
    in it is told with its exit code. Imports no torch.
    """

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._outbox: list[bytes] = []
        self._more = asyncio.Event()

    async def start(self, config: EngineConfig, target: EngineTarget) -> str:
        """Start the engine; returns the IP address of this node."""
        self._connection = processes(target)(
            0, config, self._on_message, self._on_failure
        )  # Ray has chosen its devices
        return str(ray.util.get_node_ip_address())

    async def send(self, messages: list[bytes]) -> None:
        for message in messages:
            self._connection.send(self._decode(message))

    async def receive(self, timeout_s: float) -> list[bytes]:
        """What the engine has sent since the last call; waits for something this long, then returns nothing."""
        if not self._outbox:
            self._more.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), timeout_s)
        messages, self._outbox = self._outbox, []
        return messages

    async def stop(self, timeout_s: float) -> None:
        """End the engine: SIGTERM, then SIGKILL after the timeout."""
        await self._connection.close(timeout_s)

    def _on_message(self, message: FromEngine) -> None:
        self._outbox.append(self._encode(message))
        self._more.set()

    def _on_failure(self, reason: str) -> None:
        self._on_message(EngineDied(reason))
