"""Several engines behind one address: they serve one version of the weights, and a request of a dead one runs again."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rollout.config import MAX_QUEUED, EngineConfig
from rollout.fleet.adapters import FleetAdapters
from rollout.fleet.client import EngineClient
from rollout.fleet.connection import EngineStarter, EngineTarget, processes, run_engine
from rollout.fleet.errors import EngineError
from rollout.fleet.joining import copy_weights, weights_to_give
from rollout.fleet.router import Router
from rollout.fleet.sleep import FleetSleep
from rollout.fleet.stream import PROMPT_DISCOUNT, RequestStream
from rollout.fleet.weight_calls import WeightCalls, call_all, first
from rollout.messages import AddRequest, EngineReady, EngineState
from rollout.weights.bodies import WEIGHT_CALLS

logger = logging.getLogger(__name__)

# A rank is admitted between two updates, with the weights that serve then: how long it may take to come to that.
_ADMISSION_S = 1800.0
_POLL_S = 0.1
# A copy may fail with the engine that gives it, whose death is known a moment later. Then another one gives it.
_COPIES = 3
_RETRY_S = 1.0
_CALL_S = 60.0


class Fleet:
    """`size` engines of one configuration, with ranks from 0 on. Lives on one event loop.

    Each request goes to one of them (see Router), control calls go to all. A rank that dies is restarted as
    EngineClient says, and takes part again once it serves the fleet's own weights, received from a living rank. Its
    requests are begun again on another rank, unless something of them was passed on to the client.
    `max_queued` bounds the choices in flight beyond those that all engines together can run at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        size: int = 1,
        target: EngineTarget = run_engine,
        start_engine: EngineStarter | None = None,
        stall_timeout_s: float = 300.0,
        start_timeout_s: float = 600.0,
        restarts: int = 0,
    ) -> None:
        self._start_engine = start_engine or processes(target)
        self._options: dict[str, Any] = {
            "stall_timeout_s": stall_timeout_s,
            "start_timeout_s": start_timeout_s,
            "restarts": restarts,
        }
        seed = config.seed
        if size > 1 and seed is None:
            seed = secrets.randbits(63)  # dummy weights are the same everywhere
        self._config = replace(config, seed=seed)
        self._seeds = random.Random(secrets.randbits(64) if seed is None else seed)
        self._size = size
        self._router = Router()
        self._updates = WeightCalls(self._callable)
        self.sleeping = FleetSleep(self._updates, self._callable)
        self.adapters = FleetAdapters(
            self._callable,
            self._updates.turn,
            lambda: {label for client in self.ranks for label in client.adapters},
            config.max_cpu_loras,
        )
        self._paused = False
        self._leaving: int | None = None
        self._gone = EngineState(epoch=0, version="default", paused=False)  # the newest of what those served that left
        self._scaling = asyncio.Lock()
        self.max_queued = MAX_QUEUED
        self.ranks = [self._client(rank) for rank in range(size)]

    def _client(self, rank: int) -> EngineClient:
        config = self._config
        if self._size > 1:
            if config.num_threads is None and config.device != "cuda":
                config = replace(config, num_threads=max(1, _cores() // self._size))
            if config.keep_weight_snapshot is not None:
                config = replace(config, keep_weight_snapshot=str(Path(config.keep_weight_snapshot) / f"rank-{rank}"))
        return EngineClient(
            config,
            rank=rank,
            name="The engine" if self._size == 1 else f"Engine {rank}",
            start_engine=self._start_engine,
            on_lost_request=self._resubmit,
            restore=self._restore,
            **self._options,
        )

    # -- life

    def start(self) -> None:
        """Start all engines; returns at once. Needs a running event loop."""
        for client in self.ranks:
            client.start()

    async def wait_ready(self, timeout_s: float) -> EngineReady:
        """The facts of rank 0 once all serve. Raises EngineError where one dies first or takes longer than this."""
        infos = await asyncio.gather(*(client.wait_ready(timeout_s) for client in self.ranks))
        for client in self.ranks:
            self._check_device(client)
        return infos[0]

    def _check_device(self, client: EngineClient) -> None:
        own, usual = client.info.device, self.info.device
        if own.partition(":")[0] != usual.partition(":")[0]:
            raise EngineError(
                f"Engine {client.rank} is on {own}, engine 0 on {usual}: {client.rank + 1} engines need as many "
                "devices. Have fewer, or choose --device cpu."
            )

    async def stop(self) -> None:
        """End all engines, and whatever waits for them."""
        await asyncio.gather(*(client.stop() for client in self.ranks))
        self.adapters.close()

    @property
    def living(self) -> list[EngineClient]:
        """The ranks that can be talked to: neither dead nor being prepared."""
        return [client for client in self.ranks if client.error is None]

    def _callable(self) -> list[EngineClient]:
        """Those that a control call goes to. Raises EngineError where there is none."""
        if self.error is not None:
            raise self.error
        return self.living

    @property
    def info(self) -> EngineReady:
        return self.ranks[0].info

    @property
    def world_size(self) -> int:
        """How many ranks of a trainer's group all engines take together."""
        return sum(client.info.world_size for client in self.living)

    @property
    def weight_version(self) -> str:
        """The label that serves, as far as the engines have said."""
        return max((client.state for client in self.ranks), key=lambda state: state.epoch).version

    @property
    def error(self) -> EngineError | None:
        return None if self.living else self.ranks[0].error

    @property
    def refusal(self) -> EngineError | None:
        """Why nothing can be generated now; None where one engine can."""
        refusals = [client.refusal for client in self.ranks]
        return None if None in refusals else refusals[0]

    # -- requests

    @property
    def in_flight(self) -> int:
        return sum(client.in_flight for client in self.ranks)

    def check_room(self, n: int) -> None:
        """Raise a 503 where no engine can generate, or `n` choices more would be too much, and a 400 where they always
        would; to be asked right before they are submitted."""
        sources = self._sources()
        asleep = self.sleeping.refusal if self.sleeping.level else None
        if (refusal := asleep or (None if sources else self.refusal)) is not None:
            raise refusal
        seats = self.info.max_num_seqs
        most = seats * len(self.ranks) + self.max_queued
        if n > most:
            message = (
                f"A request for {n} choices can never be taken: at most {most} run or wait at once (max_num_seqs of "
                "all engines + --max-queued-requests). Send fewer prompts, or a smaller n."
            )
            raise EngineError(message, status=400, param="n")
        most = seats * len(sources) + self.max_queued
        if (now := self.in_flight) + n > most:
            raise EngineError(
                f"The queue is full: {now} choices run or wait, and with {n} more there would be over "
                f"{most} (max_num_seqs + --max-queued-requests). Retry later."
            )

    def submit(self, request: AddRequest, rank: int | None = None) -> RequestStream:
        """Send a request, to this rank where one is given; use the stream as a context manager.

        Raises EngineError where no engine can serve it.
        """
        params = request.sampling_params
        if request.adapter is not None:  # now, and not where it is begun again
            request.adapter = self.adapters.resolve(request.adapter)
        if params.seed is None:
            params.seed = self._seeds.getrandbits(63)  # the same on every rank, and where it is begun again
        stream = RequestStream(request, pinned=rank is not None)
        (self.choose(request) if rank is None else self._pinned(rank)).submit(stream)
        return stream

    def _pinned(self, rank: int) -> EngineClient:
        if rank >= len(self.ranks):  # it has left since the request was checked
            raise EngineError(f"data_parallel_rank {rank} is out of range [0, {len(self.ranks)}).", status=400)
        if rank == self._leaving:
            raise EngineError(f"Engine {rank} leaves the fleet: pin to another one.")
        return self.ranks[rank]

    def choose(self, request: AddRequest) -> EngineClient:
        """The engine that a request should go to. Raises EngineError where none can serve it."""
        if len(self.ranks) == 1:
            return self.ranks[0]
        work = {client.rank: client.work for client in self._sources()}
        if len(work) > 1 and self._leaving is not None:
            work.pop(self._leaving, None)
        if not work:
            assert self.refusal is not None
            raise self.refusal
        params, prompt = request.sampling_params, request.prompt_token_ids
        own = params.n * (params.max_tokens or 1) + len(prompt) // PROMPT_DISCOUNT
        salt = None if request.cache_salt is request.adapter is None else f"{request.adapter}\0{request.cache_salt}"
        return self.ranks[self._router.choose(prompt, salt, own, work, request.session_id)]

    def _resubmit(self, stream: RequestStream, error: EngineError) -> None:
        """Begin a dead engine's request again on another, or fail it."""
        if not (stream.pinned or stream.passed_on) and self.refusal is None:
            try:
                self.choose(stream.request).submit(stream)
                return
            except EngineError as late:
                error = late
        stream.fail(error)

    def abort(self, request_ids: Collection[str] | None) -> int:
        """End these requests (all, where None) with finish_reason "abort". Returns how many were in flight."""
        return sum(client.abort(request_ids) for client in self.living)

    # -- control

    async def call(self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        """The answer of all engines to a control call, as one. Raises EngineError: an engine's own, or a 503 after
        the timeout."""
        params = params or {}
        ranks = self._callable()
        if method not in WEIGHT_CALLS:
            # Set first: a rank that comes back meanwhile does as the others.
            before, self._paused = self._paused, method == "pause" or (self._paused and method != "resume")
            try:
                return first(await call_all(ranks, method, params, timeout_s))
            except EngineError:
                self._paused |= method == "resume" and before
                raise
        answer = await self.adapters.call(method, params, timeout_s, self._updates.call)
        if method in ("finish_weight_update", "update_weights"):
            self._router.forget()  # older weights' keys and values are no use to what comes now
        return answer

    async def stats(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        """What each living rank has counted."""
        answers = await call_all(self.living, "stats", {}, timeout_s)
        return {client.rank: answer for client, answer in answers.items()}

    # -- ranks that come back, join and leave

    async def _restore(self, client: EngineClient, reason: str) -> EngineError | None:
        """Bring an engine that has just loaded to what the fleet serves; returns why it can't generate."""
        self._router.forget(client.rank)
        self._check_device(client)
        deadline, failures = time.monotonic() + _ADMISSION_S, 0
        copied: int | None = None
        giver: str | None = None
        while time.monotonic() < deadline:
            try:
                async with self._updates.turn:  # nothing commits or starts meanwhile
                    valid, under_way = await weights_to_give(self.living)
                    source = min(valid, key=lambda other: other.work, default=None)
                    # Where nobody has any, it goes on as a lone engine does, and those that come after it will from it.
                    known = [self._gone, *(other.state for other in self.ranks)]
                    newest = source.state if source else max(known, key=lambda state: state.epoch)
                    has_it = copied == newest.epoch
                    if not under_way and (has_it or source is None):
                        return await self._admit(client, reason, newest, giver if has_it else None)
                if source is not None and not has_it:
                    copied, giver = await copy_weights(source, client), source.name
                    continue
                await asyncio.sleep(_POLL_S)
            except EngineError as error:
                failures += error.status != 409  # that is: not now
                if failures == _COPIES:
                    raise
                logger.warning("%s was not given the fleet's weights, and tries again: %s", client.name, error)
                await asyncio.sleep(_RETRY_S)
        raise EngineError(
            f"{client.name} was not admitted within {_ADMISSION_S:g} s: the trainer's updates leave no gap"
        )

    async def _admit(
        self, client: EngineClient, reason: str, state: EngineState, giver: str | None
    ) -> EngineError | None:
        paused = self._paused
        lost = await client.restore(reason, msgspec.structs.replace(state, paused=paused), source=giver)
        await self.adapters.restore(client)
        while paused != self._paused:  # it was changed meanwhile
            paused = self._paused
            await client.send_call("pause" if paused else "resume", {"mode": "keep"}, timeout_s=_CALL_S)
        return await self.sleeping.tell(client, _CALL_S) or lost

    def _sources(self) -> list[EngineClient]:
        return [client for client in self.ranks if client.refusal is None]

    async def scale(self, size: int, *, drain_timeout_s: float) -> None:
        """Add engines, which serve once they have the fleet's weights, or take the last ones away.

        One that leaves takes no new requests, and has so many seconds for those that it runs; then they are begun
        again elsewhere, or fail. A trainer must join again after it. Raises EngineError: 409 while another one runs.
        """
        if self._scaling.locked():
            raise EngineError("the number of engines is being changed already: wait for that", status=409)
        async with self._scaling:
            self._size = max(size, self._size)
            if size > 1:
                self.ranks[0].name = "Engine 0"  # no longer the only one
            while len(self.ranks) < size:
                client = self._client(len(self.ranks))
                self.ranks.append(client)  # now: between its admission and this, what serves could be changed
                try:
                    await client.join()
                except BaseException:
                    self.ranks.remove(client)
                    raise
            while len(self.ranks) > size:
                await self._leave(self.ranks[-1], drain_timeout_s)

    async def _leave(self, client: EngineClient, drain_timeout_s: float) -> None:
        self._leaving = client.rank
        try:
            deadline = time.monotonic() + drain_timeout_s
            while client.in_flight and client.error is None and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
            async with self._updates.turn:
                self.ranks.remove(client)
                self._gone = max(self._gone, client.state, key=lambda state: state.epoch)
            await client.stop("it leaves the fleet")
        finally:
            self._leaving = None


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
