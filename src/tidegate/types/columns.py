"""One Arrow column as Python values (`to_list`) and back (`from_list`).

Both are called in the hottest loop, so C code over whole columns does the work.

Invariants:
- `to_list(from_list(values, t))` equals `values`: maps and structs come back as dicts, a timestamp as an aware datetime
  in UTC, a timestamp_ntz as a naive one.
- `from_list` never changes a value to make it fit. A float in a long column, a bool among numbers, bytes in a string
  column, a naive datetime in a timestamp column: each is a `SchemaError` that shows the value. Only an int may stand in
  a float, double or decimal column, where it is exact; and a float column rounds (1e300 to infinity), as it must.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.types import limits
from tidegate.types.ddl import ddl_of

# From Arrow to Python. Arrow's own `to_pylist` is the fastest way for strings, bools, decimals and nested types of these.
# For numbers numpy is a little faster, for dates and timestamps thirty times.

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = np.datetime64("0001-01-01", "us"), np.datetime64("9999-12-31T23:59:59.999999", "us")


def to_list(array: pa.Array) -> list[Any]:
    """Return the column as Python values, None for null."""
    convert = _TO_LIST.get(array.type.id)
    return array.to_pylist() if convert is None else convert(array)


def _numbers_to_list(array: pa.Array) -> list[Any]:
    return array.to_pylist() if array.null_count else array.to_numpy().tolist()  # type: ignore[no-any-return]


def _moments_to_list(array: pa.Array) -> list[Any]:
    moments = array.to_numpy(zero_copy_only=False)
    if moments.dtype == "datetime64[ns]":
        moments = moments.astype("datetime64[us]")  # finer than Python's times, but always within Python's years
    # numpy would return bare numbers for these. Nulls are NaT here, which compares false, and become None.
    outside = (moments < _FIRST.astype(moments.dtype)) | (moments > _LAST.astype(moments.dtype))
    if outside.any():
        raise SchemaError(f"{moments[outside][0]} is outside of the years 1 to 9999, the only ones that Python can hold")
    if array.type.id == _DATE or array.type.tz is None:
        return moments.tolist()  # type: ignore[no-any-return]
    since_epoch = moments.astype("datetime64[us]", copy=False).view("timedelta64[us]").tolist()
    if array.null_count:
        return [None if elapsed is None else _EPOCH + elapsed for elapsed in since_epoch]
    return list(map(_EPOCH.__add__, since_epoch))


def _nested_to_list(array: pa.Array) -> list[Any]:
    values: list[Any]
    if not _holds_maps_or_moments(array.type):
        return array.to_pylist()  # type: ignore[no-any-return]
    if array.type.id == _STRUCT:
        names = [field.name for field in array.type]
        values = [dict(zip(names, fields, strict=True)) for fields in zip(*map(to_list, array.flatten()), strict=True)]
    else:
        bounds = array.offsets.to_numpy()
        here = slice(int(bounds[0]), int(bounds[-1]))
        pieces = (array.keys, array.items) if array.type.id == _MAP else (array.values,)
        columns = [to_list(piece[here]) for piece in pieces]
        elements: Iterator[Any] = zip(*columns, strict=True) if array.type.id == _MAP else iter(columns[0])
        make = dict if array.type.id == _MAP else list
        values = [make(islice(elements, length)) for length in np.diff(bounds).tolist()]
    if array.null_count:
        for index in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            values[index] = None
    return values


def _holds_maps_or_moments(arrow: pa.DataType) -> bool:
    """Return whether `to_pylist` isn't used for the type: it makes lists of pairs of maps, and is slow for dates."""
    return arrow.id in (_MAP, _DATE, _TIMESTAMP) or any(
        _holds_maps_or_moments(arrow.field(index).type) for index in range(arrow.num_fields)
    )


