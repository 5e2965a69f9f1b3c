"""Weights from a folder of safetensors on a disk that both sides see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rollout.weights.bodies import Announcement
from rollout.weights.errors import WeightUpdateError
from rollout.weights.staging import Incoming, Staging

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


class DiskTransport:
    """Reads the folder that `update_info.path` names: the files of its index, or else every *.safetensors file.

    There is nobody to meet.
    """

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
        files = _files(Path(info.path))
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

    def gone(self) -> bool:
        """Never: nobody is connected."""
        return False

    def interrupt(self) -> None:
        """Nothing to do: a read ends by itself."""

    def close(self) -> None:
        """Nothing to do."""


def _files(folder: Path) -> list[Path]:
    """What a transformers checkpoint consists of; without an index, all there is."""
    index = folder / "model.safetensors.index.json"
    try:
        listed = json.loads(index.read_bytes())["weight_map"].values()
        return [folder / Path(name).name for name in sorted(set(listed))]
    except FileNotFoundError:
        return sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightUpdateError(400, f"{index} is not a checkpoint's index: {type(error).__name__} {error}") from error
