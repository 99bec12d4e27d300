"""Columnar state of the RocksDB backend: tables of rows by key, as a cache over RocksDB (rocks_tables.py).

Keys that a table doesn't have are read with one multi-get for each batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tidegate.state.column_table import ColumnState, ColumnTable
from tidegate.state.key_store import Array, IntArray
from tidegate.state.rocks_tables import READ_ENTRIES, RocksTable, RocksTables
from tidegate.state.sections import StateInfo
from tidegate.state.vectors import VectorField, put_column

if TYPE_CHECKING:
    from tidegate.state.rocksdb import RocksBackend


class RocksColumnTable(RocksTable, ColumnTable):
    """A table that may have more rows in RocksDB, unless it is `complete`."""

    def __init__(self, state: RocksColumns, at: int | None, *, complete: bool) -> None:
        ColumnTable.__init__(self, state.key_type, state.fields, touched=partial(state.touch, at), writes_all=False)
        self._cache(state.key_type, complete=complete, resized=partial(state.resized, at))
        self._state = state
        self._at = at

    def rows_of(self, keys: Sequence[pa.Array]) -> IntArray:
        if self.complete:
            return super().rows_of(keys)
        rows, added = self._index.rows_of(keys)
        if len(added):
            self._begin(added, self._epoch * 2 + 1)
            found = added[self._fetch(self._index.keys(added), added)]
            self._stamps[found] = 0
            new = added[self._stamps[added] != 0]
            if len(new):
                self._note(new)
                self.added_count += len(new)
        return rows

    def find(self, keys: Sequence[pa.Array]) -> IntArray:
        rows = super().find(keys)
        missing = np.flatnonzero(rows < 0)
        if self.complete or not len(missing):
            return rows
        # A key that comes twice is fetched once: the keys are added, and those that aren't in RocksDB removed again.
        some = [column.take(pa.array(missing)) for column in keys]
        looked, added = self._index.rows_of(some)
        self._begin(added, 0)
        is_there = self._fetch(self._index.keys(added), added)
        absent = added[~is_there]
        if len(absent):
            self._forget_rows(absent)
            looked[np.isin(looked, absent)] = -1
        rows[missing] = looked
        return rows

    def fetch_from(self, place: bytes, count: int, *, field: str, up_to: int) -> tuple[IntArray, bytes]:
        if self.complete:
            return np.empty(0, np.int64), b""
        entries, place = self._state.entries_from(self._at, place, count)
        numbers = self._state.spelling.read_numbers(field, [value for _, value in entries])
        wanted = [entries[index][0] for index in np.flatnonzero(numbers <= up_to).tolist()]
        if not wanted:
            return np.empty(0, np.int64), place
        rows = self.find(self._state.read_keys(wanted))
        return rows[rows >= 0], place

    def _fetch(self, keys: list[pa.Array], rows: IntArray) -> Array:
        """Read keys that are not in the table into these rows; return which RocksDB has."""
        wanted = np.flatnonzero(~self._is_gone(keys))
        found = np.zeros(len(rows), bool)
        for start in range(0, len(wanted), READ_ENTRIES):
            some = wanted[start : start + READ_ENTRIES]
            columns = [column.take(pa.array(some)) for column in keys]
            values = self._state.read(columns, self._at)
            there = some[[value is not None for value in values]]
            if len(there):
                fields = self._state.spelling.read_values([value for value in values if value is not None])
                for name, vector in self.vectors.items():
                    put_column(vector, rows[there], fields[name])
                found[there] = True
        return found

    def _fetch_all(self) -> None:
        if self.complete:
            return
        for keys in self._state.keys_of(self._at):
            self.find(keys)
        self.complete = True


class RocksColumns(RocksTables[ColumnTable], ColumnState):
    """The tables of one columnar state over RocksDB."""

    def __init__(self, info: StateInfo, fields: Sequence[VectorField], host: RocksBackend, prefix: bytes) -> None:
        self._open(info, host, prefix)
        ColumnState.__init__(self, info, fields)
        self._find_windows()

    def read(self, keys: list[pa.Array], at: int | None) -> list[bytes | None]:
        """Return the values that RocksDB has for these keys."""
        key = pa.StructArray.from_arrays(keys, fields=list(self.key_type)) if pa.types.is_struct(self.key_type) else keys[0]
        windows = None if at is None else pa.array(np.full(len(key), at, np.int64))
        found: list[bytes | None] = self.host.db.get(self.spelling.keys(key, windows))
        return found

    def keys_of(self, at: int | None) -> Iterator[list[pa.Array]]:
        """Return the keys that RocksDB has in a window, in parts."""
        for entries in self.entries_of(at):
            yield self.read_keys([key for key, _ in entries])

    def read_keys(self, spelled: Sequence[bytes]) -> list[pa.Array]:
        """Return what RocksDB's keys identify, as the columns of the key."""
        key = self.spelling.read_keys(spelled)[0]
        return key.flatten() if pa.types.is_struct(self.key_type) else [key]

    def _make_table(self, at: int | None) -> ColumnTable:
        # A window is new, or was found when the state was made: `_find_windows` and `load` make these incomplete.
        return RocksColumnTable(self, at, complete=True)
