"""Adapters of a fleet whose engines die, fail, leave and join while they are loaded: all have a version, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from rollout.fleet.adapters import FleetAdapters
from rollout.fleet.client import EngineClient
from rollout.fleet.errors import EngineError


@dataclass(eq=False)
class Rank:
    """An engine's adapters, by the rules of `rollout.engine.adapters`. `dies_in` and `fails_in` name a call."""

    rank: int
    starts: int = 1
    error: EngineError | None = None
    dies_in: str | None = None
    fails_in: str | None = None
    staged: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    held: asyncio.Event | None = None
    on_drop: Callable[[], None] = lambda: None

    async def send_call(self, method: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        if self.held is not None:
            await asyncio.wait_for(self.held.wait(), 60)
        await asyncio.sleep(0)
        label = body["label"]
        if self.dies_in == method:
            self.error = EngineError("it is dead")
            self.staged, self.loaded, self.dies_in = set(), set(), None
        if self.error is not None:
            raise self.error
        if self.fails_in == method:
            self.fails_in = None
            raise EngineError("the disk hangs")
        if method == "load_adapter":
            if label in self.staged | self.loaded:
                raise EngineError(f"adapter {label} is here already", status=409)
            if not Path(body["path"]).is_dir():
                raise EngineError(f"No adapter found for {body['path']}", status=404)
            if "keep_in" in body:
                Path(body["keep_in"]).mkdir(exist_ok=True)
            self.staged.add(label)
        elif method == "commit_adapter":
            self.staged.remove(label)
            self.loaded.add(label)
        else:
            self.on_drop()
            self.staged.discard(label)
            self.loaded.discard(label)
        return {"label": label}


class World:
    """A fleet of two engines, and the labels that requests run on."""

    def __init__(self, folder: Path, most: int) -> None:
        self.ranks = [Rank(0), Rank(1)]
        self.used: set[str | None] = set()
        self.turn = asyncio.Lock()
        self.folder = str(folder)
        self.adapters = FleetAdapters(self.living, self.turn, lambda: set(self.used), most)

    def living(self) -> list[EngineClient]:
        return cast(list[EngineClient], [rank for rank in self.ranks if rank.error is None])

    async def load(self, name: str, *, replace: bool = True) -> str:
        version = await self.adapters.load(name, self.folder, replace=replace, timeout_s=60)
        return version.label

    async def start(self, name: str) -> None:
        """Open an update that brings an adapter."""
        await self.adapters.call("start_weight_update", {"adapter": name}, 60, self.send)

    async def finish(self) -> None:
        """All engines have received it, and commit it."""
        await self.adapters.call("finish_weight_update", {}, 60, self.send)

    async def send(self, method: str, params: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if method == "start_weight_update":
            self.pushed = params
        else:
            Path(self.pushed["keep_in"]).mkdir(exist_ok=True)
            for rank in self.ranks:
                rank.loaded.add(self.pushed["adapter"])
        return {"update_id": "u"}


Play = Callable[[World], Awaitable[None]]


def play(tmp_path: Path, scene: Play, *, most: int = 3) -> None:
    async def run() -> None:
        world = World(tmp_path, most)
        try:
            await asyncio.wait_for(scene(world), 60)
        finally:
            world.adapters.close()

    asyncio.run(run())


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("method", ["load_adapter", "commit_adapter"])
def test_an_engine_that_dies_in_a_load_can_come_back(tmp_path: Path, dead: int, method: str) -> None:
    async def scene(world: World) -> None:
        world.ranks[dead].dies_in = method
        label = await world.load("policy")
        assert world.ranks[1 - dead].loaded == {label}
        back = Rank(dead, starts=2)
        await world.adapters.restore(cast(EngineClient, back))
        assert back.loaded == {label}

    play(tmp_path, scene)


def test_an_engine_that_failed_once_to_take_them_takes_them_then(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        labels = {await world.load(name) for name in ("a", "b")}
        back = Rank(0, starts=2)
        await world.adapters.restore(cast(EngineClient, back))
        back.loaded.remove("b@1")  # the second one didn't come through
        back.fails_in = "commit_adapter"
        with pytest.raises(EngineError, match="the disk hangs"):
            await world.adapters.restore(cast(EngineClient, back))
        await world.adapters.restore(cast(EngineClient, back))
        assert back.loaded == labels

    play(tmp_path, scene)


def test_a_version_that_one_engine_fails_to_enter_is_nowhere(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        for method in ("load_adapter", "commit_adapter"):
            world.ranks[1].fails_in = method
            with pytest.raises(EngineError, match="the disk hangs"):
                await world.load("policy")
        assert world.adapters.find("policy") is None
        await world.start("policy")
        world.ranks[1] = Rank(1, starts=2, fails_in="load_adapter")  # it has come back since
        with pytest.raises(EngineError, match="the disk hangs"):
            await world.finish()
        assert world.adapters.find("policy") is None
        for rank in world.ranks:
            assert not rank.staged | rank.loaded

    play(tmp_path, scene)


def test_of_two_loads_of_a_name_at_once_one_is_refused(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        loads = [world.load("policy", replace=False) for _ in range(2)]
        one, other = await asyncio.gather(*loads, return_exceptions=True)
        assert one == "policy@1"
        assert isinstance(other, EngineError)
        assert other.status == 400

    play(tmp_path, scene)


def test_the_bases_name_is_no_adapters(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        world.adapters.reserved = ("base",)
        for attempt in (world.load, world.start):
            with pytest.raises(EngineError, match="'base' is the base model's name"):
                await attempt("base")

    play(tmp_path, scene)


def test_a_version_stays_that_a_request_has_begun_to_use_while_another_went(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        for name in ("a", "b"):
            await world.load(name)
        await world.start("pushed")
        await world.load("c")
        world.used = {"a@1", "b@1", "c@1"}
        await world.finish()  # four now: the next load drops two
        world.used.clear()
        world.ranks[0].on_drop = lambda: world.used.add("b@1")
        await world.load("d")
        assert [version.label for version in world.adapters.current] == ["b@1", "pushed@1", "d@1"]

    play(tmp_path, scene)


def test_no_version_goes_while_an_engine_is_given_them(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        labels = {await world.load(name) for name in ("a", "b", "c")}
        back = Rank(1, starts=2)
        back.held = asyncio.Event()
        async with world.turn:
            given = asyncio.create_task(world.adapters.restore(cast(EngineClient, back)))
            more = asyncio.create_task(world.load("d"))
            gone = asyncio.create_task(world.adapters.unload("c"))
            dropped: list[str] = []
            world.ranks[0].on_drop = lambda: dropped.append("one")
            for _ in range(100):
                await asyncio.sleep(0)
            assert not dropped
            back.held.set()
            await given
            assert back.loaded == labels
        await asyncio.gather(more, gone)

    play(tmp_path, scene)


def test_what_fails_costs_none_its_place(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        labels = {await world.load(name) for name in ("a", "b", "c")}
        for method in ("load_adapter", "commit_adapter"):
            world.ranks[1].fails_in = method
            with pytest.raises(EngineError, match="the disk hangs"):
                await world.load("d")
        await world.start("e")  # and its trainer is gone
        assert {version.label for version in world.adapters.current} == labels
        assert world.ranks[0].loaded == world.ranks[1].loaded == labels

    play(tmp_path, scene)


def test_a_name_serves_while_it_is_replaced_in_the_only_place(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        await world.load("a")
        serving: list[str] = []
        world.ranks[0].on_drop = lambda: serving.append(world.adapters.resolve("a"))
        await world.load("a")
        await world.start("a")
        await world.finish()
        assert serving == ["a@2", "a@3"]
        assert world.ranks[0].loaded == {"a@3"}

    play(tmp_path, scene, most=1)


def test_where_requests_run_on_all_there_is_no_room(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        for name in ("a", "b"):
            world.used.add(await world.load(name))
        await world.adapters.unload("a")  # a request still runs on it
        for attempt in (world.load, world.start):
            with pytest.raises(EngineError, match="requests run on all of them") as caught:
                await attempt("c")
            assert caught.value.status == 503
        world.used.remove("a@1")
        assert await world.load("c") == "c@1"
        assert world.ranks[0].loaded == {"b@1", "c@1"}

    play(tmp_path, scene, most=2)


def test_a_name_means_one_thing(tmp_path: Path) -> None:
    """`policy@2` is a version of one adapter, or another one's name."""

    async def scene(world: World) -> None:
        labels = [await world.load(name) for name in ("policy", "policy@2", "policy@0")]
        assert labels == ["policy@1", "policy@2@1", "policy@0@1"]
        for attempt in (world.load, world.start):
            with pytest.raises(EngineError, match="'policy@1' is version 1 of the adapter 'policy'"):
                await attempt("policy@1")
        assert await world.load("policy") == "policy@3"
        assert world.adapters.resolve("policy@2") == "policy@2@1"

    play(tmp_path, scene, most=8)
