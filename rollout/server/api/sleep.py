"""vLLM's sleep mode: the engines' memory goes to somebody else for a while."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from rollout.messages import SLEEP_TAGS, SleepTag
from rollout.server.context import PauseMode, ServerDep
from rollout.server.errors import ApiError
from rollout.server.limits import require_json

router = APIRouter(dependencies=[Depends(require_json)])

Tags = Annotated[list[SleepTag] | None, Query()]


@router.post("/sleep")
async def sleep(
    server: ServerDep,
    level: Annotated[int, Query(ge=1, le=2)] = 1,
    mode: PauseMode = "abort",
    tags: Annotated[str | None, Query(include_in_schema=False)] = None,
) -> Response:
    """Give the memory of weights and KV cache back. Level 1 keeps the weights in host memory, level 2 loses them.

    What runs ends as at /pause in this mode; with keep it is computed again after /wake_up.
    """
    if tags is not None:
        raise ApiError(400, "sleep takes no tags: everything sleeps, and /wake_up wakes parts", param="tags")
    await server.engine.sleeping.sleep(level, mode, server.engine_config.weight_update_timeout_s)
    return Response()


@router.post("/wake_up")
async def wake_up(server: ServerDep, tags: Tags = None) -> Response:
    """Take the memory of these parts again, or of all; once nothing is asleep the engines generate."""
    await server.engine.sleeping.wake_up(tags or SLEEP_TAGS, server.engine_config.weight_update_timeout_s)
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(server: ServerDep) -> dict[str, bool]:
    """Whether anything is asleep."""
    return {"is_sleeping": server.engine.sleeping.level > 0}
