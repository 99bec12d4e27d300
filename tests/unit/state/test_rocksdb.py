"""The RocksDB backend beyond the contract of all backends: eviction, prefetching, native files, memory."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests import declaring as tg
from tidegate.errors import JobError, RestoreError, SchemaError
from tidegate.state.descriptors import descriptors_of
from tidegate.state.rocks_cells import RocksTable
from tidegate.state.rocks_db import MIN_MEMORY_BYTES, SlotMemory
from tidegate.state.rocks_folder import Folder
from tidegate.state.rocks_settling import Settling
from tidegate.state.rocksdb import FrozenRocks, RocksBackend, RocksDB, native_sections
from tidegate.state.sections import FrozenState, NativeFile, Section
from tidegate.state.timers import TimeKind, TimerQueue
from tidegate.types import to_list

GROUPS = 16
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

Held = dict[str, dict[Any, Any]]


@pytest.fixture
def settings() -> RocksDB:
    return RocksDB("16 MB", IN_MEMORY)


@pytest.fixture
def backend(settings: RocksDB) -> Iterator[RocksBackend]:
    backend = created(settings)
    yield backend
    backend.close()


def created(settings: RocksDB, native: Path | None = None) -> RocksBackend:
    backend = settings.create(key_type=pa.int64(), key_group_count=GROUPS, native=native)
    assert isinstance(backend, RocksBackend), "a time-to-live was declared"
    return backend


def held(sections: Iterable[Section]) -> Held:
    found: Held = {}
    for section in sections:
        keys, values = map(to_list, section.rows.columns)
        found.setdefault(section.state, {}).update(zip(keys, values, strict=True))
    return found


def fill(backend: RocksBackend, table: Any, entries: dict[Any, Any]) -> None:
    for backend.cursor.key, value in entries.items():
        table.set(value)


def files_of(frozen: FrozenState) -> list[NativeFile]:
    assert isinstance(frozen, FrozenRocks)
    return list(frozen.files())


def native_copy(frozen: FrozenState, to: Path) -> Path:
    to.mkdir()
    for file in files_of(frozen):
        (to / file.local).write_bytes(file.path.read_bytes())
    return to


def write_all(backend: RocksBackend) -> None:
    backend.settle()
    backend._flush(backend.cells.values())


def forget_all(backend: RocksBackend) -> None:
    """Everything is written and nothing is cached."""
    write_all(backend)
    for table in backend.cells.values():
        table.forget_older()
        table.forget_older()
        table.complete = False


# ----------------------------------------------------------------------------------------------------------- eviction

_step = st.tuples(
    st.sampled_from(["value", "list", "map", "sum", "forget", "batch"]),
    st.sampled_from(["set", "add", "put", "get", "clear", "remove"]),
    st.integers(0, 5),
    st.integers(0, 9),
)


@given(steps=st.lists(_step, max_size=80))
def test_a_state_that_is_forgotten_at_any_time_is_that_of_dictionaries(steps: list[tuple[str, str, int, int]]) -> None:
    backend = created(RocksDB("16 MB", IN_MEMORY))
    value, items = backend.table(tg.value("long", name="value")), backend.table(tg.list_("long", name="list"))
    mapped = backend.table(tg.map_("long", "long", name="map"))
    total = backend.table(tg.reducing("long", lambda a, b: a + b, name="sum"))
    values: dict[int, int] = {}
    lists: dict[int, list[int]] = {}
    maps: dict[int, dict[int, int]] = {}
    sums: dict[int, int] = {}
    for state, operation, key, number in steps:
        backend.cursor.key = key
        match state, operation:
            case "forget", _:
                forget_all(backend)
            case "batch", _:
                backend.end_batch()
                backend.begin_batch([key, number % 6])
            case "value", "set" | "add" | "put":
                value.set(number)
                values[key] = number
            case "value", "clear" | "remove":
                value.clear()
                values.pop(key, None)
            case "value", _:
                assert value.get() == values.get(key)
            case "sum", "clear":
                total.clear()
                sums.pop(key, None)
            case "sum", "get":
                assert total.get() == sums.get(key)
            case "sum", _:
                total.add(number)
                sums[key] = sums.get(key, 0) + number
            case "list", "clear" | "remove":
                items.clear()
                lists.pop(key, None)
            case "list", "get":
                assert items.get() == tuple(lists.get(key, ()))
            case "list", "put":
                items.replace([number, number])
                lists[key] = [number, number]
            case "list", _:
                items.add(number)
                lists.setdefault(key, []).append(number)
            case "map", "clear":
                mapped.clear()
                maps.pop(key, None)
            case "map", "remove":
                mapped.remove(number)
                maps.get(key, {}).pop(number, None)
            case "map", "get":
                assert mapped.get(number) == maps.get(key, {}).get(number)
                assert (number in mapped) == (number in maps.get(key, {}))
            case "map", "set":
                assert list(mapped.items()) == list(maps.get(key, {}).items()), "in the order in which they came"
            case _:
                mapped.put(number, key)
                maps.setdefault(key, {})[number] = key
    frozen = backend.freeze()
    expected = {"value": values, "list": lists, "map": {key: each for key, each in maps.items() if each}, "sum": sums}
    found = held(frozen.sections())
    assert found == {state: entries for state, entries in expected.items() if entries}
    for key, each in found.get("map", {}).items():
        assert list(each.items()) == list(maps[key].items())
    frozen.release()
    backend.close()


def test_a_state_larger_than_its_memory_stays_within_it() -> None:
    memory = SlotMemory(MIN_MEMORY_BYTES)
    memory.cache_bytes = 500_000
    backend = RocksBackend(key_type=pa.int64(), key_group_count=GROUPS, folder=Folder(IN_MEMORY), memory=memory)
    total = backend.table(tg.value("long", name="total", default=0))
    largest = 0.0
    for start in [*range(0, 20_000, 500), *range(0, 20_000, 500)]:
        keys = list(range(start, start + 500))
        backend.begin_batch(keys)
        for backend.cursor.key in keys:
            total.set(total.get() + backend.cursor.key)
        backend.end_batch()
        while backend.cells["total"].waste:
            backend.maintain(10_000)
        largest = max(largest, backend.cells["total"].held_bytes())
    assert largest < 2 * memory.cache_bytes, "a batch may be over it"
    frozen = backend.freeze()
    assert held(frozen.sections()) == {"total": {key: 2 * key for key in range(20_000)}}
    backend.close()


def test_what_isn_t_cached_is_fetched_before_a_batch_with_one_look_up(backend: RocksBackend) -> None:
    table, other = backend.table(tg.value("long", name="n")), backend.table(tg.reducing("long", max, name="most"))
    fill(backend, table, {key: key for key in range(100)})
    backend.cursor.key = 3
    other.add(7)
    forget_all(backend)
    backend.begin_batch([1, 2, 3, 1000])
    live, backend.db = backend.db, None  # nothing else may be asked
    found: list[Any] = []
    for backend.cursor.key in (1, 2, 3, 1000):
        found.append((table.get(), other.get()))
    backend.db = live
    assert found == [(1, None), (2, None), (3, 7), (None, None)]


def test_timers_are_not_fetched_where_nobody_sets_any(backend: RocksBackend) -> None:
    TimerQueue(TimeKind.EVENT, backend)
    times = backend.cells["__event_timers"]
    times.complete = False
    backend.begin_batch([1, 2, 3])
    assert not times.cache


# -------------------------------------------------------------------------------------------------------- collections


def test_adding_to_a_list_does_not_write_it_again(backend: RocksBackend) -> None:
    items = backend.table(tg.list_("string", name="items"))
    backend.cursor.key = 1
    items.extend([f"{number:09}{number * 7919 % 10007}" for number in range(20_000)])
    before = {file.local: file.path.stat().st_size for file in files_of(backend.freeze()) if file.immutable}
    items.add("one more")
    after = {file.local: file.path.stat().st_size for file in files_of(backend.freeze()) if file.immutable}
    new = sum(size for local, size in after.items() if local not in before)
    assert before.keys() <= after.keys()
    assert 0 < new < sum(before.values()) / 20
    assert len(items.get()) == 20_001


def test_a_put_does_not_write_the_map_again(backend: RocksBackend) -> None:
    counts = backend.table(tg.map_("long", "string", name="counts"))
    backend.cursor.key = 1
    for number in range(5000):
        counts.put(number, f"{number * 7919 % 10007}")
    before = {file.local: file.path.stat().st_size for file in files_of(backend.freeze()) if file.immutable}
    forget_all(backend)
    counts.put(17, "new")
    after = {file.local: file.path.stat().st_size for file in files_of(backend.freeze()) if file.immutable}
    assert sum(size for local, size in after.items() if local not in before) < sum(before.values()) / 10
    assert counts.get(17) == "new" and len(counts) == 5000
    assert list(counts)[17] == 17, "an item that is put again stays where it was"


def test_many_chunks_of_a_short_list_are_put_together(backend: RocksBackend) -> None:
    items = backend.table(tg.list_("long", name="items"))
    backend.cursor.key = 1
    for number in range(100):
        items.add(number)
        write_all(backend)
    assert items.get() == tuple(range(100))
    assert len(list(backend.scan(backend.cells["items"].prefix))) < 50


# ----------------------------------------------------------------------------------------------------------- freezing


def test_what_is_written_after_a_freeze_is_not_in_it(backend: RocksBackend) -> None:
    table = backend.table(tg.value("long", name="n"))
    fill(backend, table, {1: 1, 2: 2})
    frozen = backend.freeze()
    fill(backend, table, {2: 3, 4: 4})
    backend.cursor.key = 1
    table.clear()
    later = backend.freeze()
    assert held(later.sections()) == {"n": {2: 3, 4: 4}}
    later.release()
    assert held(frozen.sections()) == {"n": {1: 1, 2: 2}}


def test_a_second_freeze_shares_its_files_with_the_first(backend: RocksBackend) -> None:
    table = backend.table(tg.value("long", name="n"))
    fill(backend, table, {key: key for key in range(50_000)})
    first = {file.local: file.path.stat() for file in files_of(backend.freeze()) if file.immutable}
    fill(backend, table, dict.fromkeys(range(0, 50000, 100), -1))
    second = {file.local: file.path.stat() for file in files_of(backend.freeze()) if file.immutable}
    new = sum(second[local].st_size for local in second.keys() - first.keys())
    assert new < 0.1 * sum(each.st_size for each in first.values())
    assert all(second[local].st_ino == first[local].st_ino for local in second.keys() & first.keys()), "the very same"


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """What a freeze handed over isn't written before the event is set, or the block ends."""
    go = threading.Event()
    write = Settling._write

    def late(self: Settling, db: Any, table: RocksTable) -> None:
        assert go.wait(10)
        write(self, db, table)

    with patch.object(Settling, "_write", late):
        try:
            yield go
        finally:
            go.set()


