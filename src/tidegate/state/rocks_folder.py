"""Where a RocksDB backend keeps its files: a folder that is gone when its backend is, or its process.

A process that was killed can't remove anything. So each folder holds a file that its process has locked, and whoever makes a
new folder removes those beside it whose lock is free: the lock goes with the process, also where process ids are those
of another container.
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
# Between making a folder and locking it there is a moment.
_YOUNG_S = 60.0


class Folder:
    """`live` is the database, and beside it are frozen versions of it."""

    def __init__(self, under: str | None) -> None:
        above = Path(under or tempfile.gettempdir())
        above.mkdir(parents=True, exist_ok=True)
        remove_left_behind(above)
        self._path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=above))
        lock = os.open(self._path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.live = self._path / "live"
        self._discarded: list[Path] = []
        self._finalizer = weakref.finalize(self, _remove, self._path, lock)

    def place(self, name: str) -> Path:
        return self._path / name

    def discard(self, place: Path) -> None:
        """A frozen version that nobody needs. To remove a file takes about a millisecond on some disks, so it is left to
        who calls `remove_discarded`, or goes with the folder."""
        self._discarded.append(place)

    def remove_discarded(self) -> None:
        while self._discarded:
            shutil.rmtree(self._discarded.pop(), ignore_errors=True)

    def remove(self) -> None:
        """At the latest it is removed when nobody holds this object any more."""
        self._finalizer()


def remove_left_behind(above: Path) -> None:
    """Removes folders whose process is gone."""
    for lock in above.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if time.time() - lock.stat().st_mtime < _YOUNG_S:
                continue
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # somebody else's, or just gone
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
