"""What SkyRL calls beside vLLM's paths: its own methods by /collective_rpc, and generation with routed experts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends

from rollout.server.api import weights
from rollout.server.context import ServerDep
from rollout.server.errors import ApiError
from rollout.server.limits import require_json

router = APIRouter(dependencies=[Depends(require_json)])

# SkyRL's worker methods (skyrl 0.3.0, new_inference_worker_wrap.py), and the calls that they stand for.
_METHODS = {
    "skyrl_start_weight_update": "start_weight_update",
    "update_weights_nccl": "update_weights",
    "skyrl_finish_weight_update": "finish_weight_update",
}


@router.post("/collective_rpc")
async def collective_rpc(
    server: ServerDep,
    method: Annotated[str, Body(embed=True)],
    kwargs: Annotated[dict[str, Any] | None, Body(embed=True)] = None,
) -> dict[str, list[Any]]:
    """SkyRL's weight update: three methods that stand for /start_weight_update, /update_weights and
    /finish_weight_update. Any other is refused."""
    if method == "update_weights_ipc":
        raise ApiError(
            400, "update_weights_ipc carries pickles, which are never read from the network.", param="method"
        )
    if method not in _METHODS:
        raise ApiError(400, f"there is no method {method[:100]!r}, only {', '.join(_METHODS)}", param="method")
    await weights.call(server, _METHODS[method], kwargs)
    return {"results": [None] * server.engine.world_size}
