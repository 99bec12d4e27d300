"""What every backend with columnar state promises about records: many for each key, in the order of their arrival.

Random programs run on a backend and on a dictionary of lists. A backend is added by one line in `BACKENDS`
(test_columnar_state.py).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.test_columnar_state import BACKENDS, GROUPS, NO_MEMORY, assert_memory_is_known
from tidegate.state import rocks_records, versioned_table
from tidegate.state.columns import key_list
from tidegate.state.descriptors import Records
from tidegate.state.merging import LayerInMemory, resolved_rows
from tidegate.state.record_table import RecordTable
from tidegate.state.rocksdb import RocksDB, native_sections
from tidegate.state.sections import FrozenState, Section
from tidegate.state.vectors import VectorField
from tidegate.types import to_list

COLUMNS = (
    pa.field("number", pa.float64()),
    pa.field("text", pa.string()),
    pa.field("some", pa.list_(pa.int64())),
    pa.field("pair", pa.struct([("a", pa.int32()), ("b", pa.string())])),
    pa.field("amount", pa.decimal128(20, 2)),
)
FIELDS = (VectorField("matches", pa.int64(), 0), VectorField("note", pa.string()))
VALUES: dict[str, list[Any]] = {
    "number": [0.5, -0.0, None, float("inf")],
    "text": ["", "a", None, "a text of more bytes"],
    "some": [[1, 2], [], None, [3]],
    "pair": [{"a": 1, "b": "x"}, {"a": None, "b": None}, None, {"a": 2, "b": None}],
    "amount": [None, 0, 1, -2],
}

Identity = tuple[Any, Any]  # key and window
Held = dict[Identity, list[dict[str, Any]]]  # the records of a key, in order


def record(number: int) -> dict[str, Any]:
    return {name: values[number % len(values)] for name, values in VALUES.items()}


def held_of(batches: Sequence[pa.RecordBatch]) -> Held:
    """Return the records of rows of snapshots, in the order of their positions."""
    found: dict[Identity, list[tuple[int, dict[str, Any]]]] = {}
    for batch in batches:
        batch.validate(full=True)
        windows = to_list(batch.column("window")) if "window" in batch.schema.names else [None] * batch.num_rows
        positions = batch.column("position").to_pylist()
        rows = zip(key_list(batch.column("key")), windows, positions, to_list(batch.column("value")), strict=True)
        for key, window, position, value in rows:
            found.setdefault((key, window), []).append((position, value))
    for those in found.values():
        assert len({position for position, _ in those}) == len(those), "a position is given once"
    return {identity: [value for _, value in sorted(those, key=lambda one: one[0])] for identity, those in found.items()}


@dataclass
class Version:
    """A frozen version, those before it, and what it must hold with them."""

    frozen: FrozenState
    expected: Held
    before: Version | None
    sections: list[Section] | None = None

    def read(self) -> None:
        if self.sections is None:
            self.sections = list(self.frozen.sections())

    def layers(self) -> list[LayerInMemory]:
        self.read()
        assert self.sections is not None
        layer = LayerInMemory(self.sections, key_group_count=GROUPS)
        return [layer] if self.frozen.complete or self.before is None else [*self.before.layers(), layer]

    def rows(self) -> list[pa.RecordBatch]:
        return list(resolved_rows("state", self.layers(), range(GROUPS)))

    def check(self) -> None:
        assert held_of(self.rows()) == self.expected


@dataclass
class World:
    """A state of records and its oracle."""

    name: str
    key_type: pa.DataType
    windowed: bool
    held: Held = field(default_factory=dict)
    versions: list[Version] = field(default_factory=list)
    newest: Version | None = None

    def __post_init__(self) -> None:
        self.descriptor = Records("state", COLUMNS, FIELDS, windowed=self.windowed)
        self.open()

    def open(self) -> None:
        self.backend = BACKENDS[self.name](self.key_type)
        self.state = self.backend.record_state(self.descriptor)

    def table(self, window: int) -> RecordTable:
        table = self.state.window(window) if self.windowed else self.state.table()
        assert isinstance(table, RecordTable)
        return table

    def keys(self, keys: Sequence[Any]) -> list[pa.Array]:
        array = pa.array([dict(zip("ab", key, strict=True)) if type(key) is tuple else key for key in keys], self.key_type)
        return array.flatten() if pa.types.is_struct(self.key_type) else [array]

    def identity(self, key: Any, window: int) -> Identity:
        return key, window if self.windowed else None

    def append(self, window: int, keys: Sequence[Any], number: int) -> None:
        records = [record(number + place) for place in range(len(keys))]
        columns = [pa.array([each[column.name] for each in records], column.type) for column in COLUMNS]
        rows = self.table(window).append(self.keys(keys), columns)
        assert len(set(rows.tolist())) == len(keys)
        expected = [to_list(column) for column in columns]
        for place, key in enumerate(keys):
            values = dict(zip(VALUES, (column[place] for column in expected), strict=True))
            self.held.setdefault(self.identity(key, window), []).append({**values, "matches": 0, "note": None})

    def mark(self, window: int, keys: Sequence[Any], limit: int) -> None:
        """Count the matches in the records, as a join does; check what is found."""
        table = self.table(window)
        found = list(table.matches(self.keys(keys), limit))
        assert all(0 < len(probes) <= limit for probes, _ in found)
        probes = [probe for some, _ in found for probe in some.tolist()]
        wanted = [self.held.get(self.identity(key, window), []) for key in keys]
        assert probes == [probe for probe, those in enumerate(wanted) for _ in those]
        assert table.counts(self.keys(keys)).tolist() == list(map(len, wanted))
        for some, rows in found:
            table.change(rows)
            np.add.at(table.vectors["matches"].values, rows, 1)
            for probe, row in zip(some.tolist(), rows.tolist(), strict=True):
                table.vectors["note"].values[row] = repr(keys[probe])
        for key, those in zip(keys, wanted, strict=True):
            for each in those:
                each["matches"] += 1
                each["note"] = repr(key)
        columns = {name: [value for _, rows in found for value in to_list(table.column(name, rows))] for name in VALUES}
        expected = {name: [each[name] for those in wanted for each in those] for name in VALUES}
        assert repr(columns) == repr(expected), "-0.0 stays what it is"

    def delete(self, window: int, keys: Sequence[Any], every: int) -> None:
        """Delete each n-th record of these keys."""
        table = self.table(window)
        keys = list(dict.fromkeys(keys))
        rows = [rows for _, rows in table.matches(self.keys(keys), 7)]
        gone = np.concatenate(rows)[::every] if rows else np.empty(0, np.int64)
        table.delete(gone)
        place = 0
        for key in keys:
            identity = self.identity(key, window)
            those = self.held.pop(identity, [])
            left = [each for number, each in enumerate(those, place) if number % every]
            place += len(those)
            if left:
                self.held[identity] = left

    def drop(self, window: int) -> None:
        if self.windowed and window in self.state.windows():
            self.state.drop(window)
            self.held = {identity: those for identity, those in self.held.items() if identity[1] != window}

    def freeze(self) -> None:
        self.newest = Version(self.backend.freeze(), copy.deepcopy(self.held), self.newest)
        self.versions.append(self.newest)

    def restore(self, *, known: bool) -> None:
        """Continue in another backend from the newest version. Rows come in any order."""
        if self.newest is None:
            return
        version = self.newest
        batches = version.rows()
        self.backend.close()
        self.open()
        for batch in reversed(batches):
            self.backend.load("state", batch.take(pa.array(range(batch.num_rows)[::-1], pa.int64())), known=known)
        self.held = copy.deepcopy(version.expected)
        if not known:
            self.newest = None

    def maintain(self) -> None:
        """On RocksDB, forget what may be forgotten."""
        if self.name == "rocksdb":
            self.backend._memory = NO_MEMORY
        self.backend.maintain(1000)

    def check_live(self) -> None:
        tables = [(at, self.table(at)) for at in (self.state.windows() if self.windowed else [0])]
        found: Held = {}
        for at, table in tables:
            rows = table.rows()
            assert len(table) == len(rows)
            rows = rows[np.argsort(table.positions(rows))]
            values = [to_list(column) for column in table.kept(rows).values()]
            values += [table.vectors["matches"].values[rows].tolist(), table.vectors["note"].values[rows].tolist()]
            keys = table.key_columns(rows)
            key = pa.StructArray.from_arrays(keys, fields=list(self.key_type)) if len(keys) > 1 else keys[0]
            for one, *those in zip(key_list(key), *values, strict=True):
                found.setdefault(self.identity(one, at), []).append(
                    dict(zip((*VALUES, "matches", "note"), those, strict=True))
                )
        assert found == self.held


_windows = st.integers(0, 1)
_keys = st.lists(st.integers(0, 5), max_size=8)
_steps = st.one_of(
    *[st.tuples(st.just("append"), _windows, _keys, st.integers(0, 3))] * 3,
    *[st.tuples(st.just("mark"), _windows, _keys, st.integers(1, 5))] * 2,
    *[st.tuples(st.just("delete"), _windows, _keys, st.integers(1, 3))] * 2,
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
@pytest.mark.parametrize(("windowed", "key_type"), [(False, "long"), (True, "string"), (False, "two columns")])
@given(steps=st.lists(_steps, max_size=30))
def test_records_are_what_was_appended_and_frozen_ones_stay(
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
        case ("append", window, keys, number):
            world.append(window, [spelled[key] for key in keys], number)
        case ("mark", window, keys, limit):
            world.mark(window, [spelled[key] for key in keys], limit)
        case ("delete", window, keys, every):
            world.delete(window, [spelled[key] for key in keys], every)
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
@pytest.mark.usefixtures("no_leaked_threads")
def test_versions_are_read_by_another_thread_while_records_come_and_go(name: str) -> None:
    rng = np.random.default_rng(1)
    backend = BACKENDS[name](pa.int64())
    table = backend.record_state(Records("state", [pa.field("text", pa.string())], FIELDS[:1])).table()
    newest: Version | None = None
    readings: list[tuple[Version, threading.Thread]] = []
    for number in range(40):
        keys = rng.integers(0, 500, 400)
        table.append([pa.array(keys)], [pa.array([f"{key} {number}" for key in keys.tolist()])])
        rows = table.rows()
        some = rng.choice(rows, len(rows) // 3, replace=False)
        table.change(some)
        table.vectors["matches"].values[some] += 1
        table.delete(rng.choice(rows, len(rows) // 4, replace=False))
        backend.maintain(1000)
        if number % 5 == 4:
            rows = table.rows()
            rows = rows[np.argsort(table.positions(rows))]
            expected: Held = {}
            texts, matches = to_list(table.column("text", rows)), table.vectors["matches"].values[rows].tolist()
            for key, text, count in zip(to_list(table.key_columns(rows)[0]), texts, matches, strict=True):
                expected.setdefault((key, None), []).append({"text": text, "matches": count})
            newest = Version(backend.freeze(), expected, newest)
            thread = threading.Thread(target=newest.read)
            thread.start()
            readings.append((newest, thread))
    for version, thread in readings:
        thread.join()
        version.frozen.release()
        version.check()
    backend.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_hot_key_is_matched_in_bounded_parts_and_its_memory_comes_back(name: str) -> None:
    backend = BACKENDS[name](pa.int64())
    table = backend.record_state(Records("state", [pa.field("n", pa.int64())])).table()
    for start in range(0, 50_000, 1000):
        table.append([pa.array(np.zeros(1000, np.int64))], [pa.array(np.arange(start, start + 1000))])
    parts = [table.column("n", rows).to_numpy() for _, rows in table.matches([pa.array([1, 0])], 4096)]
    assert max(map(len, parts)) == 4096
    assert np.concatenate(parts).tolist() == list(range(50_000))
    full = table.nbytes
    for _ in range(50):  # in the order of arrival, as records expire
        rows = next(iter(table.matches([pa.array([0])], 990)))[1]
        table.delete(rows)
    assert table.counts([pa.array([0])]).tolist() == [500]
    backend.maintain(1000)
    assert table.nbytes < full / 4
    backend.close()


def test_positions_grow_after_a_restore_from_native_files_or_rows() -> None:
    descriptor = Records("state", [pa.field("n", pa.int64())])
    config = RocksDB("16 MB")
    backend = config.create(key_type=pa.int64(), key_group_count=GROUPS)
    backend.record_state(descriptor).table().append([pa.array([1, 1])], [pa.array([10, 11])])
    frozen: Any = backend.freeze()
    native = next(iter(frozen.files())).path.parent
    info = frozen.states[0]
    sections = list(native_sections(native, [info], key_type=pa.int64(), key_group_count=GROUPS, groups=range(GROUPS)))
    first = config.create(key_type=pa.int64(), key_group_count=GROUPS, native=native)
    second = config.create(key_type=pa.int64(), key_group_count=GROUPS)
    states = [each.record_state(descriptor) for each in (first, second)]
    for section in sections:
        second.load("state", section.rows)
    for state in states:
        table = state.table()
        table.append([pa.array([1])], [pa.array([12])])
        found = [table.column("n", rows).to_pylist() for _, rows in table.matches([pa.array([1])])]
        assert found == [[10, 11, 12]]
    frozen.release()
    for each in (backend, first, second):
        each.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_records_stay_in_order_when_rows_that_were_reused_get_new_numbers(name: str) -> None:
    backend = BACKENDS[name](pa.int64())
    table = backend.record_state(Records("state", [pa.field("n", pa.int64())])).table()
    many = 2 * versioned_table.MIN_RENUMBERED_ROWS
    others = table.append([pa.array(np.zeros(many, np.int64))], [pa.array(np.zeros(many, np.int64))])
    table.append([pa.array([7])], [pa.array([1])])
    table.delete(others[:10])
    table.append([pa.array([7, 7])], [pa.array([2, 3])])
    table.delete(others[10:])
    backend.maintain(1000)
    assert table.top == 3
    assert [table.column("n", rows).to_pylist() for _, rows in table.matches([pa.array([7])])] == [[1, 2, 3]]
    backend.close()


def test_a_hot_key_is_read_from_rocksdb_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocks_records, "READ_ENTRIES", 7)
    backend = BACKENDS["rocksdb"](pa.int64())
    table = backend.record_state(Records("state", [pa.field("n", pa.int64())])).table()
    table.append([pa.array([1] * 50)], [pa.array(range(50))])
    backend._memory = NO_MEMORY
    backend.maintain(1000)
    assert not table.row_count
    table.append([pa.array([2, 1])], [pa.array([0, 50])])
    assert [table.column("n", rows).to_pylist() for _, rows in table.matches([pa.array([1])])] == [list(range(51))]
    assert len(table) == 52
    backend.close()
