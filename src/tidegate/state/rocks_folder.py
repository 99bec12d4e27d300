"""The folder of a RocksDB backend's files, which is removed when its backend is closed or its process has ended.

A process that was killed can't remove its folders. So each folder holds a file that its process has locked, and a process
that makes a new folder removes the folders beside it whose lock is free. The lock is released when the process ends, even if
another container reuses its process id.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

_PREFIX = "tidegate-rocksdb-"
_LOCK = "lock"
# A folder younger than this may have been made and not locked yet.
_YOUNG_S = 60.0


class Folder:
    """A backend's folder. `live` is the database, and beside it are its frozen versions."""

    def __init__(self, under: str | None) -> None:
        above = Path(under or tempfile.gettempdir())
        above.mkdir(parents=True, exist_ok=True)
        remove_left_behind(above)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=above))
        lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.live = self.path / "live"
        self._discarded: list[Path] = []
        self._finalizer = weakref.finalize(self, _remove, self.path, lock)

    def discard(self, place: Path) -> None:
        """Note a frozen version that is no longer needed. To remove a file takes about a millisecond on some disks, so that
        is left to `remove_discarded`."""
        self._discarded.append(place)

    def remove_discarded(self) -> None:
        while self._discarded:
            shutil.rmtree(self._discarded.pop(), ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder. It is also removed when this object is garbage."""
        self._finalizer()


def remove_left_behind(above: Path) -> None:
    """Remove folders whose process has ended."""
    for lock in above.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if time.time() - lock.stat().st_mtime < _YOUNG_S:
                continue
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it belongs to another user, or was just removed
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
        else:
            _remove(lock.parent, handle)


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
