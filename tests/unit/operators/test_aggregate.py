"""Keyed aggregates by themselves: what comes out, record by record and batch by batch, and what a restore finds again."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidegate as tg
from tests.unit.operators.harness import Bench, Restored
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.operators.aggregate import AggregateSpec, RunningSpec
from tidegate.errors import UserFunctionError
from tidegate.types import parse_schema

RECORD = "k string, n long, x double"
ALL = {
    "count": tg.count(),
    "known": tg.count("n"),
    "total": tg.sum("n"),
    "low": tg.min("n"),
    "high": tg.max("x"),
    "first": tg.first("n"),
    "last": tg.last("n"),
    "top": tg.max_by("n", by="x"),
    "all": tg.collect_list("n"),
    "kinds": tg.count_distinct("n"),
}
ALL_DDL = (
    "count long, known long, total long, low long, high double, first long, last long, top long, all array<long>, kinds long"
)

keys = st.none() | st.sampled_from(["a", "b", "c"])
records = st.tuples(keys, st.none() | st.integers(-3, 3), st.none() | st.sampled_from([0.5, 1.5, 2.5]))
batches = st.lists(st.lists(records, min_size=1, max_size=12), max_size=6)


def aggregate(
    kind: Any, named: dict[str, tg.Aggregate], *, ttl_ms: int | None = None, restored: Restored | None = None
) -> Bench:
    aggregation = Aggregation("test", named, parse_schema(RECORD))
    ddl = {"count": "long", "sum": "long", "collect_list": "array<long>"}
    results = ALL_DDL if named is ALL else ", ".join(f"{name} {ddl[each.function]}" for name, each in named.items())
    before = "k string" if kind is AggregateSpec else RECORD
    return Bench(kind(aggregation, ("k",), ttl_ms), RECORD, returns=f"{before}, {results}", restored=restored)


def expected(history: list[Any]) -> tuple[Any, ...]:
    """The results of all aggregates over the records of one key."""
    known = [n for _, n, _ in history if n is not None]
    xs = [x for *_, x in history if x is not None]
    return (
        len(history),
        len(known),
        sum(known) if known else None,
        min(known, default=None),
        max(xs, default=None),
        history[0][1],
        history[-1][1],
        next((n for _, n, x in history if x is not None and x == max(xs)), None),
        known,
        len(set(known)),
    )


@settings(max_examples=60, deadline=None)
@given(batches)
def test_each_batch_gives_the_new_result_of_each_key_that_it_has(given_batches: list[list[Any]]) -> None:
    bench = aggregate(AggregateSpec, ALL)
    history: dict[Any, list[Any]] = defaultdict(list)
    for batch in given_batches:
        for record in batch:
            history[record[0]].append(record)
        changed = dict.fromkeys(record[0] for record in batch)
        assert bench.feed(*batch) == [(key, *expected(history[key])) for key in changed]


@settings(max_examples=60, deadline=None)
@given(batches)
def test_running_aggregates_are_those_of_all_records_up_to_each_one(given_batches: list[list[Any]]) -> None:
    bench = aggregate(RunningSpec, ALL)
    history: dict[Any, list[Any]] = defaultdict(list)
    for batch in given_batches:
        wanted = []
        for record in batch:
            history[record[0]].append(record)
            wanted.append((*record, *expected(history[record[0]])))
        assert bench.feed(*batch) == wanted


@pytest.mark.parametrize("kind", [AggregateSpec, RunningSpec])
@settings(max_examples=40, deadline=None)
@given(before=batches, after=batches)
def test_a_restored_aggregate_gives_what_it_would_have_given_without_the_restart(
    kind: Any, before: list[list[Any]], after: list[list[Any]]
) -> None:
    whole, first = aggregate(kind, ALL), aggregate(kind, ALL)
    restored: Restored = {}
    for number, batch in enumerate(before):
        whole.feed(*batch)
        first.feed(*batch)
        restored = first.freeze(number + 1)
    second = aggregate(kind, ALL, restored=restored)
    for batch in after:
        assert second.feed(*batch) == whole.feed(*batch)


def test_a_version_that_was_frozen_before_more_records_came_does_not_have_them() -> None:
    bench = aggregate(AggregateSpec, {"total": tg.sum("n"), "all": tg.collect_list("n")})
    bench.feed(("a", 1, None), ("a", 2, None))
    frozen = bench.operator.freeze(1)
    bench.feed(("a", 3, None), ("b", 4, None))
    assert frozen is not None
    (rows,) = [section.rows.to_pylist() for section in frozen.sections()]
    assert rows == [{"key": "a", "value": {"total_sum": 3, "all_collect_list": [1, 2]}}]


@pytest.mark.parametrize("kind", [AggregateSpec, RunningSpec])
def test_a_sum_that_is_too_large_names_the_operator_and_the_key(kind: Any) -> None:
    bench = aggregate(kind, {"total": tg.sum("n")})
    bench.feed(("a", 2**62, None), ("b", 1, None))
    with pytest.raises(UserFunctionError, match=r"the operator.*(?s:.)*doesn't fit into a long") as raised:
        bench.feed(("b", 1, None), ("a", 2**62, None))
    assert "key 'a'" in str(raised.value)
    assert raised.value.final, "no restart makes it fit"
    assert "Traceback" not in str(raised.value)


def test_running_sums_that_fit_are_right_when_parts_of_them_would_not_fit() -> None:
    bench = aggregate(RunningSpec, {"total": tg.sum("n")})
    bench.feed(("a", -(2**62), None))
    given_rows = [("a", 2**62, None), ("a", 2**62, None), ("b", 1, None), ("a", -1, None)]
    assert [row[-1] for row in bench.feed(*given_rows)] == [0, 2**62, 1, 2**62 - 1]


@pytest.mark.parametrize("kind", [AggregateSpec, RunningSpec])
def test_a_key_begins_again_when_no_record_has_come_for_the_ttl(kind: Any) -> None:
    bench = aggregate(kind, {"nth": tg.count()}, ttl_ms=1000)
    bench.clock.now_ms = 5000
    bench.feed(("a", 1, None), ("b", 1, None))
    bench.clock.now_ms = 5999
    assert [row[-1] for row in bench.feed(("a", 1, None))] == [2]
    bench.clock.now_ms = 6500
    assert [row[-1] for row in bench.feed(("a", 1, None), ("b", 1, None))] == [3, 1]


def test_what_the_ttl_has_ended_is_removed_between_batches() -> None:
    bench = aggregate(AggregateSpec, {"nth": tg.count()}, ttl_ms=1000)
    bench.clock.now_ms = 5000
    bench.feed(*((f"key {number}", 1, None) for number in range(100)))
    bench.clock.now_ms = 5500
    bench.feed(("key 7", 1, None))
    bench.clock.now_ms = 6200
    for _ in range(20):
        bench.operator.maintain(10)
    (rows,) = bench.freeze()["aggregates"]
    assert rows.column("key").to_pylist() == ["key 7"]


def test_keys_from_before_there_was_a_ttl_are_kept_for_one_ttl() -> None:
    first = aggregate(AggregateSpec, {"nth": tg.count()}, ttl_ms=1000)
    first.feed(("a", 1, None), ("b", 1, None))  # at the time 0, as if it were not known
    bench = aggregate(AggregateSpec, {"nth": tg.count()}, ttl_ms=1000, restored=first.freeze())
    bench.clock.now_ms = 5000
    assert bench.feed(("a", 1, None)) == [("a", 2)]
    bench.operator.maintain(10)
    bench.clock.now_ms = 5999
    bench.operator.maintain(10)
    assert bench.feed(("b", 1, None)) == [("b", 2)]
    bench.clock.now_ms = 6500
    bench.operator.maintain(10)
    assert bench.feed(("a", 1, None), ("b", 1, None)) == [("a", 1), ("b", 3)]


def test_a_key_of_several_columns_has_one_row_each() -> None:
    aggregation = Aggregation("test", {"n": tg.count()}, parse_schema("k string, n long"))
    bench = Bench(AggregateSpec(aggregation, ("k", "n"), None), "k string, n long", returns="k string, n long, count long")
    assert bench.feed(("a", 1), ("a", 2), ("b", None), ("a", 1)) == [("a", 1, 2), ("a", 2, 1), ("b", None, 1)]
    assert bench.feed(("b", None)) == [("b", None, 2)]


def test_aggregates_take_expressions() -> None:
    bench = aggregate(AggregateSpec, {"total": tg.sum("n * 2 + 1"), "many": tg.count("nullif(n, 1)")})
    assert bench.feed(("a", 1, None), ("a", 5, None)) == [("a", 14, 1)]


def test_a_record_for_which_an_expression_has_no_value_is_shown() -> None:
    bench = aggregate(AggregateSpec, {"total": tg.sum("10 div n")})
    with pytest.raises(UserFunctionError) as raised:
        bench.feed(("a", 1, None), ("b", 0, 0.5), ("a", 5, None))
    assert "k='b', n=0, x=0.5" in str(raised.value.record)


@pytest.mark.parametrize("kind", [AggregateSpec, RunningSpec])
def test_columns_may_be_encoded_as_dictionaries(kind: Any) -> None:
    text = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([pa.field("k", text), pa.field("v", text)])
    aggregation = Aggregation("test", {"n": tg.count("v"), "top": tg.max("v"), "all": tg.collect_set("v")}, schema)
    out = [schema.field("k")] if kind is AggregateSpec else list(schema)
    bench = Bench(kind(aggregation, ("k",), None), schema, returns=pa.schema([*out, *aggregation.fields]))
    keys, values = pa.array(["a", "b", "a", None]), pa.array(["x", None, "y", "z"])
    batch = pa.record_batch([keys.dictionary_encode(), values.dictionary_encode()], schema=schema)
    bench.operator.on_batch(batch, 0)
    latest = {row[0]: row[-3:] for row in bench.out.rows}
    assert latest == {"a": (2, "y", ["x", "y"]), "b": (0, None, []), None: (1, "z", ["z"])}
