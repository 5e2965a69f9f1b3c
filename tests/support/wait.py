"""Waiting for something that another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Return once the condition is true; fail the test where it isn't within the limit."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {timeout_s} s"
        time.sleep(0.005)
