"""The adapters that a fleet serves: which versions there are, what a name stands for, what goes when there is no room.

A version never changes. All engines have all of them: one that is loaded is read and checked by each engine, then
entered in all, and only then found by its name. The engines write a copy of what they have read, which is given to
one that comes back: the trainer's own folder may hold something else by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from rollout.fleet.client import EngineClient
from rollout.fleet.errors import EngineError
from rollout.fleet.weight_calls import call_all, starts
from rollout.folders import OwnedFolder

Body = dict[str, Any]
Send = Callable[[str, Body, float], Awaitable[Body]]

_CALL_S = 60.0
MOST_NAME = 256
MOST_NAMES = 1 << 16
"""Names whose last number is remembered, so that a label never names two things."""


class NameTakenError(EngineError):
    """The base model has this name, or an adapter that the load wasn't to replace."""


@dataclass(eq=False)
class Version:
    """One version of an adapter: `label` is `name@number`, `root` where it came from, `copy` the engines' own copy."""

    name: str
    number: int
    root: str
    copy: str
    used: int = 0

    @property
    def label(self) -> str:
        return f"{self.name}@{self.number}"


class FleetAdapters:
    """Names and versions. Lives on one event loop.

    `living` are the engines that calls go to; `turn` keeps engines from joining while versions come and go; `in_use`
    are the labels that requests in flight run on. At most `most` versions stay loaded: once one more serves, the oldest
    unused one that a newer one has replaced goes, or else the one whose last request was longest ago, with its name.
    None goes that a request runs on. `reserved` are the names of the base model.
    """

    def __init__(
        self,
        living: Callable[[], list[EngineClient]],
        turn: asyncio.Lock,
        in_use: Callable[[], set[str | None]],
        most: int,
    ) -> None:
        self._living, self._turn, self._in_use, self._most = living, turn, in_use, most
        self.reserved: Collection[str] = ()
        self._loading = asyncio.Lock()
        self._folder: OwnedFolder | None = None
        self._clock = itertools.count(1)
        self._numbers: dict[str, int] = {}
        self._versions: dict[str, Version] = {}
        self._current: dict[str, Version] = {}
        self._leaving: dict[str, Version] = {}
        self._pushed: dict[str, tuple[Version, frozenset[tuple[int, int]]]] = {}  # by update: one at most is open

    @property
    def current(self) -> list[Version]:
        """The version that each name stands for, by age of the name."""
        return list(self._current.values())

    def find(self, name: str) -> Version | None:
        """The version that requests for this name, or label, run on."""
        return self._current.get(name) or self._versions.get(name)

    def resolve(self, name: str) -> str:
        """The label that a request for this name, or label, runs on to its end. Raises EngineError 404."""
        version = self.find(name)
        if version is None:
            raise EngineError(f"The model `{name}` does not exist: no adapter of this name is loaded.", status=404)
        version.used = next(self._clock)
        return version.label

    async def load(self, name: str, path: str, *, replace: bool, timeout_s: float) -> Version:
        """Have all engines serve this folder under the name, from its newest version on: all of them, or none.

        Requests that run end on the version that they began on. Raises EngineError: 404 and 400 for a folder that can't
        be served, and without `replace` for a name that is loaded, 503 where there is no room, or an engine fails.
        Nothing makes room for what fails.
        """
        async with self._loading:
            self._check_free(name)
            if not replace and name in self._current:
                raise NameTakenError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    status=400,
                )
            self._check_room()
            version = self._next(name, path)
            ranks = self._living()
            prepared = starts(ranks)
            async with self._dropped_if_it_fails(version):
                body = {"label": version.label, "path": path, "keep_in": version.copy}
                await call_all(ranks, "load_adapter", body, timeout_s)
                async with self._turn:  # no engine joins meanwhile, without it
                    ranks = [rank for rank in self._living() if (rank.rank, rank.starts) in prepared]
                    await call_all(ranks, "commit_adapter", {"label": version.label}, _CALL_S)
                    await self._enter(version, prepared)
            await self._shrink(version)
            return version

    @contextlib.asynccontextmanager
    async def _dropped_if_it_fails(self, version: Version) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            await self._drop(version)
            raise

    async def call(self, method: str, params: Body, timeout_s: float, send: Send) -> Body:
        """A weight call, answered by `send`; the update that it belongs to may bring an adapter.

        Its start names it (`adapter`); a finish that has committed lets requests find it. Raises EngineError.
        """
        if method == "start_weight_update":
            params = {key: value for key, value in params.items() if key != "keep_in"}
            if (name := params.get("adapter")) is not None:
                return await self._start(name, params, timeout_s, send)
        answer = await send(method, params, timeout_s)
        if method == "finish_weight_update" and not params.get("prepare"):
            version, ranks = self._pushed.pop(str(answer.get("update_id")), (None, frozenset()))
            if version is not None:
                async with self._dropped_if_it_fails(version), self._turn:
                    await self._enter(version, ranks)
                await self._shrink(version)
        return answer

    async def _start(self, name: object, params: Body, timeout_s: float, send: Send) -> Body:
        if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
            raise EngineError(f"adapter must be a name of 1 to {MOST_NAME} characters", status=400, param="adapter")
        self._check_free(name)
        self._check_room()
        version = self._next(name, "pushed")
        ranks = starts(self._living())
        body = params | {"adapter": version.label, "keep_in": version.copy}
        answer = await send("start_weight_update", body, timeout_s)
        for abandoned, _ in self._pushed.values():
            await self._drop(abandoned)
        self._pushed = {str(answer["update_id"]): (version, ranks)}
        return answer

    def _check_free(self, name: str) -> None:
        if name in self.reserved:
            raise NameTakenError(f"'{name}' is the base model's name: give the adapter another one.", status=400)
        other, _, number = name.rpartition("@")
        if number.isdecimal() and 0 < int(number) <= self._numbers.get(other, 0):
            message = f"'{name}' is version {number} of the adapter '{other}': give this one another name."
            raise NameTakenError(message, status=400)

    def _next(self, name: str, root: str) -> Version:
        """The next version of this name, with no more of it than its label."""
        if len(self._numbers) >= MOST_NAMES and name not in self._numbers:
            raise EngineError(f"{MOST_NAMES} names of adapters were used: restart the server", status=503)
        number = self._numbers.get(name, 0) + 1
        while f"{name}@{number}" in self._numbers:  # another adapter's name
            number += 1
        self._numbers[name] = number
        self._folder = self._folder or OwnedFolder("rollout-lora-")
        return Version(name, number, root, str(self._folder.path / str(next(self._clock))))

    async def _enter(self, version: Version, ranks: frozenset[tuple[int, int]]) -> None:
        """Let requests find a version that these engines have; the others are given it."""
        late = [rank for rank in self._living() if (rank.rank, rank.starts) not in ranks]
        body = {"label": version.label, "path": version.copy}
        await call_all(late, "load_adapter", body, _CALL_S)
        await call_all(late, "commit_adapter", {"label": version.label}, _CALL_S)
        version.used = next(self._clock)
        self._versions[version.label] = self._current[version.name] = version

    async def unload(self, name: str) -> None:
        """Forget this name, with all its versions. Requests that run on them go on. Raises EngineError 404."""
        async with self._loading:
            if name not in self._current:
                raise EngineError(f"The lora adapter '{name}' cannot be found.", status=404)
            del self._current[name]
            for version in [version for version in self._versions.values() if version.name == name]:
                del self._versions[version.label]
                self._leaving[version.label] = version
            async with self._turn:
                await self._sweep()

    async def restore(self, client: EngineClient) -> None:
        """Give an engine that has just loaded every version that the fleet serves. Hold `turn`. Raises EngineError."""
        for version in list(self._versions.values()):
            body = {"label": version.label, "path": version.copy}
            await client.send_call("drop_adapter", body, timeout_s=_CALL_S)  # of a try that failed
            await client.send_call("load_adapter", body, timeout_s=_CALL_S)
            await client.send_call("commit_adapter", {"label": version.label}, timeout_s=_CALL_S)

    def close(self) -> None:
        """Remove the copies."""
        if self._folder is not None:
            self._folder.close()

    def _check_room(self) -> None:
        """Raise EngineError 503 where nothing could go for one more version."""
        used = self._in_use()
        if sum(label in used for label in (*self._versions, *self._leaving)) >= self._most:
            raise EngineError(
                f"{self._most} versions of adapters are loaded (--max-cpu-loras), and requests run on all of them: "
                "try again soon",
                status=503,
            )

    async def _shrink(self, new: Version) -> None:
        """Let go of what is too many beside this version, as far as nothing runs on it."""
        async with self._turn:
            await self._sweep()
            while len(self._versions) + len(self._leaving) > self._most:
                used = self._in_use() | {new.label}  # also of requests that came during the last drop
                idle = [version for version in self._versions.values() if version.label not in used]
                if not idle:
                    return
                oldest = min(idle, key=lambda version: (version is self._current.get(version.name), version.used))
                del self._versions[oldest.label]
                if self._current.get(oldest.name) is oldest:
                    del self._current[oldest.name]
                await self._drop(oldest)

    async def _sweep(self) -> None:
        """Drop what was unloaded and no request runs on any more."""
        used = self._in_use()
        for version in [version for version in self._leaving.values() if version.label not in used]:
            del self._leaving[version.label]
            await self._drop(version)

    async def _drop(self, version: Version) -> None:
        with contextlib.suppress(EngineError):  # an engine that is dead has forgotten it
            body = {"label": version.label}
            asked = [rank.send_call("drop_adapter", body, timeout_s=_CALL_S) for rank in self._living()]
            await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, version.copy, ignore_errors=True)
