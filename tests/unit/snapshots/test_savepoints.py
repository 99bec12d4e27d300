"""Savepoints as files: copied whole or not at all, found by any of their paths, deleted with care, asked for by a file."""

from __future__ import annotations

import os
import stat
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidegate.errors import AlreadyExists, CorruptFile, NotFound, StoreError
from tidegate.snapshots.catalog import SnapshotCatalog
from tidegate.snapshots.finding import find_snapshot, restored_from, shown_path
from tidegate.snapshots.manifest import FileEntry, Manifest, OperatorEntry, PieceEntry
from tidegate.snapshots.requests import answer_request, open_requests, request_savepoint, wait_for_savepoint
from tidegate.snapshots.savepoints import SavepointInfo, export_snapshot, remove_savepoint
from tidegate.snapshots.snapshot import Snapshot
from tidegate.store import layout
from tidegate.store.base import Store
from tidegate.store.local import LocalStore
from tidegate.store.memory import Access, Fail, Fault, Flip, LoseReply, MemoryStore, Operation, Tear
from tidegate.store.opening import open_store


def write_file(store: Store, *, attempt: int, epoch: int, subtask: int = 0, operator: str = "count") -> FileEntry:
    name = layout.state_file_name(attempt=attempt, operator=operator, subtask=subtask, epoch=epoch)
    content = os.urandom(100 + subtask)
    store.write(name, [content])
    return FileEntry(name=name, bytes=len(content), checksum=zlib.crc32(content))


def snapshot(store: Store, *, epochs: int = 1, deltas: bool = False) -> Manifest:
    """A job's store with that many complete epochs, of two operators; the newest manifest."""
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    base: tuple[FileEntry, ...] = ()
    for epoch in range(1, epochs + 1):
        files = [write_file(store, attempt=attempt, epoch=epoch, subtask=subtask) for subtask in (0, 1)]
        pieces = tuple(
            PieceEntry(
                subtask=subtask,
                key_groups=(64 * subtask, 64 * subtask + 64),
                item_counts={},
                files=(*(base if not subtask else ()), files[subtask]),
            )
            for subtask in (0, 1)
        )
        empty = PieceEntry(subtask=0, key_groups=(0, 0), files=(), item_counts={})
        manifest = Manifest(
            job="counts",
            epoch=epoch,
            attempt=attempt,
            created_ms=5,
            key_group_count=128,
            ending=None,
            operators={
                "count": OperatorEntry(parallelism=2, states=(), pieces=pieces),
                "out": OperatorEntry(parallelism=1, states=(), pieces=(empty,)),
            },
        )
        catalog.commit(manifest)
        base = pieces[0].files if deltas else ()
    return manifest


def exported(source: Store, manifest: Manifest, target: Store, **rest: Any) -> Manifest:
    return export_snapshot(
        Snapshot(source, manifest), target, created_ms=77, graph="in → count → out", versions={"python": "3"}, **rest
    )


def check_whole(store: Store, manifest: Manifest) -> None:
    for file in manifest.files():
        content = store.read(file.name)
        assert (len(content), zlib.crc32(content)) == (file.bytes, file.checksum)
    assert set(store.list("")) == {layout.SAVEPOINT, *(file.name for file in manifest.files())}


# ----------------------------------------------------------------------------------------------------------- copying


def test_a_savepoint_holds_the_snapshots_files_and_says_what_is_in_it() -> None:
    source, target = MemoryStore(), MemoryStore()
    manifest = snapshot(source, epochs=2)
    made = exported(source, manifest, target)
    check_whole(target, made)
    assert made.savepoint is not None
    assert (made.savepoint.created_ms, made.savepoint.graph) == (77, "in → count → out")
    assert made.savepoint.operator_bytes == {"count": 201, "out": 0}
    assert replace(made, savepoint=None) == manifest
    assert Manifest.from_bytes(target.read(layout.SAVEPOINT), name="s") == made


def test_two_savepoints_of_one_snapshot_have_two_ids() -> None:
    source, targets = MemoryStore(), (MemoryStore(), MemoryStore())
    manifest = snapshot(source)
    ids = {made.savepoint.id for target in targets if (made := exported(source, manifest, target)).savepoint}
    assert len(ids) == 2


def test_a_folder_that_holds_anything_is_refused_and_nothing_is_written() -> None:
    source, target = MemoryStore(), MemoryStore()
    manifest = snapshot(source)
    target.write("notes.txt", [b"mine"])
    with pytest.raises(AlreadyExists, match=r"not empty \(it holds notes\.txt\)"):
        exported(source, manifest, target)
    assert target.files == {"notes.txt": b"mine"}


