"""Weights from a folder of safetensors on a disk that both sides see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rollout.weights.bodies import Announcement
from rollout.weights.errors import WeightUpdateError
from rollout.weights.store import Incoming, Staging

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


class DiskTransport:
    """Reads every *.safetensors file of the folder that `update_info.path` names. There is nobody to meet."""

    name = "disk"
    spent_by_failure = False

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}

    def connect(self) -> None:
        """Nothing to do."""

    def describe(self, info: Announcement) -> Announcement:
        """The names, dtypes and shapes in the files' headers. Raises WeightUpdateError 400 on an unreadable folder."""
        if info.path is None:
            raise WeightUpdateError(400, 'the disk transport needs update_info {"path": "<folder of safetensors>"}')
        files = sorted(Path(info.path).glob("*.safetensors"))
        if not files:
            raise WeightUpdateError(400, f"no .safetensors file in {info.path!r} (as the server sees its disk)")
        found = Announcement(path=info.path)
        self._files = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                        piece = tensors.get_slice(name)
                        found.names.append(name)
                        found.dtype_names.append(_DTYPES.get(piece.get_dtype(), piece.get_dtype()))
                        found.shapes.append(piece.get_shape())
                        self._files[name] = file
            except (SafetensorError, OSError) as error:
                raise WeightUpdateError(400, f"{file} can't be read: {error}") from error
        return found

    def receive(
        self, info: Announcement, plan: list[Incoming], staging: Staging, progress: Callable[[int], Any]
    ) -> None:
        """Copy each tensor from the mapped file into its staged region."""
        for file in sorted(set(self._files.values())):
            with safe_open(file, framework="pt") as tensors:
                for item in plan:
                    if self._files[item.target.name] == file:
                        staging.place(item, tensors.get_tensor(item.target.name))
                        progress(item.nbytes)

    def close(self) -> None:
        """Nothing to do."""
