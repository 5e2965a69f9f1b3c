"""Errors as clients see them: `{"error": {"message", "type", "param", "code"}}`, whoever refuses the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from rollout.fleet.errors import EngineError
from rollout.sampling.params import ParameterError
from rollout.server.absent import why_absent

# Types of our own refusals; any other status bears its HTTP phrase, as do the framework's errors.
_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_MAX_SHOWN_ERRORS = 5
_MAX_SHOWN_INPUT = 200


class ErrorDetail(msgspec.Struct):
    """What is wrong; `param` is the field at fault, `code` the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is refused: HTTP status, a sentence with the value and the remedy, the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.type = type or _TYPES.get(status) or HTTPStatus(status).phrase
        self.headers = headers


def error_body(error: ApiError) -> bytes:
    """The JSON of an error. Lone surrogates that a client sent are replaced: they can't be encoded."""

    def text(value: str) -> str:
        return value.encode("utf-8", "replace").decode()

    param = text(error.param) if error.param is not None else None
    return msgspec.json.encode(ErrorBody(ErrorDetail(text(error.message), error.type, param, error.status)))


def error_response(error: ApiError) -> Response:
    """An error as an HTTP answer."""
    return Response(error_body(error), error.status, media_type="application/json", headers=dict(error.headers or {}))


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an exception raised while its request was served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ParameterError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, EngineError):
        headers = {"Retry-After": "1"} if error.status == 503 else None
        return ApiError(error.status, str(error), param=error.param, headers=headers)
    return ApiError(500, f"The server failed on this request: {type(error).__name__}. Its log has the traceback.")


def _summary(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= _MAX_SHOWN_INPUT else f"{text[:_MAX_SHOWN_INPUT]}…"


def validation_error(errors: Sequence[Any]) -> ApiError:
    """Pydantic's (or FastAPI's) findings in the wording that vLLM clients know; `param` is the first one's path."""
    lines = []
    for error in errors[:_MAX_SHOWN_ERRORS]:
        if isinstance(error, Mapping):
            shown = {"type": error["type"], "loc": ".".join(map(str, error["loc"])), "msg": error["msg"]}
            shown["input"] = _summary(error.get("input"))
            lines.append(str(shown | ({"ctx": error["ctx"]} if error.get("ctx") else {})))
        else:
            lines.append(str(error))
    if len(errors) > _MAX_SHOWN_ERRORS:
        lines.append(f"… and {len(errors) - _MAX_SHOWN_ERRORS} more")
    first = errors[0] if errors else None
    param = ".".join(map(str, first["loc"])) if isinstance(first, Mapping) else None
    count = f"{len(errors)} validation error{'' if len(errors) == 1 else 's'}"
    return ApiError(400, f"{count}:\n" + "\n".join(f"  {line}" for line in lines), param=param, type="Bad Request")


async def _on_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors()))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase, absent = HTTPStatus(error.status_code).phrase, None
    if error.status_code == 404:
        absent = why_absent(request.url.path.removeprefix(request.scope.get("root_path", "")))
    return error_response(ApiError(error.status_code, absent or str(error.detail), type=phrase, headers=error.headers))


async def _on_error(_: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of the app this shape, the framework's own 404 and 405 included."""
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    for kind in (ApiError, ParameterError, EngineError, Exception):
        app.add_exception_handler(kind, _on_error)
