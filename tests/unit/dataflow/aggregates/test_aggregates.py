"""Every aggregate against plain Python: records of some keys, cut into batches and merged from parts, in any way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.dataflow.aggregates import plain
from tidegate.dataflow.aggregates import collecting
from tidegate.dataflow.aggregates import declaring as tg
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import Aggregate, SumTooLarge
from tidegate.dataflow.aggregates.numpy_columns import held_vectors
from tidegate.errors import SchemaError

KEYS = 4
COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "whole": (pa.int64(), st.integers(-1000, 1000)),
    "small": (pa.int16(), st.integers(-5, 5)),
    "real": (pa.float64(), st.sampled_from([-1.5, 0.0, 0.25, 3.0, 1e6])),
    "odd": (pa.float64(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.5])),
    "text": (pa.string(), st.sampled_from(["", "a", "ä", "b", "🌊", "￿"])),
    "flag": (pa.bool_(), st.booleans()),
    "money": (pa.decimal128(10, 2), st.integers(-10_000, 10_000).map(lambda cents: Decimal(cents).scaleb(-2))),
    "time": (pa.timestamp("us", "UTC"), st.integers(0, 100).map(lambda second: datetime.fromtimestamp(second, UTC))),
    "parts": (pa.list_(pa.int64()), st.lists(st.integers(0, 2), max_size=2)),
}
SCHEMA = pa.schema([pa.field(name, kind) for name, (kind, _) in COLUMNS.items()])

of_column = {
    "count": (tg.count, lambda values: len(plain.present(values)), [*COLUMNS]),
    "sum": (tg.sum_, plain.total, ["whole", "small", "real", "money"]),
    "mean": (tg.mean, plain.mean, ["whole", "small", "real"]),
    "decimal mean": (tg.mean, lambda values: plain.decimal_mean(values, scale=6), ["money"]),
    "variance": (tg.variance, plain.variance, ["whole", "small", "real"]),
    "min": (tg.min_, plain.smallest, ["whole", "small", "real", "odd", "text", "flag", "money", "time"]),
    "max": (tg.max_, plain.largest, ["whole", "small", "real", "odd", "text", "flag", "money", "time"]),
    "any": (tg.any_, plain.largest, ["flag"]),
    "all": (tg.all_, plain.smallest, ["flag"]),
    "first": (tg.first, lambda values: next(iter(values), None), [*COLUMNS]),
    "last": (tg.last, lambda values: next(reversed(values), None), [*COLUMNS]),
    "first known": (
        lambda column: tg.first(column, ignore_nulls=True),
        lambda values: next(iter(plain.present(values)), None),
        [*COLUMNS],
    ),
    "collect_list": (tg.collect_list, plain.present, [*COLUMNS]),
    "collect_set": (tg.collect_set, plain.distinct, ["whole", "real", "text", "flag", "money", "time"]),
    "approx_count_distinct": (
        tg.approx_count_distinct,
        lambda values: len(plain.distinct(values)),
        ["whole", "small", "text", "flag", "money", "time"],
    ),
    "count_distinct": (tg.count_distinct, lambda values: len(plain.distinct(values)), ["whole", "text", "money", "time"]),
}
CASES = [
    pytest.param(
        make(column), [column], lambda rows, plainly=plainly: plainly([row[0] for row in rows]), id=f"{what}({column})"
    )
    for what, (make, plainly, columns) in of_column.items()
    for column in columns
] + [
    pytest.param(make(column, by=by), [column, by], plainly, id=f"{what}({column}, {by})")
    for what, make, plainly in (
        ("min_by", tg.min_by, lambda rows: plain.chosen(rows, min)),
        ("max_by", tg.max_by, lambda rows: plain.chosen(rows, max)),
        ("first", tg.first, lambda rows: plain.chosen(rows, min)),
        ("last", tg.last, lambda rows: plain.chosen(rows, max, latest=True)),
    )
    for column, by in (("text", "small"), ("whole", "odd"), ("whole", "text"), ("flag", "time"), ("parts", "money"))
]


def batch(records: Sequence[Sequence[Any]], columns: Sequence[str]) -> pa.RecordBatch:
    """The records hold a key and the values of these columns; the others are null."""
    return pa.record_batch(
        [
            pa.array(
                [row[1 + columns.index(field.name)] for row in records] if field.name in columns else [None] * len(records),
                field.type,
            )
            for field in SCHEMA
        ],
        schema=SCHEMA,
    )


def keys_of(records: Sequence[Sequence[Any]]) -> Any:
    return np.array([row[0] for row in records], np.int32)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float | int):
        return one == other or (one != one and other != other) or math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    return bool(one == other)


@pytest.mark.parametrize(("aggregate", "columns", "plainly"), CASES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_an_aggregate_is_what_plain_python_computes_however_records_are_cut_and_merged(
    aggregate: Aggregate, columns: list[str], plainly: Callable[[list[Any]], Any], data: st.DataObject
) -> None:
    check(aggregate, columns, plainly, data)


def check(aggregate: Aggregate, columns: list[str], plainly: Callable[[list[Any]], Any], data: st.DataObject) -> None:
    record = st.tuples(st.integers(0, KEYS - 1), *(st.none() | COLUMNS[column][1] for column in columns))
    parts = data.draw(st.lists(st.lists(st.lists(record, max_size=8), max_size=3), min_size=1, max_size=3))
    aggregation = Aggregation("test", {"x": aggregate}, SCHEMA)
    everyone = np.arange(KEYS)
    whole = held_vectors(aggregation.accumulators, KEYS)
    for part in parts:
        vectors = held_vectors(aggregation.accumulators, KEYS)
        for records in part:
            aggregation.add(vectors, keys_of(records), aggregation.inputs(batch(records, columns)))
        aggregation.merge(whole, everyone, vectors, everyone)
    (found,) = aggregation.results(whole, everyone)
    assert found.type == aggregation.fields[0].type
    in_order = [row for part in parts for records in part for row in records]
    for key, value in enumerate(found.to_pylist()):
        expected = plainly([tuple(row[1:]) for row in in_order if row[0] == key])
        assert same(value, expected), (key, value, expected)


@pytest.mark.parametrize(
    ("aggregate", "columns", "plainly"),
    [case for case in CASES if str(case.id).startswith(("collect_set", "count_distinct"))],
)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_distinct_values_are_the_same_if_an_index_finds_them(
    aggregate: Aggregate, columns: list[str], plainly: Callable[[list[Any]], Any], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collecting, "MANY", data.draw(st.sampled_from([1, 3])))
        check(aggregate, columns, plainly, data)


def one_key(aggregate: Aggregate, column: pa.Array) -> Any:
    aggregation = Aggregation("test", {"x": aggregate}, pa.schema([pa.field("x", column.type)]))
    vectors = held_vectors(aggregation.accumulators, 1)
    aggregation.add(vectors, np.zeros(len(column), np.int32), [column])
    return aggregation.results(vectors, np.array([0]))[0][0].as_py()


def test_a_sum_of_longs_that_fits_exactly_is_exact() -> None:
    assert one_key(tg.sum_("x"), pa.array([2**62, 2**62 - 1, -5, 5])) == 2**63 - 1
    assert one_key(tg.sum_("x"), pa.array([-(2**62), -(2**62)])) == -(2**63)


@pytest.mark.parametrize("values", [[2**63 - 1, 1], [-(2**63), -1]])
def test_a_sum_that_does_not_fit_into_a_long_is_an_error_and_never_wraps(values: list[int]) -> None:
    with pytest.raises(SumTooLarge, match="doesn't fit into a long") as raised:
        one_key(tg.sum_("x"), pa.array(values))
    assert raised.value.row == 0


def test_a_sum_that_does_not_fit_into_a_decimal_is_an_error() -> None:
    column = pa.array([Decimal(9).scaleb(37)] * 2, pa.decimal128(38, 0))
    with pytest.raises(SumTooLarge, match=r"doesn't fit into a decimal\(38,0\)"):
        one_key(tg.sum_("x"), column)


def test_a_variance_keeps_its_digits_when_the_mean_is_large() -> None:
    assert one_key(tg.variance("x"), pa.array([1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16])) == 30.0


@pytest.mark.parametrize("many", [1, collecting.MANY])
def test_nan_is_one_value_and_so_is_zero_with_any_sign(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MANY", many)
    column = pa.array([math.nan, 0.0, None, math.nan, -0.0])
    assert one_key(tg.count_distinct("x"), column) == 2
    assert math.isnan(one_key(tg.max_("x"), column)) and one_key(tg.min_("x"), column) == 0


def test_collected_values_of_a_frozen_version_do_not_change() -> None:
    aggregation = Aggregation("test", {"x": tg.collect_set("x")}, pa.schema([pa.field("x", pa.int64())]))
    vectors = held_vectors(aggregation.accumulators, 1)
    frozen = []
    for number in range(50):
        aggregation.add(vectors, np.array([0, 0]), [pa.array([number, number // 2])])
        frozen.append(vectors["x_collect_set"].values[0])
    assert [each.tolist() for each in frozen] == [list(range(number + 1)) for number in range(50)]


def test_two_rows_with_the_same_collected_values_grow_apart() -> None:
    aggregation = Aggregation("test", {"x": tg.collect_list("x")}, pa.schema([pa.field("x", pa.int64())]))
    vectors = held_vectors(aggregation.accumulators, 2)
    aggregation.add(vectors, np.array([0]), [pa.array([1])])
    held = vectors["x_collect_list"].values
    held[1] = held[0]
    aggregation.add(vectors, np.array([0, 1]), [pa.array([2, 3])])
    assert aggregation.results(vectors, np.array([0, 1]))[0].to_pylist() == [[1, 2], [1, 3]]


@pytest.mark.parametrize(
    ("aggregate", "error"),
    [
        (tg.sum_("text"), r"x: sum\(text\): takes a number, and 'text' is of type string; convert it, such as CAST"),
        (tg.mean("flag"), r"mean\(flag\): takes a number"),
        (tg.min_("parts"), r"min\(parts\): takes a number, a text or a time"),
        (tg.max_by("whole", by="parts"), "'parts' has no order"),
        (tg.any_("whole"), r"any\(whole\): takes a condition"),
        (tg.sum_("wohle"), "x=sum.wohle.: .*unknown column 'wohle' .did you mean 'whole'"),
    ],
)
def test_an_aggregate_of_the_wrong_type_is_refused_when_the_job_is_built(aggregate: Aggregate, error: str) -> None:
    with pytest.raises(SchemaError, match=error):
        Aggregation("operator 'a'", {"x": aggregate}, SCHEMA)
