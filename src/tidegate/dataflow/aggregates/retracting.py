"""Aggregates that can take a record back: count, sum, mean, variance, min, max, any, all, collect_list, and those that
choose a value: min_by, max_by, first and last.

`retractable(aggregate)` returns the form of an aggregate that also knows what it needs for that, such as how many values
are in a sum, so that the sum is null again when the last one is taken back. NaN and infinite values are counted, and not
added up, so that they go away again too. The rest of a sum of floating-point numbers may keep differences in its last
digits from numbers that were taken back; it is 0 again when no number is left.

Those that choose a value keep all of them, since any may be next, in the order in which they arrived. A deletion takes out
the first one that is equal: of records that differ in other columns only, it doesn't say which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.dataflow.aggregates.base import Accumulator, Aggregate, BoolArray, IntArray, SumTooLarge, Vectors
from tidegate.dataflow.aggregates.choosing import Arrived, ChosenBy, Extreme, Logical
from tidegate.dataflow.aggregates.collecting import Collected, CollectList, identities_of
from tidegate.dataflow.aggregates.numpy_columns import (
    column_of,
    grouped,
    numbers_of,
    objects_of,
    only,
    order_of,
    ranks,
    without_nulls,
)
from tidegate.dataflow.aggregates.summing import EXACT, LONG_MAX, Count, Mean, Sum, Variance, doubles, sum_type
from tidegate.types import ddl_of, from_list

_LONG, _DOUBLE = pa.int64(), pa.float64()
_ODD = ("nans", "infinite", "negative_infinite")


def retractable(aggregate: Aggregate) -> Aggregate | None:
    """Return the form of a bound aggregate that can take records back, or None if there is none."""
    form = _FORMS.get(type(aggregate))
    if form is not None:
        return form(aggregate)
    return aggregate if type(aggregate).retract is not Aggregate.retract else None


class _Form(Aggregate):
    """An aggregate with another state and the same results."""

    def __init__(self, of: Aggregate) -> None:
        super().__init__(*of.inputs)
        self.types = of.types
        self._of = of

    @property
    def label(self) -> str:
        return self._of.label

    @property
    def function(self) -> str:
        return self._of.function

    @property
    def result_type(self) -> pa.DataType:
        return self._of.result_type

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        self.change(vectors, rows, inputs, np.ones(len(rows), np.int64))

    def retract(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        self.change(vectors, rows, inputs, np.full(len(rows), -1))


class _CountForm(_Form):
    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return self._of.accumulators

    def change(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array], signs: IntArray) -> None:
        if inputs:
            rows, signs, _ = _known(rows, signs, inputs[0])
        np.add.at(vectors["count"].values, rows, signs)

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        self._of.merge(vectors, rows, other, other_rows)

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return self._of.result(vectors, rows)


class _SumForm(_Form):
    """The sum, and of how many values. `Mean` has the same state."""

    @property
    def _sum_type(self) -> pa.DataType:
        kind = sum_type(self)
        return _DOUBLE if isinstance(self._of, Mean) and pa.types.is_int64(kind) else kind

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        kind = self._sum_type
        zero = Decimal(0) if pa.types.is_decimal(kind) else 0.0 if pa.types.is_floating(kind) else 0
        odd = _ODD if pa.types.is_floating(kind) else ()
        return (
            Accumulator("sum", kind, zero),
            Accumulator("count", _LONG, 0),
            *(Accumulator(name, _LONG, 0) for name in odd),
        )

    def change(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array], signs: IntArray) -> None:
        rows, signs, column = _known(rows, signs, inputs[0])
        if not len(rows):
            return
        kind, sums, counts = self._sum_type, vectors["sum"].values, vectors["count"].values
        np.add.at(counts, rows, signs)
        if pa.types.is_decimal(kind):
            _change_decimals(sums, rows, column.to_pylist(), signs, kind)
        elif pa.types.is_floating(kind):
            values = _change_odd(vectors, rows, doubles(column), signs)
            np.add.at(sums, rows, values * signs)
            sums[rows[counts[rows] == 0]] = 0.0
        else:
            _change_longs(sums, rows, numbers_of(column), signs)

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        kind = self._sum_type
        sums, others = vectors["sum"].values, other["sum"].values[other_rows]
        ones = np.ones(len(rows), np.int64)
        if pa.types.is_decimal(kind):
            _change_decimals(sums, rows, others.tolist(), ones, kind)
        elif pa.types.is_floating(kind):
            sums[rows] += others
        else:
            _change_longs(sums, rows, others, ones)
        for name in vectors.keys() - {"sum"}:
            vectors[name].values[rows] += other[name].values[other_rows]

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        counts, sums = vectors["count"].values[rows], vectors["sum"].values[rows]
        kind = self._sum_type
        if pa.types.is_floating(kind):
            sums = _with_odd(sums, vectors, rows)
        if isinstance(self._of, Mean):
            return self._of.result({"sum": _Values(sums), "count": _Values(counts)}, np.arange(len(rows)))
        if pa.types.is_decimal(kind):
            return column_of(
                objects_of([each if count else None for each, count in zip(sums, counts, strict=True)]), None, kind
            )
        return column_of(sums, counts > 0, kind)


class _VarianceForm(_Form):
    """Count, mean and squares of the finite values, as in summing.py. A value is taken out as it was put in, backwards."""

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return (*self._of.accumulators, *(Accumulator(name, _LONG, 0) for name in _ODD))

    def change(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array], signs: IntArray) -> None:
        rows, signs, column = _known(rows, signs, inputs[0])
        values = doubles(column)
        _change_odd(vectors, rows, values, signs)
        finite = np.isfinite(values)
        rows, signs, values = rows[finite], signs[finite], values[finite]
        added, taken = signs > 0, signs < 0
        if added.any():
            self._of.add(self._inner(vectors), rows[added], [pa.array(values[added])])
        if taken.any():
            self._take_out(vectors, rows[taken], values[taken])

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        self._of.merge(self._inner(vectors), rows, self._inner(other), other_rows)
        for name in _ODD:
            vectors[name].values[rows] += other[name].values[other_rows]

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        odd = sum(vectors[name].values[rows] for name in _ODD)
        counts = vectors["count"].values[rows]
        squares = np.where(odd > 0, np.nan, np.maximum(vectors["squares"].values[rows], 0.0))
        held = {"count": _Values(counts + odd), "squares": _Values(squares)}
        return self._of.result(held, np.arange(len(rows)))

    def _inner(self, vectors: Vectors) -> Vectors:
        return {each.name: vectors[each.name] for each in self._of.accumulators}

    def _take_out(self, vectors: Vectors, rows: IntArray, values: npt.NDArray[np.float64]) -> None:
        groups = grouped(rows)
        size = len(groups.rows)
        counts = np.bincount(groups.of, minlength=size)
        means = np.bincount(groups.of, values, size) / counts
        distances = values - means[groups.of]
        squares = np.bincount(groups.of, distances * distances, size)
        held, mean, total = (vectors[name].values for name in ("count", "mean", "squares"))
        both, both_mean = held[groups.rows], mean[groups.rows]
        left = both - counts
        some = np.maximum(left, 1)
        left_mean = np.where(left > 0, (both_mean * both - means * counts) / some, 0.0)
        apart = means - left_mean
        with np.errstate(divide="ignore", invalid="ignore"):
            left_squares = total[groups.rows] - squares - apart * apart * left * counts / np.maximum(both, 1)
        held[groups.rows] = left
        mean[groups.rows] = left_mean
        total[groups.rows] = np.where(left > 1, np.maximum(left_squares, 0.0), 0.0)


class _LogicalForm(_Form):
    """How many values are true, and how many false."""

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return Accumulator("true", _LONG, 0), Accumulator("false", _LONG, 0)

    def change(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array], signs: IntArray) -> None:
        rows, signs, column = _known(rows, signs, inputs[0])
        is_true = numbers_of(column).astype(bool)
        np.add.at(vectors["true"].values, rows[is_true], signs[is_true])
        np.add.at(vectors["false"].values, rows[~is_true], signs[~is_true])

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        for name, vector in vectors.items():
            vector.values[rows] += other[name].values[other_rows]

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        has_true, has_false = (vectors[name].values[rows] > 0 for name in ("true", "false"))
        return pa.array(has_true if self.function == "any" else ~has_false, mask=~(has_true | has_false))


class _CollectListForm(_Form):
    """All values. The first of those that are equal is taken out, in a time that grows with the list."""

    def __init__(self, of: Aggregate) -> None:
        super().__init__(of)
        self._list = CollectList(of.inputs[0])
        self._list.types = of.types

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return self._list.accumulators

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        self._list.add(vectors, *self._listed(rows, inputs))

    def retract(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        taken: Vectors = {"collect_list": _Values(np.full(int(rows.max(initial=-1)) + 1, None, object))}
        rows, listed = self._listed(rows, inputs)
        self._list.add(taken, rows, listed)  # by row, what is to be taken out
        held, out = vectors["collect_list"].values, taken["collect_list"].values
        kind = self._list.dtype
        for row in np.unique(rows).tolist():
            if out[row] is not None and held[row] is not None:
                values = np.asarray(Collected.of(held[row], kind))
                held[row] = Collected.made(values[_left(values, np.asarray(out[row]))])

    def change(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array], signs: IntArray) -> None:
        Aggregate.change(self, vectors, rows, inputs, signs)

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        self._list.merge(vectors, rows, other, other_rows)

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return self._list.result(vectors, rows)

    def _listed(self, rows: IntArray, inputs: Sequence[pa.Array]) -> tuple[IntArray, Sequence[pa.Array]]:
        """Return what is kept in the list, and of which rows."""
        return rows, inputs


class _ChosenByForm(_CollectListForm):
    """The value of the record with the largest or smallest other value, among all pairs of the two."""

    def __init__(self, of: ChosenBy) -> None:
        super().__init__(of)
        self._chosen = of
        value, by = of.types
        self._list.types = (pa.struct([pa.field("value", value), pa.field("by", by)]),)

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return _values_of([self._best(each) for each in only(vectors).values[rows]], self.types[0])

    def _best(self, pairs: Sequence[Any] | None) -> Any:
        if pairs is None or not len(pairs):
            return None
        # Of equal ones, `max` and `min` return the first.
        choose = max if self._chosen.largest else min
        return choose(pairs if self._chosen.earliest else list(pairs)[::-1], key=_order_of_pair)

    def _listed(self, rows: IntArray, inputs: Sequence[pa.Array]) -> tuple[IntArray, Sequence[pa.Array]]:
        places, (by,) = without_nulls(np.arange(len(rows)), inputs[1])
        return rows[places], [_struct([inputs[0].take(pa.array(places)), by], self._list.types[0])]


class _ArrivedForm(_CollectListForm):
    """The first or last of all values, in the order of their arrival. Each is in a struct, so that nulls are kept too."""

    def __init__(self, of: Arrived) -> None:
        super().__init__(of)
        self._arrived = of
        self._list.types = (pa.struct([pa.field("value", of.types[0])]),)

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        place, held = -1 if self._arrived.latest else 0, only(vectors).values[rows]
        return _values_of([None if each is None or not len(each) else each[place] for each in held], self.types[0])

    def _listed(self, rows: IntArray, inputs: Sequence[pa.Array]) -> tuple[IntArray, Sequence[pa.Array]]:
        if self._arrived.ignores_nulls:
            places, inputs = without_nulls(np.arange(len(rows)), *inputs)
            rows = rows[places]
        return rows, [_struct(inputs, self._list.types[0])]


class _ExtremeForm(_CollectListForm):
    """The largest or smallest of all values: each of them may be next."""

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        kind = self._list.dtype
        held = vectors["collect_list"].values[rows]
        best = [None if each is None else self._best(np.asarray(Collected.of(each, kind))) for each in held]
        return from_list(best, self.result_type)

    def _best(self, values: npt.NDArray[Any]) -> Any:
        if not len(values):
            return None
        is_largest = self.function == "max"
        if values.dtype.kind == "O":
            return max(values) if is_largest else min(values)
        order = order_of(values)
        return values[order.argmax() if is_largest else order.argmin()].item()


def _struct(columns: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    return pa.StructArray.from_arrays(list(columns), fields=list(kind))


def _values_of(structs: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return the values in these structs."""
    return from_list([None if each is None else each["value"] for each in structs], kind)


