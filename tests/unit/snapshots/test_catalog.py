"""The catalog over a store that fails, dies and interleaves. docs/promises.md, rows 1, 2, 4, 5, 13 and 16."""

from __future__ import annotations

import random
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tidegate.errors import AlreadyExists, CorruptFile, FencedOff, JobError, NotFound, StoreError
from tidegate.snapshots.catalog import KEPT_ATTEMPTS, SnapshotCatalog, lineage
from tidegate.snapshots.claims import Claim, Program
from tidegate.snapshots.manifest import FileEntry, Manifest, OperatorEntry, PieceEntry
from tidegate.store import layout
from tidegate.store.base import Store
from tidegate.store.layout import ManifestName, OriginName
from tidegate.store.local import LocalStore
from tidegate.store.memory import Access, Fail, Flip, LoseReply, MemoryStore, Operation


class ProcessDied(BaseException):
    """Raised by a fault hook: the caller is no more."""


def _write(store: Store, *, attempt: int, epoch: int, subtask: int = 0, operator: str = "count") -> FileEntry:
    name = layout.state_file_name(attempt=attempt, operator=operator, subtask=subtask, epoch=epoch)
    content = f"state of {name}".encode()
    store.write(name, [content])
    return FileEntry(name=name, bytes=len(content), checksum=zlib.crc32(content), index_bytes=0, index_checksum=0)


def _manifest(*, attempt: int, epoch: int, files: Iterable[FileEntry] = ()) -> Manifest:
    piece = PieceEntry(subtask=0, key_groups=(0, 128), files=tuple(files), item_counts={})
    return Manifest(
        job="job",
        epoch=epoch,
        attempt=attempt,
        created_ms=0,
        key_group_count=128,
        ending=None,
        operators={"count": OperatorEntry(parallelism=1, states=(), pieces=(piece,))},
    )


def _complete(
    catalog: SnapshotCatalog, store: MemoryStore, *, attempt: int, epoch: int, also: Iterable[FileEntry] = ()
) -> FileEntry:
    file = _write(store, attempt=attempt, epoch=epoch)
    catalog.commit(_manifest(attempt=attempt, epoch=epoch, files=[*also, file]))
    return file


def _state_files(store: MemoryStore) -> set[str]:
    return set(store.list(layout.STATE))


# Attempts.


def test_attempts_grow_and_the_newest_is_current() -> None:
    store = MemoryStore()
    catalogs = [SnapshotCatalog(store) for _ in range(3)]
    assert [catalog.claim_attempt() for catalog in catalogs] == [1, 2, 3]
    assert [catalogs[0].is_current(attempt) for attempt in (1, 2, 3, 4)] == [False, False, True, False]


def test_before_any_claim_nothing_is_current_and_nothing_is_there() -> None:
    catalog = SnapshotCatalog(MemoryStore())
    assert not catalog.is_current(1)
    assert catalog.epochs() == []
    assert catalog.highest_epoch_seen() == 0
    with pytest.raises(NotFound):
        catalog.load(1)


@pytest.mark.parametrize("make", [lambda _: MemoryStore(), LocalStore])
def test_many_claimants_at_once_get_different_numbers_and_the_highest_is_current(make: Any, tmp_path: Path) -> None:
    store = make(tmp_path)
    start = threading.Barrier(8)

    def claim(_: int) -> list[int]:
        catalog, claimed = SnapshotCatalog(store), []
        start.wait()
        for _ in range(5):
            with suppress(FencedOff):
                claimed.append(catalog.claim_attempt())
        return claimed

    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(claim, range(8)))
    numbers = [number for claimed in claims for number in claimed]
    assert len(set(numbers)) == len(numbers)
    assert all(claimed == sorted(claimed) for claimed in claims)
    # Forty creates took the numbers 1 to 40; a claim is fenced only by a higher one, so the highest came through.
    assert max(numbers) == 40
    assert SnapshotCatalog(store).is_current(40)


def test_a_claim_that_loses_its_number_takes_the_next() -> None:
    store = MemoryStore()

    def intrude(access: Access) -> None:
        if access.operation is Operation.CREATE and access.name == layout.attempt_name(1):
            store.files.setdefault(access.name, b"someone else's")

    store.faults = intrude
    assert SnapshotCatalog(store).claim_attempt() == 2