_late_step = st.tuples(
    st.sampled_from(["value", "all", "list", "map", "freeze", "forget", "go", "check"]),
    st.integers(0, 5),
    st.none() | st.integers(0, 9),
)


@given(steps=st.lists(_late_step, max_size=60))
@example(steps=[("value", 1, 1), ("freeze", 0, None), ("forget", 0, None), ("check", 0, None)])
@example(steps=[("value", 2, 1), ("freeze", 0, None), ("value", 2, 2), ("forget", 0, None), ("check", 0, None)])
@example(steps=[("all", 1, 1), ("freeze", 0, None), ("all", 1, 2), ("all", 1, 3)])
def test_work_goes_on_while_a_frozen_version_is_written(steps: list[tuple[str, int, int | None]]) -> None:
    backend = created(RocksDB("16 MB", IN_MEMORY))
    tables = {
        "value": backend.table(tg.value("long", name="value")),
        "list": backend.table(tg.list_("long", name="list")),
        "map": backend.table(tg.map_("long", "long", name="map")),
        "all": backend.table(
            tg.aggregating("array<long>", create=list, add=lambda all, x: [all.append(x), all][1], name="all")
        ),
    }
    now: Held = {name: {} for name in tables}
    versions: list[tuple[FrozenState, Held]] = []

    def check() -> None:
        backend.begin_batch(range(0, 6, 2))
        for backend.cursor.key in range(6):
            seen = {
                "value": tables["value"].get(),
                "all": tables["all"].get(),
                "list": list(tables["list"].get()) or None,
                "map": dict(tables["map"].items()) or None,
            }
            assert seen == {name: held.get(backend.cursor.key) for name, held in now.items()}

    with held_up() as go:
        for name, key, number in steps:
            backend.cursor.key = key
            match name, number:
                case "freeze", _:
                    go.set()
                    backend.settle()
                    go.clear()
                    versions.append((backend.freeze(), copy.deepcopy(now)))
                case "forget", _:
                    for table in [*backend.cells.values()] * 2:
                        table.forget_older()
                case "go", _:
                    go.set()
                case "check", _:
                    check()
                case _, None:
                    tables[name].clear()
                    now[name].pop(key, None)
                case "value", _:
                    tables[name].set(number)
                    now[name][key] = number
                case "map", int():
                    tables[name].put(number, number)
                    now[name].setdefault(key, {})[number] = number
                case _:
                    tables[name].add(number)
                    now[name].setdefault(key, []).append(number)
        check()
    check()
    for frozen, then in versions:
        assert held(frozen.sections()) == {name: entries for name, entries in then.items() if entries}
    backend.close()


