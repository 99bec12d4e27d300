"""Aggregates that choose one value: min, max, min_by, max_by, first and last, any and all.

Each looks for a batch's winner of every row with whole columns, and compares only the winners with what the rows hold.
Numbers are ordered as by Spark: NaN is larger than any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.dataflow.aggregates.base import (
    Accumulator,
    Aggregate,
    BoolArray,
    IntArray,
    Vector,
    Vectors,
    check_input,
    wrong_type,
)
from tidegate.dataflow.aggregates.numpy_columns import (
    assign,
    first_of,
    grouped,
    is_fixed,
    is_orderable,
    is_set,
    last_of,
    numbers_of,
    only,
    order_of,
    put,
    ranks_of,
    result_of,
    valid_of,
    values_of,
    without_nulls,
)


class Extreme(Aggregate):
    """The largest or smallest of the values that are not null."""

    def __init__(self, text: str, *, largest: bool, name: str) -> None:
        super().__init__(check_input(name, text))
        self._largest = largest
        self._name = name

    @property
    def function(self) -> str:
        return self._name

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return (Accumulator(self._name, self.result_type),)

    @property
    def result_type(self) -> pa.DataType:
        (kind,) = self.types
        if not is_orderable(kind):
            raise wrong_type(self, "a number, a text or a time")
        return kind

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        rows, (column,) = without_nulls(rows, *inputs)
        if not len(rows):
            return
        vector = only(vectors)
        if is_fixed(column.type):
            self._compare(vector, rows, numbers_of(column))
        else:
            groups = grouped(rows)
            best = winners(ranks_of(column), groups.of, len(groups.rows), largest=self._largest, earliest=True)
            self._take(vector, groups.rows, values_of(column.take(pa.array(best))))

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        source, vector = only(other), only(vectors)
        there = is_set(source, other_rows)
        rows, values = rows[there], source.values[other_rows[there]]
        if values.dtype.kind == "O":
            self._take(vector, rows, values)
            return
        self._compare(vector, rows, values)

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return result_of(only(vectors), rows, self.result_type)

    @property
    def combines(self) -> bool:
        return True

    @property
    def merges_repeated(self) -> bool:
        return is_fixed(self.types[0])

    def singles(self, inputs: Sequence[pa.Array], count: int) -> Sequence[pa.Array]:
        return inputs

    def _compare(self, vector: Vector, rows: IntArray, values: npt.NDArray[Any]) -> None:
        """Compare numbers. Rows may repeat."""
        held, valid = vector.values, vector.valid
        assert valid is not None
        fresh = ~valid[rows]
        held[rows[fresh]] = values[fresh]
        valid[rows] = True
        with np.errstate(invalid="ignore"):  # NaN is a value like any other
            self._ufunc(values).at(held, rows, values)

    def _ufunc(self, values: npt.NDArray[Any]) -> np.ufunc:
        # `maximum` of anything and NaN is NaN, and `fmin` is the other one: NaN is the largest.
        found: np.ufunc = np.maximum if self._largest else np.fmin
        return found if values.dtype.kind != "b" else np.logical_or if self._largest else np.logical_and

    def _take(self, vector: Vector, rows: IntArray, values: npt.NDArray[Any]) -> None:
        """Compare objects, one for each row."""
        put_if = [
            old is None or (new > old if self._largest else new < old)
            for new, old in zip(values, vector.values[rows], strict=True)
        ]
        mask = np.array(put_if, bool)
        put(vector, rows[mask], values[mask], None)


class ChosenBy(Aggregate):
    """The value of the record with the largest or smallest other value: min_by, max_by, first and last by a column.

    Records whose `by` is null don't count. Of several, the earliest wins, or the latest.
    """

    def __init__(self, text: str, by: str, *, largest: bool, earliest: bool, name: str) -> None:
        super().__init__(check_input(name, text), check_input(f"{name}, by", by))
        self.largest = largest
        self.earliest = earliest
        self._name = name

    @property
    def function(self) -> str:
        return self._name

    @property
    def label(self) -> str:
        return f"{self._name}({self.inputs[0]}, by {self.inputs[1]})"

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return Accumulator("value", self.types[0]), Accumulator("by", self.types[1])

    @property
    def result_type(self) -> pa.DataType:
        if not is_orderable(self.types[1]):
            raise wrong_type(self, "by= a number, a text or a time", f"; {self.inputs[1]!r} has no order")
        return self.types[0]

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        valid = valid_of(inputs[1])
        value, by = inputs
        if valid is not None:
            keep = pa.array(valid)
            rows, value, by = rows[valid], value.filter(keep), by.filter(keep)
        if not len(rows):
            return
        groups = grouped(rows)
        best = winners(ranks_of(by), groups.of, len(groups.rows), largest=self.largest, earliest=self.earliest)
        chosen = pa.array(best)
        value, by = value.take(chosen), by.take(chosen)
        better = self._better(vectors["by"], groups.rows, values_of(by))
        valid = valid_of(value)
        rows = groups.rows[better]
        put(vectors["value"], rows, values_of(value)[better], None if valid is None else valid[better])
        put(vectors["by"], rows, values_of(by)[better], None)

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        source = other["by"]
        there = is_set(source, other_rows)
        rows, other_rows = rows[there], other_rows[there]
        better = self._better(vectors["by"], rows, source.values[other_rows])
        rows, other_rows = rows[better], other_rows[better]
        for name in ("value", "by"):
            assign(vectors[name], rows, other[name], other_rows)

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return result_of(vectors["value"], rows, self.types[0])

    @property
    def combines(self) -> bool:
        return True

    def singles(self, inputs: Sequence[pa.Array], count: int) -> Sequence[pa.Array]:
        return inputs  # where `by` is null, the value is of no account

    def _better(self, held: Vector, rows: IntArray, values: npt.NDArray[Any]) -> BoolArray:
        """Return where a later value takes the place of the one that is held."""
        there, before = is_set(held, rows), held.values[rows]
        found: BoolArray
        if values.dtype.kind == "O":
            found = np.zeros(len(rows), bool)
            for index in np.flatnonzero(there).tolist():
                new, old = values[index], before[index]
                found[index] = (new > old if self.largest else new < old) or (new == old and not self.earliest)
        else:
            new, old = order_of(values), order_of(before)
            found = new > old if self.largest else new < old
            if not self.earliest:
                found |= new == old
        return found | ~there


class Arrived(Aggregate):
    """The first or the last value to arrive. Nulls count, unless they are ignored."""

    def __init__(self, text: str, *, latest: bool, ignore_nulls: bool) -> None:
        super().__init__(check_input("last" if latest else "first", text))
        self.latest = latest
        self.ignores_nulls = ignore_nulls

    @property
    def function(self) -> str:
        return "last" if self.latest else "first"

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return Accumulator("value", self.types[0]), Accumulator("seen", pa.bool_(), False)

    @property
    def result_type(self) -> pa.DataType:
        return self.types[0]

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        column = inputs[0]
        if self.ignores_nulls:
            rows, (column,) = without_nulls(rows, column)
        if not len(rows):
            return
        seen = vectors["seen"].values
        groups = grouped(rows)
        rows, chosen = groups.rows, groups.last() if self.latest else groups.first
        if not self.latest:
            fresh = ~seen[rows]
            rows, chosen = rows[fresh], chosen[fresh]
        column = column.take(pa.array(chosen))
        put(vectors["value"], rows, values_of(column), valid_of(column))
        seen[rows] = True

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        take = other["seen"].values[other_rows]
        seen = vectors["seen"].values
        if not self.latest:
            take = take & ~seen[rows]
        rows, other_rows = rows[take], other_rows[take]
        assign(vectors["value"], rows, other["value"], other_rows)
        seen[rows] = True

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return result_of(vectors["value"], rows, self.types[0])

    @property
    def combines(self) -> bool:
        return True

    def singles(self, inputs: Sequence[pa.Array], count: int) -> Sequence[pa.Array]:
        seen = valid_of(inputs[0]) if self.ignores_nulls else None
        return [inputs[0], pa.array(np.ones(count, bool) if seen is None else seen)]


class Logical(Extreme):
    """Whether any value is true, or all are. True is larger than false."""

    @property
    def result_type(self) -> pa.DataType:
        if not pa.types.is_boolean(self.types[0]):
            raise wrong_type(self, "a condition", "; compare it with something")
        return pa.bool_()


def winners(
    ranks: npt.NDArray[np.int64], groups: IntArray, count: int, *, largest: bool, earliest: bool
) -> npt.NDArray[np.int64]:
    """Return the index of the record with the largest (or smallest) rank of each group. Every group has records."""
    best = ranks[first_of(groups, count)]
    (np.maximum if largest else np.minimum).at(best, groups, ranks)
    hits = np.flatnonzero(ranks == best[groups])
    return hits[(first_of if earliest else last_of)(groups[hits], count)]
