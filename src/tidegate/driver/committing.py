"""Which epochs' output is committed, as the slots of one attempt report it.

A slot reports an epoch when all of its sinks have committed what is due with it. A commit includes all earlier ones, so the
output of an epoch is committed when every slot has reported that epoch or a later one. Lost and repeated reports do no harm.

What is known to be committed is noted in the store (snapshots/committed.py), and savepoints wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tidegate.control.background import Background, ignored
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.committed import committable_count
from tidegate.snapshots.manifest import Manifest


class Commits:
    """`then` is called with the epoch up to which all output is committed, whenever that changes."""

    def __init__(self, catalog: SnapshotCatalog, background: Background, then: Callable[[int], None]) -> None:
        self._catalog = catalog
        self._background = background
        self._then = then
        self._attempt = 0
        self._by_slot: list[int] = []
        self._listing: list[int] = []  # complete epochs with output that isn't known to be committed

    def begin(self, slot_count: int, attempt: int) -> None:
        """Begin an attempt. Reports of older ones don't count."""
        self._attempt, self._by_slot, self._listing = attempt, [0] * slot_count, []

    def on_complete(self, manifest: Manifest) -> None:
        """Note a complete snapshot. Called before any slot is notified."""
        if committable_count(manifest):
            self._listing.append(manifest.epoch)

    def on_committed(self, slot: int, epoch: int) -> None:
        if slot >= len(self._by_slot):
            return  # the attempt doesn't run yet
        before = min(self._by_slot)
        self._by_slot[slot] = max(self._by_slot[slot], epoch)
        committed = min(self._by_slot)
        if committed == before:
            return
        due = [each for each in self._listing if each <= committed]
        if due:
            self._listing = self._listing[len(due) :]
            # Output that isn't noted as committed is committed again when the snapshot is restored.
            self._background.submit(partial(self._catalog.confirm, due[-1], attempt=self._attempt), ignored)
        self._then(committed)