def test_a_freeze_hands_over_however_much_was_changed(backend: RocksBackend) -> None:
    table = backend.table(tg.value("long", name="n"))
    fill(backend, table, {key: key for key in range(5000)})
    with held_up():
        frozen = backend.freeze()
        assert len(backend.cells["n"].frozen) == 5000 and not backend.cells["n"].dirty
    assert len(held(frozen.sections())["n"]) == 5000 and not backend.cells["n"].frozen


def test_the_loop_waits_for_a_freeze_when_there_is_too_much_that_is_not_written() -> None:
    memory = SlotMemory(MIN_MEMORY_BYTES)
    memory.cache_bytes = 500_000
    backend = RocksBackend(key_type=pa.int64(), key_group_count=GROUPS, folder=Folder(IN_MEMORY), memory=memory)
    table = backend.table(tg.value("long", name="n"))
    fill(backend, table, {0: 0})
    settle = backend.settle
    with held_up() as go:
        frozen = backend.freeze()

        def let_go() -> None:
            go.set()
            settle()

        wait = backend.settle = Mock(side_effect=let_go)  # type: ignore[method-assign]
        count = 0
        while not wait.called and count < 10_000:
            count += 1
            fill(backend, table, {count: count})
            backend.end_batch()
    assert memory.cache_bytes / 4 < count * backend.cells["n"].entry_bytes() < memory.cache_bytes
    assert held(frozen.sections()) == {"n": {0: 0}}
    assert held(backend.freeze().sections()) == {"n": {key: key for key in range(count + 1)}}
    backend.close()


