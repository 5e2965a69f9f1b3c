"""What goes wrong between a server and its engines."""

from __future__ import annotations


class EngineError(Exception):
    """The engine refused a call, did not answer in time, or is dead. `status` is the HTTP status to pass on."""

    def __init__(self, message: str, *, status: int = 503, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