def test_of_two_copies_into_one_folder_one_is_made() -> None:
    source, target = MemoryStore(), MemoryStore()
    manifest = snapshot(source)
    made: list[Manifest] = []

    def second(access: Access) -> Fault | None:
        """While the first writes."""
        if access.operation is Operation.WRITE and not made:
            target.faults = None
            with pytest.raises(AlreadyExists, match="being written"):
                exported(source, manifest, target)
        return None

    target.faults = second
    made.append(exported(source, manifest, target))
    check_whole(target, made[0])


FAULTS: dict[str, Callable[[Access], Fault | None]] = {
    "the disk is full": lambda access: Fail() if access.operation is Operation.WRITE and "s00001" in access.name else None,
    "a torn write": lambda access: Tear(7) if access.operation is Operation.WRITE and "s00001" in access.name else None,
    "a torn write that nobody tells": lambda access: (
        Tear(7, silent=True) if access.operation is Operation.WRITE and "s00001" in access.name else None
    ),
    "no manifest": lambda access: (
        Fail() if access.operation is Operation.CREATE and access.name == layout.SAVEPOINT else None
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_interrupted_copy_leaves_no_savepoint_and_an_empty_folder(fault: str) -> None:
    source, target = MemoryStore(), MemoryStore()
    manifest = snapshot(source)
    target.faults = FAULTS[fault]
    with pytest.raises(StoreError):
        exported(source, manifest, target)
    target.faults = None
    assert target.files == {}
    check_whole(target, exported(source, manifest, target))


def test_a_manifest_whose_create_got_no_answer_keeps_its_files() -> None:
    source, target = MemoryStore(), MemoryStore()
    manifest = snapshot(source)
    target.faults = lambda access: (
        LoseReply() if access.operation is Operation.CREATE and access.name == layout.SAVEPOINT else None
    )
    with pytest.raises(StoreError, match="no reply"):
        exported(source, manifest, target)
    target.faults = None
    made = Manifest.from_bytes(target.read(layout.SAVEPOINT), name="s")
    for file in made.files():
        assert zlib.crc32(target.read(file.name)) == file.checksum


@pytest.mark.parametrize("after", range(4))
def test_who_dies_while_copying_leaves_no_savepoint(after: int) -> None:
    """However far it came: the mark, one file, both, or all but the manifest."""
    source, target = MemoryStore("source"), MemoryStore("target")
    manifest = snapshot(source)

    class Died(BaseException):
        pass

    count = 0

    def die(access: Access) -> Fault | None:
        nonlocal count
        if access.operation in (Operation.WRITE, Operation.CREATE):
            count += 1
        if count > after:
            raise Died
        return None

    target.faults = die
    with pytest.raises(Died):
        exported(source, manifest, target)
    target.faults = None
    assert layout.SAVEPOINT not in target.files
    if after:
        with pytest.raises(AlreadyExists, match="interrupted"):
            exported(source, manifest, target)


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-1], lambda content: content + b"x", lambda content: bytes([content[0] ^ 1]) + content[1:]],
)
def test_a_file_that_isnt_as_its_manifest_says_is_not_copied(damage: Callable[[bytes], bytes]) -> None:
    source, target = MemoryStore(), MemoryStore()
    manifest = snapshot(source)
    name = next(file.name for file in manifest.files())
    source.files[name] = damage(source.files[name])
    with pytest.raises(CorruptFile, match=name):
        exported(source, manifest, target)
    assert target.files == {}


def test_a_bit_that_flips_on_the_way_is_noticed() -> None:
    source, target = MemoryStore(), MemoryStore()
    manifest = snapshot(source)
    source.faults = lambda access: Flip(3) if access.operation is Operation.READ else None
    with pytest.raises(CorruptFile, match="checksum"):
        exported(source, manifest, target)


def test_a_copy_can_be_cancelled() -> None:
    source, target = MemoryStore(), MemoryStore()
    manifest = snapshot(source)
    with pytest.raises(StoreError, match="cancelled"):
        exported(source, manifest, target, cancelled=lambda: True)
    assert target.files == {}


def test_increments_are_refused_unless_somebody_rewrites_them() -> None:
    source, target = MemoryStore(), MemoryStore()
    manifest = snapshot(source, epochs=3, deltas=True)
    with pytest.raises(StoreError, match="deltas or files"):
        exported(source, manifest, target)
    assert target.files == {}
    rewritten = []

    def rewrite(of: Snapshot, operator: str, piece: PieceEntry, into: Store) -> PieceEntry:
        rewritten.append((operator, piece.subtask, len(piece.files)))
        return replace(piece, files=(write_file(into, attempt=9, epoch=of.manifest.epoch, subtask=piece.subtask),))

    made = exported(source, manifest, target, rewrite=rewrite)
    assert rewritten == [("count", 0, 3)]
    check_whole(target, made)


