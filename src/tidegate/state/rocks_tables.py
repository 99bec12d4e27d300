"""State in tables on the RocksDB backend: the tables are a write-back cache over RocksDB.

Theory of operation. A table holds the rows that were used lately. A table that is not *complete* may have more rows in
RocksDB, which are read when they are asked for (rocks_columns.py, rocks_records.py). What changed is written when the state
is frozen, by the thread that settles a freeze (rocks_settling.py): it reads the frozen version as the snapshot of a heap
would, and puts its rows into write-batches. If memory is short, the loop itself does the same with a version of its own,
and forgets the rows that haven't changed since the last freeze.

Rows that were deleted, and windows that were dropped, may still be in RocksDB until that is written, and are not read from
there. A window that is dropped deletes the rows that its table knows; if the table isn't complete, the rows in RocksDB are
looked for by their prefix (rocks_rows.py).

`rows()` and `len()` of a table that is not complete read all of its rows: a window that fires has to fit into memory, and
so has one window's share of the key-groups of a subtask.

How much memory the tables take is a sum that is kept: `held_bytes` measures only the tables that were resized since.

Invariants:
- a table whose memory has changed is in `_resized` of its state;
- a row of a table that RocksDB doesn't have as it is has changed since the last freeze, or is being written;
- rows are forgotten only when nothing is being written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tidegate.state.column_freezing import FrozenColumns, FrozenTable
from tidegate.state.key_index import KeyIndex
from tidegate.state.key_store import Array, IntArray
from tidegate.state.rocks_cells import delete_all, put_all
from tidegate.state.rocks_db import rocksdict, scan_prefix, scan_range
from tidegate.state.rocks_keys import GROUP_BYTES
from tidegate.state.rocks_rows import WINDOW_BYTES, RowSpelling
from tidegate.state.sections import WINDOW, StateInfo
from tidegate.state.vectors import VectorField
from tidegate.state.versioned_table import T, TableState, VersionedTable

if TYPE_CHECKING:
    from tidegate.state.rocksdb import RocksBackend

BATCH_ENTRIES = 1024
READ_ENTRIES = 1 << 14
SEARCH_ENTRIES = 32  # a search takes about as long as reading so many entries
OBJECT_BYTES = 100  # about what a Python object in a vector takes


class RocksTable(VersionedTable):
    """A table that may have more rows in RocksDB, unless it is `complete`. A table of a backend is this first, and then its
    own kind."""

    _gone: KeyIndex  # what identifies rows that were deleted since the last freeze
    _gone_frozen: KeyIndex | None  # deleted before it, and perhaps not written yet
    _gone_type: pa.DataType
    _resized: Callable[[], None]  # called when the memory of the table changes

    def _cache(self, gone_type: pa.DataType, *, complete: bool, resized: Callable[[], None]) -> None:
        self.complete = complete
        self._resized = resized
        self._gone_type = gone_type
        self._gone, self._gone_frozen = KeyIndex(gone_type), None

    def settled(self) -> None:
        """Note that RocksDB has what was frozen."""
        self._gone_frozen = None

    def handed_over(self) -> None:
        """Note that what was deleted until now is being written."""
        self._gone_frozen, self._gone = self._gone, KeyIndex(self._gone_type)

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

    def delete(self, rows: IntArray) -> None:
        rows = np.unique(rows)
        stamps = self._stamps[rows]
        earlier = rows[(stamps >= 0) & (stamps != self._epoch * 2 + 1)]
        if len(earlier) and not self.complete:  # before a table that is complete forgets rows, what was deleted is written
            self._gone.rows_of(self.keys(earlier))
        super().delete(rows)

    def rows(self) -> IntArray:
        self._fetch_all()
        return super().rows()

    def __len__(self) -> int:
        self._fetch_all()
        return super().__len__()

    def freeze(self) -> FrozenTable:
        self._resized()
        return super().freeze()

    # Inside. Whatever changes the memory of a table does one of these.

    def _begin(self, rows: IntArray, stamp: int) -> None:
        self._resized()
        super()._begin(rows, stamp)

    def _note(self, rows: IntArray) -> None:
        self._resized()
        super()._note(rows)

    def _forget_rows(self, rows: IntArray) -> None:
        self._resized()
        super()._forget_rows(rows)

    def _free(self, rows: IntArray) -> None:
        self._resized()
        super()._free(rows)

    def _renumber(self, rows: IntArray) -> None:
        self._resized()
        super()._renumber(rows)

    def _is_gone(self, keys: Sequence[pa.Array]) -> Array:
        """Return which of these rows were deleted, and may still be in RocksDB."""
        gone = np.zeros(len(keys[0]), bool)
        for index in (self._gone, self._gone_frozen):
            if index is not None and index.count:
                gone |= index.find(keys) >= 0
        return gone

    @abstractmethod
    def _fetch_all(self) -> None:
        """Read all rows that are not here, so that the table is complete."""


class RocksTables(TableState[T]):
    """The tables of one state over RocksDB. The backend calls `freeze_rows` instead of `freeze`."""

    def _open(self, info: StateInfo, host: RocksBackend, prefix: bytes) -> None:
        """Note what belongs to the state, before its tables are made."""
        self.host = host
        self.prefix = prefix
        self.key_type = info.schema.field("key").type
        self.spelling = RowSpelling(info.schema, prefix, host.key_spelling)
        self._swept: list[int] = []  # windows that were dropped and whose rows in RocksDB have to be looked for
        self._handed_over: list[RocksTable] = []  # tables of which something is being written
        self._resized: set[int | None] = set()  # windows whose tables' memory may not be what `_sizes` says
        self._sizes: dict[int | None, int] = {}  # bytes by window
        self._held_bytes = 0  # the sum of `_sizes`

    def drop(self, at: int) -> None:
        if not self.rocks_table(at).complete:
            self._swept.append(at)
        super().drop(at)
        self.resized(at)

    def freeze_rows(self) -> FrozenRocksTables:
        self._handed_over = [self.rocks_table(at) for at in self._touched]
        for table in self._handed_over:
            table.handed_over()
        frozen = FrozenRocksTables(self.freeze(), self, self._swept)
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
        objects = sum(map(self._has_objects, self.fields))
        for at in self._resized:
            table = self._tables.get(at)  # none if the window was dropped
            size = 0 if table is None else table.nbytes + table.top * objects * OBJECT_BYTES
            self._held_bytes += size - self._sizes.pop(at, 0)
            if table is not None:
                self._sizes[at] = size
        self._resized.clear()
        return self._held_bytes

    def load(self, rows: pa.RecordBatch, *, known: bool) -> None:
        """Write rows of a snapshot to RocksDB. `known` makes no difference."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        windows = rows.column(WINDOW) if self._windowed else None
        entries = sorted(zip(self.spelling.row_keys(rows), self.spelling.values(rows.column("value")), strict=True))
        put_all(batch, [key for key, _ in entries], [value for _, value in entries])
        self.host.db.write(batch)
        for at in np.unique(windows.to_numpy()).tolist() if windows is not None else [None]:
            self.rocks_table(at).complete = False

    # What the tables call.

    def touch(self, at: int | None) -> None:
        """Note that a table has changed since the last freeze."""
        self._touched.add(at)

    def resized(self, at: int | None) -> None:
        """Note that the memory of a table has changed since `held_bytes`."""
        self._resized.add(at)

    def rocks_table(self, at: int | None) -> RocksTable:
        """Return the table of a window, which is made if it is not there."""
        table = self._table(at)
        assert isinstance(table, RocksTable)
        return table

    def entries_of(self, at: int | None) -> Iterator[list[tuple[bytes, bytes]]]:
        """Return the entries that RocksDB has in a window, in parts."""
        entries = (entry for start in self.prefixes(at) for entry in scan_prefix(self.host.db, start))
        while some := list(islice(entries, READ_ENTRIES)):
            yield some

    def entries_from(self, at: int | None, place: bytes, count: int) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return up to `count` entries that RocksDB has in a window, from a place on, and the next place. b"" is both the
        beginning and the end. A key-group counts like some entries, since it takes a search."""
        head = len(self.prefix) + GROUP_BYTES
        place = place or (self.prefix if at is None else self.spelling.key_prefix(0, at))
        entries: list[tuple[bytes, bytes]] = []
        while count > 0:
            start = self.prefix if at is None else place[: head + WINDOW_BYTES]
            some = list(islice(scan_range(self.host.db, place, _next(start)), count))
            entries += some
            if len(some) == count:
                return entries, some[-1][0] + b"\0"
            group = int.from_bytes(start[head - GROUP_BYTES : head]) + 1
            if at is None or group == self.host.key_group_count:
                return entries, b""
            place = self.spelling.key_prefix(group, at)
            count -= len(some) + SEARCH_ENTRIES
        return entries, place

    def prefixes(self, at: int | None) -> list[bytes]:
        """Return what the keys of a window may begin with."""
        if at is None:
            return [self.prefix]
        return [self.spelling.key_prefix(group, at) for group in range(self.host.key_group_count)]

    # Inside.

    def _table(self, at: int | None) -> T:
        if at not in self._tables:
            self.resized(at)
        return super()._table(at)

    def _has_objects(self, field: VectorField) -> bool:
        """Return whether the tables hold the values of a field as Python objects."""
        return field.has_objects

    def _find_windows(self) -> None:
        """Make the tables of what is in RocksDB: a look-up for each key-group and window."""
        head = len(self.prefix) + GROUP_BYTES
        place, stop = self.prefix, _next(self.prefix)
        while (entry := next(scan_range(self.host.db, place, stop), None)) is not None:
            window = entry[0][: head + WINDOW_BYTES]
            at = int.from_bytes(window[head:]) - (1 << 63) if self._windowed else None
            self.rocks_table(at).complete = False
            place = _next(window) if self._windowed else stop


class FrozenRocksTables:
    """A frozen version that is to be written to RocksDB. `swept` are windows that were dropped and whose rows are looked
    for there."""

    def __init__(self, frozen: FrozenColumns, state: RocksTables[Any], swept: Sequence[int]) -> None:
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
            self._delete(spelling.row_keys(rows), rest)
        for rows in self._frozen.rows[False]:
            keys, values = spelling.row_keys(rows), spelling.values(rows.column("value"))
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


def _next(start: bytes) -> bytes:
    """Return the first place behind all keys that begin with `start`."""
    return (int.from_bytes(start) + 1).to_bytes(len(start))
