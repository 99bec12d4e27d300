"""Joins as of a version, against brute force, with disorder, late records, snapshots and rescaling at any step."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import tidegate as tg
from tests.unit.operators.harness import Bench, on_heap
from tests.unit.operators.joining import LEFT_RECORDS, RIGHT_RECORDS, Joins, Oracle, Record, check_random_run
from tests.unit.operators.test_windows_on_rocksdb import on_rocksdb
from tests.unit.operators.windowing import group
from tidegate.dataflow.operators import joining, temporal_join, timed_records
from tidegate.dataflow.operators.temporal_join import TemporalJoinSpec
from tidegate.dataflow.pipeline import Pipeline
from tidegate.errors import GraphError
from tidegate.protocol.watermarks import MAX_WATERMARK_MS

SIDES = {"late left": LEFT_RECORDS}
RETURNS = "key long, ts long, n long, at long, m long"


def spec_of(how: str, **settings: Any) -> TemporalJoinSpec:
    pipeline = Pipeline()
    left, right = (
        pipeline.source(name, tg.sources.rows([], schema)).key_by("key")
        for name, schema in (("left", LEFT_RECORDS), ("right", RIGHT_RECORDS))
    )
    left.join("join", right, how=how, as_of=("ts", "at"), late=("late left", None), **settings)  # type: ignore[arg-type]
    spec = next(node.spec for node in pipeline._nodes if node.name == "join")
    assert isinstance(spec, TemporalJoinSpec)
    return spec


class TemporalOracle(Oracle):
    """Left records that are due get their version at the watermark that makes them due."""

    def __init__(self, spec: TemporalJoinSpec) -> None:
        super().__init__(group)
        self._spec = spec
        self._results: list[Any] = []

    def on_records(self, records: Any, port: int) -> list[Record]:
        if port == 1:
            self.records[1].extend(records)
            return []
        late = super().on_records(records, port)
        self._emit(lambda left: left[0] is None or left[1] is None)
        return late

    def on_watermark(self, at_ms: int, groups: range) -> None:
        super().on_watermark(at_ms, groups)
        self._emit(lambda left: left[0] is not None and left[1] <= self.reached[group(left[0])])

    def _emit(self, is_due: Any) -> None:
        for left in [each for each in self.records[0] if is_due(each)]:
            self.records[0].remove(left)
            key, ts, _ = left
            versions = [
                (other[1], number, other)
                for number, other in enumerate(self.records[1])
                if None not in (key, ts, other[1]) and other[0] == key and other[1] <= ts
            ]
            if versions:
                self._results.append((*left, *max(versions)[2][1:]))
            elif self._spec.how == "left":
                self._results.append((*left, None, None))

    def results(self) -> list[Any]:
        return self._results


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_records, "MIN_STRETCH_MS", 4)


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("rows", [3, 65_536])
def test_results_are_those_of_brute_force(how: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (joining, temporal_join):
        monkeypatch.setattr(module, "MAX_ROWS", rows)
    for seed in range(8):
        monkeypatch.setattr(timed_records, "MOST_OF_LENGTH", (1, 2, 4, 32)[seed % 4])
        rng = Random(seed)
        spec = spec_of(how)
        check_random_run(Joins(spec, parallelism=rng.choice((1, 2, 3))), TemporalOracle(spec), rng)


def test_results_are_the_same_on_rocksdb_with_little_memory() -> None:
    for seed in range(4):
        rng = Random(seed)
        spec = spec_of("left")
        check_random_run(Joins(spec, parallelism=rng.choice((1, 2)), make_backend=on_rocksdb), TemporalOracle(spec), rng)


def bench_of(how: str, **settings: Any) -> Bench:
    return Bench(spec_of(how), LEFT_RECORDS, RIGHT_RECORDS, returns=RETURNS, sides=SIDES, **settings)


def test_a_version_counts_from_its_time_and_the_last_of_one_time_replaces_the_others() -> None:
    bench = bench_of("left")
    bench.feed((1, 10, 1), (1, 20, 2), (1, 20, 3), (1, 30, 4), port=1)
    bench.feed((1, 9, 0), (1, 10, 1), (1, 19, 2), (1, 20, 3), (1, 35, 4), (2, 15, 5))
    bench.operator.on_watermark(40)
    versions = {row[2]: row[4] for row in bench.out.rows}
    assert versions == {0: None, 1: 1, 2: 1, 3: 3, 4: 4, 5: None}
    assert [row[1] for row in bench.out.rows if row[0] == 1 and row[4] is not None] == [10, 19, 20, 35]
    assert bench.out.others[-1] == ("watermark", 40)


def test_rows_come_in_the_order_of_event_time_however_far_records_are_apart() -> None:
    """The stretches in which they wait have several lengths then, and don't overlap."""
    rng, bench = Random(3), bench_of("left")
    times = [rng.randrange(10 ** rng.randrange(1, 10)) for _ in range(2000)]
    for start in range(0, len(times), 40):
        bench.feed(*((1, ts, number) for number, ts in enumerate(times[start : start + 40], start)))
    operator = bench.operator
    assert isinstance(operator, temporal_join.TemporalJoinOperator)
    assert len({stretch.stop_ms - stretch.start_ms for stretch in operator._waiting.stretches()}) > 3
    for at_ms in (50, 10**4, 10**6, 10**10):
        operator.on_watermark(at_ms)
        while operator.has_work():
            operator.work()
    assert [row[1] for row in bench.out.rows] == sorted(times)


