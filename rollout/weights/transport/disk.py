"""Weights from a folder of safetensors on a disk that both sides see.

The folder belongs to somebody else, who may be writing to it, and may have named something that is no file. So the
files are neither mapped (a file that gets shorter then kills the process by SIGBUS) nor opened by a library that holds
the interpreter's lock meanwhile: a thread reads them by plain bounded reads, which the update waits for as long as its
timeout says. The format is https://huggingface.co/docs/safetensors: 8 bytes of header length, a JSON header, the data.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import stat
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch

from rollout.weights.bodies import Announcement
from rollout.weights.errors import DISK_FAILURES, AbandonedError, WeightUpdateError
from rollout.weights.staging import DTYPES, Incoming, Staging
from rollout.weights.transport import Transport

T = TypeVar("T")

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_JSON_BYTES = 32 << 20
"""Most that the headers and the index of a folder may have together: 100,000 tensors take about 15 MB."""
_READ_BYTES = 16 << 20
"""What one read asks for: a disk that brings less than that within the timeout counts as one that hangs."""
_MOST_FILES = 10_000
_MOST_READERS = 8
_readers = threading.BoundedSemaphore(_MOST_READERS)

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Entry(msgspec.Struct):
    """What a header says of one tensor; `data_offsets` count from the end of the header.

    The defaults are for `__metadata__`, which is none. Decoding ends at the first entry of another form.
    """

    dtype: str = ""
    shape: Annotated[list[_Number], msgspec.Meta(max_length=16)] = []
    data_offsets: tuple[_Number, _Number] = (0, 0)


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`: the file of each tensor."""

    weight_map: dict[str, str]


