"""Savepoints: copies of complete snapshots that stand by themselves.

A savepoint is a folder (a store) with the files of one snapshot and a manifest that lists them by names relative to that
folder, so that it can be moved and copied as a whole. Invariants:

- The manifest is created last, in one step. Whatever interrupts the copying leaves no manifest and so no savepoint.
- Nothing is written into a folder that holds anything. Who writes says so first, by an exclusive create, so that two
  copies never mix.
- No byte is copied without a look at its file's length and checksum.
- Every piece is a chain of one row file, or empty: the canonical form that any backend restores from. Snapshots of full
  epochs are like that; of others, the caller says how a piece is rewritten.
- Only a savepoint is ever deleted, by who claimed it, and only the files that its manifest lists; manifest first.

Not here: when an epoch is taken, how a running job is asked for a savepoint (requests.py), and what a job does with what it
restores.
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
"""As `Snapshot.rewrite`: writes one row file with all of the piece into the target and returns the piece that lists it."""


@dataclass(frozen=True, slots=True)
class SavepointInfo:
    """`to_commit` is how many committables the savepoint carries: output of which nobody knows whether it was committed, so
    that the job that begins with it commits it where it was written. A savepoint of a running job has none."""

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
) -> Manifest:
    """Copies a complete snapshot into `target` and gives the savepoint's manifest, which is there when this returns.

    AlreadyExists where the folder isn't empty; then nothing was written. Whatever goes wrong later, what was copied is
    removed again. `cancelled` is asked now and then, from this thread.
    """
    manifest = snapshot.manifest
    odd = [
        (name, piece)
        for name, operator in manifest.operators.items()
        for piece in operator.pieces
        if not is_canonical(piece)
    ]
    if odd and rewrite is None:
        raise StoreError(
            f"epoch {manifest.epoch} can't be copied as it is: operator {odd[0][0]!r} has increments or files "
            f"of its backend in it. Take a savepoint of the running job, or of one that was stopped"
        )
    with savepoint_in_writing(target, job=manifest.job, epoch=manifest.epoch):
        operators = {
            name: _export_operator(snapshot, name, entry, target, rewrite, cancelled)
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
    """Marks the empty folder as one that is being written to. Within, files are written and `create_savepoint` is called; if
    that fails, what was written is removed again. AlreadyExists where the folder isn't empty."""
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
    # All is there. If the mark stays it does no harm: where there is a manifest it means nothing.
    with suppress(StoreError):
        target.delete(layout.INCOMPLETE)


def create_savepoint(
    target: Store, manifest: Manifest, *, created_ms: int, graph: str, versions: Mapping[str, str]
) -> Manifest:
    """Makes a savepoint of the files that the manifest lists, which are all in `target`."""
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
    """AlreadyExists where a savepoint can't be written because the folder holds something."""
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
) -> OperatorEntry:
    pieces = []
    for piece in entry.pieces:
        if is_canonical(piece) and (rewrite is None or not holds_more(piece, entry)):
            for file in piece.files:
                copy_file(snapshot.store, file, target, cancelled)
        else:
            assert rewrite is not None
            piece = rewrite(snapshot, name, piece, target)
            assert is_canonical(piece), f"operator {name!r}: {piece}"
        pieces.append(piece)
    return replace(entry, pieces=tuple(pieces))


def copy_file(source: Store, file: FileEntry, target: Store, cancelled: Callable[[], bool] = lambda: False) -> None:
    """Copies a file under its name. No byte of it is believed before its checksum was compared."""
    size_bytes = source.size(file.name)
    if size_bytes != file.bytes:
        raise CorruptFile(f"{file.name} has {size_bytes} bytes; its manifest lists {file.bytes}")

    def chunks() -> Iterator[bytes]:
        for chunk in checked_chunks(source, file):
            if cancelled():
                raise StoreError(f"the copying was cancelled at {file.name}")
            yield chunk

    written_bytes = target.write(file.name, chunks())
    found_bytes = target.size(file.name)
    if not written_bytes == found_bytes == file.bytes:
        raise StoreError(f"{file.name}: {found_bytes} of {file.bytes} bytes are in {layout.shown(target.address)}")


def _take_back(target: Store, mark: bytes) -> None:
    """Removes what an interrupted copy wrote, if it is ours: the folder was empty when we put our mark there. Where the
    manifest's create failed without an answer, it may exist: then the savepoint is whole, and stays."""
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
    """Deletes the savepoint of that id, and goes on where an earlier deletion was interrupted. False where the path holds
    nothing, or something else by now."""
    named = layout.split_manifest_address(path)
    store = open_store(path if named is None else named[0])
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
    """Where there are folders: what holds anything else stays."""
    if isinstance(store, LocalStore):
        root = Path(unquote(urlsplit(store.address).path))
        for folder in (root / layout.STATE, root):
            with suppress(OSError):
                folder.rmdir()


def versions_here() -> dict[str, str]:
    """What a savepoint tells of who wrote it, without Spark."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("tidegate")
    except PackageNotFoundError:
        own = "unknown"
    return {"tidegate": own, "python": platform.python_version()}
