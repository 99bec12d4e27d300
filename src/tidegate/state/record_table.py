"""Records by key: columnar keyed state that holds many records for each key, in the order of their arrival.

Joins keep both inputs in it, and functions of whole windows their records. All calls work on whole batches:

    rows = table.append([batch.column("auction")], [batch.column("price"), batch.column("bidder")])
    for probes, rows in table.matches([other.column("id")], limit=65_536):
        prices = table.column("price", rows)         # beside other.take(probes)
        table.change(rows)
        table.vectors["matched"].values[rows] = True
    table.delete(rows)

A record has columns, which never change (record_store.py), and fields, which are vectors like those of a `ColumnTable`:
announce with `change` what you write. Which rows a key has is in record_index.py. A state with windows has a table for each
window, and its number may be anything by which records go together: a part of event time lets records expire with `drop`,
in a time that doesn't depend on how many there are.

In snapshots a record is a row of `key`, `window` if there are windows, `position`, and `value`, a struct of its columns and
fields. The position is given when the record is added, grows from record to record, and is never given again: it says
which record of its key it is, also after a restore at another parallelism.

What callers have to observe is in versioned_table.py. `matches` is used up before the table changes: records that are
added or deleted move others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from tidegate.state.key_store import IntArray
from tidegate.state.record_index import RecordIndex
from tidegate.state.record_store import RecordStore
from tidegate.state.sections import POSITION, StateInfo
from tidegate.state.vectors import VectorField, put_column
from tidegate.state.versioned_table import TableState, VersionedTable

MATCHES = 65_536
"""How many matches are returned at a time, unless a caller wants another number."""


class RecordTable(VersionedTable):
    """Rows of records by key."""

    _index: RecordIndex

    def __init__(
        self,
        key_type: pa.DataType,
        columns: Sequence[pa.Field],
        fields: Sequence[VectorField] = (),
        *,
        positions: Callable[[int], int],
        touched: Callable[[], None] = lambda: None,
        writes_all: bool = True,
    ) -> None:
        """`positions(count)` returns the first of so many positions that no record had."""
        super().__init__(RecordIndex(key_type), fields, touched=touched, writes_all=writes_all)
        self.key_type = key_type
        self._store = RecordStore(columns)
        self._positions = positions

    # What operators call.

    def append(self, keys: Sequence[pa.Array], columns: Sequence[pa.Array], positions: IntArray | None = None) -> IntArray:
        """Add a record for each key, with these columns; return the rows. Fields have their defaults. `positions`, in
        ascending order, are those of `take_positions`, if the records of a batch go to several tables of a state."""
        return self._add(keys, columns, positions, whole=True)

    def take_positions(self, count: int) -> IntArray:
        """Return so many positions that no record of the state had, for `append`."""
        first = self._positions(count)
        return np.arange(first, first + count)

    def matches(self, keys: Sequence[pa.Array], limit: int = MATCHES) -> Iterator[tuple[IntArray, IntArray]]:
        """Return pairs of an index in `keys` and the row of a record of this key, in the order of the indices and then of
        arrival, at most `limit` at a time. A row may be in several pairs, if its key is."""
        return self._index.matches(self._index.numbers(keys), limit)

    def counts(self, keys: Sequence[pa.Array]) -> IntArray:
        """Return how many records each key has."""
        return self._index.counts(self._index.numbers(keys))

    def column(self, name: str, rows: IntArray) -> pa.Array:
        """Return a column of the records in these rows, which may come several times."""
        return self._store.take(name, rows)

    def key_columns(self, rows: IntArray) -> list[pa.Array]:
        """Return the keys of these rows, a column for each column of the key, or for each field of a struct."""
        return self._index.keys(rows)[:-1]

    def positions(self, rows: IntArray) -> IntArray:
        """Return the positions of these rows, which are in the order of arrival."""
        return self._index.positions.take(rows)

    # What a state and its versions call.

    def kept(self, rows: IntArray) -> Mapping[str, pa.Array]:
        return {name: self._store.take(name, rows) for name in self._store.names}

    def load(
        self,
        keys: Sequence[pa.Array],
        positions: IntArray,
        values: Mapping[str, pa.Array],
        *,
        known: bool,
        relinked: bool = False,
    ) -> None:
        """Load records in any order. `known`: the next frozen version builds on the snapshot that has them. `relinked`: the
        caller brings the records of their keys into order."""
        rows = self._index.load(keys, positions, relinked=relinked)
        self._begin(rows, 0 if known else self._epoch * 2 + 1)
        if not known:
            self._note(rows)
        self._put(rows, values)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._store.nbytes

    # Inside.

    def _add(
        self, keys: Sequence[pa.Array], columns: Sequence[pa.Array], positions: IntArray | None, *, whole: bool
    ) -> IntArray:
        rows = self._index.append(keys, self.take_positions(len(keys[0])) if positions is None else positions, whole=whole)
        self._begin(rows, self._epoch * 2 + 1)
        self._note(rows)
        self._store.put(rows, columns)
        return rows

    def _put(self, rows: IntArray, values: Mapping[str, pa.Array]) -> None:
        self._store.put(rows, [values[name] for name in self._store.names])
        for name, vector in self.vectors.items():
            put_column(vector, rows, values[name])

    def _renumber(self, rows: IntArray) -> None:
        super()._renumber(rows)
        self._store.renumber(rows)

    def _free(self, rows: IntArray) -> None:
        super()._free(rows)
        self._store.free(rows)


class RecordState(TableState[RecordTable]):
    """The records of one state: one table, or one for each window."""

    def __init__(self, info: StateInfo, columns: Sequence[pa.Field], fields: Sequence[VectorField]) -> None:
        self.record_columns = tuple(columns)
        self.record_fields = tuple(fields)
        self._next_position = 0
        super().__init__(info, [*(VectorField(column.name, column.type) for column in columns), *fields])

    def _take_positions(self, count: int) -> int:
        """Return the first of so many positions that no record had."""
        first = self._next_position
        self._next_position += count
        return first

    def _reached(self, position: int) -> None:
        """Note that there is a record with this position."""
        self._next_position = max(self._next_position, position + 1)

    def _make_table(self, at: int | None) -> RecordTable:
        return RecordTable(
            self.info.schema.field("key").type,
            self.record_columns,
            self.record_fields,
            positions=self._take_positions,
            touched=partial(self._touched.add, at),
        )

    def _load_into(self, table: RecordTable, rows: pa.RecordBatch, *, known: bool) -> None:
        if not rows.num_rows:
            return
        value, positions = rows.column("value"), rows.column(POSITION).to_numpy()
        self._reached(int(positions.max()))
        values = {field.name: value.field(field.name) for field in self.fields}
        table.load([rows.column("key")], positions, values, known=known)
