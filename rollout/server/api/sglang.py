"""SGLang's control of a server: pause and continue, weights, memory, and what it says of itself.

Its weight calls name neither a trainer nor an update, and know no commit. Here they are our transaction: the first
chunk after /pause_generation or /begin_weight_update opens an update, /continue_generation or /end_weight_update
commits it, and a chunk that fails drops all of it. A chunk outside of such a bracket, and a folder, is an update of its
own. A trainer is who joined last under the name of its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from rollout.config import KVPolicy
from rollout.fleet.errors import EngineError
from rollout.messages import SLEEP_TAGS, SleepTag
from rollout.server.api import control, weights
from rollout.server.context import ServerContext, ServerDep
from rollout.server.errors import ApiError
from rollout.server.limits import require_json
from rollout.server.wire.body import MAX_PROMPTS
from rollout.weights.errors import WeightUpdateError
from rollout.weights.pulling import pull_aside

router = APIRouter(dependencies=[Depends(require_json)])
memory_router = APIRouter(dependencies=[Depends(require_json)])

GROUP = "weight_update_group"
_MAX_IDLE_S = 600.0
_MOST_GROUPS = 16
PauseGeneration = Literal["abort", "retract", "in_place"]
# What a pause's mode says of the cache of those that go on after it.
_KV_POLICY: dict[PauseGeneration | None, KVPolicy | None] = {"retract": "recompute", "in_place": "keep"}
Answer = dict[str, Any]
JSON = Annotated[dict[str, Any], Body()]
Optionally = Annotated[dict[str, Any] | None, Body()]  # sent by some, and says nothing here


@dataclass
class Bracket:
    """What SGLang's trainers don't say in each call. `owners`: who has joined under which group's name, by our tokens.

    `mode` is that of the pause in force, `begun` whether /begin_weight_update was called; `update` are the ids of the
    open update, `label` the last `weight_version` of its chunks, `baseline` the checksums of a snapshot.
    """

    server: ServerContext
    owners: dict[str, str] = field(default_factory=dict)
    mode: PauseGeneration | None = None
    begun: bool = False
    update: dict[str, str] | None = None
    label: str | None = None
    baseline: dict[str, str] | None = None

    async def receive(self, chunk: Answer) -> None:
        """Take the tensors that a call announces. Raises EngineError or ApiError; all of the update is dropped then."""
        group = chunk.get("group_name", GROUP)
        owner = self.owners.get(group) if isinstance(group, str) else None
        if owner is None:
            raise ApiError(400, f"no group {group!r}: call /init_weights_update_group", param="group_name")
        partial = self.mode is None and not self.begun
        try:
            for name, known in (("load_format", (None, "auto")), ("selector", (None, "all", "target"))):
                if (value := chunk.get(name)) not in known:  # its broadcasts may be on their way already
                    await weights.call(self.server, "shutdown_weight_transfer_engine", {"owner": owner})
                    raise ApiError(400, f"{name} {value!r} is not supported; leave it out, and join again", param=name)
            if self.update is None:
                self.update, self.label = {"owner": owner, "update_id": secrets.token_hex(8)}, None
                start = {**self.update, "partial": partial, "kv_policy": _KV_POLICY.get(self.mode)}
                await weights.call(self.server, "start_weight_update", start)
            info = {"names": chunk.get("names"), "dtype_names": chunk.get("dtypes"), "shapes": chunk.get("shapes")}
            ids = {**self.update, "owner": owner}
            await weights.call(self.server, "update_weights", {**ids, "update_info": info})
            if chunk.get("weight_version") is not None:
                self.label = chunk["weight_version"]
            if partial:
                await self.commit()
        except (EngineError, ApiError):
            await self.drop()
            raise

    async def commit(self) -> None:
        """Commit what is open, if anything is. Raises EngineError; it is dropped then."""
        update, self.update = self.update, None
        if update is None:
            return
        try:
            await weights.call(self.server, "finish_weight_update", {**update, "weight_version": self.label})
        except EngineError:
            await self.drop(update)
            raise

    async def drop(self, update: dict[str, str] | None = None) -> None:
        """Drop what is open, if it still is: the engines have mostly done so themselves."""
        update, self.update = update or self.update, None
        if update is not None:
            with contextlib.suppress(EngineError):
                await self.server.engine.call("abort_weight_update", update, timeout_s=control.CONTROL_TIMEOUT_S)


async def _bracket(request: Request) -> Bracket:
    state = request.app.state
    if not hasattr(state, "bracket"):
        state.bracket = Bracket(state.server)
    bracket: Bracket = state.bracket
    return bracket


BracketDep = Annotated[Bracket, Depends(_bracket)]


def _told(call: Callable[..., Awaitable[Answer | None]]) -> Callable[..., Awaitable[Response]]:
    """A path that answers as SGLang's weight calls do: 200 with success true, or 400 with false and why."""

    @wraps(call)
    async def told(*args: Any, **kwargs: Any) -> Response:
        try:
            answer = await call(*args, **kwargs)
        except (EngineError, ApiError) as error:
            return JSONResponse({"success": False, "message": str(error)}, 400)
        return JSONResponse({"success": True, "message": "Success."} | (answer or {}))

    return told


