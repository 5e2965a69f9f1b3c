"""From per-token stamps to the half-open spans that an answer carries."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rollout.outputs import KVState, TokenOutput, WeightVersionSpan

Stamp = tuple[str, int, KVState]


def spans(stamps: Iterable[Stamp]) -> list[WeightVersionSpan]:
    """Group the (version, epoch, kv) stamps of a choice's output tokens, in order, into spans that tile [0, len).

    A span ends where any of the three changes: a commit that keeps its label still starts a new one. No tokens: [].
    """
    out: list[WeightVersionSpan] = []
    start = 0
    for (version, epoch, kv), run in groupby(stamps):
        end = start + sum(1 for _ in run)
        out.append(WeightVersionSpan(version=version, start=start, end=end, epoch=epoch, kv=kv))
        start = end
    return out


class SpanBuilder:
    """The stamps of one choice as its tokens arrive; a stop string may cut them off again."""

    def __init__(self) -> None:
        self._stamps: list[Stamp] = []

    def append(self, output: TokenOutput) -> None:
        """Take the stamp of a step's output; one without a token (an abort) has none."""
        if output.token_id is not None:
            self._stamps.append((output.version, output.epoch, output.kv))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self._stamps[length:]

    def spans(self) -> list[WeightVersionSpan]:
        """The spans of the tokens kept, tiling [0, number of tokens)."""
        return spans(self._stamps)