# Arrow's type ids, the keys of the tables below.
_INTS = {pa.int8().id: "b", pa.int16().id: "h", pa.int32().id: "i", pa.int64().id: "q"}  # with struct's codes
_FLOATS = (pa.float32().id, pa.float64().id)
_STRINGS = (pa.string().id, pa.large_string().id)
_LISTS = (pa.list_(pa.null()).id, pa.large_list(pa.null()).id)
_MAP, _STRUCT = pa.map_(pa.string(), pa.null()).id, pa.struct([]).id
_DATE, _TIMESTAMP = pa.date32().id, pa.timestamp("us").id

_TO_LIST: dict[int, Callable[[pa.Array], list[Any]]] = {
    **dict.fromkeys((*_INTS, *_FLOATS), _numbers_to_list),
    **dict.fromkeys((_DATE, _TIMESTAMP), _moments_to_list),
    **dict.fromkeys((*_LISTS, _MAP, _STRUCT), _nested_to_list),
    pa.dictionary(pa.int32(), pa.string()).id: lambda array: to_list(array.dictionary_decode()),
}


# From Python to Arrow. pyarrow alone would cut 1.5 to 1 in a long column, make 1.0 of True and text of bytes, so the
# Python types are checked first: by C code over the whole column, and one by one only when there is an error to describe.

_FEW = 256  # for fewer values numpy's fixed cost is higher than that of a look at each
_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError, struct.error)
_PYTHON_TYPES: dict[int, tuple[type, ...]] = {
    pa.bool_().id: (bool, np.bool_),
    **dict.fromkeys(_INTS, (int, np.integer)),
    **dict.fromkeys(_FLOATS, (float, np.floating, int, np.integer)),
    pa.decimal128(1).id: (Decimal, int, np.integer),
    **dict.fromkeys(_STRINGS, (str,)),
    **dict.fromkeys((pa.binary().id, pa.large_binary().id), (bytes, bytearray, memoryview)),
    _DATE: (date,),
    _TIMESTAMP: (datetime,),
    **dict.fromkeys(_LISTS, (list, tuple, np.ndarray)),
    _MAP: (dict,),
    _STRUCT: (dict, tuple),
}


def from_list(values: Sequence[Any], type: pa.DataType) -> pa.Array:
    """Return the column of these Python values, None for null. Raise `SchemaError` if one isn't a value of `type`."""
    quick = _FROM_LIST.get(type.id)
    if quick is not None:
        try:
            if (array := quick(values, type)) is not None:
                return _whole(array, values)
        except pa.ArrowCapacityError as error:
            raise _too_large(values) from error
        except _REFUSALS:
            pass
    if _fits(values, type):
        try:
            return _whole(pa.array(values, type=type), values)
        except pa.ArrowCapacityError as error:
            raise _too_large(values) from error
        except _REFUSALS:
            pass
    raise SchemaError(_misfit(values, type))


def _whole(array: Any, values: Sequence[Any]) -> pa.Array:
    """Return the column if it is one, within the bound for the bytes of a column."""
    if isinstance(array, pa.ChunkedArray) or array.get_total_buffer_size() > limits.MAX_COLUMN_BYTES:
        raise _too_large(values)
    return array


def _too_large(values: Sequence[Any]) -> limits.ColumnTooLarge:
    what = "a value has" if len(values) == 1 else f"{len(values)} values together have"
    return limits.ColumnTooLarge(
        f"{what} more than {limits.MAX_COLUMN_BYTES:,} bytes, which is the most that a column can hold. Keep large objects "
        f"in a store of objects, and their addresses in records and state"
    )


# Each of these is right for all values of most columns. It raises an error of `_REFUSALS` or returns None for the others.


def _quick_ints(values: Sequence[Any], arrow: pa.DataType) -> pa.Array | None:
    # struct takes only ints and is three times as fast as pa.array. It refuses None, floats and what is too large.
    packed = struct.pack(f"<{len(values)}{_INTS[arrow.id]}", *values)
    array = pa.Array.from_buffers(arrow, len(values), [None, pa.py_buffer(packed)])
    return None if _hides_bools(values, array) else array


def _quick_floats(values: Sequence[Any], arrow: pa.DataType) -> pa.Array | None:
    array = pa.array(values, type=arrow)
    return None if _hides_bools(values, array) else array