_State = tuple[int, int, int, int]
"""A file's device, inode, size in bytes and time of its last change."""


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies in a file, in bytes, and the state of the file whose header said so."""

    file: Path
    state: _State
    offset: int
    nbytes: int


class DiskTransport(Transport):
    """Reads the folder that `update_info.path` names: the files of its index, or else every *.safetensors file.

    There is nobody to meet. A read that brings nothing for `timeout_s` seconds ends the update.
    """

    name = "disk"
    peer = "the disk"

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        self._found: dict[str, _Stored] = {}
        self._step: Future[Any] = Future()
        self._interrupted = False

    def describe(self, info: Announcement) -> Announcement:
        """The names, dtypes and shapes in the files' headers.

        Raises WeightUpdateError: 400 on a folder that can't be read or doesn't hold what its headers say, 503 where the
        disk doesn't answer.
        """
        if info.path is None:
            raise WeightUpdateError(400, 'the disk transport needs update_info {"path": "<folder of safetensors>"}')
        found = Announcement(path=info.path)
        self._found = {}
        with self._read(_headers(Path(info.path))) as headers:
            for header in headers:
                for name, (entry, stored) in header.items():
                    found.names.append(name)
                    found.dtype_names.append(_DTYPES.get(entry.dtype, entry.dtype))
                    found.shapes.append(entry.shape)
                    self._found[name] = stored
        return found

    def receive(
        self, info: Announcement, plan: list[Incoming], staging: Staging, progress: Callable[[int], Any]
    ) -> None:
        """Copy each tensor into its staged region. Raises WeightUpdateError as `describe` does."""
        stored = [(self._found[item.target.name], item) for item in plan]
        stored.sort(key=lambda pair: (pair[0].file, pair[0].offset))
        items = (item for _, item in stored)
        with self._read(_pieces([where for where, _ in stored])) as pieces:
            for nbytes, whole in pieces:
                if whole is not None:
                    item = next(items)
                    staging.place(item, whole.view(item.dtype).view(item.target.size))
                progress(nbytes)

    def read_small(self, file: Path) -> bytes:
        """A whole file, of some megabytes at most. Raises WeightUpdateError as `describe` does."""
        with self._read(_contents(path) for path in [file]) as contents:
            return next(contents)

    def interrupt(self) -> None:
        """End with AbandonedError what waits for the disk, now or later. Any thread may call it."""
        self._interrupted = True
        self._step.cancel()

    @contextlib.contextmanager
    def _read(self, work: Generator[T]) -> Iterator[Iterator[T]]:
        """The items of `work`, made one by one on a thread of its own; each is to be done with before the next.

        A thread that hangs is left behind with its buffers. Raises WeightUpdateError 503 where too many were.
        """
        if not _readers.acquire(blocking=False):
            raise WeightUpdateError(503, f"{_MOST_READERS} reads of weights from a disk hang already: is a mount down?")
        asked: queue.SimpleQueue[Future[T | None] | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                while (step := asked.get()) is not None:
                    try:
                        made = next(work, None)
                    except BaseException as error:
                        _resolve(step, error)
                    else:
                        _resolve(step, made)
            finally:
                work.close()
                _readers.release()

        threading.Thread(target=run, name="weights-read", daemon=True).start()
        try:
            yield iter(lambda: self._next(asked), None)
        finally:
            asked.put(None)

    def _next(self, asked: queue.SimpleQueue[Future[T | None] | None]) -> T | None:
        self._step = step = Future[T | None]()
        if self._interrupted:
            raise AbandonedError
        asked.put(step)
        try:
            return step.result(self.timeout_s)
        except CancelledError:
            raise AbandonedError from None
        except TimeoutError:
            raise WeightUpdateError(
                503, f"a read of the weights brought nothing for {self.timeout_s:g} s: the disk hangs"
            ) from None
        except (OSError, ValueError) as error:
            status = 503 if isinstance(error, OSError) and error.errno in DISK_FAILURES else 400
            raise WeightUpdateError(status, f"the weights can't be read: {error}") from error


def _resolve(step: Future[Any], outcome: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled: nobody waits any more
        if isinstance(outcome, BaseException):
            step.set_exception(outcome)
        else:
            step.set_result(outcome)


# What follows runs on the reading thread. All of it may hang, and raises OSError or ValueError.


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[tuple[int, _State]]:
    """A descriptor of a regular file, and the file's state; ValueError where it changes meanwhile."""
    if not stat.S_ISREG(os.stat(file).st_mode):  # before it is opened: to open a device may do something
        raise ValueError(f"{file} is not a regular file")
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        state = _state(descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{file} is not a regular file")
        yield descriptor, state
        if _state(descriptor) != state:
            raise ValueError(f"{file} was changed while it was read")
    finally:
        os.close(descriptor)


def _state(descriptor: int) -> _State:
    now = os.fstat(descriptor)
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns


def _fill(descriptor: int, file: Path, buffer: memoryview, offset: int) -> None:
    while buffer:
        got = os.preadv(descriptor, [buffer], offset)
        if got == 0:
            raise ValueError(f"{file} has no byte {offset}: it ends before what its header announces")
        buffer, offset = buffer[got:], offset + got


def _contents(file: Path) -> bytes:
    with _opened(file) as (descriptor, (_, _, size, _)):
        if size > _JSON_BYTES:
            raise ValueError(f"{file} has {size} bytes, more than the {_JSON_BYTES} of any such file")
        data = bytearray(size)
        _fill(descriptor, file, memoryview(data), 0)
        return bytes(data)


def _decoded(file: Path, data: bytes | bytearray, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not {what}: {type(error).__name__} {error}") from error


def _files(folder: Path) -> list[Path]:
    """What a transformers checkpoint consists of; without an index, all there is. A file's own path is that file."""
    if folder.suffix == ".safetensors":
        return [folder]
    index = folder / "model.safetensors.index.json"
    try:
        listed = {
            Path(name).name
            for name in _decoded(index, _contents(index), _Index, "a checkpoint's index").weight_map.values()
        }
    except FileNotFoundError:
        with os.scandir(folder) as entries:
            listed = {entry.name for entry in entries if entry.name.endswith(".safetensors")}
    if not listed:
        raise ValueError(f"no .safetensors file in {str(folder)!r} (as the server sees its disk)")
    if len(listed) > _MOST_FILES:
        raise ValueError(f"{folder} has {len(listed)} files of weights, more than {_MOST_FILES}")
    return [folder / name for name in sorted(listed)]


def _headers(folder: Path) -> Generator[dict[str, tuple[_Entry, _Stored]]]:
    total = 0
    for file in _files(folder):
        with _opened(file) as (descriptor, state):
            size = state[2]
            prefix = bytearray(8)
            _fill(descriptor, file, memoryview(prefix), 0)
            length = int.from_bytes(prefix, "little")
            if length > size - 8:
                raise ValueError(f"{file} has {size} bytes, its header says that the header alone has {length}")
            total += length
            if total > _JSON_BYTES:
                raise ValueError(f"the headers in {folder} have more than {_JSON_BYTES} bytes together")
            text = bytearray(length)
            _fill(descriptor, file, memoryview(text), 8)
            header = _decoded(file, text, dict[str, _Entry], "a safetensors file")
            header.pop("__metadata__", None)
            _check_offsets(file, header, size - 8 - length)
            yield {
                name: (entry, _Stored(file, state, 8 + length + entry.data_offsets[0], _nbytes(entry)))
                for name, entry in header.items()
            }


def _nbytes(entry: _Entry) -> int:
    return entry.data_offsets[1] - entry.data_offsets[0]


def _check_offsets(file: Path, header: dict[str, _Entry], size: int) -> None:
    """As the format has it, the tensors lie one behind the other and fill the file."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda pair: pair[1].data_offsets):
        dtype = DTYPES.get(_DTYPES.get(entry.dtype, ""))
        due = None if dtype is None else math.prod(entry.shape) * dtype.itemsize
        if not entry.dtype or entry.data_offsets[0] != end or _nbytes(entry) < 0 or due not in (None, _nbytes(entry)):
            raise ValueError(
                f"{file}: {name} ({entry.dtype} {entry.shape}) has the bytes {list(entry.data_offsets)}, but should "
                f"begin at {end} and have {due}"
            )
        end = entry.data_offsets[1]
    if end != size:
        raise ValueError(f"{file} has {size} bytes of tensors, its header says {end}")


def _pieces(tensors: list[_Stored]) -> Generator[tuple[int, torch.Tensor | None]]:
    """How many bytes more were read, and with a tensor's last ones all of it, (bytes,) uint8; in one reused buffer."""
    buffer = torch.empty(max((stored.nbytes for stored in tensors), default=0), dtype=torch.uint8)
    memory = memoryview(buffer.numpy())  # type: ignore[arg-type]
    for file, group in itertools.groupby(tensors, key=lambda stored: stored.file):
        with _opened(file) as (descriptor, state):
            for stored in group:
                if state != stored.state:
                    raise ValueError(f"{file} was changed while it was read")
                for start in range(0, max(1, stored.nbytes), _READ_BYTES):
                    end = min(start + _READ_BYTES, stored.nbytes)
                    _fill(descriptor, file, memory[start:end], stored.offset + start)
                    if end < stored.nbytes:
                        yield end - start, None
                    else:
                        yield end - start, buffer[:end]
