"""Columnar state, its frozen versions and their readers, compared with dictionaries."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.state import column_freezing, column_table
from tidegate.state.column_table import ColumnState, ColumnTable, VectorField
from tidegate.state.columns import key_list
from tidegate.state.descriptors import Columns
from tidegate.state.heap import HeapBackend
from tidegate.state.merging import LayerInMemory, resolved_rows
from tidegate.state.sections import FrozenState, Section
from tidegate.types import to_list

GROUPS = 4
FIELDS = (
    VectorField("total", pa.float64()),
    VectorField("n", pa.int64(), 0),
    VectorField("last", pa.string()),
    VectorField("flag", pa.bool_()),
    VectorField("all", pa.list_(pa.int64())),
)
DEFAULTS: dict[str, Any] = {each.name: each.default for each in FIELDS}

Entries = dict[tuple[Any, Any], dict[str, Any]]  # (key, window) → fields


def backend_of(descriptor: Columns, key_type: pa.DataType) -> tuple[HeapBackend, ColumnState]:
    backend = HeapBackend(key_type=key_type, key_group_count=GROUPS)
    return backend, backend.column_state(descriptor)


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

    key_type: pa.DataType
    windowed: bool
    held: Entries = field(default_factory=dict)
    versions: list[Version] = field(default_factory=list)
    newest: Version | None = None

    def __post_init__(self) -> None:
        self.descriptor = Columns("state", FIELDS, windowed=self.windowed)
        self.backend, self.state = backend_of(self.descriptor, self.key_type)

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
        self.backend, self.state = backend_of(self.descriptor, self.key_type)
        for batch in resolved_rows("state", version.layers(), range(GROUPS)):
            self.backend.load("state", batch, known=known)
        self.held = copy.deepcopy(version.expected)
        if not known:
            self.newest = None

    def check_live(self) -> None:
        assert entries_of(self.backend.rows("state")) == self.held
        windows: list[Any] = list(self.state.windows()) if self.windowed else [None]
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
    st.tuples(st.just("maintain")),
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


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("key_type", _KEYS)
@given(steps=st.lists(_steps, max_size=40))
def test_what_is_frozen_stays_as_it_was_whatever_follows(
    key_type: str, windowed: bool, steps: list[tuple[Any, ...]]
) -> None:
    arrow, spelled = _KEYS[key_type]
    world = World(arrow, windowed)
    limit = column_table.MIN_RENUMBERED_ROWS
    column_table.MIN_RENUMBERED_ROWS = 2
    try:
        for step in steps:
            _do(world, step, spelled)
            world.check_live()
        for version in world.versions:
            version.read()
            version.frozen.release()
        for version in world.versions:
            version.check()
    finally:
        column_table.MIN_RENUMBERED_ROWS = limit


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
            world.backend.maintain(1000)
        case ("restore", known):
            world.restore(known=known)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("no_leaked_threads")
def test_versions_are_read_by_another_thread_while_the_table_is_written(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of few rows, so that a reading takes many turns; several versions at a time."""
    monkeypatch.setattr(column_freezing, "TURN_ROWS", 256)
    rng, random_keys = random.Random(seed), np.random.default_rng(seed)
    backend, state = backend_of(Columns("state", FIELDS[:2]), pa.int64())
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


def _finish(reading: tuple[Version, threading.Thread], others: Sequence[tuple[Version, threading.Thread]]) -> None:
    version, thread = reading
    for each in (thread, *(other for _, other in others)):
        each.join()
    version.check()
    version.frozen.release()


def test_a_freeze_copies_nothing_and_only_the_first_change_of_a_row_after_it_is_kept() -> None:
    backend, state = backend_of(Columns("state", FIELDS[:2]), pa.int64())
    table = state.table()
    rows = table.rows_of([pa.array(range(100_000))])
    values = table.vectors["n"].values
    frozen = backend.freeze()
    assert table.vectors["n"].values is values
    for _ in range(3):
        table.change(rows[:10])
        table.vectors["n"].values[rows[:10]] += 1
    log = table._outstanding[-1].log
    assert [len(entry.rows) for entry in log] == [10]
    list(frozen.sections())
    frozen.release()
    table.change(rows[:20])
    assert not table._outstanding, "nothing is kept when the version is read"


def test_an_epoch_writes_only_what_changed_and_the_keys_that_are_gone() -> None:
    backend, state = backend_of(Columns("state", FIELDS[:2], windowed=True), pa.int64())
    for window in (10, 20):
        state.window(window).rows_of([pa.array(range(100))])
    list(backend.freeze().sections())
    table = state.window(10)
    table.change(table.find([pa.array([1, 2])]))
    table.delete(table.rows_of([pa.array([3, 1000])]))
    state.window(30).rows_of([pa.array([1])])
    state.drop(30)
    state.drop(20)
    frozen = backend.freeze()
    sections = list(frozen.sections())
    there = [row for each in sections if not each.deleted for row in each.rows.to_pylist()]
    gone = [row for each in sections if each.deleted for row in each.rows.to_pylist()]
    assert not frozen.complete
    assert sorted((row["window"], row["key"]) for row in there) == [(10, 1), (10, 2)]
    assert sorted((row["window"], row["key"]) for row in gone) == [(10, 3), *((20, key) for key in range(100))]
    assert list(state.windows()) == [10]


def test_memory_goes_when_the_keys_go() -> None:
    for key_type in (pa.int64(), pa.string()):
        backend, state = backend_of(Columns("state", FIELDS[:2]), key_type)
        table = state.table()
        rows = table.rows_of([pa.array(range(100_000)).cast(key_type)])
        full_bytes = state.nbytes
        table.delete(rows[1000:])
        list(backend.freeze().sections())
        backend.maintain(1000)
        assert state.nbytes < full_bytes / 20
        assert len(table) == 1000
        assert sorted(map(int, table.keys(table.rows())[0].to_pylist())) == list(range(1000))


def test_rows_of_deleted_keys_are_used_again_when_no_version_needs_them() -> None:
    backend, state = backend_of(Columns("state", FIELDS[:2]), pa.int64())
    table = state.table()
    for start in range(0, 10_000, 100):
        table.delete(table.rows_of([pa.array(range(start, start + 100))]))
        if start % 1000 == 0:
            backend.freeze().release()
    assert table.top == 100
    rows = table.rows_of([pa.array(range(100))])
    frozen = backend.freeze()
    table.delete(rows)
    others = table.rows_of([pa.array(range(100, 200))])
    assert not set(others.tolist()) & set(rows.tolist())
    assert entries_of(each.rows for each in frozen.sections()).keys() == {(key, None) for key in range(100)}


def test_a_table_of_a_million_keys_and_one_sum_takes_at_most_64_bytes_a_key() -> None:
    _, state = backend_of(Columns("state", FIELDS[:1]), pa.int64())
    table = state.table()
    keys = np.random.default_rng(1).permutation(1_000_000)
    for start in range(0, len(keys), 65_536):
        table.change(table.rows_of([pa.array(keys[start : start + 65_536])]))
    assert state.nbytes <= 64 * len(keys)
