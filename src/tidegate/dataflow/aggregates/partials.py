"""Partial aggregates as records: what was aggregated before the exchange, in columns for the key and the accumulators.

A partial stands for one or more records of one key. It is merged into the table of the aggregate (`merge_partials`), behind
what the key has there.

Not here: how records become partials (operators/combine.py), and whether they should (combining.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import BoolArray, IntArray, SumTooLarge, Vectors
from tidegate.dataflow.aggregates.numpy_columns import (
    Groups,
    copy_rows,
    distinct_of,
    grouped,
    held_vectors,
    places_in,
    result_of,
    valid_of,
    values_of,
)

PARTIALS_PORT = 1
"""The port at which an aggregate takes partials. It takes records at port 0."""


@dataclass(frozen=True, slots=True)
class _ColumnVector:
    """A column of a batch as a vector that is only read."""

    values: npt.NDArray[Any]
    valid: BoolArray | None


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """The form of the partials of one aggregate: the columns `key`, and one for each accumulator."""

    aggregation: Aggregation
    key: tuple[str, ...]
    schema: pa.Schema

    @classmethod
    def of(cls, aggregation: Aggregation, key: tuple[str, ...], records: pa.Schema) -> Partials | None:
        """Return the form, or None if these aggregates have no partials: one of them needs the records, or a column of the
        key has the name of an accumulator, or is encoded as a dictionary, or the key is one struct, which a table splits
        into its fields."""
        names = {each.name for each in aggregation.accumulators}
        keys = [records.field(name) for name in key]
        if (
            not aggregation.combines
            or not names.isdisjoint(key)
            or any(pa.types.is_dictionary(field.type) for field in keys)
            or (len(keys) == 1 and pa.types.is_struct(keys[0].type))
        ):
            return None
        fields = [pa.field(each.name, each.type) for each in aggregation.accumulators]
        return cls(aggregation, key, pa.schema([*keys, *fields]))

    def batch(self, keys: Sequence[pa.Array], vectors: Vectors, rows: IntArray) -> pa.RecordBatch:
        """Return the partials in these rows of vectors, which have these keys."""
        columns = [result_of(vectors[each.name], rows, each.type) for each in self.aggregation.accumulators]
        return pa.RecordBatch.from_arrays([*keys, *columns], schema=self.schema)

    def singles(self, keys: Sequence[pa.Array], inputs: Sequence[pa.Array]) -> pa.RecordBatch:
        """Return a partial for each record of a batch."""
        return pa.RecordBatch.from_arrays([*keys, *self.aggregation.singles(inputs, len(keys[0]))], schema=self.schema)

    def vectors(self, batch: pa.RecordBatch) -> Vectors:
        """Return the accumulators of partials."""
        found = {}
        for each in self.aggregation.accumulators:
            values = values_of(column := batch.column(each.name))
            found[each.name] = _ColumnVector(values, None if values.dtype.kind == "O" else valid_of(column))
        return found


def merge_partials(
    aggregation: Aggregation, target: Vectors, rows: IntArray, partials: Vectors
) -> tuple[IntArray, IntArray]:
    """Merge partials into these rows of a table, in their order. Return the distinct rows, and where each is first."""
    distinct, first = distinct_of(rows)
    if len(distinct) == len(rows) or aggregation.merges_repeated:
        aggregation.merge(target, rows, partials, np.arange(len(rows)))
    else:
        _merge_repeated(aggregation, target, grouped(rows), partials)
    return distinct, first


def _merge_repeated(aggregation: Aggregation, target: Vectors, groups: Groups, partials: Vectors) -> None:
    """Merge partials into rows that repeat. The partials of such a row are merged with one another first, in pairs of
    neighbours, then in pairs of these, and so on. So a key that has n of them costs log2(n) merges of whole columns."""
    once = np.bincount(groups.of, minlength=len(groups.rows)) == 1
    repeated = np.flatnonzero(~once.take(groups.of))
    order = repeated[np.argsort(groups.of.take(repeated), kind="stable")]
    places = places_in(groups.of.take(order))
    try:
        joined = _joined(aggregation, partials, order, places)
    except SumTooLarge:  # of a part of the records, perhaps, and not of all up to one
        joined = None
    alone = np.flatnonzero(once)
    aggregation.merge(target, groups.rows.take(alone), partials, groups.first.take(alone))
    rows = groups.rows.take(groups.of.take(order))
    if joined is not None:
        heads = np.flatnonzero(places == 0)
        aggregation.merge(target, rows.take(heads), joined, heads)
        return
    for place in range(int(places.max()) + 1):
        here = np.flatnonzero(places == place)
        aggregation.merge(target, rows.take(here), partials, order.take(here))


def _joined(aggregation: Aggregation, partials: Vectors, order: IntArray, places: IntArray) -> Vectors:
    """Return copies of the partials in `order`, in which the first of each group has become all of its group."""
    joined = held_vectors(aggregation.accumulators, len(order))
    copy_rows(joined, np.arange(len(order)), partials, order)
    apart, most = 1, int(places.max())
    while apart <= most:
        later = np.flatnonzero(places % (2 * apart) == apart)
        aggregation.merge(joined, later - apart, joined, later)
        apart *= 2
    return joined
