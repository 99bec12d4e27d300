"""Aggregates that choose one value: min, max, min_by, max_by, first and last, any and all.

Each looks for a batch's winner of every row with whole columns, and compares only the winners with what the rows hold.

Of two accumulators that are merged, the other one is the later one. That isn't so for panes and sessions. There, those that
go by the order of arrival are numbered: the number of the chosen record is kept beside its value. State that was written
before there were numbers has -1, which is before all others.

Numbers are ordered as by Spark: NaN is larger than any other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.dataflow.aggregates.base import (
    NUMBER,
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
    copy_rows,
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


class _ByArrival(Aggregate):
    """What those have in common whose choice depends on which record arrived first or last."""

    _latest: bool
    _is_numbered = False

    def numbered(self) -> Self:
        one = copy.copy(self)
        one._is_numbered = True
        return one

    @property
    def _number(self) -> Sequence[Accumulator]:
        return (Accumulator(NUMBER, pa.int64(), -1),) if self._is_numbered else ()

    def _note(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array], chosen: IntArray) -> None:
        """Keep the numbers of the records that were chosen."""
        if self._is_numbered:
            vectors[NUMBER].values[rows] = inputs[-1].to_numpy()[chosen]

    def _gives_way(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> BoolArray:
        """Return where the record of another table takes the place of the one that is held, if they differ in their arrival
        only."""
        if not self._is_numbered:
            return np.full(len(rows), self._latest)
        new, old = other[NUMBER].values[other_rows], vectors[NUMBER].values[rows]
        found: BoolArray = new >= old if self._latest else new < old
        return found


class ChosenBy(_ByArrival):
    """The value of the record with the largest or smallest other value: min_by, max_by, first and last by a column.

    Records whose `by` is null don't count. Of several, the earliest wins, or the latest.
    """

    def __init__(self, text: str, by: str, *, largest: bool, earliest: bool, name: str) -> None:
        super().__init__(check_input(name, text), check_input(f"{name}, by", by))
        self.largest = largest
        self.earliest = earliest
        self._latest = not earliest
        self._name = name

    @property
    def function(self) -> str:
        return self._name

    @property
    def label(self) -> str:
        return f"{self._name}({self.inputs[0]}, by {self.inputs[1]})"

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return Accumulator("value", self.types[0]), Accumulator("by", self.types[1]), *self._number

    @property
    def result_type(self) -> pa.DataType:
        if not is_orderable(self.types[1]):
            raise wrong_type(self, "by= a number, a text or a time", f"; {self.inputs[1]!r} has no order")
        return self.types[0]

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        valid = valid_of(inputs[1])
        if valid is not None:
            keep = pa.array(valid)
            rows, inputs = rows[valid], [each.filter(keep) for each in inputs]
        if not len(rows):
            return
        value, by = inputs[:2]
        groups = grouped(rows)
        best = winners(ranks_of(by), groups.of, len(groups.rows), largest=self.largest, earliest=self.earliest)
        chosen = pa.array(best)
        value, by = value.take(chosen), by.take(chosen)
        better = self._better(vectors["by"], groups.rows, values_of(by), np.full(len(best), self._latest))
        valid = valid_of(value)
        rows = groups.rows[better]
        put(vectors["value"], rows, values_of(value)[better], None if valid is None else valid[better])
        put(vectors["by"], rows, values_of(by)[better], None)
        self._note(vectors, rows, inputs, best[better])

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        source = other["by"]
        there = is_set(source, other_rows)
        rows, other_rows = rows[there], other_rows[there]
        at_ties = self._gives_way(vectors, rows, other, other_rows)
        better = self._better(vectors["by"], rows, source.values[other_rows], at_ties)
        copy_rows(vectors, rows[better], other, other_rows[better])

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return result_of(vectors["value"], rows, self.types[0])

    @property
    def combines(self) -> bool:
        return True

    def singles(self, inputs: Sequence[pa.Array], count: int) -> Sequence[pa.Array]:
        return inputs  # where `by` is null, the value is of no account

    def _better(self, held: Vector, rows: IntArray, values: npt.NDArray[Any], at_ties: BoolArray) -> BoolArray:
        """Return where a value takes the place of the one that is held. `at_ties`: whether it does if it is equal."""
        there, before = is_set(held, rows), held.values[rows]
        found: BoolArray
        if values.dtype.kind == "O":
            found = np.zeros(len(rows), bool)
            for index in np.flatnonzero(there).tolist():
                new, old = values[index], before[index]
                found[index] = (new > old if self.largest else new < old) or (new == old and at_ties[index])
        else:
            new, old = order_of(values), order_of(before)
            found = new > old if self.largest else new < old
            found |= (new == old) & at_ties
        return found | ~there


class Arrived(_ByArrival):
    """The first or the last value to arrive. Nulls count, unless they are ignored."""

    def __init__(self, text: str, *, latest: bool, ignore_nulls: bool) -> None:
        super().__init__(check_input("last" if latest else "first", text))
        self.latest = self._latest = latest
        self.ignores_nulls = ignore_nulls

    @property
    def function(self) -> str:
        return "last" if self.latest else "first"

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return Accumulator("value", self.types[0]), Accumulator("seen", pa.bool_(), False), *self._number

    @property
    def result_type(self) -> pa.DataType:
        return self.types[0]

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        if self.ignores_nulls:
            rows, inputs = without_nulls(rows, *inputs)
        if not len(rows):
            return
        seen = vectors["seen"].values
        groups = grouped(rows)
        rows, chosen = groups.rows, groups.last() if self.latest else groups.first
        if not self.latest:
            fresh = ~seen[rows]
            rows, chosen = rows[fresh], chosen[fresh]
        column = inputs[0].take(pa.array(chosen))
        put(vectors["value"], rows, values_of(column), valid_of(column))
        seen[rows] = True
        self._note(vectors, rows, inputs, chosen)

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        gives_way = self._gives_way(vectors, rows, other, other_rows) | ~vectors["seen"].values[rows]
        take = other["seen"].values[other_rows] & gives_way
        copy_rows(vectors, rows[take], other, other_rows[take])

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
