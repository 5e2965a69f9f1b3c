"""LoRA adapters: loaded from a folder under a name, as vLLM's and SGLang's clients ask for it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Body, Depends
from fastapi.responses import PlainTextResponse, Response

from rollout.config import named_adapter
from rollout.fleet.adapters import MOST_NAME, NameTakenError
from rollout.fleet.errors import EngineError
from rollout.server.context import ServerContext, ServerDep
from rollout.server.errors import ApiError
from rollout.server.limits import require_json
from rollout.server.wire.body import Text
from rollout.server.wire.lora_path import LoadedAdapters

router = APIRouter(dependencies=[Depends(require_json)])

_MOST_PATH = 4096
_INVALID = "InvalidUserInput"  # vLLM's name for it
LOAD_TIMEOUT_S = 1800.0

Name = Annotated[Text | None, Body(embed=True)]


async def load(server: ServerContext, name: str | None, path: str | None, *, replace: bool) -> None:
    """Load a folder as the newest version of this name. Raises ApiError, as vLLM words it, or EngineError."""
    if not name or not path:
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", type=_INVALID)
    if len(name) > MOST_NAME or len(path) > _MOST_PATH:
        message = f"'lora_name' may have {MOST_NAME} characters, 'lora_path' {_MOST_PATH}."
        raise ApiError(400, message, type=_INVALID)
    try:
        await server.engine.adapters.load(name, path, replace=replace, timeout_s=LOAD_TIMEOUT_S)
    except NameTakenError as error:
        raise ApiError(400, str(error), type=_INVALID) from None


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(
    server: ServerDep,
    lora_name: Name = None,
    lora_path: Name = None,
    load_inplace: Annotated[bool, Body(embed=True)] = False,
) -> PlainTextResponse:
    """vLLM's: serve the folder that `save_pretrained` of PEFT wrote as the model `lora_name`.

    With `load_inplace`, also where there is one of this name: what runs on that ends on it.
    """
    await load(server, lora_name, lora_path, replace=load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(server: ServerDep, lora_name: Name = None) -> PlainTextResponse:
    """vLLM's: serve this adapter no more, in any version. What runs on it ends on it."""
    if not lora_name:
        raise ApiError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", type=_INVALID)
    await server.engine.adapters.unload(lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{lora_name}' removed successfully.")


@router.post("/load_lora_adapter")
async def sglang_load_lora_adapter(server: ServerDep, lora_name: Name = None, lora_path: Name = None) -> Response:
    """SGLang's, and prime-rl's, which loads every version under one name: a new one takes the old one's place."""
    try:
        await load(server, lora_name, lora_path, replace=True)
    except (ApiError, EngineError) as error:
        return _told(server, error)
    return _told(server)


@router.post("/unload_lora_adapter")
async def sglang_unload_lora_adapter(server: ServerDep, lora_name: Name = None) -> Response:
    """SGLang's."""
    try:
        await server.engine.adapters.unload(lora_name or "")
    except EngineError as error:
        return _told(server, error)
    return _told(server)


def _told(server: ServerContext, error: ApiError | EngineError | None = None) -> Response:
    """SGLang's answer: a 400 for what the caller can mend, whatever it is elsewhere, and a 503 for what may pass."""
    loaded = {version.name: version.root for version in server.engine.adapters.current}
    answer = LoadedAdapters(error is None, "" if error is None else str(error), loaded)
    status = 200 if error is None else 400 if error.status < 500 else error.status
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


async def load_modules(server: ServerContext) -> None:
    """Load what --lora-modules names, before the server serves. Raises EngineError that names the entry at fault."""
    for module in server.config.lora_modules:
        name, path = named_adapter(module)
        try:
            await load(server, name, path, replace=False)
        except (ApiError, EngineError) as error:
            raise EngineError(f"--lora-modules {module}: {error}") from None
