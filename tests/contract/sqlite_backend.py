"""A backend in one short file: rows in a database, as an external one would hold them.

It is here to prove that cells (state/cells.py) are all that a backend has to bring, and to be read by whoever writes the
next one. Everything is in one table, in SQLite's memory. A key's bytes begin with its key-group (rocks_keys.py), so rows
come out by key-group; the item of a map is spelled likewise. Things are written together, before a freeze; lists and maps at
once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.state.backend import CellBackend
from tidegate.state.cells import ABSENT, GONE, AnyCells, Cells, ListCells, MapCells
from tidegate.state.columns import column_of, held_list, key_list, keys_to_arrow
from tidegate.state.cutting import cut_by_group
from tidegate.state.rocks_keys import GROUP_BYTES, KeySpelling, as_list, read_column, spelled_column
from tidegate.state.rocks_values import value_spelling
from tidegate.state.sections import Section, StateInfo
from tidegate.types import from_list, to_list

# `item` is empty, but for the items of maps. `number` grows, and says in which order items came.
TABLE = """
    CREATE TABLE cells (state TEXT, key BLOB, item BLOB, number INTEGER, held BLOB, PRIMARY KEY (state, key, item, number))
    WITHOUT ROWID
"""
READ_ROWS = 1000


class SqliteBackend(CellBackend):
    def __init__(self, *, key_type: pa.DataType, key_group_count: int, now_ms: Callable[[], int] | None = None) -> None:
        super().__init__(key_type=key_type, key_group_count=key_group_count, now_ms=now_ms)
        self.spelling = KeySpelling(key_type, key_group_count)
        self.db = _opened()
        self.db.execute(TABLE)
        self._spelled: dict[Any, bytes] = {}
        self._number = 0

    # For `CellBackend`.

    def make_cells(self, info: StateInfo, *, as_tuples: bool, in_place: bool) -> SqliteCells:
        kinds: dict[str, type[SqliteCells]] = {"list": SqliteItems, "map": SqliteEntries}
        return kinds.get(info.shape, SqliteThings)(self, info, as_tuples=as_tuples)

    def load_rows(self, state: str, rows: pa.RecordBatch, *, known: bool) -> None:
        cells: SqliteCells = self.cells[state]
        held = held_list(rows.column("value"), as_tuples=cells.as_tuples)
        for key, thing in zip(key_list(rows.column("key")), held, strict=True):
            cells.load(key, thing)

    def all_rows(self, state: str) -> Iterator[pa.RecordBatch]:
        self.cells[state].flush()
        return self.cells[state].rows(self.db, self.spelling)

    def freeze_rows(self) -> FrozenSqlite:
        return FrozenSqlite(self)

    def close(self) -> None:
        self.db.close()

    # For the cells.

    def spelled(self, key: Any) -> bytes:
        found = self._spelled.get(key)
        if found is None:
            found = self._spelled[key] = as_list(self.spelling.spelled(keys_to_arrow([key], self.key_type)))[0]
        return found

    def next_number(self) -> int:
        self._number += 1
        return self._number


class FrozenSqlite:
    """A copy. A database with versions of rows would keep the number of one."""

    complete = True

    def __init__(self, backend: SqliteBackend) -> None:
        self._cells: list[SqliteCells] = list(backend.cells.values())
        for cells in self._cells:
            cells.flush()
        self.states = tuple(cells.info for cells in self._cells)
        self._spelling = backend.spelling
        self._db = _opened()
        backend.db.backup(self._db)

    def sections(self) -> Iterator[Section]:
        for cells in self._cells:
            rows = cells.rows(self._db, self._spelling)
            yield from cut_by_group(cells.info.name, rows, self._spelling.key_group_count)

    def release(self) -> None:
        """Its reader may not be done: the memory goes with the object."""


class SqliteCells(AnyCells):
    """Of one state. `held` is the type of what a row of the table holds."""

    def __init__(self, backend: SqliteBackend, info: StateInfo, *, as_tuples: bool) -> None:
        self.backend = backend
        self.info = info
        self.as_tuples = as_tuples
        self.value_type = info.schema.field("value").type
        self.held = self.held_in(self.value_type)
        self.spell = value_spelling(self.held, as_tuples=as_tuples)

    def held_in(self, kind: pa.DataType) -> pa.DataType:
        return kind

    def load(self, key: Any, thing: Any) -> None:
        raise AssertionError("of the subclass")

    def collected(self, rows: Sequence[tuple[bytes, Any]]) -> Any:
        """What the rows of a key hold: items, as they are spelled, and what belongs to them."""
        raise AssertionError("of the subclass")

    def flush(self) -> None:
        """Write what isn't written."""

    def delete(self, key: Any) -> None:
        self.execute("DELETE FROM cells WHERE state = ? AND key = ?", key)

    def keys_from(self, place: bytes, count: int) -> tuple[Sequence[Any], bytes]:
        query = "SELECT DISTINCT key FROM cells WHERE state = ? AND key > ? ORDER BY key LIMIT ?"
        places = [key for (key,) in self.backend.db.execute(query, (self.info.name, place, count))]
        keys = key_list(self.backend.spelling.read(places, skip=GROUP_BYTES)[0]) if places else []
        return keys, places[-1] if len(places) == count else b""

    def rows(self, db: sqlite3.Connection, spelling: KeySpelling) -> Iterator[pa.RecordBatch]:
        """The state as a snapshot has it, by growing key-group."""
        query = "SELECT key, item, held FROM cells WHERE state = ? ORDER BY key, number"
        by_key = groupby(db.execute(query, (self.info.name,)), itemgetter(0))
        while some := [(key, [row[1:] for row in rows]) for key, rows in islice(by_key, READ_ROWS)]:
            keys, _ = spelling.read([key for key, _ in some], skip=GROUP_BYTES)
            things = [self.collected([(item, self.spell.value(held)) for item, held in rows]) for _, rows in some]
            column = column_of(things, self.value_type, as_tuples=self.as_tuples)
            yield pa.RecordBatch.from_arrays([keys, column], schema=self.info.schema)

    def execute(self, query: str, key: Any, *more: Any) -> list[Any]:
        return self.backend.db.execute(query, (self.info.name, self.backend.spelled(key), *more)).fetchall()

    def insert(self, key: Any, held: Any, item: bytes = b"") -> None:
        number = self.backend.next_number()
        self.execute("INSERT INTO cells VALUES (?, ?, ?, ?, ?)", key, item, number, self.spelled(held))

    def spelled(self, held: Any) -> bytes:
        try:
            return self.spell.spelled([held])[0]
        except SchemaError as error:
            raise SchemaError(f"state {self.info.name!r} holds a value that can't be written: {error}") from error


