"""What store/base.py promises, over every store."""

from __future__ import annotations

import atexit
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs as pafs

from tests.servers.hdfs import HdfsCluster
from tests.servers.jars import JarsMissing
from tests.servers.s3 import S3Server
from tidegate.errors import AlreadyExists, CorruptFile, NotFound, StoreError
from tidegate.store.arrow import ArrowStore
from tidegate.store.base import Store
from tidegate.store.hdfs import HdfsStore
from tidegate.store.local import LocalStore
from tidegate.store.local_copy import LocalCopyStore
from tidegate.store.memory import MemoryStore
from tidegate.store.s3 import S3Store


def _arrow_on_a_subtree(folder: Path) -> Store:
    folder.mkdir(exist_ok=True)
    return ArrowStore(pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem()), "job")


def _with_copies(store: Store, folder: Path, *, limit_bytes: int = 1 << 30) -> Store:
    return LocalCopyStore(store, folder.with_name("copies"), limit_bytes=limit_bytes)


@cache
def _s3_server() -> S3Server:
    return S3Server()  # it ends with this process


def _s3(folder: Path) -> Store:
    return S3Store(_s3_server().address(f"tests/{folder.parent.name}/{folder.name}"))


@cache
def _hdfs_cluster() -> HdfsCluster:
    cluster = HdfsCluster(Path(tempfile.mkdtemp(prefix="tidegate-hdfs-")))
    atexit.register(cluster.kill)
    return cluster


def _hdfs(folder: Path) -> Store:
    try:
        return HdfsStore(_hdfs_cluster().address(f"{folder.parent.name}/{folder.name}"))
    except JarsMissing as missing:
        pytest.skip(f"Hadoop's mini-cluster can't be had here: {missing}")


STORES: dict[str, Callable[[Path], Store]] = {
    "local": LocalStore,
    "memory": lambda folder: MemoryStore(folder.name),
    "s3": _s3,
    "hdfs": _hdfs,
    "arrow-local": lambda folder: ArrowStore(pafs.LocalFileSystem(), str(folder)),
    "arrow-subtree": _arrow_on_a_subtree,
    "arrow-without-links": lambda folder: ArrowStore(pafs._MockFileSystem(), "bucket/job"),
    "local-with-copies": lambda folder: _with_copies(LocalStore(folder), folder),
    "memory-with-copies": lambda folder: _with_copies(MemoryStore(folder.name), folder),
    "arrow-with-few-copies": lambda folder: _with_copies(
        ArrowStore(pafs._MockFileSystem(), "bucket/job"), folder, limit_bytes=100_000
    ),
    "local-with-no-place-for-copies": lambda folder: LocalCopyStore(
        LocalStore(folder), "/dev/null/copies", limit_bytes=1 << 30
    ),
}
EXCLUSIVE = ("local", "memory", "arrow-local", "local-with-copies", "s3", "hdfs")


def _marked(names: Iterable[str]) -> list[Any]:
    """A cluster takes seconds to start, so the tests with it are left out of `make test`, and run in one process."""
    marks = [pytest.mark.long, pytest.mark.xdist_group("hdfs")]
    return [pytest.param(name, marks=marks) if name == "hdfs" else name for name in names]


@pytest.fixture(params=_marked(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return STORES[request.param](tmp_path / "store")


def test_what_was_written_is_read_back(store: Store) -> None:
    assert store.write("state/a", [b"ab", memoryview(b"cd"), b"", b"e"]) == 5
    assert store.read("state/a") == b"abcde"
    assert store.size("state/a") == 5


def test_nothing_at_all_can_be_written(store: Store) -> None:
    assert store.write("state/empty", []) == 0
    assert store.read("state/empty") == b""
    assert store.size("state/empty") == 0
    assert store.list("state") == ["state/empty"]


def test_many_chunks_of_all_sizes_keep_their_order(store: Store) -> None:
    chunks = [bytes([i % 251]) * (i * 997 % 300_000) for i in range(40)]
    assert store.write("state/large", iter(chunks)) == sum(map(len, chunks))
    assert store.read("state/large") == b"".join(chunks)


def test_ranges_are_read_exactly(store: Store) -> None:
    store.write("state/a", [b"0123456789"])
    assert store.read("state/a", 3) == b"3456789"
    assert store.read("state/a", 3, 4) == b"3456"
    assert store.read("state/a", 0, 0) == b""
    assert store.read("state/a", 10) == b""
    assert store.read("state/a", 10, 0) == b""


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (10, 1), (3, 2**60), (11, 0)])
def test_a_range_beyond_the_end_is_an_error_not_fewer_bytes(store: Store, offset: int, length: int) -> None:
    store.write("state/a", [b"0123456789"])
    with pytest.raises(CorruptFile):
        store.read("state/a", offset, length)