def test_a_replaced_claim_is_found_out() -> None:
    store = MemoryStore()
    first, second = SnapshotCatalog(store), SnapshotCatalog(store)
    attempt = first.claim_attempt()
    del store.files[layout.attempt_name(attempt)]  # as where two creates of one object both went through
    store.files = {name: content for name, content in store.files.items() if not name.startswith(layout.ORIGINS)}
    assert second.claim_attempt() == attempt
    with pytest.raises(FencedOff):
        first.commit(_manifest(attempt=attempt, epoch=1))
    second.commit(_manifest(attempt=attempt, epoch=1))


@pytest.mark.parametrize("arrives_after", [1, 2])
def test_a_claim_that_arrives_late_is_not_that_of_another_driver(
    monkeypatch: pytest.MonkeyPatch, arrives_after: int
) -> None:
    """Two claims get no answer. The first request is carried out during the second claim, or after it."""
    store, sent = MemoryStore(), list[bytes]()

    def claim(attempt: int, claimant: str, program: Program | None) -> Claim:
        return Claim(attempt, claimant, Program("job", "host", 1, "user"), f"second {len(sent)}")

    def lose(name: str, content: bytes) -> None:
        sent.append(content)
        if len(sent) == arrives_after + 1:
            store.files[layout.attempt_name(1)] = sent[0]
        if name in store.files:
            raise AlreadyExists(name)
        raise StoreError("no answer")

    monkeypatch.setattr(Claim, "now", claim)
    catalog = SnapshotCatalog(store)
    with monkeypatch.context() as outage:
        outage.setattr(store, "create", lose)
        for _ in range(2):
            with pytest.raises(StoreError, match="no answer"):
                catalog.claim_attempt()
    store.files[layout.attempt_name(1)] = sent[0]
    assert not catalog.is_superseded()
    attempt = catalog.claim_attempt()
    assert attempt == 2 and catalog.is_current(attempt)
    assert SnapshotCatalog(store).claim_attempt() == 3
    assert catalog.is_superseded()


def test_a_claimant_can_be_named_so_that_runs_repeat() -> None:
    contents = []
    for _ in range(2):
        store = MemoryStore()
        SnapshotCatalog(store, claimant="driver").claim_attempt()
        contents.append(store.files)
    assert contents[0] == contents[1]


def test_ten_restarts_leave_no_more_than_one() -> None:
    store = MemoryStore()
    counts = []
    for epoch in range(1, 40):
        catalog = SnapshotCatalog(store)
        attempt = catalog.claim_attempt()
        catalog.sweep(attempt)
        _complete(catalog, store, attempt=attempt, epoch=epoch)
        catalog.release(catalog.epochs()[:-1], attempt=attempt)
        counts.append(len(store.files))
    assert counts[20] == counts[-1] <= 2 * KEPT_ATTEMPTS + 2


# What is committed outside.


def _name(epoch: int, attempt: int) -> ManifestName:
    return ManifestName(epoch=epoch, attempt=attempt)


def _noted(store: MemoryStore) -> list[str]:
    return store.list(layout.COMMITTED)


def test_a_snapshot_is_confirmed_and_so_are_those_before_it() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    for epoch in (1, 2, 3):
        _complete(catalog, store, attempt=attempt, epoch=epoch)
    assert not catalog.is_confirmed(_name(1, 1))
    for epoch in (1, 2, 2):
        catalog.confirm(epoch, attempt=attempt)
        assert len(_noted(store)) == 1, "the newest stands for all"
    other = SnapshotCatalog(store)
    assert [other.is_confirmed(_name(epoch, 1)) for epoch in (1, 2, 3, 4)] == [True, True, False, False]
    assert not other.is_confirmed(_name(1, 2))
    catalog.release([1, 2], attempt=attempt)
    assert _noted(store) == []


def test_what_is_confirmed_counts_for_the_next_attempt_and_is_tidied_up() -> None:
    store = MemoryStore()
    for attempt in range(1, 5):
        catalog = SnapshotCatalog(store)
        assert catalog.claim_attempt() == attempt
        catalog.sweep(attempt)
        assert [catalog.is_confirmed(_name(each, each)) for each in range(1, attempt)] == [True] * (attempt - 1)
        _complete(catalog, store, attempt=attempt, epoch=attempt)
        catalog.confirm(attempt, attempt=attempt)
        assert len(_noted(store)) == 1
    store.create(layout.committed_name(_name(2, 2)), b"")  # whoever should have deleted it died
    catalog.sweep(4)
    assert len(_noted(store)) == 1


