"""Columnar state of the RocksDB backend: its tables are a write-back cache over RocksDB.

Theory of operation. A table (column_table.py) holds the rows that were used lately. A table that is not *complete* may have
more rows in RocksDB: keys that it doesn't have are read with one multi-get for each batch. What changed is written when the
state is frozen, by the thread that settles a freeze (rocks_settling.py): it reads the frozen version as the snapshot of a
heap would, and puts its rows into write-batches. If memory is short, the loop itself does the same with a version of its
own, and forgets the rows that haven't changed since the last freeze.

Keys that were deleted, and windows that were dropped, may still be in RocksDB until that is written, and are not read from
there. A window that is dropped deletes the keys that its table knows; if the table isn't complete, the rows in RocksDB are
looked for by their prefix (rocks_rows.py).

`rows()` and `len()` of a table that is not complete read all of its rows: a window that fires has to fit into memory, and
so has one window's share of the key-groups of a subtask.

Invariants:
- a row of a table that RocksDB doesn't have as it is has changed since the last freeze, or is being written;
- rows are forgotten only when nothing is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tidegate.state.column_freezing import FrozenColumns
from tidegate.state.column_table import ColumnState, ColumnTable
from tidegate.state.key_index import KeyIndex
from tidegate.state.key_store import Array, IntArray
from tidegate.state.rocks_cells import delete_all, put_all
from tidegate.state.rocks_db import rocksdict, scan_prefix, scan_range
from tidegate.state.rocks_keys import GROUP_BYTES
from tidegate.state.rocks_rows import WINDOW_BYTES, RowSpelling
from tidegate.state.sections import WINDOW, StateInfo
from tidegate.state.vectors import VectorField, put_column

if TYPE_CHECKING:
    from tidegate.state.rocksdb import RocksBackend

BATCH_ENTRIES = 1024
READ_ENTRIES = 1 << 14
OBJECT_BYTES = 100  # about what a Python object in a vector takes


class RocksColumnTable(ColumnTable):
    """A table that may have more rows in RocksDB, unless it is `complete`."""

    def __init__(self, state: RocksColumns, at: int | None, *, complete: bool) -> None:
        super().__init__(state.key_type, state.fields, touched=partial(state.touch, at), writes_all=False)
        self.complete = complete
        self._state = state
        self._at = at
        self._gone = KeyIndex(state.key_type)  # deleted since the last freeze
        self._gone_frozen: KeyIndex | None = None  # deleted before it, and perhaps not written yet

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

    def delete(self, rows: IntArray) -> None:
        rows = np.unique(rows)
        stamps = self._stamps[rows]
        earlier = rows[(stamps >= 0) & (stamps != self._epoch * 2 + 1)]
        if len(earlier):
            self._gone.rows_of(self.keys(earlier))
        super().delete(rows)

    def rows(self) -> IntArray:
        self._fetch_all()
        return super().rows()

    def __len__(self) -> int:
        self._fetch_all()
        return super().__len__()

    def settled(self) -> None:
        """Note that RocksDB has what was frozen."""
        self._gone_frozen = None

    def handed_over(self) -> None:
        """Note that what was deleted until now is being written."""
        self._gone_frozen, self._gone = self._gone, KeyIndex(self._state.key_type)

    def forget(self) -> None:
        """Forget rows that haven't changed since the last freeze, which is written."""
        if self.keeps_rows:
            return
        stamps = self._stamps[: self.top]
        clean = np.flatnonzero((stamps >= 0) & (stamps < self._epoch * 2))
        if len(clean):
            self.complete = False
            self._forget_rows(clean)
            self.tidy()

    def _fetch(self, keys: list[pa.Array], rows: IntArray) -> Array:
        """Read keys that are not in the table into these rows; return which RocksDB has."""
        gone = np.zeros(len(rows), bool)
        for index in (self._gone, self._gone_frozen):
            if index is not None and index.count:
                gone |= index.find(keys) >= 0
        wanted = np.flatnonzero(~gone)
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


