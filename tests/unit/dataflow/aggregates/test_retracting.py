"""Aggregates that take records back give what the same aggregates give for the records that are left."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidegate as tg
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import SumTooLarge
from tidegate.dataflow.aggregates.numpy_columns import held_vectors
from tidegate.errors import GraphError

KEYS = 3
SCHEMA = pa.schema(
    [
        ("whole", pa.int64()),
        ("real", pa.float64()),
        ("money", pa.decimal128(10, 2)),
        ("flag", pa.bool_()),
        ("text", pa.string()),
    ]
)
NAMED = {
    "rows": tg.count(),
    "known": tg.count("real"),
    "total": tg.sum("whole"),
    "real_total": tg.sum("real"),
    "money_total": tg.sum("money"),
    "mean": tg.mean("whole"),
    "real_mean": tg.mean("real"),
    "money_mean": tg.mean("money"),
    "variance": tg.variance("real"),
    "stddev": tg.stddev("whole", population=True),
    "any": tg.any("flag"),
    "all": tg.all("flag"),
    "low": tg.min("whole"),
    "high": tg.max("real"),
    "real_low": tg.min("real"),
    "cheapest": tg.min("money"),
    "last_text": tg.max("text"),
    "any_flag": tg.min("flag"),
    "of_highest": tg.max_by("whole * 2", by="whole"),
    "of_lowest": tg.min_by("text", by="text"),
    "of_real": tg.max_by("real", by="real"),
    "newest": tg.last("money", by="money"),
    "oldest": tg.first("flag", by="flag"),
    "numbers": tg.collect_list("whole"),
    "texts": tg.collect_list("text"),
}
records = st.tuples(
    st.none() | st.integers(-5, 5),
    st.none() | st.sampled_from([0.25, -1.5, 3.0, math.nan, math.inf, -math.inf]),
    st.none() | st.integers(-500, 500).map(lambda cents: Decimal(cents).scaleb(-2)),
    st.none() | st.booleans(),
    st.none() | st.sampled_from(["a", "b"]),
)
# Each step: the records of a batch with their keys, and how many of the earlier ones are taken back.
steps = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, KEYS - 1), records), max_size=6), st.integers(0, 6), st.randoms()),
    max_size=6,
)


def batch_of(rows: list[Any]) -> pa.RecordBatch:
    columns = [pa.array([row[index] for row in rows], field.type) for index, field in enumerate(SCHEMA)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def results_of(aggregation: Aggregation, vectors: Any) -> list[list[Any]]:
    return [column.to_pylist() for column in aggregation.results(vectors, np.arange(KEYS))]


def alike(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return sorted(found) == sorted(wanted)
    if isinstance(wanted, float) and found is not None:
        return math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9) or (found != found and wanted != wanted)
    return bool(found == wanted)


@settings(max_examples=120, deadline=None)
@given(steps)
def test_what_is_taken_back_leaves_no_trace(given_steps: list[Any]) -> None:
    retracting, plain = Aggregation("test", NAMED, SCHEMA, retracting=True), Aggregation("test", NAMED, SCHEMA)
    parts = [held_vectors(retracting.accumulators, KEYS) for _ in range(2)]
    left: list[Any] = []
    for number, (added, taken, random) in enumerate(given_steps):
        left += added
        random.shuffle(left)
        back, left = left[:taken], left[taken:]
        batch = [(1, each) for each in added] + [(-1, each) for each in back]
        if not batch:
            continue
        rows = np.array([key for _, (key, _) in batch])
        inputs = retracting.inputs(batch_of([record for _, (_, record) in batch]))
        retracting.change(parts[number % 2] if not back else parts[0], rows, inputs, np.array([sign for sign, _ in batch]))
        if back or number % 2 == 0:
            continue
        retracting.merge(parts[0], np.arange(KEYS), parts[1], np.arange(KEYS))
        parts[1] = held_vectors(retracting.accumulators, KEYS)
    retracting.merge(parts[0], np.arange(KEYS), parts[1], np.arange(KEYS))
    wanted = held_vectors(plain.accumulators, KEYS)
    if left:
        plain.add(wanted, np.array([key for key, _ in left]), plain.inputs(batch_of([record for _, record in left])))
    found = results_of(retracting, parts[0])
    for name, mine, theirs in zip(NAMED, found, results_of(plain, wanted), strict=True):
        if name == "variance":  # of infinite values, Welford's method gives NaN or nothing by the order; ours NaN
            theirs = [float("nan") if value is not None and not math.isfinite(value) else value for value in theirs]
        assert all(map(alike, mine, theirs)), f"{name}: {mine}, not {theirs}"


def test_a_sum_that_is_too_large_only_in_between_is_right() -> None:
    aggregation = Aggregation("test", {"total": tg.sum("whole"), "money": tg.sum("money")}, SCHEMA, retracting=True)
    vectors = held_vectors(aggregation.accumulators, 1)
    rows = [(2**62, None, None, None, None), (2**62, None, None, None, None), (-(2**63), None, None, None, None)]
    inputs = aggregation.inputs(batch_of([*rows, rows[0]]))
    aggregation.change(vectors, np.zeros(4, np.int64), inputs, np.array([1, 1, 1, -1]))
    assert aggregation.results(vectors, np.array([0]))[0].to_pylist() == [-(2**62)]
    with pytest.raises(SumTooLarge, match="doesn't fit into a long"):
        aggregation.change(vectors, np.zeros(1, np.int64), aggregation.inputs(batch_of(rows[2:])), np.array([1]))


def test_the_next_value_by_arrival_takes_the_place_of_one_that_is_taken_back() -> None:
    named = {
        "first": tg.first("whole"),
        "last": tg.last("whole"),
        "known": tg.last("whole", ignore_nulls=True),
        "of_first": tg.max_by("whole", by="flag"),
        "of_last": tg.last("whole", by="flag"),
    }
    aggregation = Aggregation("test", named, SCHEMA, retracting=True)
    vectors = held_vectors(aggregation.accumulators, 1)
    rows = [(whole, None, None, True, None) for whole in (1, 2, None, 3, None)]

    def changed(some: list[Any], sign: int) -> list[Any]:
        inputs = aggregation.inputs(batch_of(some))
        aggregation.change(vectors, np.zeros(len(some), np.int64), inputs, np.full(len(some), sign))
        return [column.to_pylist()[0] for column in aggregation.results(vectors, np.array([0]))]

    assert changed(rows, 1) == [1, None, 3, 1, None]
    assert changed(rows[4:], -1) == [1, None, 3, 1, None], "of two that are equal, the one that arrived first"
    assert changed(rows[:1], -1) == [2, None, 3, 2, None]
    assert changed(rows[3:4], -1) == [2, None, 2, 2, None], "a null is a value"
    assert changed(rows[1:3], -1) == [None] * 5


@pytest.mark.parametrize(
    ("aggregate", "advice"),
    [
        (tg.approx_count_distinct("text"), "use count, sum, mean"),
        (tg.collect_set("text"), r"aggregate by the value first, key_by\(…, 'text'\)"),
        (tg.count_distinct("text"), r"aggregate by the value first, key_by\(…, 'text'\)"),
    ],
)
def test_an_aggregate_that_can_not_take_records_back_is_refused_with_advice(aggregate: tg.Aggregate, advice: str) -> None:
    with pytest.raises(GraphError, match=f"operator 'x', a=.*: it can't take a record back.*{advice}.*as_append"):
        Aggregation("operator 'x'", {"a": aggregate}, SCHEMA, retracting=True)


class Longest(tg.Aggregate):
    """An aggregate of a user that can take records back: the total length of texts."""

    @property
    def accumulators(self) -> Any:
        return (tg.Accumulator("length", pa.int64(), 0),)

    @property
    def result_type(self) -> pa.DataType:
        return pa.int64()

    def add(self, vectors: Any, rows: Any, inputs: Any) -> None:
        np.add.at(vectors["length"].values, rows, [len(text) for text in inputs[0].to_pylist()])

    def retract(self, vectors: Any, rows: Any, inputs: Any) -> None:
        np.subtract.at(vectors["length"].values, rows, [len(text) for text in inputs[0].to_pylist()])

    def merge(self, vectors: Any, rows: Any, other: Any, other_rows: Any) -> None:
        vectors["length"].values[rows] += other["length"].values[other_rows]

    def result(self, vectors: Any, rows: Any) -> pa.Array:
        return pa.array(vectors["length"].values[rows])


def test_a_users_aggregate_with_retract_is_taken() -> None:
    aggregation = Aggregation("test", {"length": Longest("text")}, SCHEMA, retracting=True)
    vectors = held_vectors(aggregation.accumulators, 2)
    rows = [(None, None, None, None, text) for text in ("abc", "de", "abc")]
    aggregation.change(vectors, np.array([0, 1, 0]), aggregation.inputs(batch_of(rows)), np.array([1, 1, -1]))
    assert aggregation.results(vectors, np.arange(2))[0].to_pylist() == [0, 2]