def test_a_version_that_is_given_up_early_leaves_its_changes_and_no_files(tmp_path: Path) -> None:
    backend = created(RocksDB("16 MB", str(tmp_path)))
    table = backend.table(tg.value("long", name="n"))
    fill(backend, table, {1: 1})
    with held_up():
        backend.freeze().release()
    fill(backend, table, {2: 2})
    assert held(backend.freeze().sections()) == {"n": {1: 1, 2: 2}}
    assert [path.name for path in tmp_path.glob("*/frozen-*")] == ["frozen-2"]
    backend.close()


def test_what_fails_behind_a_freeze_is_told_to_its_reader_and_to_the_loop(backend: RocksBackend) -> None:
    table = backend.table(tg.value("long", name="n"))
    fill(backend, table, {1: 2**70})
    frozen = backend.freeze()
    for use in (lambda: files_of(frozen), lambda: list(frozen.sections()), backend.freeze):
        with pytest.raises(SchemaError, match="'n'"):
            use()


def test_sections_are_of_growing_groups_and_bounded(backend: RocksBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.state.cutting.BATCH_ROWS", 300)
    monkeypatch.setattr("tidegate.state.rocks_reading.BATCH_ROWS", 300)
    monkeypatch.setattr("tidegate.state.rocks_reading.SECTION_ROWS", 100)
    table = backend.table(tg.value("long", name="n"))
    fill(backend, table, {key: key for key in range(3000)})
    sections = list(backend.freeze().sections())
    ranges = [section.groups for section in sections if section.groups is not None]
    assert sum(section.rows.num_rows for section in sections) == 3000
    assert ranges == sorted(ranges, key=lambda each: each.start)
    assert all(one == other or one.stop <= other.start for one, other in pairwise(ranges))


# ------------------------------------------------------------------------------------------------------------- native


class Function:
    n = tg.value("long")
    words = tg.list_("string")
    counts = tg.map_("string", "long")


def open_with(backend: RocksBackend) -> tuple[Any, Any, Any]:
    n, words, counts = (backend.table(each) for each in descriptors_of(Function()).values())
    return n, words, counts


def full(settings: RocksDB) -> tuple[RocksBackend, Held]:
    backend = created(settings)
    n, words, counts = open_with(backend)
    for key in range(500):
        backend.cursor.key = key
        n.set(key)
        words.extend(["a", str(key)])
        counts.put("b", key)
        counts.put("a", 1)
    return backend, {
        "n": {key: key for key in range(500)},
        "words": {key: ["a", str(key)] for key in range(500)},
        "counts": {key: {"b": key, "a": 1} for key in range(500)},
    }


def test_a_backend_goes_on_from_native_files(settings: RocksDB, tmp_path: Path) -> None:
    first, expected = full(settings)
    native = native_copy(first.freeze(), tmp_path / "native")
    first.close()
    before = {path.name: path.read_bytes() for path in native.iterdir()}
    second = created(settings, native=native)
    n, words, counts = open_with(second)
    second.cursor.key = 7
    assert (n.get(), words.get(), list(counts.items())) == (7, ("a", "7"), [("b", 7), ("a", 1)])
    words.add("more")
    counts.put("0", 5)
    n.clear()
    expected["words"][7].append("more")
    expected["counts"][7]["0"] = 5
    del expected["n"][7]
    assert list(counts) == ["b", "a", "0"], "numbers go on where they were"
    frozen = second.freeze()
    assert held(frozen.sections()) == expected
    assert {file.local for file in files_of(frozen) if file.immutable} > {name for name in before if name.endswith(".sst")}
    assert {path.name: path.read_bytes() for path in native.iterdir()} == before, "left as it was"
    second.close()


def test_native_files_are_read_by_key_groups(settings: RocksDB, tmp_path: Path) -> None:
    first, expected = full(settings)
    frozen = first.freeze()
    native = native_copy(frozen, tmp_path / "native")
    found: Held = {"n": {}, "words": {}, "counts": {}}
    for groups in (range(5), range(5, 6), range(6, GROUPS)):
        sections = list(native_sections(native, frozen.states, key_type=pa.int64(), key_group_count=GROUPS, groups=groups))
        assert all(
            section.groups and groups.start <= section.groups.start < section.groups.stop <= groups.stop
            for section in sections
        )
        for state, entries in held(iter(sections)).items():
            assert not found[state].keys() & entries.keys()
            found[state].update(entries)
    assert found == expected
    first.close()


def test_rows_of_a_restored_state_can_be_read_for_timers(settings: RocksDB, tmp_path: Path) -> None:
    first, expected = full(settings)
    second = created(settings, native=native_copy(first.freeze(), tmp_path / "n"))
    open_with(second)
    rows = pa.Table.from_batches(second.rows("n"))
    assert dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)) == expected["n"]
    first.close()
    second.close()


