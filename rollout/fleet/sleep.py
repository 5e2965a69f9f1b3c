"""A fleet sleeps and wakes together, and so does an engine that comes back to it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

from rollout.fleet.client import EngineClient
from rollout.fleet.errors import EngineError
from rollout.fleet.joining import weights_to_give
from rollout.fleet.weight_calls import WeightCalls, call_all
from rollout.messages import SLEEP_TAGS

_TAGS = frozenset(SLEEP_TAGS)
_LOST = "The weights were given up by /sleep?level=2: push them, whole, to generate again."


class FleetSleep:
    """What of all engines is asleep: some of SLEEP_TAGS, since a `sleep` of this level and mode; 0 while awake.

    `turn` of the weight calls is held meanwhile: no update begins or ends then, and no rank joins.
    """

    def __init__(self, updates: WeightCalls, living: Callable[[], list[EngineClient]]) -> None:
        self._updates, self._living = updates, living
        self.asleep: frozenset[str] = frozenset()
        self.level = 0
        self._mode = "keep"
        self._falls_asleep = False

    @property
    def refusal(self) -> EngineError | None:
        """While asleep: why a new request isn't taken; None where it waits until all is awake (mode keep)."""
        if self._mode == "keep":
            return None
        return EngineError(f"The server is asleep (level {self.level}); retry after POST /wake_up.")

    async def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Have all engines sleep, whose running requests end as those of a pause in this mode.

        Raises EngineError: 409 while an update is open. Where one engine fails, the others sleep: wake them all.
        """
        async with self._updates.turn:
            ranks = self._living()
            if (await weights_to_give(ranks))[1]:
                raise EngineError(
                    "a weight update is open: finish_weight_update or abort_weight_update it before the server sleeps",
                    status=409,
                )
            before = self.asleep, self.level, self._mode
            deepest = max(level, self.level if "weights" in self.asleep else 0)
            self.asleep, self.level, self._mode = _TAGS, deepest, mode  # now: what is sent later would not be covered
            self._falls_asleep = True
            try:
                await call_all(ranks, "sleep", {"level": level, "mode": mode}, timeout_s)
            except EngineError as error:
                if error.status < 500:  # refused, so nothing has changed
                    self.asleep, self.level, self._mode = before
                raise
            finally:
                self._falls_asleep = False
            if level == 2:
                for client in ranks:
                    client.lose_weights(EngineError(_LOST))

    async def wake_up(self, tags: Collection[str], timeout_s: float) -> None:
        """Have all engines wake these parts; they generate once nothing is asleep. It also ends the wait of a `sleep`
        for what runs. Raises EngineError: then these are still asleep in one engine at least."""
        async with nullcontext() if self._falls_asleep else self._updates.turn:  # which that sleep holds
            await call_all(self._living(), "wake_up", {"tags": sorted(tags)}, timeout_s)
            self.asleep -= frozenset(tags)
            self.level = self.level if self.asleep else 0

    async def tell(self, client: EngineClient, timeout_s: float) -> EngineError | None:
        """Have an engine that comes back sleep as the others do, under `turn`. Returns why it can't generate then."""
        if not self.asleep:
            return None
        lost = self.level == 2 and "weights" in self.asleep
        how: dict[str, Any] = {"level": 2 if lost else 1, "mode": "keep"}
        await client.send_call("sleep", how, timeout_s=timeout_s)
        await client.send_call("wake_up", {"tags": sorted(_TAGS - self.asleep)}, timeout_s=timeout_s)
        return EngineError(_LOST) if lost else None