# -- generation


@router.post("/pause_generation")
async def pause_generation(bracket: BracketDep, mode: Annotated[PauseGeneration, Body(embed=True)] = "abort") -> Answer:
    """Stop generating; what comes meanwhile waits. abort: what runs ends now, with the tokens it has. retract,
    in_place: it goes on at /continue_generation, after an update with its cache computed anew, or as it is.

    With --no-pause-generation-aborts, abort ends and stops nothing: the weights come beside what runs.
    """
    server = bracket.server
    if mode != "abort" or server.config.pause_generation_aborts:
        await control.pause_engines(server, "abort" if mode == "abort" else "keep", new_requests="keep")
    bracket.mode = mode
    return {"status": "ok", "message": "Generation paused successfully."}


@router.post("/continue_generation", response_model=Answer)
async def continue_generation(bracket: BracketDep, body: Optionally = None) -> Response:
    """Commit the weights that came since /pause_generation, if any, and generate again. Where they can't be committed
    it is a 400 that says why, and the old ones generate."""
    failure = None
    try:
        await bracket.commit()
    except EngineError as error:
        failure = error
    bracket.mode, bracket.begun = None, False
    if bracket.server.pause_mode is not None:
        await control.resume(bracket.server)
    if failure is not None:
        return JSONResponse({"success": False, "message": str(failure)}, 400)
    return JSONResponse({"status": "ok", "message": "Generation continued successfully."})


@router.post("/abort_request")
async def abort_request(
    server: ServerDep,
    rid: Annotated[str | None, Body(embed=True)] = None,
    abort_all: Annotated[bool, Body(embed=True)] = False,
) -> Response:
    """End the requests of this `rid`, those of a batch included, or all."""
    if abort_all:
        server.engine.abort(None)
    elif rid:
        server.engine.abort([rid, *(f"{rid}_{index}" for index in range(MAX_PROMPTS))])
    return Response()


@router.get("/flush_cache", include_in_schema=False, response_class=PlainTextResponse)
@router.post("/flush_cache", response_class=PlainTextResponse)
async def flush_cache(bracket: BracketDep, timeout: Annotated[float, Query(ge=0, le=_MAX_IDLE_S)] = 0) -> str:
    """Forget every cached prefix; a 400 where requests still run after `timeout` seconds, unless generation is
    paused."""
    until = time.monotonic() + timeout
    while bracket.mode is None and (running := bracket.server.engine.in_flight):
        if time.monotonic() >= until:
            raise ApiError(400, f"{running} choices run or wait: pause first, or ask again once they have ended.")
        await asyncio.sleep(0.02)
    await bracket.server.engine.call("reset_prefix_cache", timeout_s=control.CONTROL_TIMEOUT_S)
    return "Cache flushed.\n"


