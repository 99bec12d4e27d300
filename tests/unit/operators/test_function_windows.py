"""Functions of whole sessions and of windows of a number of records, with restores in the middle, on both backends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.operators.harness import Bench, Clock, on_heap
from tests.unit.operators.test_record_windows import totals
from tests.unit.operators.test_windows_on_rocksdb import on_rocksdb
from tests.unit.operators.windowing import RECORDS, RESULTS, check_random_run
from tidegate.dataflow.operators import session_records, session_windows, window
from tidegate.dataflow.operators.budget import Budget
from tidegate.dataflow.operators.function_windows import FunctionWindowSpec
from tidegate.dataflow.operators.session_records import SessionRecordSpec
from tidegate.dataflow.operators.window_results import CallFunction, KeyedWindow
from tidegate.dataflow.windows import Global, Sessions, global_window, sessions
from tidegate.types import parse_schema

COUNTED = "key long, count long, numbers string"


def spec_of(
    assigner: Sessions | Global, function: Any = totals, *, late: str | None = None, lateness_ms: int = 0
) -> SessionRecordSpec | FunctionWindowSpec:
    schema, results = parse_schema(RECORDS), CallFunction(function, True)
    if isinstance(assigner, Global):
        return FunctionWindowSpec(assigner, ("key",), results, schema)
    return SessionRecordSpec((assigner,), (("key",),), results, (schema,), pa.int64(), (late,), lateness_ms)


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
@pytest.mark.parametrize("lateness_ms", [0, 17])
def test_a_function_gets_the_records_of_each_session(
    lateness_ms: int, make_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (session_records, session_windows, window):
        monkeypatch.setattr(module, "MAX_ROWS", 3)
    for seed in range(8):
        check_random_run(
            sessions("ts", 10),
            seed,
            lateness_ms=lateness_ms,
            stops_in_the_middle=seed % 2 == 0,
            make_backend=make_backend,
            make_spec=spec_of,
        )


def test_nothing_is_left_of_sessions_that_are_over() -> None:
    for lateness_ms, at_ms in ((0, 60), (100, 160)):
        bench = Bench(spec_of(sessions("ts", 10), lateness_ms=lateness_ms), RECORDS, returns=RESULTS)
        bench.feed(*((key, ts, ts) for key in range(5) for ts in (1, 5, 40, 45, 190)))
        bench.operator.on_watermark(at_ms)
        assert sum(map(len, bench.freeze()["records"])) == 5
        bench.operator.on_watermark(10**6)
        assert sum(map(len, bench.freeze()["records"])) == sum(map(len, bench.freeze()["windows"])) == 0


def listed(given: KeyedWindow, records: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    assert given.start is None and given.end is None
    yield given.key, len(records), ",".join(str(record.n) for record in records)


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_function_gets_every_so_many_records_of_a_key(size: int, make_backend: Any) -> None:
    spec = spec_of(global_window(count=size), listed)
    for seed in range(4):
        rng = Random(seed)
        bench = Bench(spec, RECORDS, returns=COUNTED, make_backend=make_backend)
        seen: defaultdict[int, list[int]] = defaultdict(list)
        for number in range(15):
            records = [(rng.randrange(4), None, 100 * number + place) for place in range(rng.choice((1, 5, 40)))]
            expected = []
            for key, _, n in records:
                seen[key].append(n)
                if len(seen[key]) % size == 0:
                    expected.append((key, size, ",".join(map(str, seen[key][-size:]))))
            found = bench.feed(*records)
            assert sorted(found) == sorted(expected)
            for key in seen:
                assert [row for row in found if row[0] == key] == [row for row in expected if row[0] == key], "in order"
            if rng.random() < 0.3:
                bench = Bench(spec, RECORDS, returns=COUNTED, restored=bench.freeze(), make_backend=make_backend)


def test_without_a_key_all_records_are_in_the_windows() -> None:
    def numbers(given: KeyedWindow, records: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        yield given.key, len(records), ",".join(str(record.n) for record in records)

    for assigner, expected in (
        (sessions("ts", 10), [(None, 3, "1,2,3"), (None, 1, "4")]),
        (global_window(count=2), [(None, 2, "1,2"), (None, 2, "3,4")]),
    ):
        spec = spec_of(assigner, numbers)
        spec = replace(spec, key=()) if isinstance(spec, FunctionWindowSpec) else replace(spec, keys=((),))
        bench = Bench(spec, RECORDS, returns=COUNTED)
        bench.feed((1, 1, 1), (2, 5, 2), (3, 8, 3))
        bench = Bench(spec, RECORDS, returns=COUNTED, restored=(first := bench).freeze())
        bench.feed((1, 50, 4))
        bench.operator.on_watermark(100)
        assert first.out.rows + bench.out.rows == expected


@pytest.mark.parametrize("assigner", [sessions("ts", 10), global_window(count=2)], ids=lambda each: each.text)
@pytest.mark.parametrize("key_count", [1, 40])
def test_a_slow_function_is_called_in_bounded_steps(assigner: Any, key_count: int) -> None:
    clock = Clock()

    def slow(given: KeyedWindow, records: Any) -> list[tuple[Any, ...]]:
        clock.now_ms += 40
        return [(given.key, len(records), "")]

    bench = Bench(spec_of(assigner, slow), RECORDS, returns=COUNTED, budget=Budget(clock))
    bench.context.budget.begin()
    # Forty windows: of forty keys, or of one key.
    records = [(number % key_count, 100 * (number // key_count), number) for number in range(40)]
    bench.feed(*(each for each in records for _ in range(2)))
    bench.operator.on_watermark(10**6)
    steps = 1
    while bench.operator.has_work():
        before = clock.now_ms
        bench.context.budget.begin()
        bench.operator.work()
        assert clock.now_ms - before <= 8 * 40, "a step of 100 ms, and the calls before the clock is looked at again"
        steps += 1
    assert steps > 4 and len(bench.out.rows) == 40
