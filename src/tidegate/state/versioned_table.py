"""Tables of numpy vectors by row whose versions can be frozen: the common part of columnar state.

A table has rows, which an index numbers (`RowIndex`), and a `Vector` for each of its fields. What identifies a row is up to
the index: a key (column_table.py), or a key and a position (record_table.py).

What vectors hold:
- integers, floats and booleans are numpy's; a date is its days in an int32, a timestamp its number in an int64. A null is
  a False in `valid`, and what is in `values` there means nothing;
- everything else (text, decimals, lists, structs) is an object vector of Python values (values.py), None for null, and has
  no `valid`. A list or dictionary may be changed in place after `change`; what is inside of it may not.

Rules for callers. Adding rows may replace the arrays, so take `.values` and `.valid` after it. Row numbers hold until the
operator gives control back (`maintain`, `freeze`): then rows may be numbered again. An operator that needs them for longer,
because it works on a table in steps, sets `keeps_rows` meanwhile. A row that was deleted is not written.

Freezing. A freeze takes the list of what changed and begins a new one (column_freezing.py). As long as a frozen version is
not read, `change` keeps the old values of rows that change for the first time after it.

Memory. Vectors grow by a quarter. Deleted rows are reused as soon as no frozen version needs them. When three quarters of
the rows are unused, `tidy` numbers the rows again and the vectors shrink: that costs as much as there are rows, and happens
after three times as many were deleted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from tidegate.state.column_freezing import TURN_ROWS, FrozenColumns, FrozenTable, Undo, rows_of_table
from tidegate.state.key_store import Array, IntArray, grown
from tidegate.state.sections import WINDOW, StateInfo
from tidegate.state.vectors import Vector, VectorField, kept, replace_objects

MIN_RENUMBERED_ROWS = 1024
UNUSED_FACTOR = 4
MAX_REPEATS = 2

# The stamp of a row that isn't there. Otherwise: twice the epoch in which it changed last, and one more if it was added in
# that epoch.
_DEAD = -1


class RowIndex(Protocol):
    """The numbers of the rows of a table. All are below `top`; `count` rows are there."""

    count: int
    top: int

    def keys(self, rows: IntArray) -> list[pa.Array]:
        """Return what identifies rows that were not freed, as columns. Other threads may call this too."""

    def remove(self, rows: IntArray) -> None:
        """Forget these rows, each of which is there once. They are not reused until they are freed."""

    def free(self, rows: IntArray) -> None:
        """Let removed rows be reused."""

    def renumber(self, rows: IntArray) -> None:
        """Let row i be what `rows[i]` is now; these are all rows. No row may wait to be freed."""

    @property
    def nbytes(self) -> int: ...


class VersionedTable:
    """Rows of vectors, of which versions can be frozen. `complete`: no rows are on the backend's disk alone."""

    complete: bool = True

    def __init__(
        self, index: RowIndex, fields: Sequence[VectorField], *, touched: Callable[[], None], writes_all: bool
    ) -> None:
        self.vectors: Mapping[str, Vector] = {field.name: Vector(field) for field in fields}
        self._index: RowIndex = index
        self._touched = touched  # called at the first change after a freeze
        self.writes_all = writes_all  # whether a frozen version may hold all rows, if most have changed
        self.generation = 0  # another one when rows were removed or numbered again
        self.keeps_rows = False  # set by an operator that needs its row numbers for longer than one call
        self._stamps = np.empty(0, np.int32)
        self._epoch = 1
        self._dirty = False  # whether anything happened since the last freeze
        self._changed: list[IntArray] = []  # rows since the last freeze, some of them more than once
        self._changed_count = 0
        self._deleted: list[list[pa.Array]] = []  # keys that an earlier frozen version may have
        self._outstanding: deque[FrozenTable] = deque()  # versions that are not read, oldest first, and versions between

    # Rows.

    def keys(self, rows: IntArray) -> list[pa.Array]:
        """Return what identifies these rows, as columns."""
        return self._index.keys(rows)

    def kept(self, rows: IntArray) -> Mapping[str, pa.Array]:
        """Return the fields of these rows that never change and are not vectors. Other threads may call this too."""
        return {}

    def rows(self) -> IntArray:
        """Return all rows."""
        return self._rows()

    def __len__(self) -> int:
        return self._index.count

    # Changes.

    def change(self, rows: IntArray) -> None:
        """Announce that the vectors will be written at these rows, in any order and repeated as you like."""
        now = self._epoch * 2
        stamps = self._stamps
        older = stamps.take(rows) < now
        if not older.any():
            return
        todo = rows[older]
        # Of several places with one row the last one's number stays. No number is that of a row without a key.
        numbers = np.arange(len(todo), dtype=np.int32)
        stamps[todo] = numbers
        todo = todo[stamps.take(todo) == numbers]
        stamps[todo] = now
        self._log(todo, alive=True, with_values=True)
        self._note(todo)

    def delete(self, rows: IntArray) -> None:
        """Remove these rows, and what identifies them."""
        rows = np.unique(rows)
        stamps = self._stamps
        rows = rows[stamps.take(rows) >= 0]
        if not len(rows):
            return
        self._touch()
        earlier = rows[stamps.take(rows) != self._epoch * 2 + 1]
        if len(earlier):
            self._deleted.append(self._index.keys(earlier))
        self._forget_rows(rows)

    # Freezing.

    def freeze(self) -> FrozenTable:
        """Return the present version, in a time that depends neither on the state nor on what changed."""
        self._prune()
        frozen = FrozenTable(self, changed=self._changed, deleted=self._deleted)
        self._changed, self._deleted, self._dirty, self._changed_count = [], [], False, 0
        self._epoch += 1
        if self._outstanding:
            self._outstanding[-1].next = frozen
        self._outstanding.append(frozen)
        return frozen

    def tidy(self) -> None:
        """Number the rows again if most are unused and no frozen version needs them."""
        self._prune()
        index = self._index
        is_sparse = index.top >= MIN_RENUMBERED_ROWS and index.count * UNUSED_FACTOR <= index.top
        if not is_sparse or self._outstanding or self.keeps_rows:
            return
        rows = self._rows()
        number_of = np.empty(index.top, np.int64)
        number_of[rows] = np.arange(len(rows))
        self._changed = [number_of[some[self._stamps[some] >= 0]] for some in self._changed]
        self._renumber(rows)

    def keys_of_earlier_versions(self) -> list[list[pa.Array]]:
        """Return all keys that an earlier frozen version may have, of a table that nobody changes any more, in parts."""
        stamps = self._stamps[: self._index.top]
        rows = np.flatnonzero((stamps >= 0) & (stamps != self._epoch * 2 + 1))
        parts = [rows[start : start + TURN_ROWS] for start in range(0, len(rows), TURN_ROWS)]
        return [*self._deleted, *map(self._index.keys, parts)]

    @property
    def stamps(self) -> Array:
        """By row, below 0 for rows without a key; for readers of frozen versions."""
        return self._stamps

    @property
    def top(self) -> int:
        return self._index.top

    @property
    def nbytes(self) -> int:
        """The memory of the table, without Python objects in vectors."""
        changed = sum(rows.nbytes for rows in self._changed)
        return self._index.nbytes + self._stamps.nbytes + changed + sum(each.nbytes for each in self.vectors.values())

    @property
    def row_count(self) -> int:
        """The number of rows that have a key."""
        return self._index.count

    # Inside.

    def _rows(self) -> IntArray:
        return np.flatnonzero(self._stamps[: self._index.top] >= 0)

    def _renumber(self, rows: IntArray) -> None:
        self.generation += 1
        self._index.renumber(rows)
        self._stamps = self._stamps[rows]
        for vector in self.vectors.values():
            vector.values = vector.values[rows]
            vector.valid = None if vector.valid is None else vector.valid[rows]

    def _forget_rows(self, rows: IntArray) -> None:
        """Remove rows. They are used again when no frozen version needs them."""
        self.generation += 1
        self._log(rows, alive=True, with_values=False)
        self._stamps[rows] = _DEAD
        self._index.remove(rows)
        self._prune()
        if self._outstanding:
            self._outstanding[-1].freed.append(rows)
        else:
            self._free(rows)

    def _begin(self, rows: IntArray, stamp: int) -> None:
        used, top = len(self._stamps), self._index.top
        if top > used:
            stamps = grown(self._stamps, used, top)
            stamps[used:] = _DEAD
            self._stamps = stamps
        if self._outstanding:  # versions know nothing of rows behind their last one
            self._log(rows[rows < self._outstanding[-1].top], alive=False, with_values=False)
        for vector in self.vectors.values():
            vector.begin(rows, top)
        self._stamps[rows] = stamp

    def _touch(self) -> None:
        if not self._dirty:
            self._dirty = True
            self._touched()

    def _note(self, rows: IntArray) -> None:
        self._touch()
        self._changed.append(rows.astype(np.int32))
        self._changed_count += len(rows)
        if self._changed_count > MAX_REPEATS * max(self._index.top, MIN_RENUMBERED_ROWS):
            # Keys have come and gone many times since the last freeze, in the same rows.
            self._changed = [np.unique(np.concatenate(self._changed))]
            self._changed_count = len(self._changed[0])

    def _log(self, rows: IntArray, *, alive: bool, with_values: bool) -> None:
        """Keep for frozen versions what these rows are now. Of several entries for one row the first one counts."""
        self._prune()
        if not self._outstanding:
            return
        values = {name: kept(vector, rows) for name, vector in self.vectors.items()} if with_values else None
        self._outstanding[-1].log.append(Undo(rows, alive, values))
        if with_values:  # after the entry: a reader that copies what will be changed must find what it was
            for vector in self.vectors.values():
                replace_objects(vector, rows)

    def _prune(self) -> None:
        """Forget versions that are read, up to the oldest one that is not, and free the rows that they needed."""
        outstanding = self._outstanding
        while outstanding and outstanding[0].read:
            for rows in outstanding.popleft().freed:
                self._free(rows)

    def _free(self, rows: IntArray) -> None:
        for vector in self.vectors.values():
            if vector.field.has_objects:
                vector.values[rows] = None
        self._index.free(rows)


