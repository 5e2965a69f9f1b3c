"""Temporary folders of which a killed process leaves nothing for good."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_OWNER = ".owner"


class OwnedFolder:
    """A new folder `path` of this process, mode 0700, called `prefix` and something, in `parent` (default: /tmp or so).

    It goes with `close`, or the context. That of a process that was killed goes when the next one is made in the same
    `parent` with the same prefix: its owner holds a lock on a file in it, which the kernel frees with the process, so a
    folder whose file can be locked has no owner. (On a disk that knows no locks it stays.) Raises OSError.
    """

    def __init__(self, prefix: str, parent: str | Path | None = None) -> None:
        root = Path(tempfile.gettempdir() if parent is None else parent)
        _remove_abandoned(root, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        unlocked = self.path / f"{_OWNER}.new"
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(self.path / _OWNER)  # it is locked when it is first seen under that name

    def close(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> OwnedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_abandoned(root: Path, prefix: str) -> None:
    """Remove this user's folders that an OwnedFolder made and whose owner is gone."""
    for owner in root.glob(f"{prefix}*/{_OWNER}"):
        folder = owner.parent
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(owner, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the owner lives
            shutil.rmtree(folder, ignore_errors=True)
