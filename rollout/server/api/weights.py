"""Weight updates: each path is the engine's method of the same name, the JSON body its parameters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends

from rollout.fleet.errors import EngineError
from rollout.server.context import ServerContext, ServerDep
from rollout.server.errors import ApiError
from rollout.server.limits import require_json
from rollout.weights.bodies import WEIGHT_CALLS

router = APIRouter(dependencies=[Depends(require_json)])

Endpoint = Callable[[ServerContext, dict[str, Any] | None], Awaitable[dict[str, Any]]]

# The engine bounds every single wait of an update and says which one failed; a whole update may rightly take many of
# them. This bound is only for an engine that answers its probes and yet never ends a call.
_WHOLE_UPDATE_S = 6 * 3600.0


async def call(server: ServerContext, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """The engines' answer to a weight call. Raises EngineError, and counts it."""
    try:
        answer = await server.engine.call(method, params, timeout_s=_WHOLE_UPDATE_S)
    except EngineError as error:
        server.metrics.refused(method, error.status)
        raise
    if method in ("finish_weight_update", "update_weights"):
        server.live.commit()
    return answer


def _endpoint(method: str) -> Endpoint:
    async def endpoint(server: ServerDep, body: Annotated[dict[str, Any] | None, Body()] = None) -> dict[str, Any]:
        return await call(server, method, body)

    return endpoint


for _method, _description in WEIGHT_CALLS.items():
    if _method not in ("update_weight_version", "weight_info"):
        router.add_api_route(
            f"/{_method}", _endpoint(_method), methods=["POST"], name=_method, description=_description
        )


@router.post("/update_weight_version")
async def update_weight_version(
    server: ServerDep,
    new_version: Annotated[str, Body(embed=True)],
    abort_all_requests: Annotated[bool, Body(embed=True)] = False,
) -> dict[str, Any]:
    """Relabel the weights that serve. Nothing is aborted unless the body says so, since nothing else changes."""
    if abort_all_requests:
        server.abort_for_update()
    return await call(server, "update_weight_version", {"new_version": new_version})


@router.post("/init_broadcaster")
async def init_broadcaster() -> None:
    """prime-rl's NCCL mode, which is refused."""
    message = (
        "This broadcast carries pickles, which are never read from the network. Write the weights to a folder "
        '(POST /update_weights {"weight_dir": …}), or use /init_weight_transfer_engine.'
    )
    raise ApiError(400, message)


@router.get("/weight_info")
async def weight_info(server: ServerDep) -> dict[str, Any]:
    """The label and epoch that serve, the session's state, the last error."""
    return await call(server, "weight_info")


@router.get("/get_world_size")
async def get_world_size(server: ServerDep, include_dp: bool = True) -> dict[str, int]:
    """How many ranks of the trainer's group all engines take; one of them, without `include_dp`."""
    return {"world_size": server.engine.world_size if include_dp else server.model.world_size}