def test_what_is_not_there_is_not_found(store: Store) -> None:
    store.write("state/a", [b"x"])
    for missing in ("state/b", "manifests/a"):
        with pytest.raises(NotFound):
            store.read(missing)
        with pytest.raises(NotFound):
            store.size(missing)


def test_the_sizes_of_many_names_come_in_their_order_and_none_where_nothing_is(store: Store) -> None:
    for size_bytes in (0, 1, 300):
        store.write(f"state/{size_bytes}", [b"x" * size_bytes])
    assert store.sizes(["state/300", "state/none", "state/0", "top", "state/1", "state/1"]) == [300, None, 0, None, 1, 1]
    assert store.sizes([f"state/{i}" for i in range(200)] + ["state/300"]) == [0, 1, *[None] * 198, 300]
    assert store.sizes([]) == []


def test_writing_a_name_again_replaces_it(store: Store) -> None:
    store.write("state/a", [b"the first try was longer"])
    store.write("state/a", [b"second"])
    assert store.read("state/a") == b"second"


def test_a_create_takes_the_name_once(store: Store) -> None:
    store.create("manifests/1", b"first")
    with pytest.raises(AlreadyExists):
        store.create("manifests/1", b"second")
    with pytest.raises(AlreadyExists):
        store.create("manifests/1", b"first")
    assert store.read("manifests/1") == b"first"


def test_a_deleted_name_can_be_created_again(store: Store) -> None:
    store.create("manifests/1", b"first")
    store.delete("manifests/1")
    store.create("manifests/1", b"second")
    assert store.read("manifests/1") == b"second"


@pytest.mark.parametrize("name", _marked(EXCLUSIVE))
def test_of_many_creators_exactly_one_wins(name: str, tmp_path: Path) -> None:
    store = STORES[name](tmp_path)
    start = threading.Barrier(8)

    def create(creator: int) -> list[int]:
        won = []
        start.wait()
        for i in range(20):
            try:
                store.create(f"attempts/{i}", f"{creator} has {i}".encode())
                won.append(i)
            except AlreadyExists:
                pass
        return won

    with ThreadPoolExecutor(8) as pool:
        winners = dict(enumerate(pool.map(create, range(8))))
    assert sorted(i for won in winners.values() for i in won) == list(range(20))
    for creator, won in winners.items():
        for i in won:
            assert store.read(f"attempts/{i}") == f"{creator} has {i}".encode()


def test_a_listing_is_sorted_and_holds_all_levels(store: Store) -> None:
    for name in ("state/b", "state/a", "state/deep/er/c", "state-2/x", "manifests/1", "top"):
        store.write(name, [b"x"])
    store.create("state/0", b"x")
    assert store.list("state") == ["state/0", "state/a", "state/b", "state/deep/er/c"]
    assert store.list("state/deep") == ["state/deep/er/c"]
    assert store.list("") == ["manifests/1", "state-2/x", "state/0", "state/a", "state/b", "state/deep/er/c", "top"]


def test_a_folder_that_was_never_used_is_empty(store: Store) -> None:
    assert store.list("state") == []
    assert store.list("") == []


def test_a_delete_removes_one_name_and_may_be_repeated(store: Store) -> None:
    store.write("state/a", [b"x"])
    store.write("state/b", [b"y"])
    store.delete("state/a")
    store.delete("state/a")
    store.delete("nothing/here")
    assert store.list("") == ["state/b"]
    with pytest.raises(NotFound):
        store.read("state/a")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        ".",
        "./a",
        "a//b",
        "a/",
        "a b",
        "a~b",
        "ä",
        "a\n",
        "a\\b",
        "a\0b",
        "x" * 256,
    ],
)
def test_a_name_that_could_leave_the_store_is_refused_everywhere(store: Store, name: str) -> None:
    operations: list[Callable[[], object]] = [
        lambda: store.write(name, [b"x"]),
        lambda: store.create(name, b"x"),
        lambda: store.read(name),
        lambda: store.delete(name),
        lambda: store.size(name),
    ]
    if name:
        operations.append(lambda: store.list(name))
    for operation in operations:
        with pytest.raises(StoreError):
            operation()
    assert store.list("") == []


def test_a_name_does_not_choose_a_compression(store: Store) -> None:
    store.write("state/a.gz", [b"plain"])
    assert store.size("state/a.gz") == 5
    assert store.read("state/a.gz") == b"plain"


def test_when_the_chunks_fail_their_error_comes_out_and_the_name_is_free_again(store: Store) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * 400_000
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.write("state/a", chunks())
    store.write("state/a", [b"whole"])
    assert store.read("state/a") == b"whole"


def test_the_address_says_where_it_is(store: Store) -> None:
    assert "://" in store.address