def test_a_note_of_a_snapshot_that_is_dead_counts_for_nothing() -> None:
    store = MemoryStore()
    old = SnapshotCatalog(store)
    old.claim_attempt()
    _complete(old, store, attempt=1, epoch=1)
    SnapshotCatalog(store).claim_attempt()
    store.create(layout.manifest_name(epoch=2, attempt=1), _manifest(attempt=1, epoch=2).to_bytes())
    store.create(layout.committed_name(_name(2, 1)), b"")
    catalog = SnapshotCatalog(store)
    assert not catalog.is_confirmed(_name(1, 1)) and not catalog.is_confirmed(_name(2, 1))
    with pytest.raises(FencedOff):
        old.confirm(1, attempt=1)
    catalog.sweep(catalog.claim_attempt())
    assert _noted(store) == []


# Snapshots.


def test_a_committed_epoch_can_be_loaded_and_verified() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    file = _complete(catalog, store, attempt=attempt, epoch=3)
    assert SnapshotCatalog(store).epochs() == [3]
    assert [entry.name for entry in SnapshotCatalog(store).load(3).files()] == [file.name]
    catalog.verify(3)
    with pytest.raises(NotFound, match="epoch 2"):
        catalog.load(2)


def test_later_attempts_go_on_from_what_earlier_ones_completed() -> None:
    store = MemoryStore()
    for attempt, epoch in ((1, 1), (2, 2), (3, 5)):
        catalog = SnapshotCatalog(store)
        assert catalog.claim_attempt() == attempt
        _complete(catalog, store, attempt=attempt, epoch=epoch)
    SnapshotCatalog(store).claim_attempt()
    assert SnapshotCatalog(store).epochs() == [1, 2, 5]


def test_a_fenced_coordinator_can_not_commit_release_discard_or_sweep() -> None:
    store = MemoryStore()
    old, new = SnapshotCatalog(store), SnapshotCatalog(store)
    attempt = old.claim_attempt()
    _complete(old, store, attempt=attempt, epoch=1)
    _complete(old, store, attempt=attempt, epoch=2)
    new.claim_attempt()
    before = dict(store.files)
    for refused in (
        lambda: old.commit(_manifest(attempt=attempt, epoch=3)),
        lambda: old.release([1], attempt=attempt),
        lambda: old.sweep(attempt),
        lambda: old.discard(before, attempt=attempt),
    ):
        with pytest.raises(FencedOff, match="attempt 1 is over"):
            refused()
    assert store.files == before


def test_an_epoch_is_committed_once_and_epochs_grow() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    catalog.commit(_manifest(attempt=attempt, epoch=2))
    with pytest.raises(AssertionError):
        catalog.commit(_manifest(attempt=attempt, epoch=2))
    with pytest.raises(AlreadyExists):
        SnapshotCatalog(store).commit(_manifest(attempt=attempt, epoch=2))


def test_the_highest_epoch_seen_counts_aborted_and_dead_ones() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    _complete(catalog, store, attempt=attempt, epoch=3)
    assert catalog.highest_epoch_seen() == 3
    _write(store, attempt=attempt, epoch=5)
    assert catalog.highest_epoch_seen() == 5
    store.files[layout.manifest_name(epoch=9, attempt=7)] = b"whatever"
    assert catalog.highest_epoch_seen() == 9


@pytest.mark.parametrize("lost", ["manifests/0000000002", "manifests/", ""])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_snapshot_that_was_there_and_is_gone_is_an_error_and_not_a_step_back(lost: str, resumed: bool) -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    catalog.claim_attempt()
    for epoch in (1, 2):
        _complete(catalog, store, attempt=1, epoch=epoch)
    if resumed:
        catalog = SnapshotCatalog(store)
        catalog.claim_attempt()
    store.files = {name: content for name, content in store.files.items() if not name.startswith(lost)}
    before = dict(store.files)
    attempt = 1 + resumed
    for refused in (catalog.epochs, lambda: catalog.release([1], attempt=attempt), lambda: catalog.sweep(attempt)):
        with pytest.raises(StoreError, match="is gone") as error:
            refused()
        assert type(error.value) is StoreError
    assert store.files == before