def _order_of_pair(pair: Any) -> tuple[bool, Any]:
    """Return what pairs are ordered by: NaN is larger than any number."""
    by = pair["by"]
    return (True, 0) if by != by else (False, by)


def _left(values: npt.NDArray[Any], out: npt.NDArray[Any]) -> BoolArray:
    """Return which values are left when others are taken out, of equal ones the first."""
    if values.dtype.kind == "O":
        counts = Counter(identities_of(out))
        keep = np.ones(len(values), bool)
        for place, identity in enumerate(identities_of(values)):
            if counts[identity]:
                counts[identity] -= 1
                keep[place] = False
        return keep
    wanted, times = np.unique(order_of(out), return_counts=True)
    codes = order_of(values)
    near = np.minimum(np.searchsorted(wanted, codes), len(wanted) - 1)
    hits = np.flatnonzero(wanted[near] == codes)
    gone = hits[ranks(near[hits]) < times[near[hits]]]
    kept = np.ones(len(values), bool)
    kept[gone] = False
    return kept


_FORMS: Mapping[type[Aggregate], Callable[[Any], Aggregate]] = {
    Count: _CountForm,
    Sum: _SumForm,
    Mean: _SumForm,
    Variance: _VarianceForm,
    Extreme: _ExtremeForm,
    ChosenBy: _ChosenByForm,
    Arrived: _ArrivedForm,
    Logical: _LogicalForm,
    CollectList: _CollectListForm,
}


