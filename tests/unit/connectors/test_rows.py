"""Rows held by the program, and the types that fit each other."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tidegate import sources
from tidegate.connectors.rows import fitted
from tidegate.dataflow.contracts import SourceContext
from tidegate.errors import JobError, RestoreError, SchemaError


def _context(subtask: int = 0, parallelism: int = 1, **restored: int) -> SourceContext:
    return SourceContext(subtask, parallelism, {key.replace("_", "-"): n for key, n in restored.items()}, lambda: 0)


def test_one_split_is_read_by_one_subtask_in_order() -> None:
    source = sources.rows([(i, str(i)) for i in range(5)], "n long, s string")
    first, second = source.open(_context(0, 2)), source.open(_context(1, 2))
    batch = first.poll(10)
    assert batch is not None
    assert batch.column("n").to_pylist() == [0, 1, 2, 3, 4]
    assert batch.column("s").to_pylist() == ["0", "1", "2", "3", "4"]
    assert first.finished
    assert second.finished
    assert source.bounded


def test_no_rows_are_no_records() -> None:
    reader = sources.rows([], "n long").open(_context())
    assert reader.finished
    assert reader.poll(10) is None


def test_a_row_that_doesnt_fit_is_found_when_the_source_is_built() -> None:
    with pytest.raises(SchemaError, match="n"):
        sources.rows([(1,), ("two",)], "n long")


def test_a_shorter_list_is_refused_at_a_restore() -> None:
    source = sources.rows([(1,), (2,)], "n long")
    with pytest.raises(RestoreError, match="only 2"):
        source.open(_context(split_0=3))


def test_a_longer_list_goes_on() -> None:
    batch = sources.rows([(1,), (2,), (3,)], "n long").open(_context(split_0=2)).poll(10)
    assert batch is not None
    assert batch.column("n").to_pylist() == [3]


def test_other_splits_are_refused_at_a_restore() -> None:
    with pytest.raises(RestoreError, match="splits"):
        sources.rows([(1,), (2,)], "n long", splits=2).open(_context(split_0=1))


def test_a_source_has_a_split() -> None:
    with pytest.raises(JobError, match="split"):
        sources.rows([(1,)], "n long", splits=0)


FITTING = [
    (pa.array([1, 2], pa.int8()), pa.int64()),
    (pa.array([1, 2], pa.uint32()), pa.int64()),
    (pa.array([1, 2], pa.int64()), pa.float64()),
    (pa.array([1.5], pa.float32()), pa.float64()),
    (pa.array(["a"], pa.large_string()), pa.string()),
    (pa.array(["a", "a"]).dictionary_encode(), pa.string()),
    (pa.array([b"a"], pa.large_binary()), pa.binary()),
    (pa.array([b"ab"], pa.binary(2)), pa.binary()),
    (pa.array([5], pa.timestamp("ms")), pa.timestamp("us", "UTC")),
    (pa.array([5000], pa.timestamp("ns", "Europe/Berlin")), pa.timestamp("us", "UTC")),
    (pa.array([0], pa.date64()), pa.date32()),
    (pa.array([None, None]), pa.string()),
    (pa.array([[1]], pa.list_(pa.field("element", pa.int32()))), pa.list_(pa.int64())),
    (pa.array([[1]], pa.large_list(pa.int64())), pa.list_(pa.int64())),
    (pa.array([{"a": 1}], pa.struct([("a", pa.int8())])), pa.struct([("a", pa.int64())])),
    (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())), pa.map_(pa.string(), pa.int64())),
    (pa.array(["1.5"]).cast(pa.decimal128(4, 1)), pa.decimal128(10, 2)),
]


@pytest.mark.parametrize(("column", "kind"), FITTING, ids=lambda x: str(getattr(x, "type", x)))
def test_a_column_fits_where_every_value_stays_what_it_is(column: pa.Array, kind: pa.DataType) -> None:
    into = fitted(column, pa.field("c", kind), where="here")
    assert into.type == kind
    assert len(into) == len(column)
    if not pa.types.is_timestamp(kind):
        assert into.to_pylist() == column.to_pylist()


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([1], pa.int64()), pa.int32()),
        (pa.array([1], pa.uint64()), pa.int64()),
        (pa.array([1.0]), pa.int64()),
        (pa.array(["1"]), pa.int64()),
        (pa.array([1]), pa.string()),
        (pa.array([True]), pa.int64()),
        (pa.array([1.0], pa.float64()), pa.float32()),
        (pa.array([b"a"]), pa.string()),
        (pa.array([1]), pa.timestamp("us")),
        (pa.array([1], pa.timestamp("us", "UTC")), pa.timestamp("us")),
        (pa.array([1]), pa.bool_()),
        (pa.array([["a"]]), pa.list_(pa.int64())),
        (pa.array([{"a": 1}]), pa.struct([("b", pa.int64())])),
        (pa.array(["1.25"]).cast(pa.decimal128(4, 2)), pa.decimal128(4, 1)),
        # The types fit, these values don't.
        (pa.array([2**60 + 1]), pa.float64()),
        (pa.array([1], pa.timestamp("ns")), pa.timestamp("us")),
        (pa.array(["99999.5"]).cast(pa.decimal128(10, 1)), pa.decimal128(5, 1)),
    ],
    ids=lambda x: str(getattr(x, "type", x)),
)
def test_a_column_that_would_change_is_refused(column: pa.Array, kind: Any) -> None:
    with pytest.raises(SchemaError, match="here: column 'c'"):
        fitted(column, pa.field("c", kind), where="here")
