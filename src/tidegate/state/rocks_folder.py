"""The folder of a RocksDB backend's files, which is removed when its backend is closed or its process has ended."""

from __future__ import annotations

import shutil
from pathlib import Path

from tidegate.scratch import ScratchFolder

_PREFIX = "tidegate-rocksdb-"


class Folder(ScratchFolder):
    """A backend's folder. `live` is the database, and beside it are its frozen versions."""

    def __init__(self, under: str | None) -> None:
        super().__init__(_PREFIX, under=under)
        self.live = self.path / "live"
        self._discarded: list[Path] = []

    def discard(self, place: Path) -> None:
        """Note a frozen version that is no longer needed. To remove a file takes about a millisecond on some disks, so that
        is left to `remove_discarded`."""
        self._discarded.append(place)

    def remove_discarded(self) -> None:
        while self._discarded:
            shutil.rmtree(self._discarded.pop(), ignore_errors=True)