class SqliteThings(SqliteCells, Cells):
    def __init__(self, backend: SqliteBackend, info: StateInfo, *, as_tuples: bool) -> None:
        super().__init__(backend, info, as_tuples=as_tuples)
        self._unwritten: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        thing = self._unwritten.get(key, ABSENT)
        if thing is not ABSENT:
            return thing
        found = self.execute("SELECT held FROM cells WHERE state = ? AND key = ?", key)
        return self.spell.value(found[0][0]) if found else GONE

    def set(self, key: Any, thing: Any) -> None:
        self._unwritten[key] = thing

    def delete(self, key: Any) -> None:
        self._unwritten[key] = GONE

    def owned(self, key: Any) -> bool:
        return True  # frozen versions hold bytes

    def load(self, key: Any, thing: Any) -> None:
        self.set(key, thing)

    def collected(self, rows: Sequence[tuple[bytes, Any]]) -> Any:
        return rows[0][1]

    def flush(self) -> None:
        unwritten, self._unwritten = self._unwritten, {}
        for key, thing in unwritten.items():
            super().delete(key)
            if thing is not GONE:
                self.insert(key, thing)


class SqliteItems(SqliteCells, ListCells):
    def held_in(self, kind: pa.DataType) -> pa.DataType:
        return kind.value_type

    def items(self, key: Any) -> Sequence[Any]:
        found = self.execute("SELECT held FROM cells WHERE state = ? AND key = ? ORDER BY number", key)
        return [self.spell.value(held) for (held,) in found]

    def extend(self, key: Any, items: Sequence[Any]) -> None:
        for item in items:
            self.insert(key, item)

    def load(self, key: Any, thing: Any) -> None:
        self.extend(key, thing)

    def collected(self, rows: Sequence[tuple[bytes, Any]]) -> Any:
        return [item for _, item in rows]


class SqliteEntries(SqliteCells, MapCells):
    def held_in(self, kind: pa.DataType) -> pa.DataType:
        return kind.item_type

    def get(self, key: Any, item: Any) -> Any:
        return self.entries(key).get(item, ABSENT)

    def put(self, key: Any, item: Any, value: Any) -> None:
        place = spelled_column(from_list([item], self.value_type.key_type))[0]
        there = "state = ? AND key = ? AND item = ?"
        if self.execute(f"SELECT 1 FROM cells WHERE {there}", key, place):
            self.backend.db.execute(
                f"UPDATE cells SET held = ? WHERE {there}",
                (self.spelled(value), self.info.name, self.backend.spelled(key), place),
            )
        else:
            self.insert(key, value, place)

    def remove(self, key: Any, item: Any) -> None:
        same = [each for each in self.entries(key) if each == item]
        if same:
            place = spelled_column(from_list(same, self.value_type.key_type))[0]
            self.execute("DELETE FROM cells WHERE state = ? AND key = ? AND item = ?", key, place)

    def entries(self, key: Any) -> Mapping[Any, Any]:
        found = self.execute("SELECT item, held FROM cells WHERE state = ? AND key = ? ORDER BY number", key)
        entries: Mapping[Any, Any] = self.collected([(item, self.spell.value(held)) for item, held in found])
        return entries

    def load(self, key: Any, thing: Any) -> None:
        for item, value in thing.items():
            self.put(key, item, value)

    def collected(self, rows: Sequence[tuple[bytes, Any]]) -> Any:
        items = read_column([item for item, _ in rows], [0] * len(rows), self.value_type.key_type)[0]
        return dict(zip(to_list(items), map(itemgetter(1), rows), strict=True))


def _opened() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
