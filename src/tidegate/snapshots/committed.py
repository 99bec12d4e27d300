"""Which committables of a snapshot are still to be committed.

A snapshot lists the committables of its sinks: output that becomes visible only when the snapshot is complete. When every
slot has reported that its sinks have committed that output, the coordinator notes it in the job's store
(`SnapshotCatalog.confirm`). A confirmed snapshot is restored without its committables, so that nothing is committed again.
The same holds for every snapshot before it, since an attempt commits what it restored before it does anything else.

A savepoint of a running job is only made of a confirmed snapshot, so it has no committables. A savepoint that is exported
while the job isn't running may have some: nobody knows whether they were committed. The job that begins with the savepoint
commits them, perhaps again, which sinks must allow.
"""

from __future__ import annotations

from dataclasses import replace

from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.manifest import Manifest, OperatorEntry, PieceEntry
from tidegate.store.base import Store
from tidegate.store.layout import ManifestName

COMMITTABLES_SHAPE = "committables"


def committable_count(manifest: Manifest) -> int:
    """Return how many committables the snapshot lists."""
    return sum(
        piece.item_counts.get(name, 0)
        for entry in manifest.operators.values()
        for name in _names(entry)
        for piece in entry.pieces
    )


def still_to_commit(store: Store, manifest: Manifest) -> Manifest:
    """Return the manifest, which is in this store, without the committables that are known to be committed."""
    if manifest.savepoint is not None or not committable_count(manifest):
        return manifest
    name = ManifestName(epoch=manifest.epoch, attempt=manifest.attempt)
    return without_committables(manifest) if SnapshotCatalog(store).is_confirmed(name) else manifest


def without_committables(manifest: Manifest) -> Manifest:
    """Return the same snapshot with nothing to commit. A piece that holds nothing else lists no file."""
    return replace(
        manifest,
        operators={
            name: replace(entry, pieces=tuple(_without(piece, entry) for piece in entry.pieces)) if _names(entry) else entry
            for name, entry in manifest.operators.items()
        },
    )


def holds_more(piece: PieceEntry, entry: OperatorEntry) -> bool:
    """Return whether the piece's files may hold committables that the piece doesn't count."""
    names = _names(entry)
    return bool(piece.files and names) and not any(piece.item_counts.get(name, 0) for name in names)


def _without(piece: PieceEntry, entry: OperatorEntry) -> PieceEntry:
    names = _names(entry)
    counts = {state: count for state, count in piece.item_counts.items() if state not in names}
    keyed = any(state.kind == "keyed" for state in entry.states)
    return replace(piece, item_counts=counts, files=piece.files if keyed or any(counts.values()) else ())


def _names(entry: OperatorEntry) -> frozenset[str]:
    return frozenset(state.name for state in entry.states if state.shape == COMMITTABLES_SHAPE)