def test_an_unreadable_newest_manifest_is_an_error_and_not_a_step_back() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    for epoch in (1, 2):
        _complete(catalog, store, attempt=attempt, epoch=epoch)
    newest = layout.manifest_name(epoch=2, attempt=attempt)
    whole = store.files[newest]
    after = SnapshotCatalog(store)

    store.faults = lambda access: Fail() if access.name == newest else None
    assert after.epochs() == [1, 2]
    with pytest.raises(StoreError):
        after.load(2)
    store.faults = lambda access: Flip(bit_index=1000) if access.name == newest else None
    with pytest.raises(CorruptFile, match=newest):
        after.load(2)
    store.faults = None
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        store.files[newest] = whole[:length]
        with pytest.raises(CorruptFile, match=newest):
            after.load(2)
    store.files[newest] = store.files[layout.manifest_name(epoch=1, attempt=attempt)]
    with pytest.raises(CorruptFile, match="holds the manifest of epoch 1"):
        after.load(2)
    assert after.load(1).epoch == 1


def test_nothing_is_deleted_beside_a_manifest_that_can_not_be_read() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    for epoch in (1, 2, 3):
        _complete(catalog, store, attempt=attempt, epoch=epoch)
    for damaged in (1, 2, 3):
        files = dict(store.files)
        after = SnapshotCatalog(store)
        newer = after.claim_attempt()
        store.files[layout.manifest_name(epoch=damaged, attempt=attempt)] = b"{}"
        before = dict(store.files)
        with pytest.raises(CorruptFile):
            after.release([1, 2], attempt=newer)
        with pytest.raises(CorruptFile):
            after.sweep(newer)
        assert store.files == before
        store.files = files


def test_a_damaged_manifest_goes_when_it_is_superseded_and_its_files_with_the_next_attempt() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    files = [_complete(catalog, store, attempt=attempt, epoch=epoch) for epoch in (1, 2, 3, 4)]
    damaged = layout.manifest_name(epoch=2, attempt=attempt)
    store.files[damaged] = store.files[damaged][:-1]
    after = SnapshotCatalog(store)
    newer = after.claim_attempt()
    intact, errors = after.intact_manifests()
    assert [each.epoch for each in intact] == [1, 3, 4] and [damaged in str(error) for error in errors] == [True]
    before = dict(store.files)
    with pytest.raises(CorruptFile):
        after.retire([1], attempt=newer)
    assert store.files == before, "the damaged one may list any file, and it is still retained"
    deleted = after.retire([1, 2], attempt=newer)
    assert damaged in deleted and after.epochs() == [3, 4]
    assert _state_files(store) == {each.name for each in files[1:]}
    last = SnapshotCatalog(store)
    last.sweep(last.claim_attempt())
    assert _state_files(store) == {each.name for each in files[2:]}
    last.verify(4)


def test_a_damaged_newest_manifest_is_not_retired() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    for epoch in (1, 2):
        _complete(catalog, store, attempt=attempt, epoch=epoch)
    newest = layout.manifest_name(epoch=2, attempt=attempt)
    store.files[newest] = b"{}"
    with pytest.raises(AssertionError, match="newest"):
        SnapshotCatalog(store).retire([2], attempt=attempt)
    assert newest in store.files


def test_verify_finds_what_is_missing_torn_or_flipped() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    file = _complete(catalog, store, attempt=attempt, epoch=1)
    whole = store.files[file.name]
    for damaged in (whole[:-1], whole + b"x", b"", whole[:5] + b"X" + whole[6:]):
        store.files[file.name] = damaged
        with pytest.raises(CorruptFile, match=file.name):
            catalog.verify(1)
    del store.files[file.name]
    with pytest.raises(NotFound, match=file.name):
        catalog.verify(1)


# Deleting.


