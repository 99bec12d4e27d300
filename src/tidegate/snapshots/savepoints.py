"""Savepoints: copies of complete snapshots that stand by themselves, and asking a running job for one.

A savepoint is a folder (a store) with the files of one snapshot and a manifest that lists them by names relative to that
folder, so that it can be moved and copied as a whole. Invariants:

- The manifest is created last, in one step. Whatever interrupts the copying leaves no manifest and so no savepoint.
- Nothing is written into a folder that holds anything. Who writes says so first, by an exclusive create, so that two
  copies never mix.
- No byte is copied without a look at its file's length and checksum.
- Every piece is a chain of one row file, or empty: the canonical form that any backend restores from. Snapshots of full
  epochs are like that; of others, the caller says how a piece is rewritten.
- Only a savepoint is ever deleted, by who claimed it, and only the files that its manifest lists; manifest first.

Requests from other processes are files in the job's store, which the running coordinator looks for; its answer is a file
beside the request. Who asked removes both. Not here: when an epoch is taken, and what a job does with what it restores.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from tidegate.errors import AlreadyExists, CorruptFile, NotFound, StoreError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.committed import holds_more
from tidegate.snapshots.manifest import ROWS, FileEntry, Manifest, OperatorEntry, PieceEntry, RestoredFrom, SavepointEntry
from tidegate.store import layout
from tidegate.store.base import Store
from tidegate.store.checked import checked_chunks
from tidegate.store.local import LocalStore
from tidegate.store.opening import open_store
from tidegate.system_errors import lasts, what_to_do

REQUEST_TIMEOUT_S = 600.0

_POLL_S = 0.2

Rewrite: TypeAlias = Callable[[Store, Manifest, str, PieceEntry, Store], PieceEntry]
"""`rewrite(source, manifest, operator, piece, target)` writes one row file with all of the piece into `target` and gives the
piece that lists it."""


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
    source: Store,
    manifest: Manifest,
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
            name: _export_operator(source, manifest, name, entry, target, rewrite, cancelled)
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
    source: Store,
    manifest: Manifest,
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
                copy_file(source, file, target, cancelled)
        else:
            assert rewrite is not None
            piece = rewrite(source, manifest, name, piece, target)
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


# Finding.


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A snapshot to begin with. `address` is what slots need to find just this one (`load_savepoint`)."""

    address: str
    store: Store
    manifest: Manifest
    origin: RestoredFrom

    @property
    def is_savepoint(self) -> bool:
        return self.manifest.savepoint is not None


def load_savepoint(address: str) -> tuple[Store, Manifest]:
    """The store and the manifest of what is at that address; for errors see `find_restore_point`."""
    found = find_restore_point(address)
    return found.store, found.manifest


def find_restore_point(path: str) -> RestorePoint:
    """`path` is that of a savepoint's folder, of a job's folder of snapshots (then its newest is meant), or of the manifest
    of either. NotFound where there is no such thing, CorruptFile where there is one that can't be believed."""
    named = layout.split_manifest_address(path)
    store = open_store(path if named is None else named[0])
    if named is None:
        if layout.SAVEPOINT in _names(store):
            named = store.address, layout.SAVEPOINT
        else:
            named = store.address, _newest_manifest(store)
    name = named[1]
    try:
        manifest = Manifest.from_bytes(store.read(name), name=name)
    except NotFound as error:
        raise NotFound(f"there is no snapshot to restore from: {error}") from error
    where = layout.shown(store.address)
    if name == layout.SAVEPOINT:
        if manifest.savepoint is None:
            raise CorruptFile(f"{name} in {where} is not the manifest of a savepoint")
        return RestorePoint(store.address, store, manifest, RestoredFrom(id=manifest.savepoint.id, path=where))
    if layout.parse_manifest_name(name) != layout.ManifestName(epoch=manifest.epoch, attempt=manifest.attempt):
        raise CorruptFile(f"{name} holds the manifest of epoch {manifest.epoch}, attempt {manifest.attempt}")
    # A job's folder has no id, and what is the newest in it changes: where it is says what it is.
    given = where if layout.split_manifest_address(path) is None else layout.inside(where, name)
    return RestorePoint(layout.inside(store.address, name), store, manifest, RestoredFrom(id=given, path=given))


