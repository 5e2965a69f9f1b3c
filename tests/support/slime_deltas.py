"""Versions of a checkpoint as slime publishes them, written from its `_encode_delta` and `_write_delta_files`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
import xxhash
import zstandard

Arrays = Mapping[str, np.ndarray]
"""Tensors by name, each as its bytes: (nbytes,) uint8."""


def read(folder: Path) -> dict[str, np.ndarray]:
    """The bytes of every tensor of a checkpoint, by the files of its index or else all of them."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
    else:
        files = set(folder.glob("*.safetensors"))
    found = {}
    for file in files:
        for name, array in safetensors.numpy.load(file.read_bytes()).items():
            found[name] = array.reshape(-1).view(np.uint8)
    return found


def publish(source: Path, version: int, old: Arrays, new: Arrays, encoding: str, files: int = 2) -> Path:
    """Write `weight_vNNNNNN`, what differs between two states."""
    folder = source / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    changed = [name for name in sorted(new) if not np.array_equal(old[name], new[name])]
    weight_map: dict[str, str] = {}
    for number in range(files):
        delta, sums = {}, {}
        for name in changed[number::files]:
            mask = new[name] != old[name]
            if encoding == "xor":
                difference = new[name] ^ old[name]
            else:
                places = np.flatnonzero(mask).astype("<u4")
                count = np.array([places.size], "<u4").view(np.uint8)
                difference = np.concatenate([count, places.view(np.uint8), new[name][mask]])
            packed = zstandard.ZstdCompressor(level=1).compress(difference.tobytes())
            delta[name], sums[name] = np.frombuffer(packed, np.uint8), xxhash.xxh3_128(new[name].tobytes()).hexdigest()
        file = f"model-{number:05d}-of-{files:05d}.safetensors"
        (folder / file).write_bytes(safetensors.numpy.save(delta, metadata=sums))
        weight_map |= dict.fromkeys(delta, file)
    metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding}
    metadata |= {"compression_format": "zstd", "checksum_format": "xxh3-128"}
    index = {"metadata": metadata, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def changed(state: Arrays, seed: int, share: float = 0.5) -> dict[str, np.ndarray]:
    """The next state: in about this share of the tensors, the low bytes of a few float32 values are others."""
    random = np.random.default_rng(seed)
    following = {name: array.copy() for name, array in state.items()}
    for array in following.values():
        if random.random() < share:
            places = random.integers(0, len(array) // 4, size=5) * 4 + 1  # neither sign nor exponent
            array[places] ^= random.integers(1, 256, size=5, dtype=np.uint8)
    return following
