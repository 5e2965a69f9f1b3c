"""The way to an engine that is an actor of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from dataclasses import replace
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.config import EngineConfig
from rollout.fleet.connection import EngineTarget, OnFailure, OnMessage
from rollout.fleet.ray.actor import EngineActor
from rollout.fleet.ray.placement import Places
from rollout.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)

# The longest that a call waits in an actor that has nothing to say; another follows at once.
_POLL_S = 10.0
_STOP_S = 2.0
_UNAVAILABLE_S = 2.0


class RayEngines:
    """Starts engines on a cluster: an EngineStarter. `close` it after its links."""

    def __init__(self, config: EngineConfig, target: EngineTarget, *, placement_timeout_s: float) -> None:
        self._target = target
        self._places = Places(config, placement_timeout_s)

    def __call__(self, rank: int, config: EngineConfig, on_message: OnMessage, on_failure: OnFailure) -> RayConnection:
        return RayConnection(rank, self._places, self._target, config, on_message, on_failure)

    def close(self) -> None:
        """Give the places of all ranks back to Ray."""
        self._places.give_back()


class RayConnection:
    """One life of an actor. Ray says when it is gone, with its process or its node, and has placed it.

    Ray doesn't restart the actor by itself: a successor needs the weights of the others first, so it is the fleet that
    asks for one, and gets the same placement group.
    """

    pid: int | None = None
    address = ""  # known once it is placed

    def __init__(
        self,
        rank: int,
        places: Places,
        target: EngineTarget,
        config: EngineConfig,
        on_message: OnMessage,
        on_failure: OnFailure,
    ) -> None:
        self._rank, self._places = rank, places
        self._on_message, self._on_failure = on_message, on_failure
        self._loop = asyncio.get_running_loop()
        self.last_message_at = self._loop.time()
        self.ended = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._outbox: list[bytes] = []
        self._more = asyncio.Event()
        self._actor: Any = None  # its handle, once it is asked for
        self._stopped: Any = None
        self._running = self._loop.create_task(self._run(target, config))
        self._closing: asyncio.Task[None] | None = None

    def send(self, message: ToEngine) -> None:
        self._outbox.append(self._encode(message))
        self._more.set()

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._running.cancel()
            if self._actor is not None:
                self._stopped = self._actor.stop.remote(_STOP_S)

    async def close(self, timeout_s: float) -> None:
        """End the engine and its actor, by force after the timeout, and leave the place to a successor."""
        self.end()
        self._closing = self._closing or self._loop.create_task(self._close(timeout_s))
        await asyncio.shield(self._closing)

    async def _close(self, timeout_s: float) -> None:
        await asyncio.gather(self._running, return_exceptions=True)
        if self._actor is not None:
            if self._stopped is not None:
                with contextlib.suppress(RayError, TimeoutError):
                    await asyncio.wait_for(self._stopped, timeout_s)
            ray.kill(self._actor)
        self._places.leave(self._rank)

    async def _run(self, target: EngineTarget, config: EngineConfig) -> None:
        try:
            self._actor = await self._start(target, config)
            await self._pass_on(self._actor)
        except Exception as error:
            reason = await self._why(error)
            if not self.ended:
                self._on_failure(reason)

    async def _start(self, target: EngineTarget, config: EngineConfig) -> Any:
        if "GPU" not in self._places.bundle:
            config = replace(config, num_threads=self._places.threads)  # this node's, not the server's
        while True:
            actor_class = ray.remote(EngineActor).options(
                num_cpus=self._places.bundle["CPU"],
                num_gpus=self._places.bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(await self._places.find(self._rank), 0),
                max_restarts=0,
            )
            self._actor = actor_class.remote()
            try:
                self.address = await self._actor.start.remote(config, target)
            except RayError:
                if await self._places.stands(self._rank):
                    raise
                continue  # Ray took a while to notice that the node is gone, and is placing the group anew
            logger.info("rank %d runs at %s", self._rank, self.address)
            return self._actor

    async def _pass_on(self, actor: Any) -> None:
        both = [self._loop.create_task(way(actor)) for way in (self._send_all, self._receive_all)]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            for way in both:
                way.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _send_all(self, actor: Any) -> None:
        """One call at a time: Ray promises no order among several."""
        while True:
            await self._more.wait()
            self._more.clear()
            messages, self._outbox = self._outbox, []
            await actor.send.remote(messages)

    async def _receive_all(self, actor: Any) -> None:
        decode = msgspec.msgpack.Decoder(FromEngine).decode
        while not self.ended:
            for message in await actor.receive.remote(_POLL_S):
                self.last_message_at = self._loop.time()
                self._on_message(decode(message))
                if self.ended:  # it was its last word
                    return

    async def _why(self, error: Exception) -> str:
        """What happened, in one line. Ray puts it below a headline and a list of ids."""
        if isinstance(error, msgspec.MsgspecError):
            return f"the engine sent a message of the wrong form: {error}"
        if isinstance(error, ActorUnavailableError):
            # Of most deaths, a broken connection is what is seen first. Messages may be lost: it is over in any case.
            try:
                await asyncio.wait_for(self._actor.receive.remote(0), _UNAVAILABLE_S)
            except ActorDiedError as later:
                error = later
            except (RayError, TimeoutError):
                pass
        if isinstance(error, ActorUnavailableError):
            return f"the connection to its actor at {self.address} broke"
        cause = re.split(r"The actor (?:is dead|died) because ", str(error))[-1].partition("Some common causes")[0]
        return " ".join(cause.split()).rstrip(".")