def _hides_bools(values: Sequence[Any], array: pa.Array) -> bool:
    """Return whether a bool was taken for a number. Only numbers that are 0 or 1 now can have been one."""
    if len(values) > _FEW:
        numbers = array.to_numpy(zero_copy_only=False)
        suspects = np.flatnonzero((numbers == 0) | (numbers == 1))
        if suspects.size * 3 < len(values):
            return bool in set(map(type, map(values.__getitem__, suspects.tolist())))
    return bool in set(map(type, values))


def _quick_strings(values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
    "".join(values)  # the fastest way to check that all of them are str
    return pa.array(values, type=arrow)


_FROM_LIST: dict[int, Callable[[Sequence[Any], pa.DataType], pa.Array | None]] = {
    **dict.fromkeys(_INTS, _quick_ints),
    **dict.fromkeys(_FLOATS, _quick_floats),
    **dict.fromkeys(_STRINGS, _quick_strings),
    pa.bool_().id: pa.array,  # which is strict for bools
}


def _fits(values: Sequence[Any], arrow: pa.DataType, *, nullable: bool = True) -> bool:
    """Return whether the Python types of all values, nested ones too, are those of `arrow`. pa.array checks ranges."""
    if pa.types.is_dictionary(arrow):
        return _fits(values, arrow.value_type, nullable=nullable)
    kinds = set(map(type, values))
    if type(None) in kinds and not nullable:
        return False
    kinds.discard(type(None))
    wanted = _PYTHON_TYPES.get(arrow.id, ())
    # A bool is an int to Python, and a datetime a date; here they are not.
    if not all(issubclass(kind, wanted) and (kind is not bool or bool in wanted) for kind in kinds):
        return False
    if arrow.id == _DATE:
        return not any(issubclass(kind, datetime) for kind in kinds)
    if arrow.id not in (_TIMESTAMP, *_LISTS, _MAP, _STRUCT):
        return True
    values = [value for value in values if value is not None]
    if arrow.id == _TIMESTAMP:
        return {zone is None for zone in set(map(attrgetter("tzinfo"), values))} <= {arrow.tz is None}
    if arrow.id == _STRUCT:
        return _structs_fit(values, arrow)
    flat = list(chain.from_iterable(values))  # of maps, the keys
    if arrow.id in _LISTS:
        return _fits(flat, arrow.value_type, nullable=arrow.value_field.nullable)
    items = list(chain.from_iterable(map(dict.values, values)))
    return _fits(flat, arrow.key_type, nullable=False) and _fits(items, arrow.item_type, nullable=arrow.item_field.nullable)


def _structs_fit(values: list[Any], arrow: pa.DataType) -> bool:
    """Return whether each value is a dict with exactly the fields' names, or a tuple of the fields' values in order."""
    names = dict.fromkeys(field.name for field in arrow)
    dicts = [value for value in values if isinstance(value, dict)]
    tuples = [value for value in values if isinstance(value, tuple)]
    if any(value.keys() != names.keys() for value in dicts) or any(len(value) != len(names) for value in tuples):
        return False
    return all(
        _fits([*map(itemgetter(field.name), dicts), *map(itemgetter(index), tuples)], field.type, nullable=field.nullable)
        for index, field in enumerate(arrow)
    )


def _misfit(values: Sequence[Any], arrow: pa.DataType) -> str:
    """Describe the first value that doesn't fit."""
    for index, value in enumerate(values):
        reason = f"it is of the Python type {type(value).__name__}"
        if arrow.id == _TIMESTAMP and isinstance(value, datetime):
            reason = (
                "give it a time zone, such as datetime.UTC, or declare timestamp_ntz"
                if value.tzinfo is None
                else "drop its time zone, or declare timestamp"
            )
        try:
            if _fits((value,), arrow):
                pa.array([value], type=arrow)
                continue
        except _REFUSALS as refusal:
            reason = str(refusal)
        return f"{shown(value)} at index {index} is no {ddl_of(arrow)}: {reason}"
    return f"the {len(values)} values, each of which fits alone, don't fit into one column of type {ddl_of(arrow)}"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
