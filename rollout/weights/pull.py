"""A checkpoint on the local disk that follows the versions that slime publishes in a folder that both sides see.

`weight_vNNNNNN` there is a whole checkpoint, or where the metadata of its index name a `delta_encoding`, what has
changed since the version before: of each changed tensor zstd-compressed bytes, and in the file's `__metadata__` the
checksum of what it then is. `xor`: as many bytes as the tensor has. `overwrite`: how many bytes change (u4), where (u4
each), and what they are. Version 0 is the model that the server was started with.

Each version is one transaction: its files get names of their own, and what they replace is in force until the index is
replaced, which is one rename. Killed before it, the folder holds the version before; after it, this one.
The format's sources: slime, `utils/disk_delta.py` and `backends/megatron_utils/update_weight/`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np

_INDEX = "model.safetensors.index.json"
_OWN = ".weight_sync"
"""A folder in each that was made here: no other is written to."""
_HEADER_BYTES = 32 << 20
_LOCK_S = 600.0
_PIECE_BYTES = 16 << 20
_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Tensor(msgspec.Struct):
    """Where a tensor lies behind its file's header, in bytes."""

    data_offsets: tuple[_Number, _Number]


class _Index(msgspec.Struct):
    """A checkpoint's index."""

    metadata: dict[str, Any] = {}
    weight_map: dict[str, str] = {}


Progress = Callable[[], None]


def pull(local_dir: str, base_dir: str, source_dir: str, version: int, progress: Progress = lambda: None) -> None:
    """Bring the checkpoint in `local_dir` to a published version; nothing happens where it has that one.

    It begins with the newest whole checkpoint up to there, unless it is beyond that already, and goes on version by
    version. Raises ValueError or OSError saying what is wrong with which file; the last whole version is kept.
    `progress` is called each time that something was read; a disk that hangs holds this call.
    """
    local, base = Path(local_dir), str(Path(base_dir).resolve())
    with _lock(local):
        index = _read_index(local)
        have = None if index is None or index.metadata.get("base") != base else int(index.metadata["version"])
        if have is not None and have > version:  # of an earlier run
            have = None
        start = version
        while start > (have or 0) and _is_delta(_published(source_dir, start)):
            start -= 1
        if have is None or start > have:
            have = start
            source = Path(base) if start == 0 else _published(source_dir, start)
            _copy(source, local, {"version": start, "base": base}, progress)
        for following in range(have + 1, version + 1):
            _apply(local, _published(source_dir, following), {"version": following, "base": base}, progress)


def _published(source_dir: str, version: int) -> Path:
    return Path(source_dir) / f"weight_v{version:06d}"


@contextlib.contextmanager
def _lock(local: Path) -> Iterator[None]:
    """One pull at a time, of all servers of this machine, into a folder that is ours."""
    own = local / _OWN
    if not own.is_dir() and local.exists() and any(local.iterdir()):
        raise ValueError(f"{local} holds files that no pull has written: name a folder that is empty or isn't there")
    own.mkdir(parents=True, exist_ok=True)
    with (own / "lock").open("w") as file:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(f"another pull into {local} takes over {_LOCK_S:g} s") from None
                time.sleep(0.05)
        yield


def _read_index(folder: Path) -> _Index | None:
    """None where there is none: the folder's *.safetensors are the checkpoint then."""
    try:
        with _opened(folder / _INDEX) as file:
            index: _Index = _decoded(folder / _INDEX, file.read(_HEADER_BYTES), _Index)
            return index
    except FileNotFoundError:
        return None


def _decoded(file: Path, data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} can't be read: {error}") from error


def _is_delta(folder: Path) -> bool:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not there: no such version is published (as the server sees its disk)")
    index = _read_index(folder)
    return index is not None and "delta_encoding" in index.metadata