def test_releasing_deletes_what_only_the_released_snapshots_need() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    base = _complete(catalog, store, attempt=attempt, epoch=1)
    delta = _complete(catalog, store, attempt=attempt, epoch=2, also=[base])
    last = _complete(catalog, store, attempt=attempt, epoch=3, also=[base])
    deleted = catalog.release([1, 2, 99], attempt=attempt)
    assert deleted == [
        layout.manifest_name(epoch=1, attempt=attempt),
        layout.manifest_name(epoch=2, attempt=attempt),
        delta.name,
    ]
    assert catalog.epochs() == [3]
    assert _state_files(store) == {base.name, last.name}
    catalog.verify(3)
    assert catalog.release([1, 2], attempt=attempt) == []


@pytest.mark.parametrize("done", range(4))
def test_a_release_that_is_repeated_deletes_what_it_has_left(done: int) -> None:
    """The store fails after so many deletions, of two manifests and two files."""
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    first, second, last = (_complete(catalog, store, attempt=attempt, epoch=epoch) for epoch in (1, 2, 3))
    deletions: list[str] = []

    def fails(access: Access) -> Fail | None:
        if access.operation is not Operation.DELETE:
            return None
        deletions.append(access.name)
        return Fail() if len(deletions) > done else None

    store.faults = fails
    with pytest.raises(StoreError):
        catalog.retire([1, 2], attempt=attempt)
    store.faults = None
    catalog.retire([1, 2], attempt=attempt)
    assert _state_files(store) == {last.name}, (first, second)
    assert catalog.epochs() == [3]
    assert len(catalog._listed_files) == 1


@pytest.mark.parametrize("aborts", [False, True])
def test_a_job_that_runs_for_months_takes_no_more_memory_and_loses_no_shared_file(aborts: bool) -> None:
    """Chains of one base and up to 20 deltas, as incremental snapshots have them; three snapshots are retained."""
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    catalog.claim_attempt()
    chain: list[FileEntry] = []
    listed: dict[int, set[str]] = {}
    sizes: list[int] = []

    def epochs(numbers: range) -> None:
        nonlocal chain
        for epoch in numbers:
            if aborts and epoch % 3 == 0:
                catalog.discard([_write(store, attempt=1, epoch=epoch).name], attempt=1)
                continue
            chain = [] if len(chain) > 20 else chain
            file = _complete(catalog, store, attempt=1, epoch=epoch, also=chain)
            chain = [*chain, file]
            listed[epoch] = {each.name for each in chain}
            for old in [old for old in listed if old < sorted(listed)[-3:][0]]:
                catalog.release([old], attempt=1)
                del listed[old]
            assert _state_files(store) == set().union(*listed.values())
            sizes.append(len(catalog._listed_files))

    tracemalloc.start()
    try:
        epochs(range(1, 200))
        before, _ = tracemalloc.get_traced_memory()
        epochs(range(200, 2500))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000 and max(sizes) <= 4, (after - before, max(sizes))
    assert catalog.epochs() == sorted(listed)
    catalog.verify(max(listed))


def test_the_newest_snapshot_is_never_released() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    _complete(catalog, store, attempt=attempt, epoch=1)
    with pytest.raises(AssertionError, match="newest"):
        catalog.release([1], attempt=attempt)
    assert catalog.epochs() == [1]


def test_a_sweep_takes_what_old_attempts_left_and_nothing_of_the_current_one() -> None:
    store = MemoryStore()
    old = SnapshotCatalog(store)
    kept = _complete(old, store, attempt=old.claim_attempt(), epoch=1)
    orphan = _write(store, attempt=1, epoch=2)
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    in_flight = _write(store, attempt=attempt, epoch=3)
    from_the_future = _write(store, attempt=attempt + 1, epoch=3)
    store.files["state/README"] = b"put there by a user"
    assert catalog.sweep(attempt) == [orphan.name]
    assert _state_files(store) == {kept.name, in_flight.name, from_the_future.name, "state/README"}
    assert catalog.sweep(attempt) == []


def test_discarding_an_aborted_epoch_keeps_what_a_snapshot_lists() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    shared = _complete(catalog, store, attempt=attempt, epoch=1)
    aborted = _write(store, attempt=attempt, epoch=2)
    names = [shared.name, aborted.name, layout.manifest_name(epoch=1, attempt=attempt), "../x"]
    assert catalog.discard(names, attempt=attempt) == [aborted.name]
    catalog.verify(1)
    assert catalog.epochs() == [1]


