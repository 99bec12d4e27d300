"""The columns of a join's result, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from tidegate.state.key_store import IntArray
from tidegate.state.record_table import RecordTable

Columns: TypeAlias = Callable[[str], pa.Array]
"""Returns a column of some records of one input."""


@dataclass(frozen=True, slots=True)
class JoinedColumn:
    """A column of the result, and the column of the left and right input that it is of. A column of the key may be of both:
    then it has the value of the side that there is."""

    field: pa.Field
    left: str | None
    right: str | None

    def source(self, port: int) -> str | None:
        return self.right if port else self.left

    def of(self, left: Columns | None, right: Columns | None, count: int) -> pa.Array:
        """Return the column of so many rows of both sides, or of one whose other side is null."""
        if left is not None and self.left is not None:
            column = left(self.left)
        elif right is not None and self.right is not None:
            column = right(self.right)
        else:
            return pa.nulls(count, self.field.type)
        return column if column.type == self.field.type else column.cast(self.field.type)


def stored_columns(table: RecordTable, rows: IntArray, key: Sequence[str]) -> Columns:
    """Return the columns of stored records, each when it is asked for. `key`: the names of the key's columns."""
    keys: list[pa.Array] = []

    def column(name: str) -> pa.Array:
        if name not in key:
            return table.column(name, rows)
        if not keys:
            keys.extend(_whole(table.key_columns(rows), table.key_type, len(key)))
        return keys[key.index(name)]

    return column


def _whole(columns: list[pa.Array], kind: pa.DataType, count: int) -> list[pa.Array]:
    """Return as many columns as the key has. One that is a struct comes from a table as the columns of its fields."""
    if count > 1 or not pa.types.is_struct(kind):
        return columns
    return [pa.StructArray.from_arrays(columns, fields=list(kind))]
