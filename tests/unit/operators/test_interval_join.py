"""Interval joins: every kind against brute force, with disorder, late records, snapshots and rescaling at any step."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.operators.harness import Bench
from tests.unit.operators.joining import LATE, LEFT_RECORDS, RIGHT_RECORDS, Joins, Oracle, check_random_run
from tests.unit.operators.test_windows_on_rocksdb import on_rocksdb
from tests.unit.operators.windowing import group
from tidegate.dataflow.operators import interval_join, joining, timed_records
from tidegate.dataflow.operators.budget import Budget
from tidegate.dataflow.operators.interval_join import ALONE, LEFT_ONLY, IntervalJoinSpec
from tidegate.dataflow.pipeline import Pipeline
from tidegate.errors import GraphError, JobError, SchemaError
from tidegate.protocol.watermarks import MAX_WATERMARK_MS

KINDS = sorted(ALONE)
LEFT_SCHEMA = "key long, ts long, n long"


def spec_of(how: str, lower_ms: int, upper_ms: int) -> IntervalJoinSpec:
    pipeline = Pipeline()
    left, right = (
        pipeline.source(name, tg.sources.rows([], schema)).key_by("key")
        for name, schema in (("left", LEFT_RECORDS), ("right", RIGHT_RECORDS))
    )
    left.join("join", right, how=how, between=(lower_ms, upper_ms), times=("ts", "at"), late=LATE)  # type: ignore[arg-type]
    spec = next(node.spec for node in pipeline._nodes if node.name == "join")
    assert isinstance(spec, IntervalJoinSpec)
    return spec


class IntervalOracle(Oracle):
    def __init__(self, spec: IntervalJoinSpec) -> None:
        super().__init__(group)
        self._spec = spec

    def _match(self, left: Any, right: Any) -> bool:
        if None in left[:2] or None in right[:2] or left[0] != right[0]:
            return False
        return bool(self._spec.lower_ms <= right[1] - left[1] <= self._spec.upper_ms)

    def results(self) -> list[Any]:
        lefts, rights = self.records
        spec = self._spec
        pairs = [(one, other) for one in lefts for other in rights if self._match(one, other)]
        matched = ({one for one, _ in pairs}, {other for _, other in pairs})
        if spec.how == "semi":
            return list(matched[0])
        alone = [
            [each for each in records if each not in with_match and self._is_over(each, spec.kept_ms[port])]
            for port, (records, with_match) in enumerate(zip(self.records, matched, strict=True))
        ]
        if spec.how == "anti":
            return list(alone[0])
        found: list[Any] = [(*one, *other[1:]) for one, other in pairs]
        if ALONE[spec.how][0]:
            found += [(*one, None, None) for one in alone[0]]
        if ALONE[spec.how][1]:
            found += [(key, None, None, *rest) for key, *rest in alone[1]]
        return found

    def _is_over(self, record: Any, kept_ms: int) -> bool:
        key, ts, _ = record
        return key is None or ts is None or ts + kept_ms <= self.reached[group(key)]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_records, "MIN_STRETCH_MS", 4)


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("bounds", [(0, 10), (-7, 3), (5, 25), (-20, -4), (0, 0)], ids=str)
def test_results_are_those_of_brute_force(how: str, bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        rows = 3 if seed % 2 else 65_536
        for module in (joining, interval_join):
            monkeypatch.setattr(module, "MAX_ROWS", rows)
        monkeypatch.setattr(interval_join, "MAX_UNSORTED_ROWS", seed)
        monkeypatch.setattr(timed_records, "MOST_OF_LENGTH", (1, 2, 4, 32)[seed])
        rng = Random(seed)
        spec = spec_of(how, *bounds)
        check_random_run(Joins(spec, parallelism=rng.choice((1, 2, 3))), IntervalOracle(spec), rng)


@pytest.mark.parametrize("how", ["inner", "full", "semi"])
def test_results_are_the_same_on_rocksdb_with_little_memory(how: str) -> None:
    for seed in range(3):
        rng = Random(seed)
        spec = spec_of(how, -7, 12)
        check_random_run(Joins(spec, parallelism=rng.choice((1, 2)), make_backend=on_rocksdb), IntervalOracle(spec), rng)


def bench_of(how: str, lower_ms: int, upper_ms: int, **settings: Any) -> Bench:
    returns = LEFT_SCHEMA if how in LEFT_ONLY else f"{LEFT_SCHEMA}, at long, m long"
    sides = dict(zip(LATE, (LEFT_RECORDS, RIGHT_RECORDS), strict=True))
    return Bench(spec_of(how, lower_ms, upper_ms), LEFT_RECORDS, RIGHT_RECORDS, returns=returns, sides=sides, **settings)


def test_state_is_dropped_when_no_match_can_come_and_watermarks_are_held_back() -> None:
    bench = bench_of("inner", -10, 100)
    for now in range(0, 2000, 10):
        bench.feed((now % 3, now, now))
        bench.feed((now % 3, now, now), port=1)
        bench.operator.on_watermark(now - 5)
        bench.operator.maintain(1000)
    state = bench.freeze()
    assert all(sum(batch.num_rows for batch in state[name]) < 40 for name in ("left_near", "right_near"))
    assert bench.out.others[-1] == ("watermark", 1985 - 100)
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    assert bench.out.others[-1] == ("watermark", MAX_WATERMARK_MS)


def test_a_hot_key_is_joined_in_steps_and_a_snapshot_waits_for_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.dataflow.operators.interval_join.MAX_ROWS", 10)
    monkeypatch.setattr(joining, "MAX_ROWS", 10)
    bench = bench_of("inner", 0, 1000, budget=Budget())
    bench.feed(*((1, 5, number) for number in range(95)))
    bench.feed((1, 6, 7), port=1)
    assert bench.operator.has_work() and bench.operator.holds_records()
    steps = 0
    while bench.operator.has_work():
        bench.operator.work()
        steps += 1
    assert steps >= 8
    assert [row[2] for row in bench.out.rows] == list(range(95)), "in the order of arrival"


def test_rows_without_a_match_are_emitted_once_although_a_snapshot_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.dataflow.operators.interval_join.MAX_ROWS", 10)
    monkeypatch.setattr(joining, "MAX_ROWS", 10)
    bench = bench_of("left", 0, 20)
    bench.feed(*((number % 4, 5, number) for number in range(50)))
    bench.operator.on_watermark(100)
    assert bench.operator.has_work() and not bench.operator.holds_records()
    first = len(bench.out.rows)
    assert 0 < first < 50
    other = bench_of("left", 0, 20, restored=bench.freeze())
    other.operator.resume()
    while other.operator.has_work():
        other.operator.work()
    assert sorted(row[2] for row in (*bench.out.rows, *other.out.rows)) == list(range(50))
    other.feed((1, 7, 99), port=1)
    assert other.sides[LATE[1]].rows == [(1, 7, 99)], "late for the watermark that came before the snapshot"


def test_another_interval_finds_the_records_of_a_snapshot() -> None:
    bench = bench_of("inner", 0, 8)
    bench.feed((1, 0, 1), (1, 5, 2))
    other = bench_of("inner", 0, 5000, restored=bench.freeze())
    assert other.feed((1, 4000, 3), port=1) == [(1, 0, 1, 4000, 3), (1, 5, 2, 4000, 3)]
    other.operator.on_watermark(100)
    assert other.feed((1, 4500, 4), port=1) == [(1, 0, 1, 4500, 4), (1, 5, 2, 4500, 4)]


def test_times_are_compared_in_microseconds() -> None:
    pipeline = Pipeline()
    left, right = (
        pipeline.source(name, tg.sources.rows([], f"key long, {name} timestamp")).key_by("key") for name in ("a", "b")
    )
    left.join("join", right, between=(0, "1 ms"), times=("a", "b"))
    spec: Any = next(node.spec for node in pipeline._nodes if node.name == "join")
    bench = Bench(spec, "key long, a timestamp", "key long, b timestamp", returns="key long, a timestamp, b timestamp")
    kind = pa.timestamp("us", tz="UTC")
    for port, times in ((0, [1500]), (1, [1499, 1500, 2500, 2501])):
        columns = [pa.array([1] * len(times)), pa.array(times, pa.int64()).cast(kind)]
        bench.operator.on_batch(pa.RecordBatch.from_arrays(columns, schema=bench.schemas[port]), port)
    assert len(bench.out.rows) == 2


def test_mistakes_are_errors_when_the_job_is_built() -> None:
    pipeline = Pipeline()
    stream = pipeline.source("left", tg.sources.rows([], LEFT_RECORDS))
    left = stream.key_by("key")
    right = pipeline.source("right", tg.sources.rows([], RIGHT_RECORDS)).key_by("key")
    good: dict[str, Any] = {"between": (0, 10), "times": ("ts", "at")}
    for other, changes, expected in (
        (right, {"how": "outer"}, "not a kind of join .do you mean 'full'"),
        (right, {"how": ["left"]}, "not a kind of join"),
        (right, {"ttl": "1 s"}, "within an interval keeps records as long as they can match: omit it"),
        (right, {"between": None}, "between= or as_of="),
        (right, {"between": "5 s"}, "from and to"),
        (right, {"between": (10, 0)}, "lower bound first"),
        (right, {"between": ("soon", 0)}, "not a duration"),
        (right, {"times": None}, "times= is missing"),
        (right, {"times": "ts"}, "ts"),
        (right, {"times": ("ts", "at", "m")}, "left and of the right stream"),
        (right, {"late": "late"}, "two names"),
        (stream, {}, "isn't keyed"),
        (left, {"times": ("ts", "ts")}, "both sides have a column 'ts', 'n'"),
        (3, {}, "keyed stream"),
    ):
        with pytest.raises((GraphError, SchemaError, JobError), match=expected):
            left.join("join", other, **{**good, **changes})  # type: ignore[arg-type]
    strings = pipeline.source("strings", tg.sources.rows([], "key string, at long")).key_by("key")
    with pytest.raises(SchemaError, match="never meet"):
        left.join("join", strings, between=(0, 10), times=("ts", "at"))
    assert left.join("join", right, between=("-1 s", "1 minute"), times=("ts", "at")).schema.names == [
        *("key", "ts", "n"),
        *("at", "m"),
    ]


def test_a_kind_of_join_does_not_take_the_state_of_another_one() -> None:
    """Or an outer join would emit records alone that had matches before."""
    names = {how: spec_of(how, 0, 10).state_names for how in KINDS}
    assert names["semi"] == names["anti"]
    assert len({left for left, _ in names.values()}) == 3 and len({right for _, right in names.values()}) == 3
    assert names["left"][0] == names["full"][0] and names["right"][1] == names["full"][1]


@pytest.mark.parametrize("how", ["inner", "left"])
def test_records_that_are_far_apart_are_taken_in_bounded_steps(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each is in a stretch of its own, which costs as much as many records."""
    monkeypatch.setattr(timed_records, "MOST_OF_LENGTH", 10_000)
    joins = Joins(spec_of(how, -1000, 1000))
    operator = joins.benches[0].operator
    records = [(number % 7, number * 10_000, number) for number in range(1500)]
    for port in (0, 1):
        joins.benches[0].feed(*records, port=port)
        steps = 1
        while operator.has_work():
            assert operator.holds_records(), "a snapshot waits for the rest of the batch"
            operator.work()
            steps += 1
        assert steps >= 1500 * joining.STRETCH_ROWS // joining.MAX_ROWS
    assert [row[:2] for row in joins.taken()[0]] == [each[:2] for each in records]


def test_late_records_without_an_output_are_counted() -> None:
    joins = Joins(replace(spec_of("inner", 0, 10), late=(None, LATE[1])))
    joins.benches[0].operator.on_watermark(100)
    for port in (0, 1):
        joins.feed([(1, 50, 1), (1, 100, 2), (1, 101, 3)], port)
    assert joins.benches[0].operator.late_dropped == 2
    assert len(joins.taken()[1][1]) == 2
