"""In what order records are ranked: by columns, as whole numbers of which the smaller one is first.

The order of values is Spark's: null is smaller than any value, NaN is larger than any number, and -0.0 equals 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import IntArray
from tidegate.dataflow.aggregates.numpy_columns import numbers_of, order_of, valid_of
from tidegate.state.vectors import Vector

Codes: TypeAlias = "list[np.ndarray[Any, np.dtype[np.int64]]]"
_SMALLEST = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Ordering:
    """The columns to order by, and which of them are descending."""

    columns: tuple[str, ...]
    descending: tuple[bool, ...]

    @property
    def text(self) -> str:
        """What `explain` shows: price DESC, ts."""
        return ", ".join(
            f"{column} DESC" if down else column for column, down in zip(self.columns, self.descending, strict=True)
        )

    def codes(self, batch: pa.RecordBatch) -> Codes:
        """Return a code for each record and column."""
        arrays = [batch.column(column) for column in self.columns]
        return [_code(numbers_of(array), valid_of(array), down) for array, down in zip(arrays, self.descending, strict=True)]

    def codes_of_rows(self, vectors: Mapping[str, Vector], rows: IntArray) -> Codes:
        """Return the codes of rows of columnar state."""
        found: Codes = []
        for column, down in zip(self.columns, self.descending, strict=True):
            vector = vectors[column]
            found.append(_code(vector.values[rows], None if vector.valid is None else vector.valid[rows], down))
        return found


def sorted_order(groups: IntArray, codes: Codes) -> IntArray:
    """Return the indices in the order of groups, and within each of the codes. Equal ones keep their order."""
    return np.lexsort((*reversed(codes), groups))


def before(one: Codes, other: Codes) -> Any:
    """Return where the first codes come before the second ones. Equal ones don't."""
    found = np.zeros(len(one[0]), bool)
    for left, right in zip(reversed(one), reversed(other), strict=True):
        found = (left < right) | ((left == right) & found)
    return found


def taken(codes: Codes, indices: Any) -> Codes:
    """Return the codes at these indices."""
    return [each[indices] for each in codes]


def joined(parts: Sequence[Codes]) -> Codes:
    """Return the codes of several parts, one behind the other."""
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


def _code(values: Any, valid: Any, down: bool) -> Any:
    order = order_of(values)
    if valid is not None:
        order = np.where(valid, order, _SMALLEST)
    return ~order if down else order
