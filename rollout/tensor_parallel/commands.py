"""What the leader tells a follower, in order, and what it hears back: msgpack over a socket pair."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.config import EngineConfig
from rollout.messages import EngineDied, Reply


class Join(msgspec.Struct, tag=True):
    """The first command: load the share of `rank`; the ranks meet at `port` of localhost."""

    config: EngineConfig
    rank: int
    port: int


class Forward(msgspec.Struct, tag=True):
    """Compute a step along with the leader: the bytes of what `ModelRunner.forward` takes, the batch as its arrays."""

    token_ids: bytes
    query_start: bytes
    context_lens: bytes
    block_tables: bytes
    head_rows: bytes


class CopyBlocks(msgspec.Struct, tag=True):
    """Copy cache blocks (source, destination)."""

    pairs: list[tuple[int, int]]


class WeightCall(msgspec.Struct, tag=True):
    """A control call of a weight update; answered by one Reply of the same id."""

    call_id: int
    method: str
    params: dict[str, Any]


class GatherWeights(msgspec.Struct, tag=True):
    """Put the live parameters together along with the leader, as they are now; answered by one Reply of the same id."""

    call_id: int


class CommitWeights(msgspec.Struct, tag=True):
    """Flip to the prepared weights: the leader has, between the steps before and after this command."""


class Started(msgspec.Struct, tag=True):
    """The follower is about to meet the other ranks."""


class Joined(msgspec.Struct, tag=True):
    """The share is loaded and checked; commands are obeyed from now on."""


ToFollower = Join | Forward | CopyBlocks | WeightCall | GatherWeights | CommitWeights
FromFollower = Started | Joined | Reply | EngineDied
