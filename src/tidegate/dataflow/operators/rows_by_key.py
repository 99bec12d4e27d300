"""Rows by key, in Arrow: small tables that are looked up by whole columns of keys, outside of any keyed state.

An index (key_index.py) gives each key a number, and the number says where the key's row is among all rows that were put. A
row that is replaced stays there until as many rows are unused as are used; then the rows are written together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import IntArray
from tidegate.dataflow.operators.process import key_type
from tidegate.state.key_index import KeyIndex

MIN_UNUSED = 4096


class RowsByKey:
    """One row for each key. `names` are the key's columns; a key with a null in it is never found."""

    def __init__(self, schema: pa.Schema, names: Sequence[str]) -> None:
        self.schema = schema
        self._names = tuple(names)
        self._index = KeyIndex(key_type(schema, self._names))
        self._places = np.empty(0, np.int64)  # by number: where the key's row is, or -1
        self._parts: list[pa.RecordBatch] = []
        self._stored = 0

    @property
    def count(self) -> int:
        return self._index.count

    @property
    def top(self) -> int:
        """All numbers are below."""
        return self._index.top

    def put(self, rows: pa.RecordBatch) -> IntArray:
        """Set the rows of their keys, of which each comes once. Return their numbers."""
        numbers, _ = self._index.rows_of([_plain(rows.column(name)) for name in self._names])
        if self._index.top > len(self._places):
            more = max(self._index.top - len(self._places), len(self._places))
            self._places = np.concatenate([self._places, np.full(more, -1)])
        self._places[numbers] = np.arange(self._stored, self._stored + rows.num_rows)
        self._parts.append(rows)
        self._stored += rows.num_rows
        return numbers

    def find(self, keys: Sequence[pa.Array]) -> IntArray:
        """Return the number of each key, or -1."""
        plain = [_plain(key) for key in keys]
        numbers = self._index.find(plain)
        for key in plain:
            if key.null_count:
                numbers[key.is_null().to_numpy(zero_copy_only=False)] = -1
        return numbers

    def rows(self, numbers: IntArray) -> pa.RecordBatch:
        """Return the rows with these numbers, and rows of nulls for -1."""
        is_missing = numbers < 0
        if not self._stored:
            columns = [pa.nulls(len(numbers), field.type) for field in self.schema]
            return pa.RecordBatch.from_arrays(columns, schema=_nullable(self.schema))
        whole = self._whole()  # which may move rows
        places = self._places[np.where(is_missing, 0, numbers)]
        found = whole.take(pa.array(places, mask=is_missing if is_missing.any() else None))
        return pa.RecordBatch.from_arrays(found.columns, schema=_nullable(self.schema))

    def remove(self, numbers: IntArray) -> None:
        """Forget keys. Their numbers are given to other keys."""
        self._places[numbers] = -1
        self._index.remove(numbers)
        self._index.free(numbers)

    def numbers(self) -> IntArray:
        """Return the numbers of all keys."""
        return np.flatnonzero(self._places >= 0)

    def frozen(self) -> tuple[pa.RecordBatch, IntArray] | None:
        """Return what doesn't change any more: rows, and which of them are there."""
        return (self._whole(), self._places[self.numbers()]) if self._stored else None

    # Inside.

    def _whole(self) -> pa.RecordBatch:
        """Return all rows in one batch."""
        if self._stored - self.count > max(self.count, MIN_UNUSED):
            numbers = self.numbers()
            kept = pa.concat_batches(self._parts).take(pa.array(self._places[numbers]))
            self._places[numbers] = np.arange(len(numbers))
            self._parts, self._stored = [kept], len(numbers)
        elif len(self._parts) > 1:
            self._parts = [pa.concat_batches(self._parts)]
        return self._parts[0]


def _plain(column: Any) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])