def test_a_commit_whose_reply_was_lost_protects_its_files() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    _complete(catalog, store, attempt=attempt, epoch=1)
    file = _write(store, attempt=attempt, epoch=2)
    store.faults = lambda access: LoseReply() if access.operation is Operation.CREATE else None
    with pytest.raises(StoreError):
        catalog.commit(_manifest(attempt=attempt, epoch=2, files=[file]))
    store.faults = None
    assert catalog.discard([file.name], attempt=attempt) == []
    assert catalog.epochs() == [1, 2]
    catalog.verify(2)


@pytest.mark.parametrize("dies_after", range(12))
def test_a_driver_that_dies_while_deleting_hurts_nothing_and_the_next_one_cleans_up(dies_after: int) -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    base = _complete(catalog, store, attempt=attempt, epoch=1)
    for epoch in (2, 3):
        _complete(catalog, store, attempt=attempt, epoch=epoch, also=[base])
    _complete(catalog, store, attempt=attempt, epoch=4)
    _write(store, attempt=attempt, epoch=5)

    deletes = iter(range(dies_after + 1))

    def die(access: Access) -> None:
        if access.operation is Operation.DELETE and next(deletes) == dies_after:
            raise ProcessDied

    store.faults = die
    died = False
    try:
        catalog.release([1, 2, 3], attempt=attempt)
    except ProcessDied:
        died = True
    assert died == (dies_after < 6)
    store.faults = None

    after = SnapshotCatalog(store)
    for epoch in after.epochs():
        after.verify(epoch)
    newer = after.claim_attempt()
    after.sweep(newer)
    after.release(after.epochs()[:-1], attempt=newer)
    assert after.epochs() == [4]
    after.verify(4)
    assert _state_files(store) == {file.name for file in after.load(4).files()}


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_deleted_every_file_of_a_retained_snapshot_exists(seed: int) -> None:
    """Random commits that build on one another, aborts, restarts, deaths in the middle; looked at after each step."""
    rng = random.Random(seed)
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    epoch = 0
    for _ in range(40):
        store.faults = lambda _: (_ for _ in ()).throw(ProcessDied) if rng.random() < 0.03 else None
        try:
            match rng.choice(("commit", "commit", "abort", "release", "sweep", "restart")):
                case "commit":
                    epoch += 1
                    listed = list(catalog.load(catalog.epochs()[-1]).files()) if catalog.epochs() else []
                    _complete(
                        catalog, store, attempt=attempt, epoch=epoch, also=[file for file in listed if rng.random() < 0.7]
                    )
                case "abort":
                    epoch += 1
                    file = _write(store, attempt=attempt, epoch=epoch)
                    if rng.random() < 0.5:
                        catalog.discard([file.name], attempt=attempt)
                case "release":
                    older = catalog.epochs()[:-1]
                    catalog.release(rng.sample(older, rng.randint(0, len(older))), attempt=attempt)
                case "sweep":
                    catalog.sweep(attempt)
                case "restart":
                    raise ProcessDied
        except ProcessDied:
            store.faults = None
            catalog = SnapshotCatalog(store)
            attempt = catalog.claim_attempt()
            epoch = max(epoch, catalog.highest_epoch_seen())
        store.faults = None
        for complete in catalog.epochs():
            catalog.verify(complete)
    catalog = SnapshotCatalog(store)
    catalog.sweep(catalog.claim_attempt())
    needed = {file.name for complete in catalog.epochs() for file in catalog.load(complete).files()}
    assert _state_files(store) == needed


def test_a_zombie_slot_writes_only_names_that_no_one_reads() -> None:
    store = MemoryStore()
    old = SnapshotCatalog(store)
    _complete(old, store, attempt=old.claim_attempt(), epoch=1)
    new = SnapshotCatalog(store)
    attempt = new.claim_attempt()
    file = _complete(new, store, attempt=attempt, epoch=2)
    zombie = _write(store, attempt=1, epoch=2)
    assert zombie.name != file.name
    new.verify(2)
    assert new.sweep(attempt) == [zombie.name]


# Fencing between a check and a create.


