"""Deletes a savepoint that the user gave away (`claim=True`), when the job that began with it has a snapshot of its own."""

from __future__ import annotations

from tidegate.control.background import Background, ignored
from tidegate.driver.attempts import Origin, Restore
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.savepoints import remove_savepoint


class Claim:
    """`settle` is called whenever the job has a complete snapshot of its own. It deletes once in each attempt."""

    def __init__(self, restore: Restore, *, catalog: SnapshotCatalog, background: Background) -> None:
        self._restore = restore
        self._catalog = catalog
        self._background = background
        self._settled_for = 0  # the last attempt that has deleted it; the one before may have ended too early

    def settle(self, origin: Origin, attempt: int) -> None:
        path, restored_from = self._restore.path, origin.restored_from
        if not self._restore.claim or self._settled_for == attempt or path is None or restored_from is None:
            return
        self._settled_for = attempt

        def remove() -> None:
            if self._catalog.is_current(attempt):
                remove_savepoint(path, restored_from.id)

        self._background.submit(remove, ignored)  # after an error the next attempt tries again
