"""The JSON bodies of the weight-update calls."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rollout.config import KVPolicy
from rollout.weights.errors import WeightUpdateError

T = TypeVar("T")
# How msgspec says which field is missing, and where in the body it found a fault.
_MISSING, _PATH = re.compile("Object missing required field `([^`]*)`"), re.compile(r"`\$\.([^`]*)`$")
Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Label = Annotated[str, msgspec.Meta(max_length=1024)]
Token = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]

WEIGHT_CALLS = {
    "init_weight_transfer_engine": 'Join the trainer\'s group: `{"init_info": {…}}`. Answers once both sides have met.',
    "start_weight_update": "Open an update.",
    "update_weights": 'Receive the parameters that `{"update_info": {…}}` names into staging.',
    "finish_weight_update": "Check what was received, commit it at a step boundary, label it with `weight_version`.",
    "abort_weight_update": "Drop the open update; the weights that serve stay.",
    "shutdown_weight_transfer_engine": "Leave the trainer's group.",
    "weight_checker": "Checksums of the stored weights, or their comparison with a `baseline`.",
    "update_weight_version": "Relabel the weights that serve.",
    "weight_info": "The label and epoch that serve, the state of the update, the last error.",
}
"""Every control call of weight updates, and what it does."""


class IpcHandle(msgspec.Struct):
    """Where a tensor lies in the trainer's memory on a device that both use; names as in torch's `rebuild_cuda_tensor`.

    `storage_handle` is the cudaIpcMemHandle_t of the allocation, 64 bytes in base64; the storage lies at
    `storage_offset_bytes` of it, and the tensor, contiguous, at `tensor_offset_bytes` of that.
    """

    storage_handle: Annotated[str, msgspec.Meta(max_length=128)]
    storage_size_bytes: Bytes
    storage_offset_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    tensor_offset_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0


class InitInfo(msgspec.Struct):
    """`init_info` of /init_weight_transfer_engine; sizes in bytes, times in seconds.

    `device_uuid` is the trainer's device; `ipc_handle`, of backend ipc, is memory there for the engine to try.
    `group_name`: the group is one of SGLang's, of this name.
    """

    master_address: str | None = None
    master_port: int | None = None
    rank_offset: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1
    world_size: Annotated[int, msgspec.Meta(ge=2, lt=2**31)] = 2
    packed: bool = False
    packed_buffer_size_bytes: Bytes = 1 << 30  # rendezvous.DEFAULT_BUFFER_BYTES; a server imports no torch
    packed_num_buffers: int = 2
    backend: Literal["gloo", "nccl", "ipc", "disk"] | None = None
    device_uuid: str | None = None
    ipc_handle: IpcHandle | None = None
    timeout_s: float | None = None
    nccl_unique_id_b64: str | None = None
    group_name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    force: bool = False


class Announcement(msgspec.Struct):
    """`update_info` of /update_weights: what comes, in order. `path` is the disk transport's.

    `packed` and the buffer size are where older clients say what newer ones say in `init_info`; they win over it.

    `counts` announces changes against the update's `base_epoch` instead of whole tensors: how many elements of each
    named tensor differ. They come packed: the ascending flat (row-major) indices, int32 where the tensor has fewer
    than 2³¹ elements and int64 otherwise, then as many values in the wire's dtype; nothing for a count of 0.

    `ipc_handles`, of backend ipc: where each tensor lies, by the UUID of the device.
    """

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    packed: bool | None = None
    packed_buffer_size_bytes: Bytes | None = None
    path: str | None = None
    counts: list[int] | None = None
    ipc_handles: list[dict[str, IpcHandle]] | None = None


class OwnedBody(msgspec.Struct):
    """What every call of an update may carry: the token of its trainer, and the update that it belongs to."""

    owner: Token | None = None
    update_id: Token | None = None


class InitBody(msgspec.Struct):
    """/init_weight_transfer_engine. `owner`: the trainer's token, which each of its calls then has to carry.

    `rejoin`: only where no other trainer has joined since this one did. `handed_out`: the server has made the token,
    for a trainer that may not know of tokens.
    """

    init_info: InitInfo
    owner: Token | None = None
    rejoin: bool = False
    handed_out: bool = False


class StartBody(OwnedBody):
    """/start_weight_update. Both kinds of names are understood, whatever `is_checkpoint_format` says.

    None stands for the server's own setting. An `update_id` is then wanted of each call, unless the server made it
    (`handed_out`). `verify` announces checksums, which finish brings; `base_epoch` names the
    weights that sparse changes apply to. `adapter` is the label of a LoRA adapter, of which all tensors come under
    PEFT's names, and `lora_config` its configuration; a copy goes to the folder `keep_in`.
    """

    is_checkpoint_format: bool = True
    partial: bool = False
    kv_policy: KVPolicy | None = None
    weight_staging: Literal["full", "in_place"] | None = None
    verify: bool = False
    base_epoch: int | None = None
    adapter: Label | None = None
    lora_config: dict[str, Any] = {}
    keep_in: str | None = None
    handed_out: bool = False


class UpdateBody(OwnedBody):
    """/update_weights: the next tensors of an open update, or (`weight_dir`) a whole update in one call.

    That call commits, unless `prepare` leaves it to a finish; `weight_version` and `kv_policy` are that update's.
    """

    update_info: Announcement | None = None
    weight_dir: str | None = None
    weight_version: Label | None = None
    kv_policy: KVPolicy | None = None
    prepare: bool = False
    handed_out: bool = False


class FinishBody(OwnedBody):
    """/finish_weight_update.

    `prepare` checks the update and holds it until the next finish commits it, so that several servers can commit
    together. `checksums`: sha256 (hex) of each tensor's bytes in row-major order and the wire's dtype, by the name it
    was announced under; for an update started with `verify`.
    """

    weight_version: Label | None = None
    prepare: bool = False
    checksums: dict[str, str] | None = None


class VersionBody(msgspec.Struct):
    """/update_weight_version."""

    new_version: Label


class CheckerBody(msgspec.Struct):
    """/weight_checker."""

    action: Literal["checksum", "compare"]
    baseline: dict[str, str] | None = None


def parse(params: dict[str, Any], kind: type[T]) -> T:
    """The body as `kind`; fields that it doesn't know are ignored. Raises WeightUpdateError 400 naming the field."""
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        missing, path = _MISSING.match(str(error)), _PATH.search(str(error))
        param = ".".join(found[1] for found in (path, missing) if found) or None
        raise WeightUpdateError(400, str(error).replace("`$.", "`").replace("`$`", "the body"), param) from error