# -- weights


@router.post("/init_weights_update_group")
@_told
async def init_weights_update_group(bracket: BracketDep, body: JSON) -> Answer | None:
    """Join the trainer's group, made as torch's init_process_group makes one of this name."""
    group, port = body.get("group_name", GROUP), body.get("master_port")
    if body.get("pp_rank"):
        raise ApiError(400, f"pp_rank {body['pp_rank']!r}: this server has no pipeline stages", param="pp_rank")
    info = {key: body[key] for key in ("master_address", "rank_offset", "world_size", "backend") if key in body}
    if isinstance(port, str) and port.isdecimal() and len(port) <= 5:
        port = int(port)  # as AReaL sends it
    if isinstance(host := info.get("master_address"), str):
        info["master_address"] = host.strip("[]")
    owner = secrets.token_hex(8)
    init = {"init_info": info | {"group_name": group, "master_port": port}, "owner": owner}
    await weights.call(bracket.server, "init_weight_transfer_engine", init)
    bracket.owners.pop(group, None)
    bracket.owners[group] = owner
    for oldest in list(bracket.owners)[:-_MOST_GROUPS]:
        del bracket.owners[oldest]
    return None


@router.post("/destroy_weights_update_group")
@_told
async def destroy_weights_update_group(
    bracket: BracketDep, group_name: Annotated[str, Body(embed=True)] = GROUP
) -> Answer | None:
    """Leave the trainer's group."""
    owner = bracket.owners.pop(group_name, None)
    if owner is None:
        raise ApiError(400, f"no group {group_name!r}", param="group_name")
    await weights.call(bracket.server, "shutdown_weight_transfer_engine", {"owner": owner})
    return None


@router.post("/begin_weight_update")
@_told
async def begin_weight_update(bracket: BracketDep, body: Optionally = None) -> Answer | None:
    """What comes until /end_weight_update is one update."""
    bracket.begun = True
    return None


@router.post("/end_weight_update")
@_told
async def end_weight_update(bracket: BracketDep, body: Optionally = None) -> Answer | None:
    """Commit what has come since the update began."""
    bracket.begun = False
    if bracket.update is None:
        raise ApiError(400, "no update is open: nothing came, or a chunk failed and all of it was dropped")
    await bracket.commit()
    return None


@router.post("/update_weights_from_distributed")
@_told
async def update_weights_from_distributed(bracket: BracketDep, body: JSON) -> Answer | None:
    """Receive what `names`, `dtypes` and `shapes` announce from the group's root: one broadcast each, in order."""
    if body.get("abort_all_requests") is True:
        bracket.server.abort_for_update()
    await bracket.receive(body)
    return None


@router.post("/update_weights_from_disk")
@_told
async def update_weights_from_disk(
    bracket: BracketDep,
    model_path: Annotated[str, Body(embed=True)],
    weight_version: Annotated[str | None, Body(embed=True)] = None,
    load_format: Annotated[Literal["auto", "safetensors"] | None, Body(embed=True)] = None,
    abort_all_requests: Annotated[bool, Body(embed=True)] = False,
) -> Answer | None:
    """Read and commit a folder of safetensors."""
    if abort_all_requests:
        bracket.server.abort_for_update()
    update = {"weight_dir": model_path, "weight_version": weight_version, "kv_policy": _KV_POLICY.get(bracket.mode)}
    try:
        await weights.call(bracket.server, "update_weights", update)
    except EngineError:
        await bracket.drop()
        raise
    return {"num_paused_requests": 0}


@router.post("/pull_weights")
@_told
async def pull_weights(
    server: ServerDep,
    local_checkpoint_dir: Annotated[str, Body(embed=True, min_length=1)],
    source_dir: Annotated[str, Body(embed=True)],
    target_version: Annotated[int, Body(embed=True, ge=0, lt=2**31)],
) -> Answer | None:
    """Bring a local checkpoint to a version that slime has published; /update_weights_from_disk then loads it."""
    config = server.engine_config
    try:
        await pull_aside(
            *(local_checkpoint_dir, config.model, source_dir, target_version), timeout_s=config.weight_update_timeout_s
        )
    except WeightUpdateError as error:
        raise ApiError(error.status, str(error)) from error
    return None