def shown_path(path: str) -> str:
    """The path of a restore point as `RestoredFrom.path` has it, also where nothing is there any more."""
    named = layout.split_manifest_address(path)
    store = open_store(path if named is None else named[0])
    where = layout.shown(store.address)
    return where if named is None or named[1] == layout.SAVEPOINT else layout.inside(where, named[1])


def _newest_manifest(store: Store) -> str:
    catalog = SnapshotCatalog(store)
    epochs = catalog.epochs()
    if epochs:
        newest = catalog.load(epochs[-1])
        return layout.manifest_name(epoch=newest.epoch, attempt=newest.attempt)
    where, names = layout.shown(store.address), _names(store)
    if layout.INCOMPLETE in names:
        raise NotFound(f"the savepoint in {where} was never finished: whoever wrote it was interrupted")
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


# Asking a running job, from another process.


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    to: str
    expires_ms: int


def request_savepoint(job: str | Store, to: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> str:
    """Asks the job whose snapshots are in this folder for a savepoint at `to`; gives the request's id. A job that isn't
    running takes no notice; nor does any after the time-out."""
    store = _job_store(job)
    if not SnapshotCatalog(store).attempts():
        raise NotFound(f"{layout.shown(store.address)} is not the folder of a job that ever ran")
    request, now_ms = uuid.uuid4().hex, round(time.time() * 1000)
    target = resolved(to)
    check_empty(open_store(target))
    content = {"to": target, "asked_ms": now_ms, "expires_ms": now_ms + round(timeout_s * 1000)}
    store.create(layout.request_name(request), json.dumps(content).encode("utf-8"))
    return request


def wait_for_savepoint(job: str | Store, request: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> SavepointInfo:
    """Waits for the answer. StoreError with the reason where there was no savepoint, TimeoutError where nobody answered;
    the request is taken back then."""
    store = _job_store(job)
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            with suppress(NotFound):
                answer = json.loads(store.read(layout.answer_name(request)))
                break
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"the job in {layout.shown(store.address)} gave no answer within {timeout_s} s: does it run?"
                )
            time.sleep(_POLL_S)
    finally:
        for name in (layout.request_name(request), layout.answer_name(request)):
            with suppress(StoreError):
                store.delete(name)
    if "failed" in answer:
        raise StoreError(f"no savepoint was taken: {answer['failed']}")
    return SavepointInfo(path=answer["path"], epoch=answer["epoch"], bytes=answer["bytes"])


def open_requests(store: Store, *, now_ms: int, known: Collection[str] = ()) -> list[Request]:
    """The requests that nobody has answered and that are not `known`. One that has expired or can't be read is removed."""
    names = store.list(layout.REQUESTS)
    answered = {layout.parse_answer_name(name) for name in names}
    found = []
    for name in names:
        request = layout.parse_request_name(name)
        if request is None or request in answered or request in known:
            continue
        try:
            content = json.loads(store.read(name))
            asked = Request(id=request, to=str(content["to"]), expires_ms=int(content["expires_ms"]))
        except NotFound:
            continue  # taken back meanwhile
        except (ValueError, KeyError, TypeError):
            store.delete(name)
            continue
        if asked.expires_ms < now_ms:
            store.delete(name)
        else:
            found.append(asked)
    return found


def answer_request(store: Store, request: str, outcome: SavepointInfo | str) -> None:
    """`outcome` is the savepoint, or says why there is none. An answer to a request that was taken back is not given."""
    content = (
        {"failed": outcome}
        if isinstance(outcome, str)
        else {"path": outcome.path, "epoch": outcome.epoch, "bytes": outcome.bytes}
    )
    if layout.request_name(request) in store.list(layout.REQUESTS):
        with suppress(AlreadyExists):
            store.create(layout.answer_name(request), json.dumps(content).encode("utf-8"))


def resolved(path: str) -> str:
    """A plain path made absolute, for whoever works in another folder; a URI as it is."""
    if "://" in path or path.startswith("file:"):
        return path
    return os.path.abspath(os.path.expanduser(path))


def versions_here() -> dict[str, str]:
    """What a savepoint tells of who wrote it, without Spark."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("tidegate")
    except PackageNotFoundError:
        own = "unknown"
    return {"tidegate": own, "python": platform.python_version()}


def _job_store(job: str | Store) -> Store:
    return open_store(job) if isinstance(job, str) else job
