"""Vectors: the values of a field of columnar state by row, in numpy.

Integers, floats and booleans are numpy's own; a date is its days, a timestamp its number, as integers. Which of them are
null is a vector of flags. Everything else (text, decimals, lists, structs) is a vector of Python objects in the form of
values.py, in which None is null.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.state.columns import column_of
from tidegate.state.key_store import Array, IntArray, grown
from tidegate.types import from_list, to_list

_BOOL, _OBJECT = np.dtype(bool), np.dtype(object)


@dataclass(frozen=True, slots=True)
class VectorField:
    """A field of a columnar state. `default` is what a new key has; the field can be null if that is None."""

    name: str
    type: pa.DataType
    default: Any = None

    @property
    def nullable(self) -> bool:
        return self.default is None

    @property
    def arrow(self) -> pa.Field:
        return pa.field(self.name, self.type)

    @property
    def has_objects(self) -> bool:
        """Whether the values are Python objects."""
        return bool(self.element == _OBJECT)

    @property
    def element(self) -> Any:
        """The numpy type of the values."""
        kind = self.type
        if pa.types.is_boolean(kind):
            return _BOOL
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            return np.dtype(kind.to_pandas_dtype())
        if pa.types.is_date32(kind):
            return np.dtype(np.int32)
        if pa.types.is_timestamp(kind):
            return np.dtype(np.int64)
        return _OBJECT


class Vector:
    """The values of one field by row, and which of them are not null (None if the field is never null, or of objects)."""

    __slots__ = ("field", "fill", "valid", "values")

    def __init__(self, field: VectorField) -> None:
        self.field = field
        self.values: Array = np.empty(0, field.element)
        self.valid: Array | None = np.empty(0, bool) if field.nullable and not field.has_objects else None
        default = field.default
        if default is not None and not field.has_objects:
            # As a number, also of dates and timestamps.
            array = from_list([default], field.type)
            default = stored(array, field.element)[0]
        self.fill = (None if field.has_objects else 0) if default is None else default

    def begin(self, rows: IntArray, top: int) -> None:
        """Set the default in new rows. All rows are below `top`."""
        used = len(self.values)
        values = grown(self.values, used, top)
        if self.field.has_objects:
            values[used:] = None
            if self.field.type.num_fields and self.fill is not None:
                for row in rows.tolist():
                    values[row] = copy.copy(self.fill)  # lists and dictionaries may be changed in place
            else:
                values[rows] = self.fill
        else:
            values[rows] = self.fill
        self.values = values
        if self.valid is not None:
            valid = grown(self.valid, len(self.valid), top)
            valid[rows] = False
            self.valid = valid

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.valid is None else self.valid.nbytes)


def stored(column: pa.Array, element: Any) -> Array:
    """Return a column of fixed width as a vector holds it; nulls are anything."""
    if element == _BOOL:
        flags: Array = column.fill_null(False).to_numpy(zero_copy_only=False)
        return flags
    itemsize = np.dtype(element).itemsize
    return np.frombuffer(column.buffers()[1], element, len(column), column.offset * itemsize)


def kept(vector: Vector, rows: IntArray) -> tuple[Array, Array | None]:
    """Return the values of rows that will be written."""
    return vector.values[rows], None if vector.valid is None else vector.valid[rows]


def replace_objects(vector: Vector, rows: IntArray) -> None:
    """Replace lists and dictionaries by copies, since they may be changed in place."""
    if vector.field.type.num_fields:
        values = vector.values
        for row in rows.tolist():
            values[row] = copy.copy(values[row])


def put_column(vector: Vector, rows: IntArray, column: pa.Array) -> None:
    """Set the values of rows to those of a column."""
    if vector.field.has_objects:
        values = to_list(column)
        if vector.field.type.num_fields:  # numpy would look into lists
            for row, value in zip(rows.tolist(), values, strict=True):
                vector.values[row] = value
        else:
            vector.values[rows] = np.fromiter(values, _OBJECT, len(values))
        return
    vector.values[rows] = stored(column, vector.field.element)
    if vector.valid is not None:
        vector.valid[rows] = column.is_valid().to_numpy(zero_copy_only=False)


def column_from(field: VectorField, values: Array, valid: Array | None) -> pa.Array:
    """Return values of a vector as a column, which may share their memory."""
    if field.has_objects:
        return column_of(values.tolist(), field.type)
    if valid is not None and valid.all():
        valid = None
    if pa.types.is_boolean(field.type):
        return pa.array(values, mask=None if valid is None else ~valid)
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
    return pa.Array.from_buffers(field.type, len(values), [bits, pa.py_buffer(values)])


def structs(columns: list[pa.Array], kind: pa.DataType, count: int) -> pa.Array:
    """Return a column of structs, which may have no fields."""
    if not columns:
        return pa.Array.from_buffers(kind, count, [None])
    return pa.StructArray.from_arrays(columns, fields=list(kind))
