"""Finding the snapshots at the path that a user gives.

A path (or URI) is one of: the folder of `Snapshots(to=)` with a folder for each job; one job's folder in it; a savepoint's
folder; the file of one manifest. Nothing here writes: no claims, no deletions, no repairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.errors import CorruptFile, NotFound, RestoreError
from tidegate.snapshots.catalog import SnapshotCatalog, read_manifest
from tidegate.snapshots.finding import resolved
from tidegate.snapshots.manifest import Manifest
from tidegate.snapshots.snapshot import Snapshot
from tidegate.store import layout
from tidegate.store.base import Store
from tidegate.store.opening import open_store


@dataclass(frozen=True, slots=True)
class SnapshotFolder:
    """The snapshots of one job, or one savepoint. `manifests` maps each complete epoch, ascending, to its manifest's name.

    `whole` is whether these are all manifests in the store. Only then is a file that none of them lists not needed.
    """

    address: str
    store: Store
    manifests: Mapping[int, str]
    whole: bool = True

    @property
    def shown(self) -> str:
        return layout.shown(self.address)

    @property
    def newest(self) -> int:
        return max(self.manifests)

    def load(self, epoch: int) -> Manifest:
        """Return the manifest of an epoch. NotFound if there is no such epoch, CorruptFile if the manifest is damaged."""
        if epoch not in self.manifests:
            raise NotFound(
                f"epoch {epoch} is not a complete snapshot in {self.shown}; there are: {', '.join(map(str, self.manifests))}"
            )
        return read_manifest(self.store, self.manifests[epoch])

    def snapshot(self, epoch: int) -> Snapshot:
        """Return the snapshot of an epoch; for errors see `load`."""
        return Snapshot(self.store, self.load(epoch))


def find_folders(path: str) -> list[SnapshotFolder]:
    """Return the snapshots of all jobs at this path; `RestoreError` if there are none."""
    path, name = layout.split_manifest_address(resolved(path))
    store = open_store(path)
    if name is not None:
        return [_of_manifest(path, store, name)]
    names = store.list("")
    if layout.SAVEPOINT in names:
        return [_of_savepoint(path, store)]
    if any(layout.parse_manifest_name(name) for name in names):
        return [_of_job(path, store)]
    jobs = sorted({job for name in names for job, _, rest in [name.partition("/")] if layout.parse_manifest_name(rest)})
    if jobs:
        addresses = [layout.inside(path, job) for job in jobs]
        return [_of_job(address, open_store(address)) for address in addresses]
    if layout.INCOMPLETE in names:
        raise RestoreError(f"the savepoint in {layout.shown(path)} was never finished")
    what = f"{len(names)} other files are there" if names else "it is empty or does not exist"
    raise RestoreError(
        f"no snapshots in {layout.shown(path)}: {what}. Give the folder of Snapshots(to=…), a job's folder "
        f"in it, a savepoint's folder, or the file of a manifest"
    )


def find_folder(path: str) -> SnapshotFolder:
    """Return the snapshots of the one job at this path; `RestoreError` if there are none, or several jobs."""
    folders = find_folders(path)
    if len(folders) > 1:
        raise RestoreError(
            f"{layout.shown(path)} holds the snapshots of {len(folders)} jobs, give one of: "
            f"{', '.join(folder.shown for folder in folders)}"
        )
    return folders[0]


def find_job(path: str) -> str:
    """Return the address of the one job at this path that ever ran, even if it has no snapshot."""
    path = resolved(path)
    names = open_store(path).list("")
    if any(layout.parse_attempt_name(name) for name in names):
        return path
    jobs = sorted({job for name in names for job, _, rest in [name.partition("/")] if layout.parse_attempt_name(rest)})
    if len(jobs) == 1:
        return layout.inside(path, jobs[0])
    what = f"the folders of {len(jobs)} jobs, give one: {', '.join(jobs)}" if jobs else "no job's folder"
    raise RestoreError(f"{layout.shown(path)} holds {what}")


def _of_job(address: str, store: Store) -> SnapshotFolder:
    names = {
        manifest.epoch: layout.manifest_name(epoch=manifest.epoch, attempt=manifest.attempt)
        for manifest in SnapshotCatalog(store).live_manifests()
    }
    if not names:
        raise RestoreError(f"no complete snapshot in {layout.shown(address)}")
    return SnapshotFolder(address, store, names)


def _of_savepoint(address: str, store: Store) -> SnapshotFolder:
    try:
        epoch = Manifest.from_bytes(store.read(layout.SAVEPOINT), name=layout.SAVEPOINT).epoch
    except CorruptFile:
        epoch = 0  # the error is raised when the manifest is loaded
    return SnapshotFolder(address, store, {epoch: layout.SAVEPOINT})


def _of_manifest(address: str, store: Store, name: str) -> SnapshotFolder:
    parsed = layout.parse_manifest_name(name)
    if parsed is None:
        return _of_savepoint(address, store)
    return SnapshotFolder(address, store, {parsed.epoch: name}, whole=False)