def test_versions_that_no_record_can_need_are_dropped() -> None:
    bench = bench_of("inner")
    for now in range(0, 1000, 5):
        bench.feed((1, now, now), port=1)
        bench.feed((1, now + 1, now))
        bench.operator.on_watermark(now - 10)
        bench.operator.maintain(1000)
    state = bench.freeze()
    assert sum(batch.num_rows for batch in state["versions"]) < 10
    assert sum(batch.num_rows for batch in state["waiting"]) < 10
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    assert [row[4] for row in bench.out.rows] == list(range(0, 1000, 5))


def test_records_are_emitted_once_although_a_snapshot_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (joining, temporal_join):
        monkeypatch.setattr(module, "MAX_ROWS", 10)
    bench = bench_of("inner")
    bench.feed(*((number % 3, 1, number) for number in range(6)), port=1)
    bench.feed(*((number % 3, 2, number) for number in range(60)))
    bench.operator.on_watermark(2)
    assert bench.operator.has_work() and not bench.operator.holds_records()
    first = len(bench.out.rows)
    assert first < 60
    other = bench_of("inner", restored=bench.freeze())
    other.operator.resume()
    while other.operator.has_work():
        other.operator.work()
    assert sorted(row[2] for row in (*bench.out.rows, *other.out.rows)) == list(range(60))


TTL_MS = 1000


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
def test_with_a_ttl_a_key_that_is_neither_asked_for_nor_updated_is_forgotten(make_backend: Any) -> None:
    """Against a model. Ages of keys are never between one ttl and one and a quarter, when nothing is promised."""
    spec = spec_of("left", ttl=TTL_MS)
    for seed in range(6 if make_backend is on_heap else 3):
        rng = Random(seed)

        def opened(restored: Any = None) -> Bench:
            return Bench(
                spec, LEFT_RECORDS, RIGHT_RECORDS, returns=RETURNS, sides=SIDES, restored=restored, make_backend=make_backend
            )

        bench, clock_ms, ts = opened(), 5 * TTL_MS, 0
        versions: dict[int, list[tuple[int, int]]] = {}  # by key: time and number
        used_ms: dict[int, int] = {}
        for number in range(60):
            clock_ms += rng.choice((0, 0, 450, 450, 2 * TTL_MS))
            bench.clock.now_ms = clock_ms
            for key in [key for key, at_ms in used_ms.items() if at_ms + TTL_MS < clock_ms]:
                del versions[key], used_ms[key]
            keys, what = [key for key in range(5) if rng.random() < 0.4], rng.random()
            ts += 10
            if what < 0.4 and keys:
                new = {key: (ts - rng.randrange(20), number) for key in keys}
                bench.feed(*((key, *version) for key, version in new.items()), port=1)
                for key, version in new.items():
                    versions.setdefault(key, []).append(version)
                    used_ms[key] = clock_ms
            elif what < 0.85 and keys:
                bench.out.events.clear()
                bench.feed(*((key, ts, number) for key in keys))
                bench.operator.on_watermark(ts)
                found = {row[0]: row[4] for row in bench.out.rows}
                assert found == {key: max(versions[key])[1] if key in versions else None for key in keys}
                used_ms.update((key, clock_ms) for key in keys if key in versions)
            else:
                bench.operator.maintain(1000)
                bench = opened(bench.freeze())
                bench.clock.now_ms = clock_ms
        bench.clock.now_ms = clock_ms + 2 * TTL_MS
        bench.operator.maintain(1000)
        assert not sum(batch.num_rows for batch in bench.freeze()["versions_by_use"]), "and nothing is left"


def test_mistakes_are_errors_when_the_job_is_built() -> None:
    pipeline = Pipeline()
    left, right = (
        pipeline.source(name, tg.sources.rows([], schema)).key_by("key")
        for name, schema in (("left", LEFT_RECORDS), ("right", RIGHT_RECORDS))
    )
    for changes, expected in (
        ({"how": "full"}, "'inner' or 'left'"),
        ({"times": ("ts", "at")}, "omit times="),
        ({"between": (0, 1)}, "give one of them"),
        ({"ttl": 0}, "would keep no version"),
        ({"ttl": "soon"}, "ttl: 'soon' is not a duration"),
        ({"late": ("late", "late too")}, "no side output|there is none"),
    ):
        with pytest.raises(GraphError, match=expected):
            left.join("join", right, **{"as_of": ("ts", "at"), **changes})  # type: ignore[arg-type]
