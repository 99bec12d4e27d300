"""Operators that make and take changes: applied to a table, what comes out is the result of what went in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.operators.changing import Row, applied, on_rocksdb, random_changes
from tests.unit.operators.harness import Bench, Restored, on_heap
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.operators.aggregate_changes import AggregateOfChangesSpec
from tidegate.dataflow.operators.changelog import ChangelogSpec
from tidegate.types import parse_schema

BACKENDS: dict[str, Callable[[pa.DataType], Any]] = {"heap": on_heap, "rocksdb": on_rocksdb}
RECORD = "row_kind string, k string, n long"
ROWS = [(k, n) for k in ("a", "b", "c", None) for n in (1, 2, 3, None)]
UPSERT = "k string, n long, names array<string>, t timestamp"


def aggregates(restored: Restored | None = None, *, ttl_ms: int | None = None, make_backend: Any = on_heap) -> Bench:
    named = {"rows": tg.count(), "total": tg.sum("n"), "mean": tg.mean("n"), "all": tg.collect_list("n")}
    schema = parse_schema(RECORD)
    spec = AggregateOfChangesSpec(Aggregation("test", named, schema, retracting=True), ("k",), ttl_ms)
    returns = "row_kind string not null, k string, rows long, total long, mean double, all array<long>"
    return Bench(spec, schema, returns=returns, restored=restored, make_backend=make_backend)


def changelog(restored: Restored | None = None, *, ttl_ms: int | None = None, make_backend: Any = on_heap) -> Bench:
    spec = ChangelogSpec(("k",), parse_schema(UPSERT), ttl_ms)
    return Bench(spec, UPSERT, returns=f"row_kind string not null, {UPSERT}", restored=restored, make_backend=make_backend)


def results(table: list[Row]) -> Counter[Row]:
    """The aggregates of a table, by key, with the values in order."""
    found: Counter[Row] = Counter()
    for key in {row[0] for row in table}:
        known = sorted(n for k, n in table if k == key and n is not None)
        count = sum(row[0] == key for row in table)
        found[key, count, sum(known) if known else None, sum(known) / len(known) if known else None, tuple(known)] = 1
    return found


def with_values_in_order(table: Counter[Row]) -> Counter[Row]:
    return Counter({(*row[:-1], tuple(sorted(row[-1]))): count for row, count in table.items()})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(6))
def test_aggregates_of_changes_are_those_of_the_rows_that_are_left(seed: int, backend: str) -> None:
    rng = Random(seed)
    bench = aggregates(make_backend=BACKENDS[backend])
    table: list[Row] = []
    out: Counter[Row] = Counter()
    for epoch in range(1, 20):
        changes = random_changes(rng, table, ROWS, rng.randint(1, 12), delete=0.5)
        applied(bench.feed(*changes), out)
        assert with_values_in_order(out) == results(table), f"seed {seed}, epoch {epoch}"
        bench.operator.maintain(100)
        if rng.random() < 0.3:
            restored = bench.freeze(epoch)
            bench.operator.close()
            bench = aggregates(restored, make_backend=BACKENDS[backend])
    bench.feed(*(("-D", *row) for row in table)) if table else None
    state = bench.freeze(99)["aggregates of changes"]
    assert sum(rows.num_rows for rows in state) == 0, "a key without records leaves nothing behind"
    bench.operator.close()


def test_a_batch_that_changes_no_result_emits_nothing() -> None:
    bench = aggregates()
    bench.feed(("+I", "a", None), ("+I", "b", None))
    before = bench.feed(("-D", "a", None), ("+I", "a", None), ("+I", "c", 1), ("-D", "c", 1))
    assert before == [("-D", "a", 1, None, None, []), ("+I", "a", 1, None, None, [])], "lists aren't compared"
    named = {"rows": tg.count()}
    schema = parse_schema(RECORD)
    spec = AggregateOfChangesSpec(Aggregation("test", named, schema, retracting=True), ("k",), None)
    bench = Bench(spec, schema, returns="row_kind string not null, k string, rows long")
    bench.feed(("+I", "a", None), ("+I", "b", None))
    assert bench.feed(("-D", "a", None), ("+I", "a", 7), ("+I", "b", 1)) == [("-D", "b", 1), ("+I", "b", 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_value_is_chosen_from_what_a_snapshot_has_kept(backend: str) -> None:
    named = {"best": tg.max_by("n", by="t"), "first": tg.first("n"), "last": tg.last("n"), "old": tg.min_by("t", by="n")}
    schema = parse_schema("row_kind string, k string, n long, t timestamp")
    spec = AggregateOfChangesSpec(Aggregation("test", named, schema, retracting=True), ("k",), None)
    returns = "row_kind string not null, k string, best long, first long, last long, old timestamp"
    early, late = (datetime(2024, 5, day, tzinfo=UTC) for day in (1, 2))
    bench = Bench(spec, schema, returns=returns, make_backend=BACKENDS[backend])
    bench.feed(("+I", "a", 1, early), ("+I", "a", 2, late), ("+I", "a", None, None))
    bench = Bench(spec, schema, returns=returns, restored=bench.freeze(), make_backend=BACKENDS[backend])
    assert bench.feed(("-D", "a", 2, late)) == [("-D", "a", 2, 1, None, early), ("+I", "a", 1, 1, None, early)]
    assert bench.feed(("-D", "a", 1, early))[-1] == ("+I", "a", None, None, None, None)
    bench.operator.close()


def test_deletions_of_what_the_ttl_has_ended_are_ignored() -> None:
    bench = aggregates(ttl_ms=1000)
    bench.clock.now_ms = 1000
    bench.feed(("+I", "a", 1))
    bench.clock.now_ms = 5000
    assert bench.feed(("-D", "a", 1)) == []
    assert bench.feed(("+I", "a", 2)) == [("+I", "a", 1, 2, 2.0, [2])]
    bench.clock.now_ms = 9000
    update = ("-D", "a", 2), ("+I", "a", 3), ("-D", "a", 3), ("+I", "a", 2)
    assert bench.feed(*update) == [("+I", "a", 1, 2, 2.0, [2])], "of an update, the insertion counts"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_changelog_has_the_last_row_of_each_key(seed: int, backend: str) -> None:
    rng = Random(seed)
    bench = changelog(make_backend=BACKENDS[backend])
    last: dict[Any, Row] = {}
    out: Counter[Row] = Counter()
    for epoch in range(1, 15):
        upserts = [
            (rng.choice("abcdef"), rng.choice([1, 2, None]), rng.choice([["x"], [], None]), None)
            for _ in range(rng.randint(1, 10))
        ]
        last |= {row[0]: row for row in upserts}
        applied(bench.feed(*upserts), out)
        wanted = {tuple(tuple(each) if isinstance(each, list) else each for each in row) for row in last.values()}
        assert out == Counter(wanted), f"seed {seed}, epoch {epoch}"
        bench.operator.maintain(100)
        if rng.random() < 0.3:
            restored = bench.freeze(epoch)
            bench.operator.close()
            bench = changelog(restored, make_backend=BACKENDS[backend])
    bench.operator.close()


def test_a_row_that_stays_as_it_is_changes_nothing() -> None:
    schema = parse_schema("k string, n long")
    bench = Bench(ChangelogSpec(("k",), schema, None), schema, returns="row_kind string not null, k string, n long")
    assert bench.feed(("a", 1), ("a", 2), ("b", None)) == [("+I", "a", 2), ("+I", "b", None)]
    assert bench.feed(("a", 2), ("b", None)) == []
    assert bench.feed(("b", 0), ("a", 2)) == [("-D", "b", None), ("+I", "b", 0)]


def test_a_row_that_the_ttl_has_ended_is_not_deleted() -> None:
    bench = changelog(ttl_ms=1000)
    bench.clock.now_ms = 1000
    bench.feed(("a", 1, None, None), ("b", 1, None, None))
    bench.clock.now_ms = 1500
    assert len(bench.feed(("b", 2, None, None))) == 2
    bench.clock.now_ms = 2100
    assert bench.feed(("a", 2, None, None)) == [("+I", "a", 2, None, None)]
    bench.operator.maintain(100)
    bench.clock.now_ms = 3200
    bench.operator.maintain(100)
    assert sum(rows.num_rows for rows in bench.freeze()["rows"]) == 0