@router.post("/update_weights_from_ipc")
@router.post("/update_weights_from_tensor")
@_told
async def update_weights_from_pickles(body: Annotated[Any, Body()] = None) -> Answer | None:
    """Refused: these carry pickles."""
    raise ApiError(
        400,
        "This call carries pickles, which are never read from the network. Use /update_weights_from_distributed or "
        "/update_weights_from_disk.",
    )


@router.post("/weights_checker")
@_told
async def weights_checker(
    bracket: BracketDep, action: Annotated[Literal["checksum", "snapshot", "compare"], Body(embed=True)] = "checksum"
) -> Answer | None:
    """Checksums of the stored weights; `snapshot` keeps them, `compare` says whether they are still the same."""
    if action == "compare":
        if bracket.baseline is None:
            raise ApiError(400, "compare needs a snapshot before it", param="action")
        compared = {"action": "compare", "baseline": bracket.baseline}
        if wrong := (await weights.call(bracket.server, "weight_checker", compared))["mismatches"]:
            raise ApiError(400, f"{len(wrong)} tensors differ from the snapshot: {', '.join(wrong[:5])}")
        return None
    answer = await weights.call(bracket.server, "weight_checker", {"action": "checksum"})
    if action == "snapshot":
        bracket.baseline = answer["checksums"]
        return None
    return {"checksums": answer["checksums"]}


# -- memory

Tags = Annotated[list[SleepTag] | None, Body(embed=True)]


@memory_router.post("/release_memory_occupation")
async def release_memory_occupation(server: ServerDep, tags: Tags = None) -> Response:
    """Give the memory of these parts back, or of all; weights are kept in host memory. What runs ends now."""
    timeout_s, asleep = server.engine_config.weight_update_timeout_s, server.engine.sleeping.asleep
    await server.engine.sleeping.sleep(1, "abort", timeout_s)
    if tags and (awake := set(SLEEP_TAGS) - {*tags, *asleep}):
        await server.engine.sleeping.wake_up(awake, timeout_s)
    return Response()


@memory_router.post("/resume_memory_occupation")
async def resume_memory_occupation(server: ServerDep, tags: Tags = None) -> Response:
    """Take the memory of these parts again, or of all."""
    await server.engine.sleeping.wake_up(tags or SLEEP_TAGS, server.engine_config.weight_update_timeout_s)
    return Response()


# -- what it says of itself


@router.get("/health_generate")
async def health_generate(server: ServerDep) -> Response:
    """As /health."""
    return await control.health(server)


@router.get("/get_model_info", include_in_schema=False)
@router.get("/model_info")
async def model_info(server: ServerDep) -> Answer:
    """What SGLang's clients and its router read of the model."""
    return {
        "model_path": server.engine_config.model,
        "served_model_name": server.model_name,
        "tokenizer_path": server.engine_config.model,
        "is_generation": True,
        "weight_version": server.engine.weight_version,
        "model_type": server.model.model_type,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


@router.get("/get_weight_version")
async def get_weight_version(server: ServerDep) -> Answer:
    """The label that serves."""
    return {"weight_version": server.engine.weight_version}


@router.get("/v1/loads")
async def loads(server: ServerDep) -> Answer:
    """How many choices each engine runs, and how many wait."""
    stats = await server.engine.stats(control.CONTROL_TIMEOUT_S)
    told = [
        {"dp_rank": rank, "num_running_reqs": counted["running"], "num_waiting_reqs": counted["waiting"]}
        for rank, counted in stats.items()
    ]
    return {"timestamp": time.time(), "dp_rank_count": len(told), "loads": told}