def test_a_state_that_nobody_declares_any_more_is_dropped_from_native_files(settings: RocksDB, tmp_path: Path) -> None:
    first, expected = full(settings)
    second = created(settings, native=native_copy(first.freeze(), tmp_path / "n"))
    second.table(tg.value("long", name="n"))
    other = second.table(tg.value("string", name="other"))
    second.cursor.key = 1
    other.set("x")
    assert held(second.freeze().sections()) == {"n": expected["n"], "other": {1: "x"}}
    second.freeze()
    second.settle()
    assert len([*second.db.items()]) == 502, "with the entry that says what is there"
    first.close()
    second.close()


@pytest.mark.parametrize("declared", [tg.value("string", name="n"), tg.list_("long", name="n")])
def test_native_files_of_another_type_are_refused(settings: RocksDB, tmp_path: Path, declared: Any) -> None:
    first, _ = full(settings)
    native = native_copy(first.freeze(), tmp_path / "native")
    second = created(settings, native=native)
    with pytest.raises(RestoreError, match="'n'"):
        second.table(declared)
    with pytest.raises(RestoreError, match="16 key-groups"):
        settings.create(key_type=pa.int64(), key_group_count=GROUPS + 1, native=native)
    with pytest.raises(RestoreError, match="another key"):
        settings.create(key_type=pa.string(), key_group_count=GROUPS, native=native)
    first.close()
    second.close()


