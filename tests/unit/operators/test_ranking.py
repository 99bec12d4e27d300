"""Deduplicate and top, compared with sorted lists; restored and rescaled, on both backends."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import pytest

import tidegate as tg
from tests.unit.operators.harness import Bench
from tests.unit.operators.keyed_runs import BACKENDS, Subtasks
from tidegate.dataflow.operators import top, window_top
from tidegate.dataflow.operators.budget import Budget
from tidegate.dataflow.pipeline import Pipeline
from tidegate.dataflow.ranking import deduplicate_spec, ranked_schema, top_spec, window_top_spec
from tidegate.dataflow.windows import tumbling
from tidegate.protocol.watermarks import MAX_WATERMARK_MS
from tidegate.state.column_table import ColumnTable
from tidegate.types import parse_schema

RECORD = "key long, x double, n long, text string"
SCHEMA = parse_schema(RECORD)
NULL_FIRST = float("-inf")


def record(rng: Random, number: int) -> tuple[Any, ...]:
    return rng.randrange(9), rng.choice((None, -1.5, 0.5, 2.0, float("nan"), 3.0)), number, f"record {number}"


def order(x: float | None) -> tuple[int, float]:
    """Null is the smallest, NaN the largest."""
    return (0, 0.0) if x is None else (2, 0.0) if x != x else (1, x)


def shown(rows: list[Any]) -> list[str]:
    return sorted(map(repr, rows))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep", ["first", "last"])
@pytest.mark.parametrize("order_by", [None, "x"])
@pytest.mark.parametrize("seed", range(2))
def test_one_record_of_each_key_is_kept(backend: str, keep: str, order_by: str | None, seed: int) -> None:
    rng = Random(seed)
    spec = deduplicate_spec("op", SCHEMA, ("key",), keep=keep, order_by=order_by, ttl=None)
    subtasks = Subtasks(spec, RECORD, RECORD, backend=backend, parallelism=2)
    history: dict[int, list[Any]] = defaultdict(list)
    upserted: dict[int, Any] = {}
    for number in range(0, 200, 10):
        some = [record(rng, number + index) for index in range(rng.randrange(1, 10))]
        emitted = subtasks.feed(some)
        if keep == "first" and order_by is None:
            assert not {row[0] for row in emitted} & upserted.keys(), "the first record is emitted once"
        for each in some:
            history[each[0]].append(each)
        upserted |= {row[0]: row for row in emitted}
        assert len(emitted) == len({row[0] for row in emitted}) and set(map(repr, emitted)) <= set(map(repr, some))
        best = {key: kept(of_key, keep, order_by) for key, of_key in history.items()}
        assert repr(sorted(upserted.items())) == repr(sorted(best.items()))
        if rng.random() < 0.3 and spec.stateful:
            subtasks = subtasks.restored(rng.choice((1, 2, 3)))


def kept(records: list[Any], keep: str, order_by: str | None) -> Any:
    if order_by is None:
        return records[0 if keep == "first" else -1]
    if keep == "first":
        return min(records, key=lambda each: order(each[1]))
    return max(reversed(records), key=lambda each: order(each[1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_those_of_all_records_so_far(backend: str, count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordered by x descending, then by n modulo 3."""
    monkeypatch.setattr(top, "MERGED_ROWS", 6)  # several parts for each batch
    rng = Random(seed)
    spec = top_spec("op", SCHEMA, ("key",), count=count, by=["x", "n"], descending=[True, False], ttl=None)
    subtasks = Subtasks(spec, RECORD, ranked_schema("op", SCHEMA, "rank"), backend=backend, parallelism=2)
    history: dict[int, list[Any]] = defaultdict(list)
    ranks: dict[tuple[int, int], Any] = {}
    for number in range(0, 200, 10):
        some = [
            (key, x, n % 3, text) for key, x, n, text in (record(rng, number + i) for i in range(rng.choice((1, 4, 40))))
        ]
        for each in some:
            history[each[0]].append(each)
        before = dict(ranks)
        emitted = subtasks.feed(some)
        ranks |= {(row[0], row[4]): row[:4] for row in emitted}
        assert repr(sorted(ranks.items())) == repr(sorted(ranks_of(history, count).items()))
        assert all(repr(before.get((row[0], row[4]))) != repr(row[:4]) for row in emitted), "only what changed is emitted"
        if rng.random() < 0.3:
            subtasks = subtasks.restored(rng.choice((1, 2, 3)))


