"""The real engine, but rank 1 fails where it is told to: what it is told is the label of an update."""

from __future__ import annotations

import os
from typing import Any

from rollout.config import EngineConfig
from rollout.engine.process import run_engine as run
from rollout.weights.errors import WeightUpdateError
from rollout.weights.receiver import Answer
from rollout.weights.updater import WeightUpdater

REFUSE_CHECK = "rank 1 refuses to prepare this"
REFUSE_COMMIT = "rank 1 refuses to commit this"


def run_engine(config: EngineConfig, to_engine: str, from_engine: str) -> None:
    """The process function."""
    finish = WeightUpdater._call_finish_weight_update

    def spoiled(self: WeightUpdater, params: dict[str, Any], answer: Answer) -> None:
        refused = REFUSE_CHECK if params.get("prepare") else REFUSE_COMMIT
        if params.get("weight_version") == refused and self._store.epoch == 1:  # a successor begins at 0
            raise WeightUpdateError(500, "spoiled")
        finish(self, params, answer)

    if os.environ["CUDA_VISIBLE_DEVICES"] == "1":
        WeightUpdater._call_finish_weight_update = spoiled  # type: ignore[method-assign]
    run(config, to_engine, from_engine)
