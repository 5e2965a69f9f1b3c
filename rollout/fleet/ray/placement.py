"""Where engines run: a placement group of one bundle for each rank, so that ranks can come and go one by one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rollout.config import EngineConfig
from rollout.fleet.client import RESTART_WINDOW_S

logger = logging.getLogger(__name__)

# How often a wait for room says so, and the longest that a cancelled one goes on.
_SAY_S, _TURN_S = 30.0, 1.0
# A dead engine's place is kept this long for the successor of its rank, which comes at once.
_KEEP_S = 5.0
# A rank that has lost its place waits this long for another, and is then dead once more: never so often that the
# restarts of an engine run out by it.
_AGAIN_S = RESTART_WINDOW_S


class NoRoom(Exception):
    """No node has room for an engine; says what was asked for and what there is."""


class Places:
    """The placement groups of the ranks. Ray moves one to another node when its own is lost, as soon as there is room.

    Bundles hold `tensor_parallel_size` GPUs where the cluster has GPUs (or the configuration wants them), else so many
    times `num_threads` CPUs. Raises NoRoom from `find` after `timeout_s`; a rank that was placed before waits longer.
    """

    def __init__(self, config: EngineConfig, timeout_s: float) -> None:
        self.threads = config.num_threads or 1
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        if config.device == "cuda" or (config.device == "auto" and gpus):
            self.bundle: dict[str, float] = {"CPU": self.threads, "GPU": config.tensor_parallel_size}
        else:
            self.bundle = {"CPU": self.threads * config.tensor_parallel_size}
        self._timeout_s = timeout_s
        self._groups: dict[int, PlacementGroup] = {}
        self._nodes: dict[int, str] = {}
        self._placed: set[int] = set()
        self._leaving: dict[int, asyncio.TimerHandle] = {}
        self._creating = asyncio.Lock()  # one after the other: each looks where the ones before it went

    async def find(self, rank: int) -> PlacementGroup:
        """The group of this rank, once Ray has placed it: that of the rank's last engine, or a new one."""
        if (leaving := self._leaving.pop(rank, None)) is not None:
            leaving.cancel()
        async with self._creating:
            if rank not in self._groups:
                self._groups[rank] = await asyncio.to_thread(self._create, rank)
        group = self._groups[rank]
        patience = _AGAIN_S if rank in self._placed else self._timeout_s
        deadline, say = time.monotonic() + patience, time.monotonic() + _SAY_S
        while not await asyncio.to_thread(group.wait, _TURN_S):
            if (now := time.monotonic()) > deadline:
                raise NoRoom(await asyncio.to_thread(self._what_there_is))
            if now > say:
                say = now + _SAY_S
                logger.warning("rank %d: %s", rank, await asyncio.to_thread(self._what_there_is))
        (self._nodes[rank],) = (await asyncio.to_thread(placement_group_table, group))["bundles_to_node_id"].values()
        self._placed.add(rank)
        return group

    async def stands(self, rank: int) -> bool:
        """Whether the node that the rank was placed on is alive, as far as Ray knows."""
        return self._nodes[rank] in {node["NodeID"] for node in await asyncio.to_thread(_nodes)}

    def leave(self, rank: int) -> None:
        """The rank's engine has ended: give its place back, unless a successor takes it soon."""
        if rank in self._groups and rank not in self._leaving:
            self._leaving[rank] = asyncio.get_running_loop().call_later(_KEEP_S, self._give_back, rank)

    def give_back(self) -> None:
        for leaving in self._leaving.values():
            leaving.cancel()
        for rank in list(self._groups):
            self._give_back(rank)

    def _give_back(self, rank: int) -> None:
        self._leaving.pop(rank, None)
        self._placed.discard(rank)
        self._nodes.pop(rank, None)
        remove_placement_group(self._groups.pop(rank))

    def _create(self, rank: int) -> PlacementGroup:
        """Groups know nothing of each other: spread them, by asking for the node with the fewest engines."""
        engines = Counter(self._nodes.values())
        fitting = [
            node["NodeID"]
            for node in _nodes()
            if all(node["Resources"].get(kind, 0) >= amount for kind, amount in self.bundle.items())
        ]
        target = min(fitting, key=engines.__getitem__, default=None)
        if target is not None:
            self._nodes[rank] = target
        name = f"rollout engine {rank}"
        group: PlacementGroup = placement_group([self.bundle], "STRICT_PACK", name=name, _soft_target_node_id=target)
        return group

    def _what_there_is(self) -> str:
        free = ray.available_resources()
        nodes = "; ".join(f"{node['NodeManagerAddress']} has {_amounts(node['Resources'])}" for node in _nodes())
        return f"no node has room for an engine ({_amounts(self.bundle)}): {nodes}; {_amounts(free)} are free in all"


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
