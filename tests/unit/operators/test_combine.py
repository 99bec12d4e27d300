"""Aggregating before the exchange: two combining operators before an aggregate give what the aggregate alone gives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidegate as tg
from tests.unit.operators.harness import Bench
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.partials import PARTIALS_PORT, Partials
from tidegate.dataflow.operators.aggregate import AggregateSpec
from tidegate.dataflow.operators.combine import CombineLimits, CombineSpec
from tidegate.errors import SchemaError, UserFunctionError
from tidegate.types import parse_schema, rows_of

RECORD = "k string, n long, x double, t string"
ALL = {
    "count": (tg.count(), "long"),
    "known": (tg.count("n"), "long"),
    "total": (tg.sum("n"), "long"),
    "sum": (tg.sum("x"), "double"),
    "exact": (tg.sum("cast(n as decimal(9, 2))"), "decimal(19, 2)"),
    "mean": (tg.mean("n"), "double"),
    "spread": (tg.variance("n"), "double"),
    "low": (tg.min("n"), "long"),
    "high": (tg.max("x"), "double"),
    "word": (tg.max("t"), "string"),
    "all": (tg.all("n > 0"), "boolean"),
    "first": (tg.first("t"), "string"),
    "last": (tg.last("n"), "long"),
    "late": (tg.last("t", ignore_nulls=True), "string"),
    "top": (tg.max_by("t", by="n"), "string"),
    "low_by": (tg.min_by("n", by="x"), "long"),
}
LIMITS = CombineLimits(hold_ms=1000)

keys = st.none() | st.sampled_from(["a", "b", "c", "d"])
records = st.tuples(
    keys,
    st.none() | st.integers(-3, 3),
    st.none() | st.sampled_from([0.5, 1.5, 2.5, math.inf]),
    st.none() | st.sampled_from(["p", "q", "rr"]),
)
# A batch comes to one of two combining operators, or one of them emits what it holds.
events = st.lists(
    st.tuples(st.integers(0, 1), st.lists(records, min_size=1, max_size=9) | st.sampled_from(["lull", "snapshot", "time"])),
    max_size=8,
)
small_limits = st.builds(
    CombineLimits,
    hold_ms=st.just(1000),
    records=st.integers(1, 20),
    keys=st.integers(1, 5),
    enough_records=st.integers(1, 10),
    enough_per_key=st.integers(1, 4),
    least_passed=st.integers(1, 12),
    most_passed=st.just(20),
)


class Exchange:
    """Two combining operators in front of an aggregate, and the same aggregate without them."""

    def __init__(self, named: dict[str, Any], limits: CombineLimits = LIMITS, record: str = RECORD) -> None:
        schema = parse_schema(record)
        aggregation = Aggregation("test", {name: aggregate for name, (aggregate, _) in named.items()}, schema)
        partials = Partials.of(aggregation, ("k",), schema)
        assert partials is not None
        results = f"k {record.split()[1].rstrip(',')}, " + ", ".join(f"{name} {kind}" for name, (_, kind) in named.items())
        spec = AggregateSpec(aggregation, ("k",), None)
        self.alone, self.target = (Bench(spec, record, returns=results, name="totals") for _ in range(2))
        self.ways = [Bench(CombineSpec("totals", partials, limits, True), record, returns=partials.schema) for _ in range(2)]
        for way in self.ways:
            way.operator.consumers[:] = [_ToPartials(self.target)]

    def feed(self, *rows: Any, way: int = 0) -> list[Any]:
        before = len(self.target.out.rows)
        self.ways[way].feed(*rows)
        return self.target.out.rows[before:]

    def end(self) -> None:
        for way in self.ways:
            way.operator.before_snapshot()


class _ToPartials:
    def __init__(self, target: Bench) -> None:
        self.events: list[Any] = []
        self._target = target

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        batch.validate(full=True)
        self.events.append(("partials", *map(tuple, rows_of(batch))))
        self._target.operator.on_batch(batch, PARTIALS_PORT)

    def on_watermark(self, at_ms: int) -> None:
        self.events.append(("watermark", at_ms))

    def on_idle(self) -> None:
        self.events.append(("idle",))

    def on_end(self) -> None:
        self.events.append(("end",))


def last_of(rows: list[Any]) -> dict[Any, Any]:
    return {row[0]: tuple(rounded(value) for value in row[1:]) for row in rows}


def rounded(value: Any) -> Any:
    return round(value, 9) if isinstance(value, float) and math.isfinite(value) else str(value)


def kinds(exchange: Exchange) -> list[str]:
    return [event[0] for event in exchange.ways[0].operator.consumers[0].events]  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(events, small_limits)
def test_the_results_are_those_of_the_aggregate_alone(given_events: list[Any], limits: CombineLimits) -> None:
    # first and last depend on the order of arrival, which is determined for the records of one way only.
    exchange = Exchange(ALL, limits)
    for way, event in given_events:
        operator = exchange.ways[way].operator
        if event == "lull":
            operator.on_lull()
        elif event == "snapshot":
            operator.before_snapshot()
        elif event == "time":
            exchange.ways[way].clock.now_ms += 600
            if (at_ms := operator.deadline_ms()) is not None and at_ms <= exchange.ways[way].clock.now_ms:
                operator.on_time(exchange.ways[way].clock.now_ms)
        else:
            own = [(None if key is None else key + str(way), *rest) for key, *rest in event]
            if any(key is None for key, *_ in own):
                own = [(key or f"none{way}", *rest) for key, *rest in own]
            exchange.feed(*own, way=way)
            exchange.alone.feed(*own)
    exchange.end()
    assert last_of(exchange.target.out.rows) == last_of(exchange.alone.out.rows)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(records, min_size=1, max_size=30), max_size=4))
def test_partials_of_single_records_are_merged_in_their_order_however_often_a_key_comes(batches: list[Any]) -> None:
    exchange = Exchange(ALL, CombineLimits(hold_ms=1))
    partials = exchange.ways[0].operator._partials  # type: ignore[attr-defined]
    for batch in batches:
        rows = [(key or "none", *rest) for key, *rest in batch]
        exchange.alone.feed(*rows)
        made = pa.RecordBatch.from_pylist(
            [dict(zip(("k", "n", "x", "t"), row, strict=True)) for row in rows], schema=exchange.alone.schemas[0]
        )
        singles = partials.singles([made.column("k")], partials.aggregation.inputs(made))
        exchange.target.operator.on_batch(singles, PARTIALS_PORT)
        assert last_of(exchange.target.out.rows) == last_of(exchange.alone.out.rows)


def test_one_partial_stands_for_all_records_of_a_key_that_are_held() -> None:
    exchange = Exchange({"n": (tg.count(), "long"), "total": (tg.sum("n"), "long")})
    assert exchange.feed(("a", 1, None, None), ("b", 2, None, None), ("a", 3, None, None)) == []
    assert exchange.feed(("a", 5, None, None)) == []
    exchange.end()
    assert exchange.ways[0].operator.consumers[0].events == [("partials", ("a", 3, 9), ("b", 1, 2))]  # type: ignore[attr-defined]
    assert exchange.target.out.rows == [("a", 3, 9), ("b", 1, 2)]


@pytest.mark.parametrize("call", ["on_lull", "on_idle", "on_end", "before_snapshot"])
def test_what_is_held_is_emitted_when_nothing_more_comes_and_before_a_snapshot(call: str) -> None:
    exchange = Exchange({"n": (tg.count(), "long")})
    exchange.feed(("a", 1, None, None))
    getattr(exchange.ways[0].operator, call)()
    assert kinds(exchange)[0] == "partials"
    assert exchange.ways[0].operator.deadline_ms() is None
    getattr(exchange.ways[0].operator, call)()
    assert kinds(exchange).count("partials") == 1


def test_what_is_held_is_emitted_when_it_is_as_old_as_allowed() -> None:
    exchange = Exchange({"n": (tg.count(), "long")}, replace(LIMITS, hold_ms=50))
    way = exchange.ways[0]
    way.clock.now_ms = 1000
    exchange.feed(("a", 1, None, None))
    assert way.operator.deadline_ms() == 1050
    way.clock.now_ms = 1049
    assert exchange.feed(("a", 1, None, None)) == []
    way.clock.now_ms = 1050
    assert exchange.feed(("a", 1, None, None)) == [("a", 3)]
    exchange.feed(("a", 1, None, None))
    way.operator.on_time(1100)
    assert exchange.target.out.rows[-1] == ("a", 4)


def test_enough_records_of_each_key_wait_no_longer() -> None:
    exchange = Exchange({"n": (tg.count(), "long")}, replace(LIMITS, enough_records=6, enough_per_key=3))
    assert exchange.feed(*[("a", 1, None, None)] * 5) == []
    assert exchange.feed(("b", 1, None, None)) == [("a", 5), ("b", 1)]


def test_long_keys_are_forgotten_before_they_take_much_memory() -> None:
    exchange = Exchange({"n": (tg.count(), "long")}, replace(LIMITS, key_bytes=1 << 20))
    operator: Any = exchange.ways[0].operator
    most = 0
    for number in range(40):
        exchange.feed(*((f"{number} {each} " + "x" * 5000, 1, None, None) for each in (*range(20), *range(20))))
        most = max(most, operator._index.nbytes)
    assert most < 2 << 20 and operator._index.count < 400
    exchange.end()
    assert len(exchange.target.out.rows) == 800 and {row[1] for row in exchange.target.out.rows} == {2}


def test_a_watermark_follows_the_records_that_came_before_it() -> None:
    exchange = Exchange({"n": (tg.count(), "long")})
    operator = exchange.ways[0].operator
    operator.on_watermark(5)
    exchange.feed(("a", 1, None, None))
    operator.on_watermark(6)
    operator.on_watermark(7)
    operator.before_snapshot()
    operator.on_watermark(8)
    operator.on_end()
    found = [event[:2] for event in operator.consumers[0].events]  # type: ignore[attr-defined]
    assert found == [("watermark", 5), ("partials", ("a", 1)), ("watermark", 7), ("watermark", 8), ("end",)]


def test_records_pass_for_a_while_if_keys_repeat_too_rarely_and_longer_each_time() -> None:
    limits = replace(LIMITS, keys=4, least_passed=4, most_passed=8, enough_records=1000)
    exchange = Exchange({"n": (tg.count(), "long")}, limits)
    passed = []
    for number in range(40):
        exchange.feed((f"k{number}", 1, None, None))
        passed.append(kinds(exchange).count("partials"))
    steps = np.diff([0, *passed]).tolist()
    hold, at_once = [0, 0, 0, 1], [1]
    assert steps == hold + at_once * 4 + hold + at_once * 8 + hold + at_once * 8 + hold + at_once * 4
    assert last_of(exchange.target.out.rows) == {f"k{number}": ("1",) for number in range(40)}


def test_a_sum_that_is_too_large_names_the_aggregate_and_the_key() -> None:
    exchange = Exchange({"total": (tg.sum("n"), "long")})
    exchange.feed(("a", 2**62, None, None), ("b", 1, None, None))
    with pytest.raises(UserFunctionError, match=r"totals(?s:.)*doesn't fit into a long") as raised:
        exchange.feed(("b", 1, None, None), ("a", 2**62, None, None))
    assert "key 'a'" in str(raised.value)
    assert raised.value.final


def test_a_sum_whose_parts_do_not_fit_and_which_fits_itself_is_no_error() -> None:
    exchange = Exchange({"total": (tg.sum("n"), "long")})
    exchange.feed(("a", -(2**62), None, None), ("a", -(2**62), None, None))
    exchange.feed(("a", 2**62, None, None), ("a", 2**62, None, None), ("a", 2**62, None, None))
    exchange.end()
    assert exchange.target.out.rows[-1] == ("a", 2**62)


def test_the_mean_of_numbers_with_more_digits_than_a_double_has_is_no_error() -> None:
    exchange = Exchange({"mean": (tg.mean("n"), "double")}, replace(LIMITS, records=2))
    for rows in ([("a", 2**62 + 1)] * 3, [("a", None)], [("a", 2**62 + 1)] * 3):  # each too many to be held
        exchange.feed(*((key, n, None, None) for key, n in rows))
    exchange.end()
    assert exchange.target.out.rows[-1] == ("a", 2.0**62)


def test_keys_that_are_structs_need_the_records() -> None:
    """A table returns them as the columns of the struct."""
    for key, combines in (("k", False), ("k, n", True)):
        schema = parse_schema("k struct<a: long, b: string>, n long")
        found = Partials.of(Aggregation("test", {"n_of": tg.count()}, schema), tuple(key.split(", ")), schema)
        assert (found is not None) is combines


def test_large_values_join_what_is_held_in_their_order() -> None:
    exchange = Exchange({"total": (tg.sum("n"), "long"), "last": (tg.last("n"), "long")})
    exchange.feed(("a", 1, None, None))
    assert exchange.feed(("a", 2**62, None, None)) == [("a", 1, 1), ("a", 2**62 + 1, 2**62)]


def test_an_expression_that_fails_names_the_aggregate_and_the_record() -> None:
    exchange = Exchange({"total": (tg.sum("10 div n"), "long")})
    with pytest.raises(UserFunctionError, match=r"totals(?s:.)*Record\(k='a', n=0|totals(?s:.)*n=0"):
        exchange.feed(("a", 0, None, None))


def test_null_keys_are_refused_by_the_name_of_the_aggregate() -> None:
    exchange = Exchange({"n": (tg.count(), "long")})
    with pytest.raises(SchemaError, match=r"operator 'totals': key column 'k' is null in record \{'k': None, 'n': 7"):
        exchange.feed((None, 7, None, None))


@pytest.mark.parametrize(
    "aggregate",
    [tg.collect_list("n"), tg.collect_set("n"), tg.count_distinct("n"), tg.sum("cast(n as decimal(38, 0))")],
)
def test_aggregates_whose_parts_are_as_large_as_the_records_or_may_not_fit_need_the_records(aggregate: Any) -> None:
    schema = parse_schema(RECORD)
    aggregation = Aggregation("test", {"one": tg.count(), "other": aggregate}, schema)
    assert Partials.of(aggregation, ("k",), schema) is None


class Product(tg.Aggregate):
    """An aggregate of a user's own, which may be combined."""

    combines = True
    accumulators = (tg.Accumulator("product", pa.int64(), 1),)
    result_type = pa.int64()

    def add(self, vectors: Any, rows: Any, inputs: Any) -> None:
        np.multiply.at(vectors["product"].values, rows, inputs[0].to_numpy())

    def merge(self, vectors: Any, rows: Any, other: Any, other_rows: Any) -> None:
        assert len(set(rows.tolist())) == len(rows)
        vectors["product"].values[rows] *= other["product"].values[other_rows]

    def result(self, vectors: Any, rows: Any) -> pa.Array:
        return pa.array(vectors["product"].values[rows])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-5, 5)), min_size=1), max_size=5), small_limits)
def test_a_users_own_aggregate_is_combined_if_it_says_so(batches: list[Any], limits: CombineLimits) -> None:
    exchange = Exchange({"product": (Product("n"), "long")}, limits)
    for batch in batches:
        rows = [(key, n, None, None) for key, n in batch]
        exchange.feed(*rows)
        exchange.alone.feed(*rows)
    exchange.end()
    assert last_of(exchange.target.out.rows) == last_of(exchange.alone.out.rows)
