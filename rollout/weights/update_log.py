"""What became of the updates: for /weight_info, for the counters, and for the log."""

from __future__ import annotations

import logging
from typing import Any

from rollout.weights.errors import WeightUpdateError
from rollout.weights.store import WeightStore
from rollout.weights.update import Update

logger = logging.getLogger(__name__)

REMEMBERED = 8


class UpdateLog:
    """`last` is the end of the last update; `totals` counts updates, bytes and seconds by result.

    `committed`: the epochs of the last few committed updates, by their ids, the newest last.
    """

    def __init__(self) -> None:
        self.last: dict[str, Any] = {"last_error": None, "bytes": 0, "seconds": 0.0, "transport": None}
        self.totals = {result: {"updates": 0, "bytes": 0, "seconds": 0.0} for result in ("committed", "aborted")}
        self.committed: dict[str, int] = {}

    def record(self, update: Update, error: WeightUpdateError | None, state: str, store: WeightStore) -> None:
        """An update has ended, in `state`: committed, or dropped for this error."""
        self.last = {"last_error": None if error is None else error.message, **update.figures()}
        if error is None:
            self.committed[update.id] = store.epoch
            for oldest in list(self.committed)[:-REMEMBERED]:
                del self.committed[oldest]
        totals = self.totals["committed" if error is None else "aborted"]
        totals["updates"] += 1
        for name in ("bytes", "seconds"):
            totals[name] += self.last[name]
        logger.log(
            logging.INFO if error is None else logging.WARNING,
            "weight_update state=%s epoch=%d weight_version=%r transport=%s bytes=%d seconds=%.3f "
            "weights=%s partial=%s sparse=%s error=%r",
            state,
            store.epoch,
            store.label,
            self.last["transport"],
            self.last["bytes"],
            self.last["seconds"],
            store.validity,
            update.body.partial,
            update.body.base_epoch is not None,
            self.last["last_error"],
        )
