"""The OpenAPI document: FastAPI's own, and what FastAPI can't see of the answers that msgspec writes, and of errors."""

from __future__ import annotations

from array import array
from typing import Any, Literal

import msgspec
from fastapi import FastAPI

from rollout.server.errors import ErrorBody
from rollout.server.wire.answer import Writer
from rollout.server.wire.chat import ChatChunk, ChatResponse, ChatWriter
from rollout.server.wire.completions import CompletionChunk, CompletionResponse, CompletionWriter
from rollout.server.wire.lora_path import LoadedAdapters
from rollout.server.wire.messages import MessagesWriter
from rollout.server.wire.render import DerenderedChunk, RenderedRequest
from rollout.server.wire.sglang import SGLangWriter
from rollout.server.wire.tokens import GenerateWriter
from rollout.weights import bodies

_DIALECTS: dict[str, type[Writer[Any]]] = {
    "/inference/v1/generate": GenerateWriter,
    "/v1/completions": CompletionWriter,
    "/v1/chat/completions": ChatWriter,
    "/v1/messages": MessagesWriter,
    "/generate": SGLangWriter,
}

# What is answered: one of these types.
_ANSWERS: dict[str, tuple[Any, ...]] = {
    **{path: writer.whole_kinds for path, writer in _DIALECTS.items()},
    "/v1/completions/render": (list[RenderedRequest],),
    "/v1/chat/completions/render": (RenderedRequest,),
    "/v1/completions/derender": (CompletionResponse, DerenderedChunk[CompletionChunk]),
    "/v1/chat/completions/derender": (ChatResponse, DerenderedChunk[ChatChunk]),
}

# What the events of a stream are; the last one of each says that something went wrong after the first.
_EVENTS = {path: writer.event_kinds for path, writer in _DIALECTS.items()}

_ADAPTERS = {"/load_lora_adapter", "/unload_lora_adapter"}
_ANSWERS |= dict.fromkeys(_ADAPTERS, (LoadedAdapters,))
_TEXTS = {"/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
_EMPTY = {
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/health",
    "/liveness",
    "/health_generate",
    "/abort_request",
    "/ping",
    "/inference/v1/abort_requests",
    "/sleep",
    "/wake_up",
}

# The bodies of weight calls, which the engine reads.
_BODIES: dict[str, type] = {
    "/init_weight_transfer_engine": bodies.InitBody,
    "/start_weight_update": bodies.StartBody,
    "/update_weights": bodies.UpdateBody,
    "/finish_weight_update": bodies.FinishBody,
    "/update_weight_version": bodies.VersionBody,
    "/weight_checker": bodies.CheckerBody,
}


class Refusal(msgspec.Struct):
    """A weight call of SGLang's dialect that was refused: all that its update had received is dropped."""

    success: Literal[False]
    message: str


# Paths whose 400 is a Refusal, but where the body itself is wrong.
_REFUSALS = {
    *("/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update"),
    *("/update_weights_from_distributed", "/update_weights_from_disk", "/update_weights_from_tensor"),
    *("/update_weights_from_ipc", "/pull_weights", "/weights_checker", "/continue_generation"),
}

_ERRORS = {
    400: "The body or a parameter is wrong; `param` names it.",
    401: "The server needs an API key.",
    403: "The endpoint, or the page that sends the request, needs a flag that the server was started without.",
    404: "There is no such model.",
    408: "The body stopped coming.",
    409: "A weight call out of order; the message names the state.",
    413: "The body is too large.",
    503: "The engine is restarting, paused, full or shutting down, or a sender of weights was lost. Retry-After says "
    "when to ask again, where that can be known.",
}


def install_openapi(app: FastAPI) -> None:
    """Make the app's document true to its answers: their bodies, and the errors in place of FastAPI's 422."""
    plain = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(plain())
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    told = [kind for table in (_ANSWERS, _EVENTS) for kinds in table.values() for kind in kinds]
    kinds = list({repr(kind): kind for kind in (*told, ErrorBody, Refusal, *_BODIES.values())}.values())
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}", schema_hook=_array_schema
    )
    by_kind = dict(zip(map(repr, kinds), schemas, strict=True))
    document["components"]["schemas"] |= components
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused, None)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation, by_kind)
    return document


def _complete(path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    if path in _ANSWERS:
        content = {"application/json": {"schema": _any_of(_ANSWERS[path], schemas)}}
        if path in _EVENTS:
            content["text/event-stream"] = {"schema": _event(_any_of(_EVENTS[path], schemas))}
        responses["200"]["content"] = content
    elif path in _EMPTY:
        responses["200"].pop("content", None)
    elif path in _TEXTS:
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if path in _BODIES:
        body = schemas[repr(_BODIES[path])]
        operation["requestBody"]["content"]["application/json"]["schema"] = body
    error = {"application/json": {"schema": schemas[repr(ErrorBody)]}}
    for status, description in _ERRORS.items():
        responses[str(status)] = {"description": description, "content": error}
    if path in _ADAPTERS:
        either = _any_of((ErrorBody, LoadedAdapters), schemas)
        responses["400"] = responses["400"] | {"content": {"application/json": {"schema": either}}}
    if path in _REFUSALS:
        either = _any_of((ErrorBody, Refusal), schemas)
        responses["400"] = responses["400"] | {"content": {"application/json": {"schema": either}}}


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """The schema of one server-sent event, which is what stands for a stream in OpenAPI 3.1."""
    forms = [{"const": "[DONE]"}, {"type": "string", "contentMediaType": "application/json", "contentSchema": data}]
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": forms}},
        "required": ["data"],
    }


def _any_of(kinds: tuple[Any, ...], schemas: dict[str, Any]) -> dict[str, Any]:
    found = [schemas[repr(kind)] for kind in kinds]
    return {"anyOf": found} if len(found) > 1 else found[0]


def _array_schema(kind: type) -> dict[str, Any]:
    if kind is array:
        return {"type": "array", "items": {"type": "integer"}}
    raise NotImplementedError(kind)
