"""Savepoints: self-contained copies of complete snapshots.

A savepoint is a folder (a store) with the files of one snapshot and a manifest that lists them by names relative to that
folder, so that it can be moved and copied as a whole. Invariants:

- The manifest is created last, in one step. If the copying is interrupted, there is no manifest and so no savepoint.
- Nothing is written into a folder that isn't empty. The writer marks the folder first, by an exclusive create, so that two
  copies never mix.
- The length and checksum of every file are checked when it is copied.
- Every piece is a chain of one row file, or empty: the canonical form, which any backend restores. Snapshots of full epochs
  have that form; for others, the caller gives a function that rewrites a piece.
- Only the job that claimed a savepoint deletes it, and only the files that its manifest lists, the manifest first.

Not here: when an epoch is taken, how another process requests a savepoint (requests.py), and how a job restores one.
"""

from __future__ import annotations

import json
import platform
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from tidegate.errors import AlreadyExists, CorruptFile, NotFound, StoreError
from tidegate.snapshots.committed import holds_more
from tidegate.snapshots.manifest import ROWS, FileEntry, Manifest, OperatorEntry, PieceEntry, SavepointEntry
from tidegate.snapshots.snapshot import Snapshot
from tidegate.store import layout
from tidegate.store.base import Store
from tidegate.store.checked import checked_chunks
from tidegate.store.local import LocalStore
from tidegate.store.opening import open_store

Rewrite: TypeAlias = Callable[[Snapshot, str, PieceEntry, Store], PieceEntry]
"""Like `Snapshot.rewrite`: write all of the piece into the target as one row file, and return the piece that lists it."""


@dataclass(frozen=True, slots=True)
class SavepointInfo:
    """A savepoint that was written. `to_commit` is the number of its committables that may not be committed yet; the job
    that begins with the savepoint commits them. A savepoint of a running job has none."""

    path: str
    epoch: int
    bytes: int
    to_commit: int = 0


# Copying.


def export_snapshot(
    snapshot: Snapshot,
    target: Store,
    *,
    created_ms: int,
    graph: str = "",
    versions: Mapping[str, str] | None = None,
    rewrite: Rewrite | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    copied: Callable[[int], None] = lambda count: None,
) -> Manifest:
    """Copy a complete snapshot into `target`, and return the savepoint's manifest after it was created.

    AlreadyExists if the folder isn't empty; then nothing was written. After any later error the copied files are removed.
    `cancelled` is called now and then, from this thread, and `copied` with the size of each part that was copied.
    """
    manifest = snapshot.manifest
    odd = [name for name, operator in manifest.operators.items() for piece in operator.pieces if not is_canonical(piece)]
    if odd and rewrite is None:
        raise StoreError(
            f"epoch {manifest.epoch} can't be copied as it is: operator {odd[0]!r} has deltas or files "
            f"of its backend. Take a savepoint of the running job, or of one that was stopped"
        )
    with savepoint_in_writing(target, job=manifest.job, epoch=manifest.epoch):
        operators = {
            name: _export_operator(snapshot, name, entry, target, rewrite, cancelled, copied)
            for name, entry in manifest.operators.items()
        }
        return create_savepoint(
            target,
            replace(manifest, operators=operators, savepoint=None),
            created_ms=created_ms,
            graph=graph,
            versions=versions or {},
        )


@contextmanager
def savepoint_in_writing(target: Store, *, job: str, epoch: int) -> Iterator[None]:
    """Mark the empty folder as one that is being written to. In the context, the caller writes files and then calls
    `create_savepoint`; after an error, what was written is removed. AlreadyExists if the folder isn't empty."""
    check_empty(target)
    mark = json.dumps({"job": job, "epoch": epoch, "id": uuid.uuid4().hex}).encode("utf-8")
    target.create(layout.INCOMPLETE, mark)
    try:
        check_empty(target, but=(layout.INCOMPLETE,))
        yield
    except BaseException:
        with suppress(StoreError):
            _take_back(target, mark)
        raise
    # The savepoint exists. A mark that stays is harmless: beside a manifest it means nothing.
    with suppress(StoreError):
        target.delete(layout.INCOMPLETE)


def create_savepoint(
    target: Store, manifest: Manifest, *, created_ms: int, graph: str, versions: Mapping[str, str]
) -> Manifest:
    """Create the manifest of a savepoint whose files are all in `target`."""
    entry = SavepointEntry(
        id=uuid.uuid4().hex,
        created_ms=created_ms,
        graph=graph,
        versions=dict(versions),
        operator_bytes=manifest.operator_bytes(),
    )
    made = replace(manifest, savepoint=entry)
    target.create(layout.SAVEPOINT, made.to_bytes())
    return made


