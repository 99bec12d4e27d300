"""Held values become columns, whatever they are held as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import SchemaError
from tidegate.state.columns import column_of

LISTS: list[Any] = [[1, 2, 3], None, [], [2**40], None, list(range(100))]


@pytest.mark.parametrize("element", ["int64", "int32", "int8", "float64"])
def test_lists_that_are_numpys_arrays_are_the_column_that_plain_lists_are(element: str) -> None:
    lists = [None if each is None else [value % 100 for value in each] for each in LISTS]
    kind = pa.list_(pa.from_numpy_dtype(np.dtype(element)))
    arrays = [None if each is None else np.array(each, element) for each in lists]
    for some in (slice(None), slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 0)):
        column = column_of(arrays[some], kind)
        column.validate(full=True)
        assert column.type == kind and column.equals(pa.array(lists[some], kind))


def test_arrays_of_other_numbers_than_the_type_says_are_checked_one_by_one() -> None:
    lists = [np.array([1, 2], np.int32), np.array([2**40], np.int64)]
    assert column_of(lists, pa.list_(pa.int64())).to_pylist() == [[1, 2], [2**40]]
    with pytest.raises(SchemaError):
        column_of(lists, pa.list_(pa.int32()))