# ------------------------------------------------------------------------------------------------- settings and folders


def test_folders_are_gone_when_backends_are(tmp_path: Path) -> None:
    backend = created(RocksDB("16 MB", str(tmp_path)))
    table = backend.table(tg.value("long", name="n"))
    fill(backend, table, {1: 1})
    frozen = backend.freeze()
    backend.close()
    assert held(frozen.sections()) == {"n": {1: 1}}, "what is frozen outlives its backend"
    frozen.release()
    del frozen, backend, table
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_behind_is_removed(tmp_path: Path) -> None:
    dead, living = tmp_path / "tidegate-rocksdb-dead", Folder(str(tmp_path))
    dead.mkdir()
    (dead / "lock").touch()
    for lock in tmp_path.glob("*/lock"):
        os.utime(lock, (0, 0))
    another = Folder(str(tmp_path))
    assert not dead.exists() and (living.path / "lock").exists() and (another.path / "lock").exists()


@pytest.mark.parametrize("memory", ["much", "1 MB", -1, "12 parsecs", None])
def test_memory_that_is_none_is_refused(memory: Any) -> None:
    with pytest.raises(JobError, match="memory="):
        RocksDB(memory)


def test_settings_travel_and_are_shared(settings: RocksDB) -> None:
    twin = pickle.loads(pickle.dumps(RocksDB("1.5 GB")))
    assert twin.memory_bytes == 3 << 29
    backends = [created(settings) for _ in range(2)]
    assert backends[0]._memory is backends[1]._memory, "one budget for the whole slot"
    for backend in backends:
        backend.close()


def test_backends_share_the_memory_that_others_leave() -> None:
    memory = SlotMemory(MIN_MEMORY_BYTES)
    one, other = object(), object()
    assert memory.allowed(one, 0) == memory.cache_bytes
    assert memory.allowed(other, 100) == memory.cache_bytes
    assert memory.allowed(one, memory.cache_bytes) == memory.cache_bytes - 100
    assert memory.allowed(other, memory.cache_bytes / 4) == memory.cache_bytes / 2, "an equal share in any case"
    memory.leave(one)
    assert memory.allowed(other, 0) == memory.cache_bytes