def test_a_savepoint_on_disk_is_for_its_owner_only_and_can_be_moved(tmp_path: Path) -> None:
    source = LocalStore(tmp_path / "job")
    made = exported(source, snapshot(source), LocalStore(tmp_path / "a" / "savepoint"))
    for path in (tmp_path / "a").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    (tmp_path / "a" / "savepoint").rename(tmp_path / "elsewhere")
    found = find_snapshot(str(tmp_path / "elsewhere"))
    assert found.manifest == made
    check_whole(found.store, found.manifest)


# ----------------------------------------------------------------------------------------------------------- finding


def test_every_path_of_a_snapshot_leads_to_it(tmp_path: Path) -> None:
    job = LocalStore(tmp_path / "job")
    newest = snapshot(job, epochs=3)
    made = exported(job, newest, LocalStore(tmp_path / "savepoint"))
    assert made.savepoint is not None
    for path in ("savepoint", "savepoint/", "savepoint/savepoint.json"):
        for given in (f"{tmp_path}/{path}", (tmp_path / path).as_uri()):
            point = find_snapshot(given)
            assert point.manifest == made and point.is_savepoint
            origin = restored_from(given, point)
            assert origin.id == made.savepoint.id
            assert origin.path == shown_path(given) == (tmp_path / "savepoint").as_uri()
            assert find_snapshot(point.address).manifest == made
    point = find_snapshot(str(tmp_path / "job"))
    assert point.manifest == newest and not point.is_savepoint
    assert point.address.endswith("job/manifests/0000000003-a0000000001.json")
    assert find_snapshot(point.address).manifest == newest
    older = str(tmp_path / "job/manifests/0000000002-a0000000001.json")
    assert find_snapshot(older).manifest.epoch == 2
    found = find_snapshot(older)
    assert restored_from(older, found).id == shown_path(older) != restored_from(str(tmp_path / "job"), point).id


def test_a_query_stays_at_the_end_of_an_address() -> None:
    assert layout.inside("s3://bucket/x?region=eu", "savepoint.json") == "s3://bucket/x/savepoint.json?region=eu"
    assert layout.split_manifest_address("s3://bucket/x/savepoint.json?region=eu") == (
        "s3://bucket/x?region=eu",
        "savepoint.json",
    )
    assert layout.split_manifest_address("s3://bucket/x?region=eu") == ("s3://bucket/x?region=eu", None)
    assert layout.split_manifest_address("/x/manifests/1.json") == ("/x/manifests/1.json", None)


def test_what_is_no_snapshot_says_what_it_is_instead(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing is there"):
        find_snapshot(str(tmp_path / "nowhere"))
    with pytest.raises(NotFound, match="no snapshot to restore from"):
        find_snapshot(str(tmp_path / "nowhere/savepoint.json"))
    job = LocalStore(tmp_path / "snapshots/counts")
    snapshot(job)
    with pytest.raises(NotFound, match=r"folders of the jobs \['counts'\]"):
        find_snapshot(str(tmp_path / "snapshots"))
    LocalStore(tmp_path / "half").create(layout.INCOMPLETE, b"")
    with pytest.raises(NotFound, match="never finished"):
        find_snapshot(str(tmp_path / "half"))


def test_a_manifest_that_cant_be_believed_is_an_error_and_nothing_older_is_taken(tmp_path: Path) -> None:
    job = LocalStore(tmp_path / "job")
    newest = snapshot(job, epochs=2)
    path = tmp_path / "job/manifests/0000000002-a0000000001.json"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptFile):
        find_snapshot(str(tmp_path / "job"))
    savepoint = LocalStore(tmp_path / "savepoint")
    savepoint.create(layout.SAVEPOINT, newest.to_bytes())
    with pytest.raises(CorruptFile, match="not the manifest of a savepoint"):
        find_snapshot(str(tmp_path / "savepoint"))


# ---------------------------------------------------------------------------------------------------------- deleting


