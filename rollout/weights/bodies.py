"""The JSON bodies of the weight-update calls."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from rollout.config import KVPolicy
from rollout.weights.errors import WeightUpdateError

T = TypeVar("T")


class InitInfo(msgspec.Struct):
    """`init_info` of /init_weight_transfer_engine; sizes in bytes, times in seconds."""

    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int = 1
    world_size: int = 2
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2
    backend: Literal["gloo", "nccl", "disk"] | None = None
    timeout_s: float | None = None
    nccl_unique_id_b64: str | None = None
    force: bool = False


class Announcement(msgspec.Struct):
    """`update_info` of /update_weights: what comes, in order. `path` is the disk transport's.

    `packed` and the buffer size are where older clients say what newer ones say in `init_info`; they win over it.
    """

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    packed: bool | None = None
    packed_buffer_size_bytes: int | None = None
    path: str | None = None


class InitBody(msgspec.Struct):
    """/init_weight_transfer_engine."""

    init_info: InitInfo


class StartBody(msgspec.Struct):
    """/start_weight_update. Both kinds of names are understood, whatever `is_checkpoint_format` says."""

    is_checkpoint_format: bool = True
    partial: bool = False
    kv_policy: KVPolicy | None = None


class UpdateBody(msgspec.Struct):
    """/update_weights: the next tensors of an open update, or (`weight_dir`) a whole update in one call."""

    update_info: Announcement | None = None
    weight_dir: str | None = None


class FinishBody(msgspec.Struct):
    """/finish_weight_update."""

    weight_version: str | None = None


class VersionBody(msgspec.Struct):
    """/update_weight_version."""

    new_version: str


class CheckerBody(msgspec.Struct):
    """/weight_checker."""

    action: Literal["checksum", "compare"]
    baseline: dict[str, str] | None = None


def parse(params: dict[str, Any], kind: type[T]) -> T:
    """The body as `kind`; fields that it doesn't know are ignored. Raises WeightUpdateError 400 naming the field."""
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise WeightUpdateError(400, str(error).replace("`$.", "`").replace("`$`", "the body")) from error
