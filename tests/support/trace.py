"""What a piece of work costs in steps that don't depend on the machine: calls, moves between source files, lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import rollout

ROOT = f"{Path(rollout.__file__).parent}/"
"""The product's own files; all others are left out."""


class Trace:
    """The calls of the product's functions, in order: (file and function of the caller, those of the called).

    The caller is the product's function that is nearest on the stack.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    @property
    def calls_between_files(self) -> list[tuple[str, str]]:
        """Those that lead from one source file into another: each is a move that a reader makes, and makes back."""
        return [(a, b) for a, b in self.calls if a.partition(":")[0] != b.partition(":")[0]]


@contextmanager
def traced(*, without: tuple[str, ...] = ()) -> Iterator[Trace]:
    """Record what this thread calls within the block, but for files below ROOT whose path begins as `without` says."""
    trace = Trace()

    def name(frame: FrameType) -> str | None:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        file = frame.f_code.co_filename.removeprefix(ROOT)
        return None if file.startswith(without) else f"{file}:{frame.f_code.co_name}"

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (called := name(frame)) is None:
            return
        back = frame.f_back
        while back is not None and (caller := name(back)) is None:
            back = back.f_back
        if back is not None:
            trace.calls.append((str(caller), called))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        yield trace
    finally:
        sys.setprofile(before)


def count_lines(work: Callable[[], Any]) -> int:
    """How many lines of the product's own files run while `work` does."""
    count = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename.startswith(ROOT) else None)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
