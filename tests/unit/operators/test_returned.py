"""What a user's function may return in place of a list of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from tidegate.dataflow.operators.returned import taker
from tidegate.errors import SchemaError


class Result:
    """As a database gives it: rows to iterate over, and the names of their columns."""

    columns = ("n",)

    def __iter__(self) -> Iterator[tuple[int]]:
        return iter([(1,), (2,)])


class Frame(pd.DataFrame):
    """As libraries derive their own."""


def taken(given: Any) -> list[Any]:
    out: list[Any] = []
    taker(lambda: given, out)(given)
    return out


def test_rows_that_know_their_columns_are_rows() -> None:
    assert taken(Result()) == [(1,), (2,)]


@pytest.mark.parametrize("given", [
    pd.DataFrame({"n": [5]}), Frame({"n": [5]}), pa.table({"n": [5]}), pa.record_batch({"n": [5]}),
])
def test_a_single_table_is_not_rows(given: Any) -> None:
    with pytest.raises(SchemaError, match=rf"returned one {type(given).__name__}, and not several rows"):
        taken(given)