def test_a_claimed_savepoint_is_deleted_but_not_what_else_is_in_its_folder(tmp_path: Path) -> None:
    job, store = LocalStore(tmp_path / "job"), LocalStore(tmp_path / "savepoint")
    made = exported(job, snapshot(job), store)
    assert made.savepoint is not None
    assert not remove_savepoint(str(tmp_path / "savepoint"), "0" * 32), "that is another one's id"
    assert find_snapshot(str(tmp_path / "savepoint")).manifest == made
    (tmp_path / "savepoint/state/notes.txt").write_text("mine")
    assert remove_savepoint(str(tmp_path / "savepoint"), made.savepoint.id)
    assert store.list("") == ["state/notes.txt"]
    assert not remove_savepoint(str(tmp_path / "savepoint"), made.savepoint.id)


def test_the_folder_goes_with_it_where_nothing_else_is_in_it(tmp_path: Path) -> None:
    job, store = LocalStore(tmp_path / "job"), LocalStore(tmp_path / "savepoint")
    made = exported(job, snapshot(job), store)
    assert made.savepoint is not None and remove_savepoint(f"{tmp_path}/savepoint/savepoint.json", made.savepoint.id)
    assert not (tmp_path / "savepoint").exists()


def test_a_jobs_own_snapshots_are_never_taken_for_a_savepoint(tmp_path: Path) -> None:
    job = LocalStore(tmp_path / "job")
    snapshot(job)
    before = job.list("")
    assert not remove_savepoint(str(tmp_path / "job"), shown_path(str(tmp_path / "job")))
    assert job.list("") == before


def test_an_interrupted_deletion_leaves_no_savepoint_and_is_taken_up_again() -> None:
    source = MemoryStore()
    target = open_store("memory://interrupted-deletion")
    assert isinstance(target, MemoryStore)
    made = exported(source, snapshot(source), target)
    assert made.savepoint is not None
    target.faults = lambda access: (
        Fail() if access.operation is Operation.DELETE and access.name.startswith(layout.STATE) else None
    )
    with pytest.raises(StoreError):
        remove_savepoint(target.address, made.savepoint.id)
    assert layout.SAVEPOINT not in target.files, "manifest first: one that is there never lists what is gone"
    target.faults = None
    assert remove_savepoint(target.address, made.savepoint.id)
    assert target.files == {}


# ---------------------------------------------------------------------------------------------- requests by a file


def test_a_request_is_found_answered_and_gone(tmp_path: Path) -> None:
    job = LocalStore(tmp_path / "job")
    snapshot(job)
    request = request_savepoint(str(tmp_path / "job"), str(tmp_path / "sp"))
    (found,) = open_requests(job, now_ms=0)
    assert (found.id, found.to) == (request, str(tmp_path / "sp"))
    assert open_requests(job, now_ms=0, known={request}) == []
    info = SavepointInfo(path="p", epoch=3, bytes=9)
    waiting = threading.Timer(0.1, answer_request, (job, request, info))
    waiting.start()
    assert wait_for_savepoint(str(tmp_path / "job"), request, timeout_s=30) == info
    waiting.join()
    assert job.list(layout.REQUESTS) == []


def test_an_answered_request_is_not_found_again_and_a_refusal_is_told() -> None:
    job = MemoryStore()
    snapshot(job)
    request = request_savepoint(job, "memory://somewhere")
    answer_request(job, request, "the disk is full")
    answer_request(job, request, "something else")
    assert open_requests(job, now_ms=0) == []
    with pytest.raises(StoreError, match="no savepoint was taken: the disk is full"):
        wait_for_savepoint(job, request)


def test_a_request_that_nobody_answers_is_taken_back() -> None:
    job = MemoryStore()
    snapshot(job)
    request = request_savepoint(job, "memory://somewhere")
    with pytest.raises(TimeoutError, match="does it run"):
        wait_for_savepoint(job, request, timeout_s=0)
    assert job.list(layout.REQUESTS) == []
    answer_request(job, request, "too late")
    assert job.list(layout.REQUESTS) == []


def test_old_and_unreadable_requests_are_removed() -> None:
    job = MemoryStore()
    snapshot(job)
    request_savepoint(job, "memory://somewhere", timeout_s=1)
    job.write(layout.request_name("f" * 32), [b"{"])
    job.write("requests/notes.txt", [b"mine"])
    assert open_requests(job, now_ms=2**60) == []
    assert job.list(layout.REQUESTS) == ["requests/notes.txt"]


def test_a_request_is_refused_where_there_is_no_job_or_no_room(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="not the folder of a job"):
        request_savepoint(str(tmp_path / "nowhere"), str(tmp_path / "sp"))
    job = LocalStore(tmp_path / "job")
    snapshot(job)
    with pytest.raises(AlreadyExists, match="not empty"):
        request_savepoint(job, str(tmp_path / "job"))
