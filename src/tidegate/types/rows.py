"""A batch as named tuples (`rows_of`) and back (`batch_of`).

A row costs about 100 ns and, under Python's default gc thresholds, as much again for the collector, which examines the
young rows again and again. So raise the thresholds (gc.set_threshold) if you make rows in a hot loop.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Any

import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.types.columns import from_list, shown, to_list
from tidegate.types.ddl import ddl_of
from tidegate.types.limits import ColumnTooLarge


def row_class(schema: pa.Schema) -> type[tuple[Any, ...]]:
    """Return a named tuple class with the columns' names; names that a named tuple can't have are read by getattr."""
    return _row_class(tuple(schema.names))


@lru_cache(maxsize=1024)
def _row_class(names: tuple[str, ...]) -> type[tuple[Any, ...]]:
    row: type[tuple[Any, ...]] = namedtuple("Row", names, rename=True)  # type: ignore[misc]
    for index, name in enumerate(names):
        if not hasattr(row, name):
            setattr(row, name, property(itemgetter(index)))
    return row


def rows_of(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """Return the batch as named tuples."""
    row = _row_class(tuple(batch.schema.names))
    return list(map(tuple.__new__, repeat(row), zip(*map(to_list, batch.columns), strict=True)))


def batch_of(rows: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows (tuples or lists; dicts too, slowly) as a batch. Raise `SchemaError` naming the row or the column."""
    if not rows:
        return pa.RecordBatch.from_pylist([], schema=schema)
    if not all(issubclass(kind, tuple | list) for kind in set(map(type, rows))):
        rows = [_positional(row, index, schema) for index, row in enumerate(rows)]
    try:
        columns = list(zip(*rows, strict=True))
    except ValueError:
        columns = []
    if len(columns) != len(schema):
        index, row = next((index, row) for index, row in enumerate(rows) if len(row) != len(schema))
        raise SchemaError(f"row {index} {shown(row)} has {len(row)} values; expected {len(schema)}: {ddl_of(schema)}")
    arrays = [_column_of(values, field) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column_of(values: Sequence[Any], field: pa.Field) -> pa.Array:
    try:
        array = from_list(values, field.type)
    except ColumnTooLarge as error:
        raise ColumnTooLarge(f"column {field.name!r}: {error}") from None
    except SchemaError as misfit:
        raise SchemaError(f"column {field.name!r}: {misfit}") from None
    if array.null_count and not field.nullable:
        raise SchemaError(f"column {field.name!r} is NOT NULL, but row {values.index(None)} has None there")
    return array


def _positional(row: Any, index: int, schema: pa.Schema) -> Sequence[Any]:
    if isinstance(row, tuple | list):
        return row
    if not isinstance(row, dict):
        hint = ", also for one column: (value,)" if len(schema) == 1 else ""
        raise SchemaError(
            f"row {index} is {shown(row)}, of type {type(row).__name__}; expected a tuple, list or dict "
            f"of the columns {ddl_of(schema)}{hint}"
        )
    if row.keys() != set(schema.names):
        raise SchemaError(f"row {index} {shown(row)} doesn't have exactly the columns {ddl_of(schema)}")
    return [row[name] for name in schema.names]
