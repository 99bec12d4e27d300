"""Aggregates that add up: count, sum, mean, variance and standard deviation.

A sum of whole numbers is a long and never wraps around: if it may not fit, it is added up again with Python's integers, and
`SumTooLarge` is raised if it doesn't. Variances are kept as count, mean and the sum of squared distances from the mean, and
merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979), so
that large means cost no digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.dataflow.aggregates.base import (
    Accumulator,
    Aggregate,
    IntArray,
    SumTooLarge,
    Vector,
    Vectors,
    check_input,
    wrong_type,
)
from tidegate.dataflow.aggregates.numpy_columns import (
    column_of,
    grouped,
    is_set,
    numbers_of,
    objects_of,
    only,
    result_of,
    valid_of,
    without_nulls,
)
from tidegate.types import ddl_of

LONG_MAX = 2**63 - 1
_MAX_DIGITS = 38
EXACT = Context(prec=2 * _MAX_DIGITS)


class Count(Aggregate):
    """The number of records, or of values that are not null."""

    def __init__(self, *inputs: str) -> None:
        super().__init__(*(check_input("count", each) for each in inputs))

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return (Accumulator("count", pa.int64(), 0),)

    @property
    def result_type(self) -> pa.DataType:
        return pa.int64()

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        valid = valid_of(inputs[0]) if inputs else None
        np.add.at(only(vectors).values, rows if valid is None else rows[valid], 1)

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        np.add.at(only(vectors).values, rows, only(other).values[other_rows])

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return pa.array(only(vectors).values[rows], pa.int64())

    @property
    def combines(self) -> bool:
        return True

    @property
    def merges_repeated(self) -> bool:
        return True

    def singles(self, inputs: Sequence[pa.Array], count: int) -> Sequence[pa.Array]:
        return [_counts(inputs[0] if inputs else None, count)]


class Sum(Aggregate):
    """The sum of the values that are not null; null if there are none."""

    def __init__(self, text: str) -> None:
        super().__init__(check_input("sum", text))

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return (Accumulator("sum", self.result_type),)

    @property
    def result_type(self) -> pa.DataType:
        return sum_type(self)

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        rows, (values,) = without_nulls(rows, *inputs)
        if len(rows):
            _add_to(only(vectors), rows, values, self.result_type)

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        source = only(other)
        there = is_set(source, other_rows)
        if not there.all():
            rows, other_rows = rows[there], other_rows[there]
        if len(rows):
            values = column_of(source.values.take(other_rows), None, self.result_type)
            _add_to(only(vectors), rows, values, self.result_type)

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return result_of(only(vectors), rows, self.result_type)

    @property
    def combines(self) -> bool:
        return _combines(self.types[0])

    @property
    def merges_repeated(self) -> bool:
        return True

    def fits(self, inputs: Sequence[pa.Array], count: int) -> bool:
        if not pa.types.is_int64(inputs[0].type):
            return True
        values = numbers_of(inputs[0])
        return not len(values) or max(int(values.max()), -int(values.min())) * count <= LONG_MAX

    def singles(self, inputs: Sequence[pa.Array], count: int) -> Sequence[pa.Array]:
        return [inputs[0].cast(self.result_type)]


class Mean(Aggregate):
    """The mean of the values that are not null; null if there are none."""

    def __init__(self, text: str) -> None:
        super().__init__(check_input("mean", text))

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return Accumulator("sum", self._sum_type), Accumulator("count", pa.int64(), 0)

    @property
    def result_type(self) -> pa.DataType:
        kind = self._sum_type
        if not pa.types.is_decimal(kind):
            return kind
        given = self.types[0]
        return pa.decimal128(min(_MAX_DIGITS, given.precision + 4), min(_MAX_DIGITS, given.scale + 4))

    @property
    def _sum_type(self) -> pa.DataType:
        kind = sum_type(self)
        return pa.float64() if pa.types.is_int64(kind) else kind

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        rows, (values,) = without_nulls(rows, *inputs)
        if len(rows):
            _add_to(vectors["sum"], rows, values, self._sum_type)
            np.add.at(vectors["count"].values, rows, 1)

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        there = other["count"].values[other_rows] > 0
        rows, other_rows = rows[there], other_rows[there]
        if len(rows):
            values = column_of(other["sum"].values[other_rows], None, self._sum_type)
            _add_to(vectors["sum"], rows, values, self._sum_type)
            np.add.at(vectors["count"].values, rows, other["count"].values[other_rows])

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        counts = vectors["count"].values[rows]
        sums = vectors["sum"].values[rows]
        there = counts > 0
        kind = self.result_type
        if not pa.types.is_decimal(kind):
            return pa.array(sums / np.maximum(counts, 1), kind, mask=~there)
        unit = Decimal(1).scaleb(-kind.scale)
        means = [
            EXACT.divide(total, int(count)).quantize(unit, ROUND_HALF_UP, EXACT) if count else None
            for total, count in zip(sums, counts.tolist(), strict=True)
        ]
        return column_of(objects_of(means), None, kind)

    @property
    def combines(self) -> bool:
        return _combines(self.types[0])

    @property
    def merges_repeated(self) -> bool:
        return True

    def singles(self, inputs: Sequence[pa.Array], count: int) -> Sequence[pa.Array]:
        # A long is rounded to a double, as where sums are added up.
        return [inputs[0].cast(self._sum_type, safe=False), _counts(inputs[0], count)]


class Variance(Aggregate):
    """The variance of the values that are not null: of a sample (null for fewer than two values), or of the population."""

    def __init__(self, text: str, *, population: bool, root: bool) -> None:
        super().__init__(check_input("stddev" if root else "variance", text))
        self._population = population
        self._root = root

    @property
    def function(self) -> str:
        return "variance"  # the state is the same

    @property
    def label(self) -> str:
        return f"{'stddev' if self._root else 'variance'}{'_pop' if self._population else ''}({self.inputs[0]})"

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        kind = pa.float64()
        return Accumulator("count", pa.int64(), 0), Accumulator("mean", kind, 0.0), Accumulator("squares", kind, 0.0)

    @property
    def result_type(self) -> pa.DataType:
        sum_type(self)
        return pa.float64()

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        rows, (column,) = without_nulls(rows, *inputs)
        groups = grouped(rows)
        size = len(groups.rows)
        values = doubles(column)
        counts = np.bincount(groups.of, minlength=size)
        means = np.bincount(groups.of, values, size) / counts
        distances = values - means[groups.of]
        self._combine(vectors, groups.rows, counts, means, np.bincount(groups.of, distances * distances, size))

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        counts = other["count"].values[other_rows]
        there = counts > 0
        rows, other_rows = rows[there], other_rows[there]
        self._combine(vectors, rows, counts[there], other["mean"].values[other_rows], other["squares"].values[other_rows])

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        degrees = vectors["count"].values[rows] - (0 if self._population else 1)
        found = vectors["squares"].values[rows] / np.maximum(degrees, 1)
        return pa.array(np.sqrt(found) if self._root else found, pa.float64(), mask=degrees <= 0)

    @property
    def combines(self) -> bool:
        return True

    @staticmethod
    def _combine(
        vectors: Vectors, rows: IntArray, counts: IntArray, means: npt.NDArray[Any], squares: npt.NDArray[Any]
    ) -> None:
        had, mean = vectors["count"].values, vectors["mean"].values
        before = had[rows]
        both = before + counts
        with np.errstate(invalid="ignore", over="ignore"):  # of infinite values, as in Spark
            apart = means - mean[rows]
            mean[rows] += apart * (counts / both)
            vectors["squares"].values[rows] += squares + apart * apart * (before * (counts / both))
        had[rows] = both


def sum_type(aggregate: Aggregate) -> pa.DataType:
    """Return the type of a sum of the aggregate's input."""
    (kind,) = aggregate.types
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(_MAX_DIGITS, kind.precision + 10), kind.scale)
    text = aggregate.inputs[0]
    raise wrong_type(aggregate, "a number", f"; convert it, such as CAST({text} AS DOUBLE)")


