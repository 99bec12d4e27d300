"""What a function on columns calls on a state that `tg.columns` declares: reads and writes of many keys at once.

The rows of the keys that were looked up last are remembered until the keys' table may number its rows again: the operator
calls `forget` between two batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.errors import JobError, SchemaError
from tidegate.state.batch_keys import Keys
from tidegate.state.column_table import ColumnTable
from tidegate.state.column_ttl import ColumnTtl
from tidegate.state.descriptors import DeclaredColumns
from tidegate.state.key_store import IntArray
from tidegate.state.vectors import Vector, VectorField, column_from, put_column
from tidegate.types import ddl_of


class ColumnsHandle:
    """The `ColumnsState` of handles.py."""

    def __init__(self, table: ColumnTable, descriptor: DeclaredColumns, now_ms: Callable[[], int]) -> None:
        self._table = table
        self._name = descriptor.name
        self._fields = {field.name: field for field in descriptor.declared}
        self._schema = pa.schema([field.arrow for field in descriptor.declared])
        self._ttl = None if descriptor.ttl_ms is None else ColumnTtl(table, descriptor.ttl_ms, now_ms)
        self._last: tuple[Keys, IntArray] | None = None

    def get_many(self, keys: Keys) -> pa.RecordBatch:
        rows = self._find(keys)
        known = rows >= 0
        columns = [_read(self._table.vectors[name], field, rows, known) for name, field in self._fields.items()]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def contains_many(self, keys: Keys) -> Any:
        return self._find(keys) >= 0

    def set_many(self, keys: Keys, columns: Mapping[str, Any] | pa.RecordBatch | None = None, /, **named: Any) -> None:
        given = dict(zip(columns.schema.names, columns.columns, strict=True)) if isinstance(columns, pa.RecordBatch) else {}
        given |= named if isinstance(columns, pa.RecordBatch) else {**(columns or {}), **named}
        arrays = {name: self._array(name, value, len(_checked(keys))) for name, value in given.items()}
        if not len(keys):
            return
        rows = self._find(keys)
        if (rows < 0).any():
            rows = self._table.rows_of(keys.columns.columns)
            self._last = keys, rows
        self._table.change(rows)
        for name, array in arrays.items():
            put_column(self._table.vectors[name], rows, array)
        if self._ttl is not None:
            self._ttl.touch(rows)

    def delete_many(self, keys: Keys) -> None:
        rows = self._find(keys)
        self._last = None
        self._table.delete(rows[rows >= 0])

    # What the operator calls.

    def forget(self) -> None:
        """Forget which rows the keys have."""
        self._last = None

    def maintain(self, budget: int) -> None:
        """Remove some of what the ttl has ended."""
        self.forget()
        if self._ttl is not None:
            self._ttl.sweep(budget)

    # Inside.

    def _find(self, keys: Keys) -> IntArray:
        """Return the row of each key, or -1. What the ttl has ended is removed."""
        if self._last is not None and self._last[0] is keys:
            return self._last[1]
        rows = self._table.find(_checked(keys).columns.columns)
        if self._ttl is not None:
            there = np.flatnonzero(rows >= 0)
            ended = there[self._ttl.ended(rows[there])]
            if len(ended):
                self._table.delete(rows[ended])
                rows[ended] = -1
        self._last = keys, rows
        return rows

    def _array(self, name: str, given: Any, count: int) -> pa.Array:
        """Return what is to be set as a column of the declared type."""
        field = self._fields.get(name)
        if field is None:
            raise JobError(f"state {self._name!r} has no column {name!r}; it has {', '.join(map(repr, self._fields))}")
        try:
            array = _converted(given, field.type, count)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaError(
                f"state {self._name!r}: column {name!r} is declared with {ddl_of(field.type)!r}, and what set_many was "
                f"given doesn't fit: {error}"
            ) from error
        if len(array) != count:
            raise JobError(f"state {self._name!r}: set_many was given {len(array)} values of {name!r} for {count} keys")
        if not field.nullable and array.null_count:
            raise SchemaError(
                f"state {self._name!r}: column {name!r} has a default and is never null, and set_many was given a null; "
                f"omit it from defaults=, or give {field.default!r}"
            )
        return array


def _checked(keys: Any) -> Keys:
    if not isinstance(keys, Keys):
        raise JobError(f"state is found by ctx.keys, or by a part of them such as ctx.keys.where(mask), not by {keys!r:.60}")
    return keys


def _converted(given: Any, kind: pa.DataType, count: int) -> pa.Array:
    if isinstance(given, pa.ChunkedArray):
        given = given.combine_chunks()
    if isinstance(given, pa.Array):
        return given if given.type.equals(kind) else given.cast(kind)
    if isinstance(given, np.ndarray) and given.ndim == 1:
        return pa.array(given, kind)
    if isinstance(given, list | tuple) and not pa.types.is_nested(kind):
        return pa.array(given, kind)
    return pa.repeat(pa.scalar(given, kind), count)


def _read(vector: Vector, field: VectorField, rows: IntArray, known: Any) -> pa.Array:
    """Return the values of rows, and the default if there is no row."""
    if known.all():
        return column_from(field, vector.values[rows], None if vector.valid is None else vector.valid[rows])
    there = rows[known]
    values = np.full(len(rows), None if field.has_objects else vector.fill, vector.values.dtype)
    if field.has_objects and vector.fill is not None:
        for index in np.flatnonzero(~known).tolist():
            values[index] = vector.fill
    values[known] = vector.values[there]
    valid = None
    if vector.valid is not None:
        valid = np.zeros(len(rows), bool)
        valid[known] = vector.valid[there]
    return column_from(field, values, valid)