T = TypeVar("T", bound=VersionedTable)


class TableState(ABC, Generic[T]):
    """The tables of one state: one, or one for each window."""

    def __init__(self, info: StateInfo, fields: Sequence[VectorField]) -> None:
        self.info = info
        self.fields = tuple(fields)
        self._windowed = WINDOW in info.schema.names
        self._tables: dict[int | None, T] = {}
        # Since the last freeze: the windows that changed, and tables of windows that were dropped.
        self._touched: set[int | None] = set()
        self._dropped: list[tuple[int | None, T]] = []
        if not self._windowed:
            self._table(None)

    def table(self) -> T:
        """Return the table of a state without windows."""
        assert not self._windowed, f"state {self.info.name!r} has windows"
        return self._tables[None]

    def window(self, at: int) -> T:
        """Return the table of a window, which is made if it is not there."""
        assert self._windowed, f"state {self.info.name!r} has no windows"
        return self._table(at)

    def has_window(self, at: int) -> bool:
        """Return whether a window has a table."""
        return at in self._tables

    def windows(self) -> Sequence[int]:
        """Return the windows that have a table, in ascending order."""
        return sorted(at for at in self._tables if at is not None)

    def drop(self, at: int) -> None:
        """Delete all keys of a window, and its table, in a time that doesn't depend on how many there are."""
        self._dropped.append((at, self._tables.pop(at)))
        self._touched.discard(at)

    # What a backend calls.

    def freeze(self) -> FrozenColumns:
        """Return the present version, in a time that depends only on the number of windows that changed."""
        versions = {at: self._tables[at].freeze() for at in self._touched}
        frozen = FrozenColumns(
            self.info, self.fields, versions, self._dropped, has_all_tables=len(versions) == len(self._tables)
        )
        self._touched.clear()
        self._dropped = []
        return frozen

    def tidy(self) -> None:
        """Let memory go that the tables don't need any more."""
        for table in self._tables.values():
            table.tidy()

    def load(self, rows: pa.RecordBatch, *, known: bool) -> None:
        """Load rows of a snapshot. `known`: the next frozen version builds on that snapshot."""
        if not self._windowed:
            self._load_into(self._tables[None], rows, known=known)
            return
        if not rows.num_rows:
            return
        windows = rows.column(WINDOW).to_numpy()
        order = np.argsort(windows, kind="stable")
        at, starts = np.unique(windows[order], return_index=True)
        for window, start, stop in zip(at.tolist(), starts, [*starts[1:], len(order)], strict=True):
            self._load_into(self._table(window), rows.take(pa.array(order[start:stop])), known=known)

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Return all rows, before anything is changed."""
        for at, table in self._tables.items():
            rows = table.rows()
            for start in range(0, len(rows), TURN_ROWS):
                yield rows_of_table(table, rows[start : start + TURN_ROWS], self.fields, self.info.schema, at)

    @property
    def nbytes(self) -> int:
        """The memory of all tables, without Python objects in vectors."""
        return sum(table.nbytes for table in self._tables.values())

    def _table(self, at: int | None) -> T:
        table = self._tables.get(at)
        if table is None:
            table = self._tables[at] = self._make_table(at)
        return table

    @abstractmethod
    def _make_table(self, at: int | None) -> T: ...

    @abstractmethod
    def _load_into(self, table: T, rows: pa.RecordBatch, *, known: bool) -> None: ...
