"""Columns as numpy arrays, in the form in which vectors hold them.

Numbers and booleans are numpy's own; dates and timestamps are integers of their unit; everything else is an array of Python
objects, in which null is None. What is in a null's place among numbers means nothing: ask `valid_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.dataflow.aggregates.base import Accumulator, BoolArray, IntArray, Vector, Vectors
from tidegate.types import from_list, to_list

_LARGEST = np.iinfo(np.int64).max


def is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date32(kind) or pa.types.is_timestamp(kind))


def is_fixed(kind: pa.DataType) -> bool:
    """Whether vectors of this type hold no Python objects."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or is_time(kind))


def dtype_of(kind: pa.DataType) -> np.dtype[Any]:
    if not is_fixed(kind):
        return np.dtype(object)
    if is_time(kind):
        return np.dtype(f"int{kind.bit_width}")
    plain: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return plain


def valid_of(array: pa.Array) -> BoolArray | None:
    """Return which values are not null, or None if all are."""
    if array.null_count == 0:
        return None
    found: BoolArray = array.is_valid().to_numpy(zero_copy_only=False)
    return found


def numbers_of(array: pa.Array) -> npt.NDArray[Any]:
    """Return a column of fixed width as numbers. Nulls are zeros."""
    kind = array.type
    if is_time(kind):
        array = array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(kind) else 0)
    found: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return found