def test_what_a_stopped_coordinator_commits_late_is_dead() -> None:
    store = MemoryStore()
    old, new = SnapshotCatalog(store), SnapshotCatalog(store)
    attempt = old.claim_attempt()
    _complete(old, store, attempt=attempt, epoch=1)
    file = _write(store, attempt=attempt, epoch=2)
    late = layout.manifest_name(epoch=2, attempt=attempt)
    successor = 0

    def take_over(access: Access) -> None:
        nonlocal successor
        if access.operation is Operation.CREATE and access.name == late:
            store.faults = None
            successor = new.claim_attempt()

    store.faults = take_over
    with pytest.raises(FencedOff):
        old.commit(_manifest(attempt=attempt, epoch=2, files=[file]))
    assert late in store.files
    assert new.epochs() == [1]
    third = SnapshotCatalog(store)
    assert third.claim_attempt() == successor + 1
    assert third.epochs() == [1]
    assert third.sweep(successor + 1) == [late, file.name]


class Turns:
    """A fault hook that lets one of several threads at a time go on to its next store operation."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: set[str] = set()
        self._turn: str | None = None

    def __call__(self, _: Access) -> None:
        name = threading.current_thread().name
        with self._changed:
            self._waiting.add(name)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._turn == name, timeout=30)
            self._turn = None
            self._waiting.discard(name)

    def run(self, parts: dict[str, Callable[[], object]], order: Iterator[str]) -> dict[str, object]:
        """Runs the parts; `order` says whose turn it is, and whoever is done is passed over. Results, or errors."""
        results: dict[str, object] = {}

        def run(name: str) -> None:
            try:
                results[name] = parts[name]()
            except Exception as error:
                results[name] = error
            with self._changed:
                self._changed.notify_all()

        threads = [threading.Thread(target=run, args=(name,), name=name) for name in parts]
        for thread in threads:
            thread.start()
        for name in order:
            with self._changed:
                assert self._changed.wait_for(
                    lambda: self._turn is None and len(self._waiting) + len(results) == len(parts), timeout=30
                )
                if len(results) == len(parts):
                    break
                if name in self._waiting:
                    self._turn = name
                    self._changed.notify_all()
        for thread in threads:
            thread.join(30)
        return results


def _race(claimants: int, order: Iterator[str]) -> None:
    """Attempt 1 commits epoch 2 while others claim. Whoever deploys must agree on whether epoch 2 happened."""
    store = MemoryStore()
    old = SnapshotCatalog(store, claimant="old")
    old.claim_attempt()
    _complete(old, store, attempt=1, epoch=1)
    file = _write(store, attempt=1, epoch=2)
    parts: dict[str, Callable[[], object]] = {"old": lambda: old.commit(_manifest(attempt=1, epoch=2, files=[file]))}
    for number in range(claimants):
        parts[f"new{number}"] = SnapshotCatalog(store, claimant=f"new{number}").claim_attempt
    turns = Turns()
    store.faults = turns
    results = turns.run(parts, order)
    store.faults = None

    committed = results.pop("old")
    assert committed is None or isinstance(committed, FencedOff)
    assert all(isinstance(result, int | FencedOff) for result in results.values())
    deployed = {attempt for attempt in results.values() if isinstance(attempt, int)}
    origins = map(layout.parse_origin_name, store.list(layout.ORIGINS))
    began_from = {origin.parent_epoch for origin in origins if origin is not None and origin.attempt in deployed}
    assert len(began_from) == 1, "one attempt went on from the epoch and another one didn't"
    last = SnapshotCatalog(store)
    last.claim_attempt()
    assert began_from == {last.epochs()[-1]}
    if committed is None:
        assert began_from == {2}, "an epoch that was announced is passed over"


def test_in_every_interleaving_a_claim_and_a_commit_agree() -> None:
    commits, claims = 5, 7  # store operations; `_race` fails where these are too few
    for mine in combinations(range(commits + claims), commits):
        schedule = ["old" if step in mine else "new0" for step in range(commits + claims)]
        _race(1, iter([*schedule, "old", "new0", "old", "new0"]))


@pytest.mark.parametrize("seed", range(300))
def test_two_claims_and_a_commit_agree(seed: int) -> None:
    rng = random.Random(seed)
    _race(2, iter(lambda: rng.choice(("old", "new0", "new1")), None))


# Lineage, by itself.


def _manifests(*pairs: tuple[int, int]) -> list[ManifestName]:
    return [ManifestName(epoch=epoch, attempt=attempt) for attempt, epoch in pairs]


def _origins(*triples: tuple[int, int, int]) -> dict[int, OriginName]:
    return {attempt: OriginName(attempt, parent, epoch) for attempt, parent, epoch in triples}


def test_a_lineage_goes_back_through_origins_and_leaves_out_side_branches() -> None:
    origins = _origins((1, 0, 0), (2, 1, 3), (3, 1, 3), (5, 3, 6))
    manifests = _manifests((1, 1), (1, 3), (1, 4), (2, 5), (3, 5), (3, 6), (3, 7), (5, 8))
    assert lineage(origins, manifests) == _manifests((1, 1), (1, 3), (3, 5), (3, 6), (5, 8))


def test_complete_snapshots_are_not_passed_over_where_origins_are_lost() -> None:
    assert lineage({}, _manifests((1, 1), (2, 2), (2, 3))) == _manifests((2, 2), (2, 3))
    assert lineage(_origins((1, 0, 0)), _manifests((1, 1), (2, 2))) == _manifests((2, 2))


def test_no_snapshot_has_no_lineage() -> None:
    assert lineage({}, []) == []
    assert lineage(_origins((1, 0, 0), (2, 0, 0)), []) == []


def test_an_attempt_can_be_claimed_above_another_stores() -> None:
    catalog = SnapshotCatalog(MemoryStore())
    assert catalog.claim_attempt(above=7) == 8
    assert catalog.claim_attempt(above=3) == 9
    assert catalog.attempts() == [8, 9]


# A snapshot is complete only if others can read it.


def test_a_manifest_that_lists_a_file_which_is_not_in_the_store_is_not_created() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    there, gone = (_write(store, attempt=attempt, epoch=1, subtask=subtask) for subtask in (0, 1))
    del store.files[gone.name]
    with pytest.raises(NotFound, match=f"{gone.name}, which subtask 1 of 'count' has written"):
        catalog.commit(_manifest(attempt=attempt, epoch=1, files=[there, gone]))
    assert catalog.epochs() == []


def test_a_manifest_that_lists_a_file_of_another_length_is_not_created() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    file = _write(store, attempt=attempt, epoch=1)
    store.files[file.name] += b"more"
    with pytest.raises(CorruptFile, match=f"{file.name} .* has {file.bytes + 4} bytes, but"):
        catalog.commit(_manifest(attempt=attempt, epoch=1, files=[file]))
    assert catalog.epochs() == []


def test_only_new_files_are_looked_at_before_a_manifest_is_created() -> None:
    store = MemoryStore()
    catalog = SnapshotCatalog(store)
    attempt = catalog.claim_attempt()
    base = _complete(catalog, store, attempt=attempt, epoch=1)
    looked: list[str] = []
    store.faults = lambda access: looked.append(access.name) if access.operation is Operation.SIZE else None
    delta = _complete(catalog, store, attempt=attempt, epoch=2, also=[base])
    assert looked == [delta.name]


def test_a_folder_that_the_hosts_do_not_share_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    here, elsewhere = LocalStore(tmp_path / "here"), LocalStore(tmp_path / "elsewhere")
    catalog = SnapshotCatalog(here)
    attempt = catalog.claim_attempt()
    file = _write(elsewhere, attempt=attempt, epoch=1)
    with pytest.raises(JobError, match=rf"{file.name}.*{tmp_path}/here.*Snapshots\(to='s3://"):
        catalog.commit(_manifest(attempt=attempt, epoch=1, files=[file]))
    assert catalog.epochs() == []


def test_a_file_that_a_newer_attempt_swept_means_that_this_attempt_is_over() -> None:
    store = MemoryStore()
    old, new = SnapshotCatalog(store), SnapshotCatalog(store)
    attempt = old.claim_attempt()
    file = _write(store, attempt=attempt, epoch=1)

    def take_over(access: Access) -> None:
        if access.operation is Operation.SIZE:
            store.faults = None
            new.sweep(new.claim_attempt())

    store.faults = take_over
    with pytest.raises(FencedOff):
        old.commit(_manifest(attempt=attempt, epoch=1, files=[file]))
