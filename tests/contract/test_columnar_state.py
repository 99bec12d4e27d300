"""What every backend with columnar state promises: its frozen versions and their readers, compared with dictionaries.

Random programs run on a backend and on a dictionary by key and window. A backend is added by one line in `BACKENDS`.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.state import column_freezing, versioned_table
from tidegate.state.column_freezing import rows_of_table
from tidegate.state.column_table import ColumnState, ColumnTable, VectorField
from tidegate.state.columns import key_list
from tidegate.state.descriptors import Columns
from tidegate.state.heap import HeapBackend
from tidegate.state.merging import LayerInMemory, resolved_rows
from tidegate.state.rocks_columns import RocksColumnTable
from tidegate.state.rocks_db import SlotMemory
from tidegate.state.rocks_tables import OBJECT_BYTES, RocksTables
from tidegate.state.rocksdb import RocksDB, native_sections
from tidegate.state.sections import FrozenState, Section
from tidegate.types import to_list

GROUPS = 4
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # thousands of small databases: no disk needs to spin
FIELDS = (
    VectorField("total", pa.float64()),
    VectorField("n", pa.int64(), 0),
    VectorField("last", pa.string()),
    VectorField("flag", pa.bool_()),
    VectorField("all", pa.list_(pa.int64())),
)
DEFAULTS: dict[str, Any] = {each.name: each.default for each in FIELDS}

BACKENDS: dict[str, Callable[[pa.DataType], Any]] = {
    "heap": lambda key_type: HeapBackend(key_type=key_type, key_group_count=GROUPS),
    "rocksdb": lambda key_type: RocksDB("16 MB", IN_MEMORY).create(key_type=key_type, key_group_count=GROUPS),
}


def assert_memory_is_known(state: Any) -> None:
    """What a state on RocksDB believes to hold is what its tables hold."""
    if isinstance(state, RocksTables):
        objects = sum(map(state._has_objects, state.fields))
        tables = [state.rocks_table(at) for at in state._tables]
        assert state.held_bytes() == sum(table.nbytes + table.top * objects * OBJECT_BYTES for table in tables)


Entries = dict[tuple[Any, Any], dict[str, Any]]  # (key, window) → fields


def backend_of(descriptor: Columns, key_type: pa.DataType, name: str = "heap") -> tuple[Any, ColumnState]:
    backend = BACKENDS[name](key_type)
    return backend, backend.column_state(descriptor)


class NoMemory(SlotMemory):
    """So little memory that a backend forgets all that it may."""

    def allowed(self, user: object, used_bytes: float) -> float:
        return 0.0


NO_MEMORY = NoMemory(16 << 20)


def entries_of(batches: Iterable[pa.RecordBatch]) -> Entries:
    found: Entries = {}
    for batch in batches:
        windows = to_list(batch.column("window")) if "window" in batch.schema.names else [None] * batch.num_rows
        for key, window, value in zip(key_list(batch.column("key")), windows, to_list(batch.column("value")), strict=True):
            assert (key, window) not in found, "each key is there once"
            found[key, window] = value
    return found


@dataclass
class Version:
    """A frozen version, those before it, and what it must hold with them."""

    frozen: FrozenState
    expected: Entries
    before: Version | None
    sections: list[Section] | None = None

    def read(self) -> None:
        if self.sections is None:
            self.sections = list(self.frozen.sections())
            places = [(each.deleted, each.groups.start) for each in self.sections if each.groups is not None]
            assert places == sorted(places)
            identities = [
                (key, window)
                for each in self.sections
                for key, window in zip(
                    key_list(each.rows.column("key")),
                    to_list(each.rows.column("window"))
                    if "window" in each.rows.schema.names
                    else [None] * each.rows.num_rows,
                    strict=True,
                )
            ]
            assert len(identities) == len(set(identities)), "each key is in a layer once, set or deleted"

    def layers(self) -> list[LayerInMemory]:
        self.read()
        assert self.sections is not None
        layer = LayerInMemory(self.sections, key_group_count=GROUPS)
        return [layer] if self.frozen.complete or self.before is None else [*self.before.layers(), layer]

    def check(self) -> None:
        assert entries_of(resolved_rows("state", self.layers(), range(GROUPS))) == self.expected


@dataclass
class World:
    """A columnar state and its oracle."""

    name: str
    key_type: pa.DataType
    windowed: bool
    held: Entries = field(default_factory=dict)
    versions: list[Version] = field(default_factory=list)
    newest: Version | None = None

    def __post_init__(self) -> None:
        self.descriptor = Columns("state", FIELDS, windowed=self.windowed)
        self.backend, self.state = backend_of(self.descriptor, self.key_type, self.name)

    def table(self, window: int) -> ColumnTable:
        return self.state.window(window) if self.windowed else self.state.table()

    def columns(self, keys: Sequence[Any]) -> list[pa.Array]:
        array = pa.array([dict(zip("ab", key, strict=True)) if type(key) is tuple else key for key in keys], self.key_type)
        return array.flatten() if pa.types.is_struct(self.key_type) else [array]

    def write(self, window: int, keys: Sequence[Any], number: int) -> None:
        """Counts and sums, as an aggregate does; lists change in place."""
        table = self.table(window)
        rows = table.rows_of(self.columns(keys))
        table.change(rows)
        vectors = table.vectors
        total, flag = vectors["total"], vectors["flag"]
        assert total.valid is not None and flag.valid is not None
        np.add.at(vectors["n"].values, rows, 1)
        total.values[rows] = np.where(total.valid[rows], total.values[rows], 0.0) + number
        total.valid[rows] = True
        flag.values[rows], flag.valid[rows] = number % 2 == 0, number % 3 != 0
        vectors["last"].values[rows] = str(number)
        for key, row in zip(keys, rows.tolist(), strict=True):
            if vectors["all"].values[row] is None:
                vectors["all"].values[row] = []
            vectors["all"].values[row].append(number)
            held = self.held.setdefault((key, window if self.windowed else None), copy.deepcopy(DEFAULTS))
            held["n"] += 1
            held["all"] = [*(held["all"] or []), number]
        for key in set(keys):
            held = self.held[key, window if self.windowed else None]
            held["total"] = (held["total"] or 0.0) + number
            held["flag"] = None if number % 3 == 0 else number % 2 == 0
            held["last"] = str(number)

    def add(self, window: int, keys: Sequence[Any]) -> None:
        self.table(window).rows_of(self.columns(keys))
        for key in keys:
            self.held.setdefault((key, window if self.windowed else None), copy.deepcopy(DEFAULTS))

    def delete(self, window: int, keys: Sequence[Any]) -> None:
        table = self.table(window)
        rows = table.find(self.columns(keys))
        table.delete(rows[rows >= 0])
        for key in keys:
            self.held.pop((key, window if self.windowed else None), None)

    def drop(self, window: int) -> None:
        if self.windowed and window in self.state.windows():
            self.state.drop(window)
            self.held = {(key, at): value for (key, at), value in self.held.items() if at != window}

    def freeze(self) -> None:
        self.newest = Version(self.backend.freeze(), copy.deepcopy(self.held), self.newest)
        self.versions.append(self.newest)

    def restore(self, *, known: bool) -> None:
        """Continue in another backend from the newest version."""
        if self.newest is None:
            return
        version = self.newest
        version.read()
        self.backend.close()
        self.backend, self.state = backend_of(self.descriptor, self.key_type, self.name)
        for batch in resolved_rows("state", version.layers(), range(GROUPS)):
            self.backend.load("state", batch, known=known)
        self.held = copy.deepcopy(version.expected)
        if not known:
            self.newest = None

    def maintain(self) -> None:
        """On RocksDB, forget what may be forgotten."""
        if self.name == "rocksdb":
            self.backend._memory = NO_MEMORY
        self.backend.maintain(1000)

    def check_live(self) -> None:
        windows: list[Any] = list(self.state.windows()) if self.windowed else [None]
        assert {window for _, window in self.held} <= set(windows)
        tables = [(window, self.table(window)) for window in windows]
        schema = self.state.info.schema
        batches = [rows_of_table(table, table.rows(), FIELDS, schema, window) for window, table in tables]
        assert entries_of(batches) == self.held
        for window in windows:
            table = self.table(window)
            keys = [key for key, at in self.held if at == window]
            assert len(table) == len(keys)
            assert sorted(table.find(self.columns(keys)).tolist()) == table.rows().tolist()


_windows = st.integers(0, 2)
_steps = st.one_of(
    *[st.tuples(st.just("write"), _windows, st.lists(st.integers(0, 5), max_size=5), st.integers(0, 9))] * 3,
    st.tuples(st.just("add"), _windows, st.lists(st.integers(0, 5), max_size=3)),
    *[st.tuples(st.just("delete"), _windows, st.lists(st.integers(0, 5), max_size=4))] * 2,
    st.tuples(st.just("drop"), _windows),
    *[st.tuples(st.just("freeze"))] * 2,
    st.tuples(st.just("read"), st.integers(0, 2)),
    *[st.tuples(st.just("maintain"))] * 2,
    st.tuples(st.just("check")),
    st.tuples(st.just("restore"), st.booleans()),
)
_KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "long": (pa.int64(), [None, 0, 1, 2, -1, 3]),
    "string": (pa.string(), [None, "", "a", "b", "a long one of many bytes", "c"]),
    "two columns": (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        [(None, None), (1, "x"), (1, None), (None, "x"), (2, "x"), (2, "y")],
    ),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("key_type", _KEYS)
@given(steps=st.lists(_steps, max_size=40))
def test_what_is_frozen_stays_as_it_was_whatever_follows(
    name: str, key_type: str, windowed: bool, steps: list[tuple[Any, ...]]
) -> None:
    arrow, spelled = _KEYS[key_type]
    world = World(name, arrow, windowed)
    limit = versioned_table.MIN_RENUMBERED_ROWS
    versioned_table.MIN_RENUMBERED_ROWS = 2
    try:
        for step in steps:
            _do(world, step, spelled)
            assert_memory_is_known(world.state)
            if name == "heap":
                world.check_live()
        world.check_live()
        for version in world.versions:
            version.read()
            version.frozen.release()
        for version in world.versions:
            version.check()
        world.backend.close()
    finally:
        versioned_table.MIN_RENUMBERED_ROWS = limit


def _do(world: World, step: tuple[Any, ...], spelled: Sequence[Any]) -> None:
    match step:
        case ("write", window, keys, number):
            world.write(window, [spelled[key] for key in keys], number)
        case ("add", window, keys):
            world.add(window, [spelled[key] for key in keys])
        case ("delete", window, keys):
            world.delete(window, [spelled[key] for key in keys])
        case ("drop", window):
            world.drop(window)
        case ("freeze",):
            world.freeze()
        case ("read", index):
            for version in world.versions[-1 - index : len(world.versions) - index]:
                version.check()
                version.frozen.release()
        case ("maintain",):
            world.maintain()
        case ("check",):
            world.check_live()
        case ("restore", known):
            world.restore(known=known)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("no_leaked_threads")
def test_versions_are_read_by_another_thread_while_the_table_is_written(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of few rows, so that a reading takes many turns; several versions at a time."""
    monkeypatch.setattr(column_freezing, "TURN_ROWS", 256)
    rng, random_keys = random.Random(seed), np.random.default_rng(seed)
    backend, state = backend_of(Columns("state", FIELDS[:2]), pa.int64(), name)
    table, held = state.table(), np.zeros(20_000)
    there = np.zeros(20_000, bool)
    readings: list[tuple[Version, threading.Thread]] = []
    newest: Version | None = None
    for number in range(120):
        keys = random_keys.integers(0, len(held), 2_000)
        rows = table.rows_of([pa.array(keys)])
        table.change(rows)
        total = table.vectors["total"]
        assert total.valid is not None
        total.values[rows], total.valid[rows] = number, True
        held[keys], there[keys] = number, True
        gone = np.unique(random_keys.integers(0, len(held), rng.choice([0, 20, 3_000])))
        gone = gone[there[gone]]
        table.delete(table.find([pa.array(gone)]))
        there[gone] = False
        backend.maintain(1000)
        if number % 8 == 7:
            expected = {(key, None): {"total": held[key], "n": 0} for key in np.flatnonzero(there).tolist()}
            newest = Version(backend.freeze(), expected, newest)
            thread = threading.Thread(target=newest.read)
            thread.start()
            readings.append((newest, thread))
        if len(readings) == 3:
            _finish(readings.pop(rng.randrange(3)), readings)
    while readings:
        _finish(readings.pop(0), readings)
    backend.close()