def objects_of(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Return an array of these objects, whatever they are."""
    found = np.empty(len(values), object)
    for index, value in enumerate(values):  # numpy would make a matrix of lists
        found[index] = value
    return found


def values_of(array: pa.Array) -> npt.NDArray[Any]:
    """Return a column as a vector would hold it."""
    return numbers_of(array) if is_fixed(array.type) else objects_of(to_list(array))


def column_of(values: npt.NDArray[Any], valid: BoolArray | None, kind: pa.DataType) -> pa.Array:
    """Return an Arrow column of values that a vector holds."""
    if is_fixed(kind):
        nulls = None if valid is None else ~valid
        if is_time(kind):
            whole = pa.int64() if kind.bit_width == 64 else pa.int32()
            return pa.array(values, whole, mask=nulls).view(kind)
        return pa.array(values, kind, mask=nulls)
    return from_list(list(values), kind)


def result_of(vector: Vector, rows: IntArray, kind: pa.DataType) -> pa.Array:
    """Return what a vector holds at these rows."""
    valid = None if vector.valid is None else vector.valid.take(rows)
    if valid is not None and valid.all():
        valid = None
    return column_of(vector.values.take(rows), valid, kind)


def order_of(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return integers in the order of these numbers, as Spark orders them: NaN is the largest, and -0.0 equals 0.0."""
    if values.dtype.kind != "f":
        return values.astype(np.int64)
    floats = values.astype(np.float64) + 0.0
    bits = floats.view(np.int64)
    order = np.where(bits < 0, bits ^ np.int64(_LARGEST), bits)
    order[np.isnan(floats)] = _LARGEST
    return order


def ranks_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return integers in the order of a column without nulls, the same for equal values."""
    if is_fixed(array.type):
        return order_of(numbers_of(array))
    encoded = array.dictionary_encode()
    ranks = np.empty(len(encoded.dictionary), np.int64)
    ranks[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(ranks))
    found: npt.NDArray[np.int64] = ranks[encoded.indices.to_numpy()]
    return found


def is_orderable(kind: pa.DataType) -> bool:
    """Whether `ranks_of` takes it."""
    return (
        is_fixed(kind)
        or bool(pa.types.is_decimal(kind) or pa.types.is_temporal(kind))
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


@dataclass(frozen=True, slots=True)
class Groups:
    """A batch's rows, grouped. `rows` are the distinct ones in the order of their first record, `of` has for each record
    the index of its row in `rows`, `first` the index of each row's first record."""

    rows: IntArray
    of: IntArray
    first: IntArray

    def last(self) -> IntArray:
        """Return the index of each row's last record."""
        return last_of(self.of, len(self.rows))

    def order(self) -> IntArray:
        """Return the records' indices, sorted by group and within each in the order of the batch."""
        few = len(self.rows) <= 1 << 16  # numpy sorts small integers by their bits, in a tenth of the time
        return np.argsort(self.of.astype(np.uint16) if few else self.of, kind="stable")


def grouped(rows: IntArray) -> Groups:
    """Group a batch by row, in time that depends on the batch alone."""
    first, at = _firsts(rows)
    distinct = rows.take(first)
    at[distinct] = np.arange(len(first), dtype=np.int32)
    return Groups(distinct, at.take(rows).astype(np.int64), first)


def distinct_of(rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return the distinct rows of a batch in the order of their first record, and the index of that record."""
    first, _ = _firsts(rows)
    return rows.take(first), first


def _firsts(rows: IntArray) -> tuple[IntArray, npt.NDArray[np.int32]]:
    """Return the index of the first record of each row, and an array that has it by row, and anything elsewhere."""
    numbers = np.arange(len(rows), dtype=np.int32)
    at = np.empty(int(rows.max(initial=-1)) + 1, np.int32)  # read only where it is written
    at[rows[::-1]] = numbers[::-1]  # of an index that repeats, the last value stays
    return np.flatnonzero(at.take(rows) == numbers), at


def ranks(values: IntArray) -> IntArray:
    """Return for each element how many of the same value are before it."""
    order = np.argsort(values, kind="stable")
    inside = values[order]
    firsts = np.flatnonzero(np.append(True, inside[1:] != inside[:-1]))[: len(values)]
    sizes = np.diff(np.append(firsts, len(inside)))
    found = np.empty(len(values), np.int64)
    found[order] = np.arange(len(values)) - np.repeat(firsts, sizes)
    return found


def places_in(groups: IntArray) -> IntArray:
    """Return for each record of a batch in the order of its groups which one of its group it is, from 0."""
    numbers = np.arange(len(groups))
    starts = np.zeros(len(groups), np.int64)
    begins = np.flatnonzero(np.diff(groups)) + 1
    starts[begins] = begins
    return numbers - np.maximum.accumulate(starts)


def last_of(groups: IntArray, count: int) -> IntArray:
    """Return the index of the last record of each group. Every group has one."""
    last = np.empty(count, np.int64)
    last[groups] = np.arange(len(groups))
    return last


def first_of(groups: IntArray, count: int) -> IntArray:
    """Return the index of the first record of each group. Every group has one."""
    first = np.empty(count, np.int64)
    first[groups[::-1]] = np.arange(len(groups) - 1, -1, -1)
    return first


class HeldVector:
    """A vector outside any state, for intermediate results."""

    __slots__ = ("valid", "values")

    def __init__(self, accumulator: Accumulator, count: int) -> None:
        kind = dtype_of(accumulator.type)
        default = accumulator.default
        self.valid: BoolArray | None = np.zeros(count, bool) if default is None and kind.kind != "O" else None
        if default is None:
            self.values: npt.NDArray[Any] = np.empty(count, object) if kind.kind == "O" else np.zeros(count, kind)
        elif kind.kind == "O":
            self.values = objects_of([default] * count)
        else:
            self.values = np.full(count, default, kind)

    def copied_at(self, rows: IntArray) -> HeldVector:
        one = HeldVector.__new__(HeldVector)
        one.values = self.values[rows]
        one.valid = None if self.valid is None else self.valid[rows]
        return one


def held_vectors(accumulators: Iterable[Accumulator], count: int) -> dict[str, HeldVector]:
    """Return vectors with every accumulator at its default in `count` rows."""
    return {each.name: HeldVector(each, count) for each in accumulators}


def copy_rows(target: Vectors, rows: IntArray, source: Vectors, source_rows: IntArray) -> None:
    """Set rows of the target to rows of the source."""
    for name, vector in target.items():
        assign(vector, rows, source[name], source_rows)


def assign(vector: Vector, rows: IntArray, source: Vector, source_rows: IntArray) -> None:
    valid = source.valid
    put(vector, rows, source.values[source_rows], None if valid is None else valid[source_rows])


def put(vector: Vector, rows: IntArray, values: npt.NDArray[Any], valid: BoolArray | None) -> None:
    """Set rows of a vector."""
    vector.values[rows] = values
    if vector.valid is not None:
        vector.valid[rows] = True if valid is None else valid


def is_set(vector: Vector, rows: IntArray) -> BoolArray:
    """Return which of these rows are not null."""
    if vector.valid is not None:
        return vector.valid.take(rows)
    values = vector.values[rows]
    if values.dtype.kind != "O":
        return np.ones(len(rows), bool)
    return np.fromiter((value is not None for value in values), bool, len(rows))


def only(mapping: Mapping[str, Vector]) -> Vector:
    """Return the single vector of an aggregate that has one."""
    (vector,) = mapping.values()
    return vector


def without_nulls(rows: IntArray, *inputs: pa.Array) -> tuple[IntArray, list[pa.Array]]:
    """Return the records in which no input is null."""
    keep: BoolArray | None = None
    for array in inputs:
        valid = valid_of(array)
        if valid is not None:
            keep = valid if keep is None else keep & valid
    if keep is None:
        return rows, list(inputs)
    mask = pa.array(keep)
    return rows[keep], [array.filter(mask) for array in inputs]
