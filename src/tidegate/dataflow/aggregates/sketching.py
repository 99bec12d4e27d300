"""Approximate distinct counts, by the HyperLogLog sketches of Apache DataSketches.

A row holds its sketch as bytes, in the library's own format, which is the same in all of its languages. Bytes never change,
so a frozen version needs no copy. A batch makes a sketch of a row's bytes once, adds the row's values by their hash (ours,
which is Spark's: so equal values are equal whatever their type's rules), and turns it into bytes again. A sketch of few
values is a list of them and nearly exact; it grows to about half a byte for each of its 2^lg_k places.

The relative standard error depends on `lg_k` only. Estimates depend a little on the order of the records, and on whether
sketches were merged, within that error.

Not here: exact counts (collecting.py). The library is an extra of the package, and imported when the first sketch is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate import arguments
from tidegate.dataflow.aggregates.base import Accumulator, Aggregate, IntArray, Vectors, check_input
from tidegate.dataflow.aggregates.numpy_columns import grouped, only, without_nulls
from tidegate.errors import JobError
from tidegate.hashing import hash_columns

NAME = "approx_count_distinct"
LEAST_LG_K, MOST_LG_K = 6, 18


class ApproxCountDistinct(Aggregate):
    """About how many distinct values there are that are not null."""

    def __init__(self, text: str, relative_error: float) -> None:
        super().__init__(check_input(NAME, text))
        self.lg_k = _lg_k(relative_error)

    @property
    def function(self) -> str:
        return NAME

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return (Accumulator(NAME, pa.binary()),)

    @property
    def result_type(self) -> pa.DataType:
        hash_columns([pa.array([], self.types[0])])  # raises `SchemaError` for maps
        return pa.int64()

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        rows, (column,) = without_nulls(rows, *inputs)
        groups = grouped(rows)
        hashes = hash_columns([column])[groups.order()].tolist()
        held, start = only(vectors).values, 0
        stops = np.cumsum(np.bincount(groups.of, minlength=len(groups.rows))).tolist()
        for row, stop in zip(groups.rows.tolist(), stops, strict=True):
            sketch = self._sketch(held[row])
            deque(map(sketch.update, hashes[start:stop]), maxlen=0)
            held[row] = sketch.serialize_compact()
            start = stop

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        held, others = only(vectors).values, only(other).values
        for row, other_row in zip(rows.tolist(), other_rows.tolist(), strict=True):
            if held[row] is None or others[other_row] is None:
                held[row] = held[row] if others[other_row] is None else others[other_row]
                continue
            union = _library().hll_union(self.lg_k)
            union.update(self._sketch(held[row]))
            union.update(self._sketch(others[other_row]))
            held[row] = union.get_result().serialize_compact()

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        held = only(vectors).values
        return pa.array([0 if held[row] is None else round(self._sketch(held[row]).get_estimate()) for row in rows.tolist()])

    def _sketch(self, held: bytes | None) -> Any:
        library = _library()
        return library.hll_sketch(self.lg_k) if held is None else library.hll_sketch.deserialize(held)


def _lg_k(relative_error: object) -> int:
    """Return how many places a sketch needs, as a power of two: those of merged sketches, which are less exact."""
    least = arguments.number(NAME, "relative_error", relative_error, at_least=0.0)
    error_of = _library().hll_sketch.get_rel_err
    found = next((lg_k for lg_k in range(LEAST_LG_K, MOST_LG_K + 1) if error_of(False, True, lg_k, 1) <= least), None)
    if found is None:
        arguments.refuse(NAME, "relative_error", relative_error, "0.003 or more, or use tg.count_distinct, which is exact")
    return found


def _library() -> Any:
    try:
        import datasketches
    except ImportError as error:
        raise JobError(
            "tg.approx_count_distinct needs the package datasketches, which is not installed: pip install "
            "'tidegate[sketches]', on the driver and on all executors"
        ) from error
    return datasketches