def _finish(reading: tuple[Version, threading.Thread], others: Sequence[tuple[Version, threading.Thread]]) -> None:
    version, thread = reading
    for each in (thread, *(other for _, other in others)):
        each.join()
    version.check()
    version.frozen.release()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("windowed", [False, True])
def test_a_state_without_fields_is_a_set_of_keys(name: str, windowed: bool) -> None:
    descriptor = Columns("state", [], windowed=windowed)
    backend, state = backend_of(descriptor, pa.string(), name)
    table = state.window(-5) if windowed else state.table()
    table.rows_of([pa.array(["a", "b", "c", None])])
    table.delete(table.find([pa.array(["b"])]))
    sections = list(backend.freeze().sections())
    again, restored = backend_of(descriptor, pa.string(), name)
    for section in sections:
        again.load("state", section.rows, known=False)
    table = restored.window(-5) if windowed else restored.table()
    assert (table.find([pa.array(["a", "b", "c", None])]) >= 0).tolist() == [True, False, True, True]
    assert len(table) == 3
    backend.close()
    again.close()


def test_rocksdb_starts_from_its_own_files_with_all_windows(tmp_path: Path) -> None:
    descriptor = Columns("state", FIELDS, windowed=True)
    backend, state = backend_of(descriptor, pa.string(), "rocksdb")
    for window in (-10, 0, 7):
        table = state.window(window)
        rows = table.rows_of([pa.array([f"{key}" for key in range(50)])])
        table.change(rows)
        table.vectors["n"].values[rows] = np.arange(50) + window
    state.drop(0)
    frozen = backend.freeze()
    for file in frozen.files():
        shutil.copyfile(file.path, tmp_path / file.local)
    frozen.release()
    backend.close()
    again = RocksDB("16 MB", IN_MEMORY).create(key_type=pa.string(), key_group_count=GROUPS, native=tmp_path)
    restored = again.column_state(descriptor)
    assert list(restored.windows()) == [-10, 7]
    table = restored.window(7)
    rows = table.find([pa.array(["3", "50"])])
    assert rows[1] == -1
    assert table.vectors["n"].values[rows[0]] == 10
    info = descriptor.info(pa.string())
    found = native_sections(tmp_path, [info], key_type=pa.string(), key_group_count=GROUPS, groups=range(1, 3))
    keys = [key for section in found for key in to_list(section.rows.column("key"))]
    assert len(keys) == 2 * len(set(keys)) and 0 < len(set(keys)) < 50
    again.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_version_is_what_it_was_if_a_later_one_was_taken_before_the_next_change(name: str) -> None:
    world = World(name, pa.int64(), windowed=False)
    world.write(0, [1, 2], 4)
    world.freeze()
    world.write(0, [2], 5)
    world.freeze()
    world.write(0, [1, 2, 3], 7)
    world.delete(0, [2])
    for version in world.versions:
        version.check()
    world.backend.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_list_that_is_changed_in_place_is_what_it_was_in_a_version(name: str) -> None:
    backend, state = backend_of(Columns("state", FIELDS[4:]), pa.int64(), name)
    table = state.table()
    rows = table.rows_of([pa.array([1])])
    table.change(rows)
    table.vectors["all"].values[rows[0]] = [1]
    frozen = backend.freeze()
    table.change(rows)
    table.vectors["all"].values[rows[0]].append(2)
    assert [row["value"] for each in frozen.sections() for row in each.rows.to_pylist()] == [{"all": [1]}]
    assert table.vectors["all"].values[rows[0]] == [1, 2]
    backend.close()