def _combines(kind: pa.DataType) -> bool:
    """Return whether sums of parts fit their type whenever that of all does: decimals have 10 digits more for the sum, which
    are enough for as many records as are ever held, unless there was no room for these digits."""
    return not pa.types.is_decimal(kind) or bool(kind.precision + 10 <= _MAX_DIGITS)


def _counts(column: pa.Array | None, count: int) -> pa.Array:
    """Return for each record whether it counts, as 1 or 0."""
    valid = None if column is None else valid_of(column)
    return pa.array(np.ones(count, np.int64) if valid is None else valid.astype(np.int64))


def doubles(column: pa.Array) -> npt.NDArray[np.float64]:
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    return numbers_of(column).astype(np.float64)


def _add_to(vector: Vector, rows: IntArray, column: pa.Array, kind: pa.DataType) -> None:
    """Add values without nulls to a vector of sums that is null where nothing was added."""
    there = is_set(vector, rows)
    if not there.all():
        fresh = rows[~there]
        vector.values[fresh] = Decimal(0) if pa.types.is_decimal(kind) else 0
        if vector.valid is not None:
            vector.valid[fresh] = True
    if pa.types.is_decimal(kind):
        _add_decimals(vector.values, rows, column.to_pylist(), kind)
    elif pa.types.is_floating(kind):
        np.add.at(vector.values, rows, doubles(column))
    else:
        _add_longs(vector.values, rows, numbers_of(column))


def _add_longs(sums: npt.NDArray[Any], rows: IntArray, values: IntArray) -> None:
    held = sums.take(rows)
    highest = max(int(held.max()), -int(held.min())) + len(rows) * max(int(values.max()), -int(values.min()), 0)
    if highest > LONG_MAX:  # perhaps: no single sum need be that large
        exact: dict[int, int] = {}
        for row, value in zip(rows.tolist(), values.tolist(), strict=True):
            total = exact[row] = exact.get(row, int(sums[row])) + value
            if not -LONG_MAX <= total + 1 <= LONG_MAX + 1:
                raise SumTooLarge(row, f"the sum {total} doesn't fit into a long; sum a decimal(38, 0) or a double")
    np.add.at(sums, rows, values.astype(np.int64, copy=False))


def _add_decimals(sums: npt.NDArray[Any], rows: IntArray, values: Sequence[Decimal], kind: pa.DataType) -> None:
    limit = Decimal(1).scaleb(kind.precision - kind.scale)
    add = EXACT.add
    for row, value in zip(rows.tolist(), values, strict=True):
        total = sums[row] = add(sums[row], value)
        if abs(total) >= limit:
            raise SumTooLarge(row, f"the sum {total} doesn't fit into a {ddl_of(kind)}; sum a double")
