"""Local copies of state files: used where they are proven, never believed otherwise, and never in the way."""

from __future__ import annotations

import itertools
import os
import stat
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import NotFound, StoreError
from tidegate.snapshots.manifest import FileEntry
from tidegate.store.base import CountedStore, Store
from tidegate.store.local_copy import BLOCK_BYTES, LocalCopyStore
from tidegate.store.memory import Access, Fail, Fault, MemoryStore, Operation, Tear

NAME = "state/a0000000001-e0000000001-s00000-count.tgs"
OTHER = "state/a0000000001-e0000000002-s00000-count.tgs"
PLENTY = 1 << 30


def content_of(size_bytes: int, seed: int = 1) -> bytes:
    return bytes((i * seed + i // 251) % 256 for i in range(size_bytes))


def entry(name: str, content: bytes) -> FileEntry:
    return FileEntry(name=name, bytes=len(content), checksum=zlib.crc32(content))


def copies_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def beneath() -> MemoryStore:
    return MemoryStore("beneath")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "copies"


class ReadCounts(NamedTuple):
    local_bytes: int
    store_bytes: int


class CountingStore(LocalCopyStore):
    """Counts the bytes that were read from local copies, and from the store."""

    def __init__(self, store: Store, folder: Path, *, limit_bytes: int) -> None:
        self._beneath = CountedStore(store)
        self._lock_of_count = threading.Lock()
        self._read_bytes = 0
        super().__init__(self._beneath, folder, limit_bytes=limit_bytes)

    @property
    def counts(self) -> ReadCounts:
        return ReadCounts(self._read_bytes - self._beneath.read_bytes, self._beneath.read_bytes)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        content = super().read(name, offset, length)
        with self._lock_of_count:
            self._read_bytes += len(content)
        return content


def open_copies(beneath: MemoryStore, folder: Path, limit_bytes: int = PLENTY) -> CountingStore:
    return CountingStore(beneath, folder, limit_bytes=limit_bytes)


def no_reads(access: Access) -> Fault | None:
    return Fail() if access.operation is Operation.READ else None


def test_what_was_written_is_read_without_the_store(beneath: MemoryStore, folder: Path) -> None:
    store = open_copies(beneath, folder)
    content = content_of(3 * BLOCK_BYTES + 17)
    store.write(NAME, [content[:10], memoryview(content)[10 : BLOCK_BYTES + 5], content[BLOCK_BYTES + 5 :]])
    assert beneath.files[NAME] == content
    beneath.faults = no_reads
    for start, stop in [(0, 1), (BLOCK_BYTES - 1, BLOCK_BYTES + 1), (5, len(content)), (3 * BLOCK_BYTES, len(content))]:
        assert store.read(NAME, start, stop - start) == content[start:stop]
    assert store.read(NAME) == content
    assert store.counts.store_bytes == 0
    assert store.counts.local_bytes == 1 + 2 + len(content) - 5 + 17 + len(content)


@given(
    size_bytes=st.integers(0, 3 * BLOCK_BYTES),
    cuts=st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=5),
    start=st.integers(0, 3 * BLOCK_BYTES),
    length=st.integers(0, 3 * BLOCK_BYTES),
)
def test_every_range_of_every_file_is_right(
    tmp_path_factory: pytest.TempPathFactory, size_bytes: int, cuts: list[int], start: int, length: int
) -> None:
    beneath = MemoryStore("beneath")
    store = open_copies(beneath, tmp_path_factory.mktemp("copies"))
    content = os.urandom(size_bytes)
    bounds = [0, *sorted(min(cut, size_bytes) for cut in cuts), size_bytes]
    store.write(NAME, [content[low:high] for low, high in itertools.pairwise(bounds)])
    beneath.faults = no_reads
    start = min(start, size_bytes)
    length = min(length, size_bytes - start)
    assert store.read(NAME, start, length) == content[start : start + length]
    assert store.read(NAME, start) == content[start:]


def test_the_next_process_on_the_host_uses_what_its_predecessor_left(beneath: MemoryStore, folder: Path) -> None:
    content, missing = content_of(2 * BLOCK_BYTES + 3), content_of(1000, seed=3)
    open_copies(beneath, folder).write(NAME, [content])
    beneath.write(OTHER, [missing])  # by a slot on another host
    store = open_copies(beneath, folder)
    assert store.adopt([entry(NAME, content), entry(OTHER, missing)]) == len(content)
    assert store.read(NAME, 100, 50_000) == content[100:50_100]
    assert store.read(OTHER, 0, 400) == missing[:400]
    assert store.counts == ReadCounts(local_bytes=50_000, store_bytes=400)


def test_what_nobody_vouched_for_is_not_used(beneath: MemoryStore, folder: Path) -> None:
    open_copies(beneath, folder).write(NAME, [b"of an earlier life"])
    beneath.files[NAME] = b"the user emptied the store and began again"
    store = open_copies(beneath, folder)
    assert store.read(NAME) == beneath.files[NAME]
    again = open_copies(beneath, folder)
    again.adopt([entry(NAME, beneath.files[NAME])])
    assert again.read(NAME, 0, 8) == b"the user"


@pytest.mark.parametrize("earlier", [b"0123456789", b"012345678", b"9876543210"])
def test_a_leftover_of_the_same_name_and_other_bytes_is_not_adopted(
    beneath: MemoryStore, folder: Path, earlier: bytes
) -> None:
    open_copies(beneath, folder).write(NAME, [earlier])
    beneath.files[NAME] = b"0123456789"
    store = open_copies(beneath, folder)
    adopted_bytes = store.adopt([entry(NAME, b"0123456789")])
    assert adopted_bytes == (10 if earlier == b"0123456789" else 0)
    assert store.read(NAME, 0, 10) == b"0123456789"
    assert store.counts.local_bytes == adopted_bytes


def test_the_copies_of_two_stores_are_told_apart(folder: Path) -> None:
    one, two = MemoryStore("one"), MemoryStore("two")
    open_copies(one, folder).write(NAME, [b"one"])
    open_copies(two, folder).write(NAME, [b"two"])
    for beneath in (one, two):
        content = beneath.files[NAME]
        store = open_copies(beneath, folder)
        assert store.adopt([entry(NAME, content)]) == 3
        beneath.faults = no_reads
        assert store.read(NAME) == content


def test_any_flipped_bit_sends_the_reader_to_the_store(beneath: MemoryStore, folder: Path) -> None:
    content = content_of(BLOCK_BYTES + 40)
    for adopted in (False, True):
        store = open_copies(beneath, folder)
        store.write(NAME, [content])
        [path] = copies_in(folder)
        whole = path.read_bytes()
        for position in [0, 7, BLOCK_BYTES - 1, BLOCK_BYTES, len(content) - 1, *range(len(content), len(whole))]:
            store = open_copies(beneath, folder)
            store.write(NAME, [content])
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            if adopted:
                path.write_bytes(damaged)
                store = open_copies(beneath, folder)
                store.adopt([entry(NAME, content)])
            else:
                path.write_bytes(damaged)
            assert store.read(NAME, 0, len(content)) == content, position
            if position < len(content):
                assert store.counts.store_bytes == len(content)
                assert not path.exists() or path.read_bytes() == whole  # what was wrong is gone
                assert store.read(NAME, 3, 4) == content[3:7]


def test_a_copy_that_was_cut_at_any_length_is_not_used(beneath: MemoryStore, folder: Path) -> None:
    content = content_of(BLOCK_BYTES + 100)
    open_copies(beneath, folder).write(NAME, [content])
    [path] = copies_in(folder)
    whole = path.read_bytes()
    for kept in {*range(0, len(whole), 10_007), *range(BLOCK_BYTES - 2, BLOCK_BYTES + 3), *range(len(content), len(whole))}:
        path.write_bytes(whole[:kept])
        store = open_copies(beneath, folder)
        assert store.adopt([entry(NAME, content)]) == 0
        assert store.read(NAME, 10, 20) == content[10:30]
        # And if it happens under the eyes of the process that wrote it:
        store.write(NAME, [content])
        path.write_bytes(whole[:kept])
        assert store.read(NAME, 0, len(content)) == content


def test_a_copy_that_another_process_removed_is_read_from_the_store(beneath: MemoryStore, folder: Path) -> None:
    store = open_copies(beneath, folder)
    store.write(NAME, [b"abc"])
    copies_in(folder)[0].unlink()
    assert store.read(NAME, 0, 2) == b"ab"
    assert store.counts == ReadCounts(local_bytes=0, store_bytes=2)


def test_a_file_that_is_read_whole_is_kept_and_one_that_is_read_in_part_is_not(beneath: MemoryStore, folder: Path) -> None:
    beneath.files |= {NAME: b"whole", OTHER: b"in part", "manifests/0000000001-a0000000001.json": b"{}"}
    store = open_copies(beneath, folder)
    store.read(NAME)
    store.read(OTHER, 0, 3)
    store.read("manifests/0000000001-a0000000001.json")
    assert [path.name for path in copies_in(folder)] == [NAME.replace("/", "~")]
    beneath.faults = no_reads
    assert store.read(NAME, 1, 2) == b"ho"


def test_a_file_that_a_manifest_lists_may_be_read_whole_by_its_length(beneath: MemoryStore, folder: Path) -> None:
    beneath.files[NAME] = b"whole"
    store = open_copies(beneath, folder)
    store.adopt([entry(NAME, b"whole")])
    store.read(NAME, 0, 4)
    assert copies_in(folder) == []
    store.read(NAME, 0, 5)
    beneath.faults = no_reads
    assert store.read(NAME) == b"whole"


def test_what_is_exclusively_created_is_the_stores_alone(beneath: MemoryStore, folder: Path) -> None:
    store = open_copies(beneath, folder)
    store.create("attempts/0000000001", b"mine")
    beneath.files["attempts/0000000001"] = b"taken over by another claimant"
    assert store.read("attempts/0000000001") == b"taken over by another claimant"
    assert copies_in(folder) == []


def test_a_write_that_the_store_refused_leaves_no_copy(beneath: MemoryStore, folder: Path) -> None:
    store = open_copies(beneath, folder)
    store.write(NAME, [b"first"])
    beneath.faults = lambda access: Tear(2) if access.operation is Operation.WRITE else None
    with pytest.raises(StoreError):
        store.write(NAME, [b"second"])
    assert copies_in(folder) == []
    assert store.read(NAME, 0, 2) == b"se"


def test_chunks_that_fail_leave_no_copy(beneath: MemoryStore, folder: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * 400_000
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        open_copies(beneath, folder).write(NAME, chunks())
    assert copies_in(folder) == []


def test_a_store_that_does_not_take_all_chunks_leaves_no_copy(folder: Path) -> None:
    class TakesTheFirst(MemoryStore):
        def write(self, name: str, chunks: object) -> int:
            return super().write(name, [next(iter(chunks))])  # type: ignore[call-overload]

    store = LocalCopyStore(TakesTheFirst(), folder, limit_bytes=PLENTY)
    assert store.write(NAME, [b"ab", b"cd"]) == 2
    assert store.read(NAME) == b"ab"


def test_a_local_disk_that_fails_fails_nothing(beneath: MemoryStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_copies(beneath, folder)

    def full(descriptor: int, content: memoryview) -> int:
        raise OSError(28, "No space left on device")

    content = content_of(BLOCK_BYTES)
    with monkeypatch.context() as patched:
        patched.setattr("tidegate.store.local_copy.os.write", full)
        assert store.write(NAME, [content[:50], content[50:]]) == len(content)
    assert copies_in(folder) == []
    assert store.read(NAME, 0, len(content)) == content
    assert store.counts.store_bytes == len(content)


def test_a_folder_that_can_not_be_made_fails_nothing(beneath: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = open_copies(beneath, tmp_path / "file" / "copies")
    store.write(NAME, [b"abc"])
    assert store.adopt([entry(NAME, b"abc")]) == 0
    store.retain([])
    assert store.read(NAME) == b"abc"
    store.delete(NAME)
    assert beneath.files == {}


def test_a_folder_that_another_made_for_us_is_not_used(beneath: MemoryStore, folder: Path, tmp_path: Path) -> None:
    open_copies(beneath, folder)
    [own] = folder.iterdir()
    own.rmdir()
    planted = tmp_path / "planted"
    planted.mkdir()
    own.symlink_to(planted)
    open_copies(beneath, folder).write(NAME, [b"abc"])
    assert list(planted.iterdir()) == []


def test_nobody_else_can_read_the_copies(beneath: MemoryStore, folder: Path) -> None:
    before = os.umask(0)
    try:
        open_copies(beneath, folder).write(NAME, [b"abc"])
    finally:
        os.umask(before)
    [own] = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, own)] == [0o700, 0o700]
    assert [stat.S_IMODE(path.stat().st_mode) for path in copies_in(folder)] == [0o600]
    own.chmod(0o755)
    open_copies(beneath, folder)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_a_deleted_file_is_gone_in_both(beneath: MemoryStore, folder: Path) -> None:
    store = open_copies(beneath, folder)
    store.write(NAME, [b"abc"])
    store.delete(NAME)
    assert copies_in(folder) == []
    with pytest.raises(NotFound):
        store.read(NAME)


def test_adopting_a_snapshot_removes_what_is_not_in_it(beneath: MemoryStore, folder: Path) -> None:
    store = open_copies(beneath, folder)
    store.write(NAME, [b"kept"])
    store.write(OTHER, [b"of an aborted epoch"])
    store.adopt([entry(NAME, b"kept")])
    assert [path.name for path in copies_in(folder)] == [NAME.replace("/", "~")]
    assert store.read(OTHER, 0, 2) == b"of"
    assert OTHER in beneath.files


def test_only_old_temporary_files_are_leftovers(beneath: MemoryStore, folder: Path) -> None:
    store = open_copies(beneath, folder)
    [own] = folder.iterdir()
    old, young = own / "state~x~~1", own / "state~x~~2"
    for path in (old, young):
        path.write_bytes(b"torn")
    os.utime(old, (1, 1))
    store.retain([])
    assert (old.exists(), young.exists()) == (False, True)


def test_the_oldest_copies_go_when_the_limit_is_reached(beneath: MemoryStore, folder: Path) -> None:
    store = open_copies(beneath, folder, limit_bytes=100_000)
    names = [f"state/file-{i:02d}" for i in range(30)]
    for age, name in enumerate(names):
        store.write(name, [content_of(10_000)])
        [path] = [path for path in copies_in(folder) if path.name == name.replace("/", "~")]
        os.utime(path, (1_000 + age, 1_000 + age))
        assert sum(path.stat().st_size for path in copies_in(folder)) <= 100_000 * 9 // 8 + 10_100
    left = [path.name.replace("~", "/") for path in copies_in(folder)]
    assert left == names[-len(left) :] and len(left) >= 8
    for name in names:
        assert store.read(name, 0, 10_000) == content_of(10_000)
    assert store.counts.store_bytes == (30 - len(left)) * 10_000


def test_leftovers_of_other_jobs_count_and_go(beneath: MemoryStore, folder: Path) -> None:
    open_copies(MemoryStore("a job of last year"), folder).write(NAME, [content_of(50_000)])
    [path] = copies_in(folder)
    os.utime(path, (1, 1))
    store = open_copies(beneath, folder, limit_bytes=60_000)
    assert path.exists()
    store.write(NAME, [content_of(40_000)])
    assert not path.exists()
    beneath.faults = no_reads
    assert len(store.read(NAME)) == 40_000


def test_a_file_that_could_never_fit_is_not_copied(beneath: MemoryStore, folder: Path) -> None:
    store = open_copies(beneath, folder, limit_bytes=1_000)
    store.write(OTHER, [content_of(900)])
    store.write(NAME, [content_of(600), content_of(600)])
    assert [path.name for path in copies_in(folder)] == [OTHER.replace("/", "~")]
    assert len(store.read(NAME)) == 1_200


def test_threads_may_write_and_read_at_once(beneath: MemoryStore, folder: Path) -> None:
    store = open_copies(beneath, folder, limit_bytes=400_000)
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        start.wait()
        for i in range(40):
            content = content_of(5_000 + i, seed=thread)
            store.write(f"state/{thread}-{i}", [content])
            for back in range(max(i - 20, 0), i + 1, 5):
                assert store.read(f"state/{thread}-{back}", 5, 4_000) == content_of(5_000 + back, seed=thread)[5:4_005]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert store.counts.local_bytes > 0
