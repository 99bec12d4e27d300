"""Columnar keyed state: tables of numpy vectors by key, for operators that work on whole batches.

A `ColumnTable` has a row for each key (key_index.py) and a `Vector` for each of its fields. An operator looks up the rows of
a batch's keys, announces with `change` which rows it will write, and then reads and writes the vectors with numpy:

    rows = table.rows_of([batch.column("auction")])
    table.change(rows)
    np.add.at(table.vectors["total"].values, rows, prices)

A state with windows has a table for each window, so a window that ends is dropped without a search for its keys.

What vectors hold, and what callers have to observe, is in versioned_table.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.hashing import hash_columns
from tidegate.state.key_index import KeyIndex
from tidegate.state.key_store import IntArray
from tidegate.state.vectors import Vector as Vector
from tidegate.state.vectors import VectorField as VectorField
from tidegate.state.vectors import put_column
from tidegate.state.versioned_table import TableState, VersionedTable


class ColumnTable(VersionedTable):
    """Rows of vectors by key."""

    _index: KeyIndex

    def __init__(
        self,
        key_type: pa.DataType,
        fields: Sequence[VectorField],
        *,
        touched: Callable[[], None] = lambda: None,
        writes_all: bool = True,
        hash_of: Callable[[Sequence[pa.Array]], Any] = hash_columns,
    ) -> None:
        super().__init__(KeyIndex(key_type, hash_of=hash_of), fields, touched=touched, writes_all=writes_all)
        self.added_count = 0  # keys that `rows_of` has added, ever

    def rows_of(self, keys: Sequence[pa.Array]) -> IntArray:
        """Return the row of each key. Keys that are not there are added, with the defaults."""
        rows, added = self._index.rows_of(keys)
        if len(added):
            self._begin(added, self._epoch * 2 + 1)
            self._note(added)
            self.added_count += len(added)
        return rows

    def find(self, keys: Sequence[pa.Array]) -> IntArray:
        """Return the row of each key, or -1."""
        return self._index.find(keys)

    def fetch_from(self, place: bytes, count: int, *, field: str, up_to: int) -> tuple[IntArray, bytes]:
        """Look at up to `count` rows of the backend's disk, from a place on, and fetch those that have at most `up_to` in a
        field of 64 bits. Return these rows, and the next place; b"" is both the beginning and the end. What is on the disk
        may be older than the row: look at the rows themselves. A row that was just written may be missing."""
        return np.empty(0, np.int64), b""

    def load(self, keys: Sequence[pa.Array], columns: Mapping[str, pa.Array], *, known: bool) -> None:
        """Load keys that are not there. `known`: the next frozen version builds on the snapshot that has them."""
        rows, added = self._index.rows_of(keys)
        assert len(added) == len(rows), "a key comes twice, or was there before"
        self._begin(added, 0 if known else self._epoch * 2 + 1)
        if not known:
            self._note(added)
        for name, vector in self.vectors.items():
            put_column(vector, rows, columns[name])


class ColumnState(TableState[ColumnTable]):
    """The tables of one state: one, or one for each window."""

    def _make_table(self, at: int | None) -> ColumnTable:
        return ColumnTable(self.info.schema.field("key").type, self.fields, touched=partial(self._touched.add, at))

    def _load_into(self, table: ColumnTable, rows: pa.RecordBatch, *, known: bool) -> None:
        value = rows.column("value")
        columns = {field.name: value.field(field.name) for field in self.fields}
        table.load([rows.column("key")], columns, known=known)