class RocksColumns(ColumnState):
    """The tables of one state over RocksDB. The backend calls `freeze_rows` instead of `freeze`."""

    def __init__(self, info: StateInfo, fields: Sequence[VectorField], host: RocksBackend, prefix: bytes) -> None:
        self.host = host
        self.prefix = prefix
        self.key_type = info.schema.field("key").type
        self.spelling = RowSpelling(info.schema, prefix, host.key_spelling)
        self._swept: list[int] = []  # windows that were dropped and whose rows in RocksDB have to be looked for
        self._handed_over: list[RocksColumnTable] = []  # tables of which something is being written
        super().__init__(info, fields)
        self._find_windows()

    def drop(self, at: int) -> None:
        if not self.rocks_table(at).complete:
            self._swept.append(at)
        super().drop(at)

    def freeze_rows(self) -> FrozenRocksColumns:
        self._handed_over = [self.rocks_table(at) for at in self._touched]
        for table in self._handed_over:
            table.handed_over()
        frozen = FrozenRocksColumns(self.freeze(), self, self._swept)
        self._swept = []
        return frozen

    def settled(self) -> None:
        """Note that RocksDB has what was frozen."""
        for table in self._handed_over:
            table.settled()
        self._handed_over = []

    def forget(self) -> None:
        """Forget rows that RocksDB has. Nothing is being written."""
        for at in self._tables:
            self.rocks_table(at).forget()

    def held_bytes(self) -> float:
        """About the memory of all tables."""
        objects = sum(field.has_objects for field in self.fields)
        return self.nbytes + sum(table.top for table in self._tables.values()) * objects * OBJECT_BYTES

    def load(self, rows: pa.RecordBatch, *, known: bool) -> None:
        """Write rows of a snapshot to RocksDB. `known` makes no difference."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        windows = rows.column(WINDOW) if self._windowed else None
        entries = sorted(
            zip(self.spelling.keys(rows.column("key"), windows), self.spelling.values(rows.column("value")), strict=True)
        )
        put_all(batch, [key for key, _ in entries], [value for _, value in entries])
        self.host.db.write(batch)
        for at in np.unique(windows.to_numpy()).tolist() if windows is not None else [None]:
            self.rocks_table(at).complete = False

    # What the tables call.

    def touch(self, at: int | None) -> None:
        """Note that a table has changed since the last freeze."""
        self._touched.add(at)

    def rocks_table(self, at: int | None) -> RocksColumnTable:
        """Return the table of a window, which is made if it is not there."""
        table = self._table(at)
        assert isinstance(table, RocksColumnTable)
        return table

    def read(self, keys: list[pa.Array], at: int | None) -> list[bytes | None]:
        """Return the values that RocksDB has for these keys."""
        key = pa.StructArray.from_arrays(keys, fields=list(self.key_type)) if pa.types.is_struct(self.key_type) else keys[0]
        windows = None if at is None else pa.array(np.full(len(key), at, np.int64))
        found: list[bytes | None] = self.host.db.get(self.spelling.keys(key, windows))
        return found

    def keys_of(self, at: int | None) -> Iterator[list[pa.Array]]:
        """Return the keys that RocksDB has in a window, in parts."""
        entries = (entry for start in self.prefixes(at) for entry in scan_prefix(self.host.db, start))
        while some := list(islice(entries, READ_ENTRIES)):
            key = self.spelling.read_keys([key for key, _ in some])[0]
            yield key.flatten() if pa.types.is_struct(self.key_type) else [key]

    def prefixes(self, at: int | None) -> list[bytes]:
        """Return what the keys of a window may begin with."""
        if at is None:
            return [self.prefix]
        return [self.spelling.key_prefix(group, at) for group in range(self.host.key_group_count)]

    # Inside.

    def _make_table(self, at: int | None) -> ColumnTable:
        # A window is new, or was found when the state was made: `_find_windows` and `load` make these incomplete.
        return RocksColumnTable(self, at, complete=True)

    def _find_windows(self) -> None:
        """Make the tables of what is in RocksDB: a look-up for each key-group and window."""
        head = len(self.prefix) + GROUP_BYTES
        place, stop = self.prefix, _next(self.prefix)
        while (entry := next(scan_range(self.host.db, place, stop), None)) is not None:
            window = entry[0][: head + WINDOW_BYTES]
            at = int.from_bytes(window[head:]) - (1 << 63) if self._windowed else None
            self.rocks_table(at).complete = False
            place = _next(window) if self._windowed else stop


class FrozenRocksColumns:
    """A frozen version that is to be written to RocksDB. `swept` are windows that were dropped and whose rows are looked
    for there."""

    def __init__(self, frozen: FrozenColumns, state: RocksColumns, swept: Sequence[int]) -> None:
        self._frozen = frozen
        self._state = state
        self._swept = swept

    def write(self, rest: Callable[[], None]) -> None:
        """Write what changed, in batches; `rest` is called after each. Another thread than the loop may call this."""
        state, spelling = self._state, self._state.spelling
        self._frozen.take()
        for at in self._swept:
            for prefix in state.prefixes(at):
                self._delete([key for key, _ in scan_prefix(state.host.db, prefix)], rest)
        for rows in self._frozen.rows[True]:
            self._delete(spelling.keys(rows.column("key"), _windows(rows)), rest)
        for rows in self._frozen.rows[False]:
            keys, values = spelling.keys(rows.column("key"), _windows(rows)), spelling.values(rows.column("value"))
            order = sorted(range(len(keys)), key=keys.__getitem__)
            for start in range(0, len(order), BATCH_ENTRIES):
                batch = rocksdict.WriteBatch(raw_mode=True)
                some = order[start : start + BATCH_ENTRIES]
                put_all(batch, [keys[place] for place in some], [values[place] for place in some])
                state.host.db.write(batch)
                rest()

    def _delete(self, keys: Sequence[bytes], rest: Callable[[], None]) -> None:
        for start in range(0, len(keys), BATCH_ENTRIES):
            batch = rocksdict.WriteBatch(raw_mode=True)
            delete_all(batch, keys[start : start + BATCH_ENTRIES])
            self._state.host.db.write(batch)
            rest()


def _windows(rows: pa.RecordBatch) -> pa.Array | None:
    return rows.column(WINDOW) if WINDOW in rows.schema.names else None


def _next(start: bytes) -> bytes:
    """Return the first place behind all keys that begin with `start`."""
    return (int.from_bytes(start) + 1).to_bytes(len(start))
