"""A trainer's weight calls, to several engines as if they were one: all of them commit, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollout.fleet.client import EngineClient
from rollout.fleet.errors import EngineError
from rollout.two_phase import TwoPhaseCommit
from rollout.weights.ownership import with_ids

Body = dict[str, Any]

# What one engine refuses, the others mostly refuse as well: they have this long to say so before they are told to stop.
_GRACE_S = 0.5
_UNDO_S = 30.0


async def call_all(
    clients: Sequence[EngineClient], method: str, params: Body, timeout_s: float
) -> dict[EngineClient, Body]:
    """The answers of those that live to give one, in order. Raises the first EngineError of an engine that lives, and
    where there is no answer at all."""
    asked = [client.send_call(method, params, timeout_s=timeout_s) for client in clients]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    answers = {client: outcome for client, outcome in zip(clients, outcomes, strict=True) if isinstance(outcome, dict)}
    for client, outcome in zip(clients, outcomes, strict=True):
        if isinstance(outcome, BaseException) and (client.error is None or not answers):
            raise outcome
    return answers


def first(answers: dict[EngineClient, Body]) -> Body:
    """One answer for all that say the same."""
    return next(iter(answers.values()))


class WeightCalls:
    """One trainer's updates of all living ranks.

    Sending to all is one act, so all ranks get all calls in the same order. `turn` is held while ranks commit, and
    while a rank joins: an update has the same ranks from its start to its end. `living` raises EngineError where there
    is none.
    """

    def __init__(self, living: Callable[[], list[EngineClient]]) -> None:
        self._living = living
        self.turn = asyncio.Lock()
        self._flip = asyncio.Lock()  # held by the commit itself: what would end an update waits for it
        self._inits = 0
        self._joined: frozenset[tuple[int, int]] = frozenset()
        self._handlers: dict[str, Callable[[Body, float], Awaitable[Body]]] = {
            "init_weight_transfer_engine": self._init,
            "start_weight_update": self._start,
            "update_weights": self._update,
            "finish_weight_update": self._finish,
            "update_weight_version": self._relabel,
            "weight_info": self._info,
            "weight_checker": self._check,
        }

    async def call(self, method: str, params: Body, timeout_s: float) -> Body:
        """The answer of all as one. Raises EngineError; an update that fails on one rank is dropped on all."""
        params = with_ids(method, params)
        handler = self._handlers.get(method)
        if handler is not None:
            return await handler(params, timeout_s)
        async with self._flip:  # abort, shutdown
            return first(await call_all(self._living(), method, params, timeout_s))

    async def _init(self, params: Body, timeout_s: float) -> Body:
        async with self._flip:
            ranks = self._living()
        joined = starts(ranks)
        bodies = [params] * len(ranks)
        init = params.get("init_info")
        if len(ranks) > 1 and isinstance(init, dict) and init.get("backend") not in ("disk", "ipc"):
            offset, world_size = init.get("rank_offset", 1), init.get("world_size", 2)
            if isinstance(offset, int) and isinstance(world_size, int):
                taken = sum(rank.info.world_size for rank in ranks)
                if world_size - offset < taken:
                    message = (
                        f"init_info.world_size {world_size} leaves {world_size - offset} rank(s) from rank_offset "
                        f"{offset} on, and this server takes {taken}: ask GET /get_world_size"
                    )
                    raise EngineError(message, status=400, param="init_info.world_size")
                bodies = []
                for rank in ranks:
                    bodies.append({**params, "init_info": {**init, "rank_offset": offset}})
                    offset += rank.info.world_size
        undo = "shutdown_weight_transfer_engine"
        self._inits += 1
        answers = await self._together(ranks, "init_weight_transfer_engine", bodies, timeout_s, undo=undo)
        self._joined = joined
        return answers[0]

    async def _start(self, params: Body, timeout_s: float) -> Body:
        async with self.turn:
            ranks = self._living()
            if self._joined and self._joined != starts(ranks):
                raise EngineError(
                    "Engines have joined, left or restarted since init_weight_transfer_engine: call it again with a "
                    "fresh group, of the size that GET /get_world_size says plus the trainer",
                    status=409,
                )
            return (await self._all(ranks, "start_weight_update", params, timeout_s))[0]

    async def _update(self, params: Body, timeout_s: float) -> Body:
        if params.get("weight_dir") is None:
            return (await self._all(self._living(), "update_weights", params, timeout_s))[0]
        async with self.turn:  # a whole update in one call
            ready = await self._all(self._living(), "update_weights", {**params, "prepare": True}, timeout_s)
            if params.get("prepare") is True:
                return ready[0]
            answer = await self._commit({"update_id": params["update_id"]}, timeout_s)
            return {"status": "ok"} | {key: answer[key] for key in answer if key not in ("message", "weight_version")}

    async def _finish(self, params: Body, timeout_s: float) -> Body:
        if len(ranks := self._living()) == 1:
            return (await self._all(ranks, "finish_weight_update", params, timeout_s))[0]
        ready = await self._all(ranks, "finish_weight_update", {**params, "prepare": True}, timeout_s)
        if params.get("prepare") is True:
            return ready[0]
        body = {key: value for key, value in params.items() if key in ("weight_version", "owner", "update_id")}
        async with self.turn:
            return await self._commit(body, timeout_s)

    async def _commit(self, body: Body, timeout_s: float) -> Body:
        """All are ready. One that dies now, or fails as none should, comes back with what the others have committed."""
        async with self._flip:
            ranks = self._living()
            change = TwoPhaseCommit(ranks)
            for rank in ranks:
                change.report(rank)  # each was prepared; one that died meanwhile lives no more
            asked = [rank.send_call("finish_weight_update", body, timeout_s=timeout_s) for rank in ranks]
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for rank, outcome in zip(ranks, outcomes, strict=True):
            change.report(rank, outcome if isinstance(outcome, BaseException) else None)
        if change.phase == "aborted":
            assert change.error is not None
            raise change.error
        for rank in change.failed:
            if rank.error is None:
                rank.fail(f"it did not commit with the others: {change.error}")
        return next(outcome for outcome in outcomes if not isinstance(outcome, BaseException))

    async def _relabel(self, params: Body, timeout_s: float) -> Body:
        async with self.turn:
            return first(await call_all(self._living(), "update_weight_version", params, timeout_s))

    async def _info(self, params: Body, timeout_s: float) -> Body:
        ranks = self._living()
        infos = await call_all(ranks, "weight_info", params, timeout_s)
        transfer = "none" if not self._joined else "joined" if self._joined == starts(ranks) else "stale"
        shown = ("weight_version", "epoch", "state", "weights", "device_uuid")
        each = [{"rank": r.rank} | {key: i[key] for key in shown if key in i} for r, i in infos.items()]
        committed = {key: epoch for i in infos.values() for key, epoch in i.get("committed_updates", {}).items()}
        return first(infos) | {"committed_updates": committed, "transfer": transfer, "ranks": each}

    async def _check(self, params: Body, timeout_s: float) -> Body:
        answers = await call_all(self._living(), "weight_checker", params, timeout_s)
        one, known = next(iter(answers.items()))
        for rank, answer in answers.items():
            if answer.get("checksums") != known.get("checksums"):
                raise EngineError(f"engines {one.rank} and {rank.rank} store different weights", status=500)
        if "mismatches" not in known:
            return known
        names = sorted({name for answer in answers.values() for name in answer["mismatches"]})
        return {"match": not names, "mismatches": names}

    async def _all(self, ranks: list[EngineClient], method: str, params: Body, timeout_s: float) -> list[Body]:
        return await self._together(ranks, method, [params] * len(ranks), timeout_s, undo="abort_weight_update")

    async def _together(
        self, ranks: list[EngineClient], method: str, bodies: list[Body], timeout_s: float, *, undo: str
    ) -> list[Body]:
        """The answers of all. Where only some fail, all are told to `undo` it, unless another trainer has taken over
        since. Raises the first failure."""
        inits = self._inits
        asked = [rank.send_call(method, body, timeout_s=timeout_s) for rank, body in zip(ranks, bodies, strict=True)]
        tasks = [asyncio.ensure_future(answer) for answer in asked]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        _, late = await asyncio.wait(tasks, timeout=_GRACE_S)
        change = TwoPhaseCommit(ranks)
        for rank, task in zip(ranks, tasks, strict=True):
            if task not in late:
                change.report(rank, task.exception())
        failure = change.error
        if failure is None:
            return await asyncio.gather(*tasks)
        if inits == self._inits:
            ids = {key: value for key, value in bodies[0].items() if key in ("owner", "update_id")}
            undone = [rank.send_call(undo, ids, timeout_s=_UNDO_S) for rank in change.undo if rank.error is None]
            await asyncio.gather(*undone, return_exceptions=True)
        for task in late:
            task.cancel()
        if isinstance(failure, EngineError) and len(ranks) > 1:
            rank = change.failed[0]
            raise EngineError(f"engine {rank.rank}: {failure}", status=failure.status, param=failure.param) from failure
        raise failure


def starts(ranks: Sequence[EngineClient]) -> frozenset[tuple[int, int]]:
    """These engines, each in its present life."""
    return frozenset((rank.rank, rank.starts) for rank in ranks)