def test_rocksdb_deletes_the_rows_of_a_dropped_window_that_are_not_in_memory() -> None:
    world = World("rocksdb", pa.string(), windowed=True)
    for window in (0, 1):
        world.write(window, ["a", "b"], 3)
    world.freeze()
    world.maintain()
    assert world.state.window(0).row_count == 0, "the rows were forgotten"
    world.drop(0)
    world.write(0, ["b"], 5)
    world.check_live()
    world.freeze()
    world.maintain()
    world.check_live()
    world.versions[-1].check()
    world.backend.close()


def test_state_on_rocksdb_may_be_larger_than_its_memory() -> None:
    """Three passes over more keys than there is memory for: every key is found again, and memory stays bounded."""
    backend, state = backend_of(Columns("state", FIELDS[:2]), pa.int64(), "rocksdb")
    table, count, most = state.table(), 300_000, 0
    for _ in range(3):
        for start in range(0, count, 10_000):
            rows = table.rows_of([pa.array(range(start, start + 10_000))])
            table.change(rows)
            table.vectors["n"].values[rows] += 1
            backend.maintain(1000)
            most = max(most, state.nbytes)
        backend.freeze().release()
    assert most < 10_000_000, "half of the memory, and what one batch adds"
    assert isinstance(table, RocksColumnTable) and not table.complete
    rows = table.find([pa.array([0, 1, count - 1, count])])
    assert rows[3] == -1
    assert table.vectors["n"].values[rows[:3]].tolist() == [3, 3, 3]
    backend.close()


def test_a_step_on_rocksdb_measures_only_the_tables_that_it_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, state = backend_of(Columns("state", FIELDS, windowed=True), pa.int64(), "rocksdb")
    for window in range(100):
        state.window(window).rows_of([pa.array([1])])
    backend.maintain(1000)
    measured: list[RocksColumnTable] = []

    def nbytes(table: RocksColumnTable) -> int:
        measured.append(table)
        return super(RocksColumnTable, table).nbytes

    monkeypatch.setattr(RocksColumnTable, "nbytes", property(nbytes))
    backend.maintain(1000)
    assert not measured
    for window in (3, 5):
        state.window(window).rows_of([pa.array([2])])
    state.drop(7)
    backend.maintain(1000)
    assert {id(table) for table in measured} == {id(state.window(3)), id(state.window(5))}
    assert_memory_is_known(state)
    backend.close()