class _Values:
    """A vector outside any state."""

    __slots__ = ("valid", "values")

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values
        self.valid: BoolArray | None = None


def _known(rows: IntArray, signs: IntArray, column: pa.Array) -> tuple[IntArray, IntArray, pa.Array]:
    """Return the records in which the value is not null."""
    places, (column,) = without_nulls(np.arange(len(rows)), column)
    return rows[places], signs[places], column


def _change_odd(
    vectors: Vectors, rows: IntArray, values: npt.NDArray[np.float64], signs: IntArray
) -> npt.NDArray[np.float64]:
    """Count NaN and infinite values, and return the values with zeros in their places."""
    finite = np.isfinite(values)
    if finite.all():
        return values
    for name, here in zip(_ODD, (np.isnan(values), np.isposinf(values), np.isneginf(values)), strict=True):
        np.add.at(vectors[name].values, rows[here], signs[here])
    return np.where(finite, values, 0.0)


def _with_odd(sums: npt.NDArray[np.float64], vectors: Vectors, rows: IntArray) -> npt.NDArray[np.float64]:
    nans, above, below = (vectors[name].values[rows] > 0 for name in _ODD)
    sums = np.where(above, np.inf, np.where(below, -np.inf, sums))
    return np.where(nans | (above & below), np.nan, sums)


