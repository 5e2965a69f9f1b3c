"""What is asked of a server beside generation: is it alive, what does it serve, pause, resume, abort."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Query, Request, Response

from rollout.fleet.errors import EngineError
from rollout.server.context import PauseMode, ServerContext, ServerDep
from rollout.server.errors import ApiError
from rollout.server.limits import require_json
from rollout.version import __version__

router = APIRouter(dependencies=[Depends(require_json)])

# For calls that the engine answers between two steps; a step may be a long one.
CONTROL_TIMEOUT_S = 60.0

# More than one address can serve, and longer than any rollout takes: whoever asks for more has mistyped.
MAX_ENGINES = 1024
MAX_DRAIN_S = 86_400.0


@router.get("/health")
async def health(server: ServerDep) -> Response:
    """200 and no body; 503 while there is no engine. One that lost its weights is healthy: trainers ask, then push."""
    if server.engine.error is not None:
        raise server.engine.error
    return Response()


@router.get("/ping")
@router.post("/ping")
async def ping(server: ServerDep) -> Response:
    """The same under the name that SageMaker probes."""
    return await health(server)


@router.get("/liveness")
async def liveness(server: ServerDep) -> Response:
    """The same under the name that prime-rl probes."""
    return await health(server)


@router.get("/version")
async def version() -> dict[str, str]:
    """This package's version."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(server: ServerDep) -> Response:
    """Prometheus series. Behind the key, like all but the probes."""
    stats = await server.engine.stats(CONTROL_TIMEOUT_S)
    restarts = {client.rank: client.restarts for client in server.engine.ranks}
    return Response(server.metrics.render(stats, restarts), headers={"content-type": server.metrics.content_type})


@router.get("/v1/models")
async def models(server: ServerDep) -> dict[str, Any]:
    """The model served and its adapters, in OpenAI's list form; an adapter's `parent` is the model."""
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": server.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    model = {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "rollout",
        "root": server.engine_config.model,
        "parent": None,
        "max_model_len": server.model.max_model_len,
        "permission": [permission],
    }
    adapters = [
        model | {"id": version.name, "root": version.root, "parent": server.model_name, "weight_version": version.label}
        for version in server.engine.adapters.current
    ]
    return {"object": "list", "data": [model, *adapters]}


def sglang_info(server: ServerContext) -> dict[str, Any]:
    """The part of SGLang's server arguments that its trainers and its router read. `num_gpus`: the ranks that all
    engines take in a trainer's group."""
    return {
        "model_path": server.engine_config.model,
        "served_model_name": server.model_name,
        "dtype": server.model.dtype,
        "tp_size": server.engine_config.tensor_parallel_size,
        "pp_size": 1,
        "ep_size": 1,
        "dp_size": len(server.engine.ranks),
        "num_gpus": server.engine.world_size,
        "disaggregation_mode": "null",
        "encoder_only": False,
        "enable_memory_saver": server.engine_config.enable_sleep_mode,
        "enable_return_routed_experts": server.engine_config.enable_return_routed_experts,
        "max_total_num_tokens": server.model.num_blocks * server.model.block_size,
        "version": __version__,
    }


@router.get("/get_server_info", include_in_schema=False)
@router.get("/server_info")
async def server_info(server: ServerDep, config_format: Literal["json"] = "json") -> dict[str, Any]:
    """What trainers read of vLLM's configuration, and of SGLang's."""
    info, mode, config = server.model, server.engine_config.logprobs_mode, server.engine_config
    lora = {name: getattr(config, name) for name in ("max_loras", "max_cpu_loras", "max_lora_rank")}
    return {
        **sglang_info(server),
        "vllm_config": {
            "model_config": {"dtype": f"torch.{info.dtype}", "logprobs_mode": mode},
            "lora_config": lora if config.enable_lora else None,
            "parallel_config": {"data_parallel_size": len(server.engine.ranks)},
            "weight_transfer_config": {"backend": "nccl" if info.device.startswith("cuda") else "gloo"},
        },
    }


@router.post("/pause")
async def pause(server: ServerDep, mode: PauseMode = "abort", clear_cache: bool = False) -> dict[str, str]:
    """Stop generating. abort: running requests end now; wait: once they have finished; keep: they go on at resume.

    New requests are refused in the first two modes, queued in the third. A wait that takes too long is a 503, and the
    pause stands. In the first two modes `clear_cache` forgets every cached prefix, too; that isn't needed for new
    weights, which find no prefix of older ones.
    """
    await pause_engines(server, mode, new_requests=mode)
    if clear_cache and mode != "keep":
        await server.engine.call("reset_prefix_cache", timeout_s=CONTROL_TIMEOUT_S)
    return {"status": "paused"}


async def pause_engines(server: ServerContext, mode: PauseMode, *, new_requests: PauseMode) -> None:
    """Pause what runs in one mode, and treat what comes meanwhile as another mode says."""
    # Set first: what is sent after the call would not be covered by it.
    before, server.pause_mode = server.pause_mode, new_requests
    try:
        await server.engine.call("pause", {"mode": mode}, timeout_s=server.engine_config.weight_update_timeout_s)
    except EngineError as error:
        if error.status < 500:  # refused, so nothing has changed
            server.pause_mode = before
        raise


@router.post("/resume")
async def resume(server: ServerDep) -> dict[str, str]:
    """Generate again."""
    await server.engine.call("resume", timeout_s=CONTROL_TIMEOUT_S)
    server.pause_mode = None
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(server: ServerDep) -> dict[str, Any]:
    """Whether the engine is paused."""
    return await server.engine.call("is_paused", timeout_s=CONTROL_TIMEOUT_S)


@router.post("/scale_elastic_ep")
async def scale_elastic_ep(
    server: ServerDep,
    new_data_parallel_size: Annotated[int, Body(embed=True, ge=1, le=MAX_ENGINES)],
    drain_timeout: Annotated[float, Body(embed=True, ge=0, le=MAX_DRAIN_S)] = 120.0,
) -> dict[str, str]:
    """Serve with so many engines, under vLLM's name for it; answers once it is so.

    New ones take the fleet's weights from one that serves. Those that leave have `drain_timeout` seconds for what they
    run. A trainer must call /init_weight_transfer_engine again after it.
    """
    await server.engine.scale(new_data_parallel_size, drain_timeout_s=drain_timeout)
    return {"message": f"Scaled to {new_data_parallel_size} data parallel engines"}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    server: ServerDep,
    reset_running_requests: Annotated[bool, Query(include_in_schema=False)] = False,
    reset_external: Annotated[bool, Query(include_in_schema=False)] = False,
) -> dict[str, bool]:
    """Forget every cached prefix."""
    for name, asked, why in (
        ("reset_running_requests", reset_running_requests, "what runs keeps its cache: POST /pause?mode=abort ends it"),
        ("reset_external", reset_external, "there is no cache but the engines' own"),
    ):
        if asked:
            raise ApiError(400, f"{name} is not supported by this server: {why}; leave it out.", param=name)
    await server.engine.call("reset_prefix_cache", timeout_s=CONTROL_TIMEOUT_S)
    return {"success": True}


@router.post("/abort_requests")
async def abort_requests(
    request: Request, server: ServerDep, request_ids: Annotated[list[str] | None, Body(embed=True)] = None
) -> Any:
    """End these requests, or all. A caller without the key gets the legacy call: named ids only, an empty answer."""
    if not request.state.authenticated:
        if request_ids is None:
            raise ApiError(400, "Missing 'request_ids' in request body", type="Bad Request")
        server.engine.abort(request_ids)
        return Response()
    return {"status": "aborted", "aborted": server.engine.abort(request_ids)}
