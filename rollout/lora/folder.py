"""An adapter from a folder as PEFT's `save_pretrained` writes it, and such a folder from an adapter that was received.

Read by `DiskTransport`: plain bounded reads on a thread, each of which ends by a timeout. Nothing is unpickled:
`adapter_model.bin` is not looked at.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from safetensors.torch import save_file

from rollout.lora.peft_config import PeftConfig
from rollout.lora.staging import AdapterStaging
from rollout.weights.bodies import Announcement
from rollout.weights.errors import WeightUpdateError
from rollout.weights.transport.disk import DiskTransport

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_BYTES = 4 << 20


def read_adapter(path: str, stage: Callable[[PeftConfig], AdapterStaging], *, timeout_s: float) -> AdapterStaging:
    """The adapter in this folder, whole and checked, in what `stage` makes for its configuration.

    Blocks, at most `timeout_s` for any one read. Raises WeightUpdateError: 404 where there is none, 400 where it can't
    be served, 503 where the disk hangs.
    """
    folder, disk = Path(path), DiskTransport(timeout_s)
    staging = stage(_config(disk, folder))
    try:
        info = disk.describe(Announcement(path=str(folder / TENSORS)))
    except WeightUpdateError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            message = f"No adapter found for {path}: it has no {TENSORS} (adapter_model.bin, a pickle, isn't read)"
            raise WeightUpdateError(404, message, "lora_path") from None
        raise
    plan = staging.resolve(info.names, info.dtype_names, info.shapes)
    disk.receive(info, plan, staging, lambda _: None)
    staging.check(partial=False, progress=lambda: None)
    return staging


def _config(disk: DiskTransport, folder: Path) -> PeftConfig:
    try:
        text = disk.read_small(folder / CONFIG)
    except WeightUpdateError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            message = f"No adapter found for {folder}: it has no {CONFIG} (as the server sees its disk)"
            raise WeightUpdateError(404, message, "lora_path") from None
        raise
    if len(text) > _CONFIG_BYTES:
        raise WeightUpdateError(400, f"{folder / CONFIG} has {len(text)} bytes, more than {_CONFIG_BYTES}", "lora_path")
    return parse_config(text)


def parse_config(text: bytes) -> PeftConfig:
    """Raises WeightUpdateError 400 for what is no LoraConfig."""
    try:
        return msgspec.json.decode(text, type=PeftConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightUpdateError(400, f"{CONFIG} is no LoraConfig of PEFT: {error}", "lora_path") from None


def write_adapter(staging: AdapterStaging, folder: Path) -> None:
    """Keep a checked adapter in this folder, for an engine that needs it later; of several writers one is enough.

    Raises OSError.
    """
    own = folder.with_name(f"{folder.name}.{os.getpid()}.{threading.get_ident()}")
    own.mkdir(mode=0o700)
    try:
        save_file(staging.tensors, own / TENSORS)
        (own / CONFIG).write_bytes(msgspec.json.encode(staging.config))
        with contextlib.suppress(OSError):  # it is there already
            own.rename(folder)
    finally:
        shutil.rmtree(own, ignore_errors=True)