def is_canonical(piece: PieceEntry) -> bool:
    return len(piece.files) <= 1 and all(file.form == ROWS for file in piece.files)


def check_empty(target: Store, *, but: Collection[str] = ()) -> None:
    """Raise AlreadyExists if the folder holds anything, so that no savepoint can be written into it."""
    found = [name for name in target.list("") if name not in but]
    if not found:
        return
    where = layout.shown(target.address)
    if layout.INCOMPLETE in found and layout.SAVEPOINT not in found:
        raise AlreadyExists(
            f"{where} holds a savepoint that is being written, or whose writing was interrupted: choose "
            f"another folder, or delete it first"
        )
    raise AlreadyExists(f"{where} is not empty (it holds {found[0]}): a savepoint needs a folder of its own")


def _export_operator(
    snapshot: Snapshot,
    name: str,
    entry: OperatorEntry,
    target: Store,
    rewrite: Rewrite | None,
    cancelled: Callable[[], bool],
    copied: Callable[[int], None],
) -> OperatorEntry:
    pieces = []
    for piece in entry.pieces:
        if is_canonical(piece) and (rewrite is None or not holds_more(piece, entry)):
            for file in piece.files:
                copy_file(snapshot.store, file, target, cancelled, copied)
        else:
            assert rewrite is not None
            piece = rewrite(snapshot, name, piece, target)
            assert is_canonical(piece), f"operator {name!r}: {piece}"
        pieces.append(piece)
    return replace(entry, pieces=tuple(pieces))


def copy_file(
    source: Store,
    file: FileEntry,
    target: Store,
    cancelled: Callable[[], bool] = lambda: False,
    copied: Callable[[int], None] = lambda count: None,
) -> None:
    """Copy a file under its name, and check its length and checksum."""
    size_bytes = source.size(file.name)
    if size_bytes != file.bytes:
        raise CorruptFile(f"{file.name} has {size_bytes} bytes; its manifest lists {file.bytes}")

    def chunks() -> Iterator[bytes]:
        for chunk in checked_chunks(source, file):
            if cancelled():
                raise StoreError(f"the copying was cancelled at {file.name}")
            yield chunk
            copied(len(chunk))

    written_bytes = target.write(file.name, chunks())
    found_bytes = target.size(file.name)
    if not written_bytes == found_bytes == file.bytes:
        raise StoreError(f"{file.name}: {found_bytes} of {file.bytes} bytes are in {layout.shown(target.address)}")


def _take_back(target: Store, mark: bytes) -> None:
    """Remove what an interrupted copy wrote, if the mark is ours: the folder was empty when we created it. If the create of
    the manifest failed without an answer, the manifest may exist; then the savepoint is complete and stays."""
    names = target.list("")
    if layout.SAVEPOINT in names or target.read(layout.INCOMPLETE) != mark:
        return
    for name in names:
        if name.startswith(f"{layout.STATE}/"):
            target.delete(name)
    target.delete(layout.INCOMPLETE)
    _remove_empty_folders(target)


# Deleting, by the job that claimed it.


def remove_savepoint(path: str, savepoint_id: str) -> bool:
    """Delete the savepoint of that id, or finish a deletion that was interrupted. Return False if the path holds nothing, or
    another savepoint by now."""
    store = open_store(layout.split_manifest_address(path)[0])
    try:
        content = store.read(layout.SAVEPOINT)
    except NotFound:
        try:
            content = store.read(layout.CLAIMED)
        except NotFound:
            return False
    manifest = Manifest.from_bytes(content, name=layout.SAVEPOINT)
    if manifest.savepoint is None or manifest.savepoint.id != savepoint_id:
        return False
    with suppress(AlreadyExists):
        store.create(layout.CLAIMED, content)
    store.delete(layout.SAVEPOINT)
    for name in sorted({file.name for file in manifest.files()}):
        store.delete(name)
    for name in (layout.INCOMPLETE, layout.CLAIMED):
        store.delete(name)
    _remove_empty_folders(store)
    return True


def _remove_empty_folders(store: Store) -> None:
    """Remove the folders of a local store, unless they hold other files."""
    if isinstance(store, LocalStore):
        root = Path(unquote(urlsplit(store.address).path))
        for folder in (root / layout.STATE, root):
            with suppress(OSError):
                folder.rmdir()


def versions_here() -> dict[str, str]:
    """Return the versions that a savepoint is written with, without Spark's."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("tidegate")
    except PackageNotFoundError:
        own = "unknown"
    return {"tidegate": own, "python": platform.python_version()}