def _change_longs(sums: npt.NDArray[Any], rows: IntArray, values: IntArray, signs: IntArray) -> None:
    held = sums[rows]
    highest = max(int(held.max()), -int(held.min())) + len(rows) * max(int(values.max()), -int(values.min()))
    if highest > LONG_MAX:  # perhaps: no single sum need be that large
        exact: dict[int, int] = {}
        for row, value, sign in zip(rows.tolist(), values.tolist(), signs.tolist(), strict=True):
            exact[row] = exact.get(row, int(sums[row])) + sign * value
        for row, total in exact.items():
            if not -LONG_MAX - 1 <= total <= LONG_MAX:
                raise SumTooLarge(row, f"the sum {total} doesn't fit into a long; sum a decimal(38, 0) or a double")
    np.add.at(sums, rows, values.astype(np.int64, copy=False) * signs)  # modulo 2**64, as the sums in between


def _change_decimals(
    sums: npt.NDArray[Any], rows: IntArray, values: Sequence[Decimal], signs: IntArray, kind: pa.DataType
) -> None:
    for row, value, sign in zip(rows.tolist(), values, signs.tolist(), strict=True):
        sums[row] = EXACT.add(sums[row], value) if sign > 0 else EXACT.subtract(sums[row], value)
    limit = Decimal(1).scaleb(kind.precision - kind.scale)
    for row in np.unique(rows).tolist():
        if abs(sums[row]) >= limit:
            raise SumTooLarge(row, f"the sum {sums[row]} doesn't fit into a {ddl_of(kind)}; sum a double")
