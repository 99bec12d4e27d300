"""Columns of state: keys and values as state holds them, to Arrow and back.

What state holds has the form of values.py already, so most of it needs no check on its way to a column.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.types import from_list, to_list

# ------------------------------------------------------------------------------------------------------------- keys


def key_list(column: pa.Array) -> list[Any]:
    """Return keys as tables hold them: hashable, and equal if they are one key. Structs, arrays and keys of several columns
    are tuples; NaN and zero have one form each."""
    kind = column.type
    if pa.types.is_struct(kind):
        return list(zip(*map(key_list, column.flatten()), strict=True))
    if pa.types.is_floating(kind):
        return [_NAN if key != key else key + 0.0 if key is not None else None for key in to_list(column)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        items = iter(key_list(column.flatten()))
        return [
            None if length is None else tuple(islice(items, length)) for length in pc.list_value_length(column).to_pylist()
        ]
    if pa.types.is_dictionary(kind):
        return key_list(column.dictionary_decode())
    return to_list(column)


def held_as_it_is(kind: pa.DataType) -> bool:
    """Return whether `key_list` is `to_list` for columns of this type."""
    return not (kind.num_fields or pa.types.is_floating(kind) or pa.types.is_dictionary(kind))


_NAN = float("nan")


def keys_to_arrow(keys: Sequence[Any], key_type: pa.DataType) -> pa.Array:
    """Return keys as a column: the inverse of `key_list`."""
    if not pa.types.is_struct(key_type):
        return column_of(keys, key_type)
    fields = list(key_type)
    columns = [keys_to_arrow(column, field.type) for column, field in zip(zip(*keys, strict=True), fields, strict=True)]
    return pa.StructArray.from_arrays(columns, fields=fields)


# ----------------------------------------------------------------------------------------------------------- values


def column_of(values: Sequence[Any], arrow: pa.DataType, *, as_tuples: bool = False) -> pa.Array:
    """Return held values as a column, as `from_list` does. No bool can hide among held numbers, and to look for one would
    release the interpreter's lock several times for each chunk. `as_tuples` is as in cells.py."""
    if as_tuples:
        return _column_of_tuples(values, arrow)
    code = _NUMBERS.get(arrow.id)
    if code is not None:
        try:
            return pa.Array.from_buffers(arrow, len(values), [None, pa.py_buffer(array(code, values))])
        except (TypeError, OverflowError):
            pass  # there is a null, or one is too large
    if pa.types.is_list(arrow) and (lists := _lists_of_numbers(values, arrow)) is not None:
        return lists
    if pa.types.is_struct(arrow) and arrow.num_fields and not any(field.type.num_fields for field in arrow):
        # If there are lists in it, an accumulator may have been changed in place: `from_list` checks everything.
        try:
            return _struct_of([list(map(itemgetter(field.name), values)) for field in arrow], arrow)
        except TypeError:
            pass  # there is a null
    return from_list(values, arrow)


def _lists_of_numbers(values: Sequence[Any], arrow: pa.DataType) -> pa.Array | None:
    """Return the column if all lists are numpy's arrays of the numbers that the type says: they are copied as they are."""
    kind = arrow.value_type
    if kind.id not in _NUMBERS:
        return None
    element = np.dtype(kind.to_pandas_dtype())
    lists = [value for value in values if value is not None]
    if not lists or not all(isinstance(value, np.ndarray) and value.dtype == element for value in lists):
        return None
    ends = np.cumsum([0 if value is None else len(value) for value in values])
    if ends[-1] > _MOST_ITEMS:
        return None
    items = pa.array(np.concatenate(lists))
    mask = pa.array([value is None for value in values]) if len(lists) < len(values) else None
    return pa.ListArray.from_arrays(pa.array(np.append(0, ends), pa.int32()), items, type=arrow, mask=mask)


def held_list(column: pa.Array, *, as_tuples: bool = False) -> list[Any]:
    """Return a column as held values: the inverse of `column_of`."""
    if not as_tuples:
        return to_list(column)
    if pa.types.is_struct(column.type):
        return list(zip(*map(to_list, column.flatten()), strict=True))
    lengths, keys, items = nested_parts(column)
    tuples = iter(held_list(items, as_tuples=True))
    if keys is None:
        return [list(islice(tuples, length)) for length in lengths.tolist()]
    pairs = zip(to_list(keys), tuples, strict=True)
    return [dict(islice(pairs, length)) for length in lengths.tolist()]


def _column_of_tuples(values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
    if pa.types.is_struct(arrow):
        return _struct_of(list(zip(*values, strict=True)) if values else [()] * arrow.num_fields, arrow)
    offsets = pa.array([0, *accumulate(map(len, values))], pa.int32())
    if pa.types.is_list(arrow):
        items = column_of(list(chain.from_iterable(values)), arrow.value_type, as_tuples=True)
        return pa.ListArray.from_arrays(offsets, items, type=arrow)
    keys = from_list(list(chain.from_iterable(values)), arrow.key_type)
    items = column_of(list(chain.from_iterable(map(dict.values, values))), arrow.item_type, as_tuples=True)
    return pa.MapArray.from_arrays(offsets, keys, items, type=arrow)


def _struct_of(columns: Iterable[Sequence[Any]], arrow: pa.DataType) -> pa.Array:
    fields = list(arrow)
    return pa.StructArray.from_arrays(
        [column_of(column, field.type) for column, field in zip(columns, fields, strict=True)], fields=fields
    )


_MOST_ITEMS = 2**31 - 1

# The codes of Python's arrays.
_NUMBERS = {pa.int8().id: "b", pa.int16().id: "h", pa.int32().id: "i", pa.int64().id: "q", pa.float64().id: "d"}


# ------------------------------------------------------------------------------------------------- lists and maps


class NestedParts(NamedTuple):
    """A column of lists or maps, none of which is null: how long each is, and the keys (of maps) and items of all."""

    lengths: np.ndarray[Any, np.dtype[np.int64]]
    keys: pa.Array | None
    items: pa.Array

    def joined(self, kind: pa.DataType) -> pa.Array:
        """Return the column that has these parts."""
        offsets = pa.array(np.concatenate(([0], np.cumsum(self.lengths))), pa.int32())
        if self.keys is None:
            return pa.ListArray.from_arrays(offsets, self.items, type=kind)
        return pa.MapArray.from_arrays(offsets, self.keys, self.items, type=kind)


def nested_parts(column: pa.Array) -> NestedParts:
    offsets = np.asarray(column.offsets, np.int64)
    start, length = int(offsets[0]), int(offsets[-1] - offsets[0])
    is_map = pa.types.is_map(column.type)
    items = (column.items if is_map else column.values).slice(start, length)
    return NestedParts(np.diff(offsets), column.keys.slice(start, length) if is_map else None, items)
