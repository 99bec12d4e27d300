"""Columnar tables from inside: what is copied, what is written, and how much memory there is.

What any backend promises is tested in tests/contract/test_columnar_state.py.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import pyarrow as pa
import pytest

from tests.contract.test_columnar_state import FIELDS, backend_of, entries_of
from tidegate.state import column_freezing
from tidegate.state.column_freezing import Taken
from tidegate.state.column_table import ColumnTable, VectorField
from tidegate.state.cutting import Pace
from tidegate.state.descriptors import Columns

LISTS = VectorField("all", pa.list_(pa.int64()))


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


@pytest.mark.parametrize("first", range(5))
def test_a_list_that_changes_while_its_version_is_read_is_written_as_it_was(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, state = backend_of(Columns("state", [LISTS]), pa.int64())
    table = state.table()
    rows = table.rows_of([pa.array([1, 2])])
    for row in rows.tolist():
        table.vectors["all"].values[row] = [0]

    turns = count()

    class Loop(Pace):
        """What the loop does while the reader rests: nothing at first."""

        def rest_if_due(self) -> None:
            if next(turns) < first:
                return
            table.change(rows)
            for row in rows.tolist():
                table.vectors["all"].values[row].append(1)

    monkeypatch.setattr(column_freezing, "OBJECT_ROWS", 1)
    monkeypatch.setattr(column_freezing, "Pace", Loop)
    entries = entries_of(each.rows for each in backend.freeze().sections())
    assert [entry["all"] for entry in entries.values()] == [[0], [0]]


def test_a_reader_that_comes_while_lists_are_copied_for_a_change_finds_them_as_they_were() -> None:
    table = ColumnTable(pa.int64(), [LISTS])
    rows = table.rows_of([pa.array([1, 2])])
    taken: list[Taken] = []

    class Copied(list[int]):
        def __copy__(self) -> Copied:
            taken.append(frozen.take(Pace(rest_factor=0)))
            return Copied(self)

    values = table.vectors["all"].values
    values[rows[0]], values[rows[1]] = [0], Copied([0])
    frozen = table.freeze()
    table.change(rows)
    for row in rows.tolist():
        values[row].append(1)
    assert [list(each) for each in taken[0].values["all"][0]] == [[0], [0]]


def test_keys_that_come_and_go_in_one_epoch_leave_nothing_behind() -> None:
    _, state = backend_of(Columns("state", FIELDS[:1]), pa.int64())
    table = state.table()
    sizes = []
    for start in range(0, 200_000, 1_000):
        table.delete(table.rows_of([pa.array(range(start, start + 1_000))]))
        sizes.append(state.nbytes)
    assert max(sizes[100:]) <= max(sizes[:100])
