"""What a user's function may return in place of a list of rows."""

from __future__ import annotations

import functools
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


class Frame(pd.DataFrame):  # type: ignore[misc]
    """As libraries derive their own."""


def taken(given: Any) -> list[Any]:
    out: list[Any] = []
    taker(lambda: given, out)(given)
    return out


def test_rows_that_know_their_columns_are_rows() -> None:
    assert taken(Result()) == [(1,), (2,)]


@pytest.mark.parametrize(
    "given",
    [
        pd.DataFrame({"n": [5]}),
        Frame({"n": [5]}),
        pa.table({"n": [5]}),
        pa.record_batch({"n": [5]}),
    ],
)
def test_a_single_table_is_not_rows(given: Any) -> None:
    with pytest.raises(SchemaError, match=rf"returned one {type(given).__name__}, and not several rows"):
        taken(given)


def halfway(n: int) -> Any:
    """As it looks when half of a function has been changed."""
    if n % 2 == 0:
        return [(n,)]
    yield (n,)


def only_rows(n: int) -> Any:
    if n < 0:
        return
    yield (n,)


def test_what_a_generator_returns_beside_its_rows_is_an_error_and_not_lost() -> None:
    out: list[Any] = []
    take = taker(halfway, out)
    take(halfway(1))
    assert out == [(1,)]
    with pytest.raises(SchemaError, match=r"halfway returned \[\(2,\)\] and has a `yield` elsewhere.*`yield row`"):
        take(halfway(2))


class Method:
    halfway = staticmethod(halfway)

    def process(self, n: int) -> Any:
        yield (n,)
        return (n,) if n else None


def test_a_generator_is_looked_through_only_if_it_may_return_something() -> None:
    out: list[Any] = []
    assert taker(only_rows, out) == out.extend
    for function in (Method().process, functools.partial(Method().process), Method.halfway):
        assert taker(function, out) != out.extend
    take = taker(Method().process, out)
    take(Method().process(0))
    with pytest.raises(SchemaError, match="process returned"):
        take(Method().process(1))