def ranks_of(history: dict[int, list[Any]], count: int) -> dict[tuple[int, int], Any]:
    found: dict[tuple[int, int], Any] = {}
    for key, records in history.items():
        ascending = sorted(records, key=lambda each: (tuple(-part for part in order(each[1])), each[2]))
        found |= {(key, rank): each for rank, each in enumerate(ascending[:count], start=1)}
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_each_window_are_emitted_once_when_it_is_complete(
    backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_top, "MAX_ROWS", 3)  # several steps for each window
    rng = Random(seed)
    spec = window_top_spec(
        "op", WINDOWED, ("key",), assigner=tumbling("ts", 10), count=2, by="x", descending=True, late="late"
    )
    schema = ranked_schema("op", WINDOWED, "rank", time_column="ts")
    subtasks = Subtasks(spec, WINDOWED_DDL, schema, backend=backend, parallelism=2, sides={"late": WINDOWED_DDL})
    windows: dict[tuple[int, int], list[Any]] = defaultdict(list)
    now, reached = 0, -(10**9)
    for number in range(60):
        what = rng.random()
        if what < 0.6:
            some = [
                (rng.randrange(6), rng.choice((None, now, now, now - 25, now - 3)), float(rng.randrange(4)), f"{number} {i}")
                for i in range(rng.choice((1, 3, 12)))
            ]
            now += rng.randrange(6)
            late = [each for each in some if each[1] is not None and each[1] // 10 * 10 + 9 <= reached]
            for each in some:
                if each[1] is not None and each not in late:
                    windows[each[0], each[1] // 10 * 10].append(each)
            assert subtasks.feed(some) == []
            assert sorted(subtasks.aside("late")) == sorted(late)
        elif what < 0.85:
            reached = max(reached, now - rng.randrange(8))
            emitted = subtasks.watermark(reached)
            while any(bench.operator.has_work() for bench in subtasks.benches):
                if rng.random() < 0.3:
                    # In the middle of a window: the restored operator emits the rest before anything else.
                    subtasks = subtasks.restored(rng.choice((1, 2, 3)))
                    emitted += subtasks.watermark(reached)
                for bench in subtasks.benches:
                    if bench.operator.has_work():
                        bench.operator.work()
                emitted += subtasks.taken()
            assert sorted(emitted) == sorted(best_of(windows, reached))
        else:
            subtasks = subtasks.restored(rng.choice((1, 2, 3)))
    emitted = subtasks.watermark(MAX_WATERMARK_MS)
    for bench in subtasks.benches:
        while bench.operator.has_work():
            bench.operator.work()
    assert sorted(emitted + subtasks.taken()) == sorted(best_of(windows, MAX_WATERMARK_MS))


WINDOWED_DDL = "key long, ts long, x double, text string"
WINDOWED = parse_schema(WINDOWED_DDL)


def best_of(windows: dict[tuple[int, int], list[Any]], at_ms: int) -> list[Any]:
    """Take the windows that are complete out, and return their two best records."""
    rows = []
    for key, start in sorted(windows):
        if start + 9 <= at_ms:
            best = sorted(windows.pop((key, start)), key=lambda each: -each[2])[:2]
            rows += [(*each, start, start + 10, rank) for rank, each in enumerate(best, start=1)]
    return rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_counts_as_new_when_its_ttl_is_over(backend: str) -> None:
    spec = deduplicate_spec("op", SCHEMA, ("key",), keep="first", order_by=None, ttl="1 s")
    subtasks = Subtasks(spec, RECORD, RECORD, backend=backend, parallelism=1)
    subtasks.at(5_000)
    assert len(subtasks.feed([(1, 0.0, 0, ""), (2, 0.0, 0, "")])) == 2
    subtasks.at(5_999)
    assert subtasks.feed([(1, 0.0, 0, "")]) == []
    subtasks.at(6_000)
    assert len(subtasks.feed([(1, 0.0, 0, "")])) == 1
    subtasks = subtasks.restored(1)
    subtasks.at(9_000)
    subtasks.feed([])
    assert sum(batch.num_rows for batch in subtasks.benches[0].freeze()["seen"]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_is_ranked_again_when_its_ttl_is_over(backend: str) -> None:
    spec = top_spec("op", SCHEMA, ("key",), count=2, by="n", descending=False, ttl="1 s")
    subtasks = Subtasks(spec, RECORD, ranked_schema("op", SCHEMA, "rank"), backend=backend, parallelism=1)
    subtasks.at(5_000)
    subtasks.feed([(1, 0.0, 10, ""), (1, 0.0, 20, ""), (2, 0.0, 10, "")])
    subtasks.at(5_999)
    assert [row[2:] for row in subtasks.feed([(1, 0.0, 15, "")])] == [(15, "", 2)]
    subtasks.at(6_500)
    assert [row[2:] for row in subtasks.feed([(1, 0.0, 30, "")])] == []
    assert [row[2:] for row in subtasks.feed([(2, 0.0, 30, "")])] == [(30, "", 1)]
    subtasks.at(7_000)
    assert [row[2:] for row in subtasks.feed([(1, 0.0, 40, "")])] == [(40, "", 1)]
    subtasks.at(9_000)
    subtasks.feed([])
    assert sum(batch.num_rows for batch in subtasks.benches[0].freeze()["ranks"]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_ended_keys_are_removed_at_another_parallelism_while_others_are_renewed(backend: str) -> None:
    """What is restored at 3 subtasks is on RocksDB's disk. Two snapshots in the middle of the sweep."""
    spec = top_spec("op", SCHEMA, ("key",), count=2, by="n", descending=False, ttl="1 s")
    subtasks = Subtasks(spec, RECORD, ranked_schema("op", SCHEMA, "rank"), backend=backend, parallelism=2)
    subtasks.at(5_000)
    subtasks.feed([(key, 0.0, n, "") for key in range(300) for n in (10, 20)])
    subtasks.at(5_900)
    subtasks.feed([(key, 0.0, 15, "") for key in range(0, 300, 3)])
    subtasks = subtasks.restored(3)
    for now_ms, left in ((6_300, 100), (6_900, 0)):
        subtasks.at(now_ms)
        for number in range(30):
            for bench in subtasks.benches:
                bench.operator.maintain(40)
            if number == 2:
                subtasks = subtasks.restored(1 if left else 2)
                subtasks.at(now_ms + 300)  # a round over the disk begins again after a quarter of the ttl
        found = [batch for bench in subtasks.benches for batch in bench.freeze()["ranks"]]
        assert sum(batch.num_rows for batch in found) == 2 * left


def test_ended_keys_are_looked_for_only_at_the_ranks_that_they_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = top_spec("op", SCHEMA, ("key",), count=10, by="n", descending=False, ttl="1 s")
    subtasks = Subtasks(spec, RECORD, ranked_schema("op", SCHEMA, "rank"), backend="heap", parallelism=1)
    subtasks.at(5_000)
    subtasks.feed([(0, 0.0, n, "") for n in range(10)] + [(key, 0.0, 0, "") for key in range(1, 100)])
    looked = []
    find = ColumnTable.find

    def counted(table: ColumnTable, keys: Any) -> Any:
        looked.append(len(keys[0]))
        return find(table, keys)

    monkeypatch.setattr(ColumnTable, "find", counted)
    subtasks.at(6_000)
    subtasks.feed([])
    assert looked == [100, 100, 1, 1, 1, 1, 1, 1, 1, 1]


def test_fewer_ranks_are_kept_when_the_program_asks_for_fewer() -> None:
    specs = [top_spec("op", SCHEMA, ("key",), count=count, by="n", descending=False, ttl=None) for count in (3, 1)]
    first = Bench(specs[0], RECORD, returns=ranked_schema("op", SCHEMA, "rank"))
    first.feed((1, 0.0, 10, ""), (1, 0.0, 20, ""), (1, 0.0, 30, ""))
    second = Bench(specs[1], RECORD, returns=ranked_schema("op", SCHEMA, "rank"), restored=first.freeze())
    assert second.feed((1, 0.0, 15, "")) == []
    assert sum(batch.num_rows for batch in second.freeze()["ranks"]) == 1
    assert [row[2] for row in second.feed((1, 0.0, 5, ""))] == [5]


def test_top_pauses_between_keys_and_a_snapshot_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "MERGED_ROWS", 1)
    budget = Budget()
    spec = top_spec("op", SCHEMA, ("key",), count=1, by="n", descending=False, ttl=None)
    bench = Bench(spec, RECORD, returns=ranked_schema("op", SCHEMA, "rank"), budget=budget)
    budget.end()
    bench.feed(*((key, 0.0, 0, "") for key in range(5)))
    bench.operator.work()
    assert len(bench.out.rows) == 1 and bench.operator.holds_records()
    while bench.operator.has_work():
        bench.operator.work()
    assert len(bench.out.rows) == 5


def test_mistakes_are_errors_when_the_job_is_built() -> None:
    def keyed() -> tg.KeyedStream:
        return Pipeline().source("in", tg.sources.rows([], RECORD + ", ts long")).key_by("key")

    mistakes: tuple[tuple[Any, str], ...] = (
        (lambda: keyed().deduplicate("op", keep="newest"), "keep='newest'; give 'first' or 'last'"),  # type: ignore[arg-type]
        (lambda: keyed().deduplicate("op", order_by="m"), "there is no column 'm'"),
        (lambda: keyed().deduplicate("op", order_by="text"), "column 'text' is of type string, and records are ordered by"),
        (lambda: keyed().deduplicate("op", keep="last", ttl="1 s"), "needs no state that a ttl could end"),
        (lambda: keyed().top("op", 0, by="x"), "from 1 to 1,000"),
        (lambda: keyed().top("op", 3, by=[]), r"by=\[\]; give the name of a column"),
        (lambda: keyed().top("op", 3, by=["x", "n"], descending=[True]), "for 2 columns"),
        (lambda: keyed().top("op", 3, by="x", rank="n"), "have a column 'n' already"),
        (
            lambda: keyed().window(tg.tumbling("ts", "10 s")).top("op", 3, by="x", rank="window_end"),
            "is the name of one of the window's bounds",
        ),
        (lambda: keyed().top("op", 3, by="x", ttl="0 s"), "give a millisecond or more"),
        (lambda: keyed().window(tg.sliding("ts", "10 s", "5 s")).top("op", 3, by="x"), "top takes tumbling windows"),
        (lambda: keyed().window(tg.tumbling("ts", "10 s"), early="1 s").top("op", 3, by="x"), "emits each window once"),
        (lambda: keyed().top("op", 3, by="x").filter("rank = 1"), "emits upserts by \\(key, rank\\)"),
        (lambda: keyed().deduplicate("op", keep="last").filter("x > 1"), "emits upserts by \\(key\\)"),
    )
    for build, message in mistakes:
        with pytest.raises(tg.TidegateError, match=message):
            build()
    best = keyed().window(tg.tumbling("ts", "10 s")).top("op", 3, by="x")
    assert best._pipeline._nodes[-1].needs_event_time, "a query refuses it where no time moves"
    assert keyed().deduplicate("op").filter("x > 1").schema.names[0] == "key"
