"""Finding the snapshot that a path means."""

from __future__ import annotations

import os

from tidegate.errors import NotFound, StoreError
from tidegate.snapshots.catalog import SnapshotCatalog, read_manifest
from tidegate.snapshots.manifest import RestoredFrom
from tidegate.snapshots.snapshot import Snapshot
from tidegate.store import layout
from tidegate.store.base import Store
from tidegate.store.opening import open_store
from tidegate.system_errors import lasts, what_to_do


def find_snapshot(path: str, *, epoch: int | None = None) -> Snapshot:
    """Return the snapshot at a path, as `restore_from` takes it: the folder of a savepoint, a job's folder of snapshots
    (its newest snapshot, or that of `epoch`), or the manifest of either. NotFound if there is none, CorruptFile if it is
    damaged."""
    address, name = layout.split_manifest_address(resolved(path))
    store = open_store(address)
    if name is None:
        name = layout.SAVEPOINT if layout.SAVEPOINT in _names(store) else _newest_manifest(store)
    found = _snapshot_of(store, name)
    if epoch is None or found.manifest.epoch == epoch:
        return found
    catalog = SnapshotCatalog(store)
    epochs = [] if found.is_savepoint else catalog.epochs()
    if epoch not in epochs:
        there = ", ".join(map(str, epochs)) or f"{found.manifest.epoch} alone"
        raise NotFound(f"epoch {epoch} is not a complete snapshot in {layout.shown(store.address)}; there are: {there}")
    return _snapshot_of(store, layout.manifest_name(epoch=epoch, attempt=catalog.load(epoch).attempt))


def restored_from(path: str, snapshot: Snapshot) -> RestoredFrom:
    """Return how the snapshots of a job that begins with this one refer to it: by a savepoint's id, otherwise by its
    path."""
    where, savepoint = shown_path(path), snapshot.manifest.savepoint
    return RestoredFrom(id=where if savepoint is None else savepoint.id, path=where)


def _snapshot_of(store: Store, name: str) -> Snapshot:
    try:
        return Snapshot(store, read_manifest(store, name))
    except NotFound as error:
        raise NotFound(f"there is no snapshot to restore from: {error}") from error


def shown_path(path: str) -> str:
    """Return the path of a snapshot as `RestoredFrom.path` has it, even if nothing is there any more."""
    address, name = layout.split_manifest_address(path)
    where = layout.shown(open_store(address).address)
    return where if name in (None, layout.SAVEPOINT) else layout.inside(where, name)


def _newest_manifest(store: Store) -> str:
    catalog = SnapshotCatalog(store)
    epochs = catalog.epochs()
    if epochs:
        newest = catalog.load(epochs[-1])
        return layout.manifest_name(epoch=newest.epoch, attempt=newest.attempt)
    where, names = layout.shown(store.address), _names(store)
    if layout.INCOMPLETE in names:
        raise NotFound(f"the savepoint in {where} was never finished: its writing was interrupted")
    jobs = sorted({name.partition("/")[0] for name in names if f"/{layout.MANIFESTS}/" in name})
    if jobs:
        raise NotFound(f"{where} has folders of the jobs {jobs}: give the path of one, such as {where}/{jobs[0]}")
    what = f"neither a savepoint ({layout.SAVEPOINT}) nor a job's folder of snapshots ({layout.MANIFESTS}/)"
    raise NotFound(
        f"{where} is {what}: {'it holds other files' if names else 'nothing is there'}. Give the folder of a "
        f"savepoint, or a job's folder, which is named after it in Snapshots(to=…); a job has none before its "
        f"first snapshot is complete"
    )


def _names(store: Store) -> list[str]:
    try:
        return store.list("")
    except StoreError as error:
        if not lasts(error):
            raise
        raise NotFound(
            f"there are no snapshots in {layout.shown(store.address)}: {error.__cause__}. {what_to_do(error)}"
        ) from error


def resolved(path: str) -> str:
    """Return a plain path as an absolute path, for processes with another working directory, and a URI unchanged."""
    if "://" in path or path.startswith("file:"):
        return path
    return os.path.abspath(os.path.expanduser(path))
