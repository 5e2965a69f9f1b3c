"""A rank that joins a fleet, or comes back to it, takes its weights from one that serves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.fleet.client import EngineClient
from rollout.fleet.weight_calls import call_all

_CALL_S = 60.0
# How long a rank may take to receive a whole model, and how long any single wait in that may be.
_COPY_S = 1800.0
_STALL_S = 60.0


async def copy_weights(source: EngineClient, client: EngineClient) -> int:
    """Bring the weights that `source` serves to `client`, which serves nothing yet; returns their epoch.

    It is an update like any other, with `source` for its trainer. Raises EngineError.
    """
    size = {"world_size": 1 + client.info.world_size}
    meeting = {"timeout_s": _STALL_S, "address": source.address} | size
    offer = await source.send_call("offer_weights", meeting, timeout_s=_CALL_S)
    init = {
        "backend": "gloo",
        "master_address": source.address,
        "master_port": offer["port"],
        "timeout_s": _STALL_S,
        "force": True,
    } | size
    named = {key: offer[key] for key in ("names", "dtype_names", "shapes")}

    async def call(method: str, params: dict[str, Any]) -> None:
        await client.send_call(method, params, timeout_s=_COPY_S)

    await call("pause", {"mode": "keep"})  # an update in place needs it
    await call("init_weight_transfer_engine", {"init_info": init})
    await call("start_weight_update", {})
    await call("update_weights", {"update_info": named})
    await call("finish_weight_update", {"weight_version": offer["version"]})
    await call("shutdown_weight_transfer_engine", {})
    return int(offer["epoch"])


async def weights_to_give(sources: Sequence[EngineClient]) -> tuple[list[EngineClient], bool]:
    """Which of these have valid weights to give, and whether a trainer's update of any is under way. Raises
    EngineError."""
    infos = await call_all(sources, "weight_info", {}, _CALL_S)
    valid = [source for source, info in infos.items() if info["weights"] == "valid"]
    return valid, any(info["state"] in ("open", "receiving", "ready") for info in infos.values())