def _opened(file: Path) -> BinaryIO:
    """To be read. Raises ValueError for what is no file: to open a pipe waits for its writer."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{file} is not a regular file")
    return file.open("rb")


def _copy_file(source: Path, target: Path, progress: Progress) -> None:
    with _opened(source) as read, target.open("wb") as written:
        while piece := read.read(_PIECE_BYTES):
            written.write(piece)
            progress()


def _copy(source: Path, local: Path, metadata: dict[str, Any], progress: Progress) -> None:
    """Take a whole checkpoint."""
    if not source.is_dir():
        raise ValueError(f"{source} is no folder of safetensors: deltas need one to begin with")
    index = _read_index(source)
    names = {Path(name).name for name in index.weight_map.values()} if index is not None else None
    weight_map: dict[str, str] = {}
    for entry in sorted(source.iterdir()):
        if not entry.is_file() or entry.name == _INDEX:
            continue
        if entry.suffix != ".safetensors":
            _copy_file(entry, local / entry.name, progress)
        elif names is None or entry.name in names:
            made = local / f"v{metadata['version']:06d}-{entry.name}"
            _copy_file(entry, made, progress)
            _sync(made)
            weight_map |= dict.fromkeys(_tensors(made)[1], made.name)
    if index is not None and (missing := sorted(index.weight_map.keys() - weight_map.keys())):
        raise ValueError(f"{source} lacks {len(missing)} tensors of its index: {', '.join(missing[:5])}")
    if not weight_map:
        raise ValueError(f"{source} has no tensor in any .safetensors file")
    _commit(local, weight_map, metadata)


def _apply(local: Path, published: Path, metadata: dict[str, Any], progress: Progress) -> None:
    """Take the version that follows what the folder has."""
    version = metadata["version"]
    delta, index = _read_index(published), _read_index(local)
    assert index is not None
    meta = {} if delta is None else delta.metadata
    wanted = {"version": version, "base_version": version - 1}
    if {name: _number(meta.get(name)) for name in wanted} != wanted or meta.get("compression_format") != "zstd":
        raise ValueError(f"{published / _INDEX}: {meta} is not version {version} on top of {version - 1}, in zstd")
    change = {"xor": _xor, "overwrite": _overwrite}.get(str(meta.get("delta_encoding")))
    checksum = _checksums().get(str(meta.get("checksum_format")))
    if change is None or checksum is None:
        raise ValueError(f"{published / _INDEX}: no such delta_encoding or checksum_format: {meta}")
    made: dict[str, Path] = {}
    places: dict[Path, tuple[int, dict[str, tuple[int, int]]]] = {}
    try:
        for file in sorted(published.glob("*.safetensors")):
            start, tensors, sums = _tensors(file)
            with _opened(file) as packed:
                for name, (offset, nbytes) in tensors.items():
                    if name not in index.weight_map:
                        raise ValueError(f"{file}: {name} is not in the checkpoint that it changes")
                    old = index.weight_map[name]
                    if old not in made:
                        file_of = made[old] = local / f"v{version:06d}-{old.partition('-')[2]}"
                        _copy_file(local / old, file_of, progress)
                        places[file_of] = _tensors(file_of)[:2]
                    behind, place = places[made[old]]
                    packed.seek(start + offset)
                    at = behind + place[name][0], place[name][1]
                    try:
                        _change(made[old], at, packed.read(nbytes), change, checksum, sums.get(name))
                    except (ValueError, IndexError) as error:
                        raise ValueError(f"{file}: the change of {name} is wrong: {error}") from error
                    progress()
        for file in made.values():
            _sync(file)
        now = {name: made[old].name if old in made else old for name, old in index.weight_map.items()}
        _commit(local, now, metadata)
    except BaseException:
        for file in made.values():
            file.unlink(missing_ok=True)
        raise


def _number(text: object) -> int | None:
    return int(text) if isinstance(text, str) and text.isdecimal() else None


Change = Callable[[np.ndarray, bytes], None]
Checksum = Callable[[memoryview], str]


def _change(
    file: Path, at: tuple[int, int], packed: bytes, change: Change, checksum: Checksum, due: str | None
) -> None:
    """Change the tensor `at` (offset, size in bytes) of a file. Raises ValueError where it then isn't what its checksum
    says."""
    with file.open("r+b") as stored:
        stored.seek(at[0])
        values = np.frombuffer(bytearray(stored.read(at[1])), np.uint8)
        change(values, packed)
        if (got := checksum(values.data)) != due:
            raise ValueError(f"its checksum is {got} after it, not {due}")
        stored.seek(at[0])
        stored.write(values.data)


def _xor(values: np.ndarray, packed: bytes) -> None:
    difference = np.frombuffer(_unpacked(packed, len(values)), np.uint8)
    if len(difference) != len(values):
        raise ValueError(f"{len(difference)} bytes for a tensor of {len(values)}")
    values ^= difference


def _overwrite(values: np.ndarray, packed: bytes) -> None:
    told = _unpacked(packed, 4 + 5 * len(values))
    count = int.from_bytes(told[:4], "little")
    if len(told) != 4 + 5 * count:
        raise ValueError(f"{len(told)} bytes for {count} changes")
    values[np.frombuffer(told[4 : 4 + 4 * count], "<u4")] = np.frombuffer(told[4 + 4 * count :], np.uint8)


def _unpacked(packed: bytes, most: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise _missing("zstandard") from None
    try:
        with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
            told: bytes = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(told) > most:
        raise ValueError(f"more than {most} bytes")
    return told


def _checksums() -> dict[str, Checksum]:
    try:
        import xxhash
    except ImportError:
        raise _missing("xxhash") from None
    return {"xxh3-128": xxhash.xxh3_128_hexdigest, "adler32": lambda data: f"{zlib.adler32(data):08x}"}


def _missing(package: str) -> ValueError:
    return ValueError(f"deltas need {package}: pip install 'rollout-engine[slime]'")


def _tensors(file: Path) -> tuple[int, dict[str, tuple[int, int]], dict[str, str]]:
    """Where the header of a safetensors file ends; offset behind it and size of each tensor; its `__metadata__`."""
    size = file.stat().st_size
    with _opened(file) as stored:
        length = int.from_bytes(stored.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_BYTES):
            raise ValueError(f"{file} has {size} bytes, its header says that the header alone has {length}")
        header = _decoded(file, stored.read(length), dict[str, msgspec.Raw])
    metadata = _decoded(file, bytes(header.pop("__metadata__", b"{}")), dict[str, str])
    found: dict[str, tuple[int, int]] = {}
    for name, raw in header.items():
        begin, end = _decoded(file, bytes(raw), _Tensor).data_offsets
        if not begin <= end <= size - 8 - length:
            raise ValueError(f"{file}: {name} would lie at the bytes {[begin, end]} of {size - 8 - length}")
        found[name] = begin, end - begin
    return 8 + length, found, metadata


def _commit(local: Path, weight_map: dict[str, str], metadata: dict[str, Any]) -> None:
    """Make these files the checkpoint, by one rename, and let what they replace go."""
    fresh = local / _OWN / _INDEX
    fresh.write_bytes(msgspec.json.encode(_Index(metadata, weight_map)))
    _sync(fresh)
    fresh.replace(local / _INDEX)
    for file in local.glob("v??????-*.safetensors"):
        if file.name not in weight_map.values():
            file.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
