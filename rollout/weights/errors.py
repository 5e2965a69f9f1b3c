"""Why a weight update, or one call of it, was refused."""

from __future__ import annotations

import errno
import logging

logger = logging.getLogger(__name__)

DISK_FAILURES = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Of reads that a request asked for: the errors that say more of the machine than of the request."""


_MOST_SAID = 4000
"""Characters of a message, which may quote what a caller has sent, or a folder holds."""


class WeightUpdateError(Exception):
    """A refused or failed call: the HTTP status to answer with, and a sentence with the value and the remedy.

    400: the body, or what it names, is wrong. 409: the call comes out of order. 503: the sender was lost or stalled.
    500: a fault of our own. `param` names the field of the body that it is about, where it is one: "owner" means that
    the transfer belongs to another trainer.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        if len(message) > _MOST_SAID:
            message = message[:_MOST_SAID] + "…"
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


class AbandonedError(Exception):
    """Raised within a job whose update is over, to end it."""


def as_update_error(error: BaseException) -> WeightUpdateError:
    """What to answer for any failure; one of our own is logged."""
    if isinstance(error, WeightUpdateError):
        return error
    logger.error("weight update failed", exc_info=error)
    return WeightUpdateError(500, f"{type(error).__name__}: {error}")


_MOST_ENTRY = 400


def listing(entries: list[str]) -> str:
    """The first few entries spelled out, and how many more there are."""
    shown = 8
    more = f"; and {len(entries) - shown} more" if len(entries) > shown else ""
    told = [entry if len(entry) <= _MOST_ENTRY else entry[:_MOST_ENTRY] + "…" for entry in entries[:shown]]
    return "; ".join(told) + more
