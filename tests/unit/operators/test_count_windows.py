"""Windows of a number of records, and windows of processing time."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.operators.harness import Bench, Clock
from tests.unit.operators.windowing import RECORDS, RESULTS, spec_of
from tidegate.dataflow.aggregates.numpy_columns import ranks
from tidegate.dataflow.operators.base import AT_ONCE_MS
from tidegate.dataflow.operators.count_windows import CountWindowOperator
from tidegate.dataflow.windows import global_window, tumbling
from tidegate.errors import UserFunctionError
from tidegate.protocol.watermarks import MAX_WATERMARK_MS

COUNTED = "key long, count long, total long"


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_every_so_many_records_of_a_key_give_a_result(size: int) -> None:
    for seed in range(20):
        rng = Random(seed)
        spec = spec_of(global_window(count=size))
        bench = Bench(spec, RECORDS, returns=COUNTED)
        seen: dict[int, list[int]] = {}
        for _ in range(12):
            records = [(rng.randrange(4), None, rng.randrange(100)) for _ in range(rng.choice((1, 5, 30)))]
            expected = []
            for key, _, n in records:
                numbers = seen.setdefault(key, [])
                numbers.append(n)
                if len(numbers) % size == 0:
                    expected.append((key, size, sum(numbers[-size:])))
            assert sorted(bench.feed(*records)) == sorted(expected)
            if rng.random() < 0.3:
                bench = Bench(spec, RECORDS, returns=COUNTED, restored=bench.freeze())


def test_a_window_that_is_not_full_stays_at_the_end_of_input() -> None:
    spec = spec_of(global_window(count=2))
    bench = Bench(spec, RECORDS, returns=COUNTED)
    bench.feed((1, 0, 5))
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    bench.operator.on_end()
    assert bench.out.events == [("watermark", MAX_WATERMARK_MS), ("end",)]
    again = Bench(spec, RECORDS, returns=COUNTED, restored=bench.freeze())
    assert again.feed((1, 0, 6)) == [(1, 2, 11)]


def test_all_windows_of_a_batch_are_made_at_once() -> None:
    """A key that fills thousands of windows in one batch must not make the slot silent."""
    spec = spec_of(global_window(count=10))
    bench = Bench(spec, RECORDS, returns=COUNTED)
    operator = bench.operator
    assert isinstance(operator, CountWindowOperator)
    added: list[int] = []
    add = operator._aggregation.add
    operator._aggregation.add = lambda *given: (added.append(len(given[1])), add(*given))[1]  # type: ignore[method-assign,func-returns-value]
    bench.feed((1, None, 1))
    assert len(bench.feed(*((1, None, 1) for _ in range(20_003)))) == 2000
    assert added == [1, 20_003]
    assert bench.feed(*((1, None, 1) for _ in range(6))) == [(1, 10, 10)]


def test_a_sum_that_is_too_large_names_its_key() -> None:
    bench = Bench(spec_of(global_window(count=2)), RECORDS, returns=COUNTED)
    with pytest.raises(UserFunctionError, match=r"key 8"):
        bench.feed((7, None, 1), (8, None, 1), (8, None, 1), (8, None, 2**63 - 1), (8, None, 1))


def test_a_sum_that_fits_is_right_when_a_part_of_it_would_not_fit() -> None:
    bench = Bench(spec_of(global_window(count=3)), RECORDS, returns=COUNTED)
    bench.feed((8, None, -(2**62)))
    assert bench.feed((8, None, 2**62), (8, None, 2**62)) == [(8, 3, 2**62)]


def test_nobody_is_told_that_event_time_never_moves() -> None:
    bench = Bench(spec_of(global_window(count=2)), RECORDS, returns=COUNTED, open=False)
    told: list[str] = []
    bench.operator.open(replace(bench.context, on_timer_without_event_time=lambda: told.append("never")))
    bench.feed((1, None, 1))
    assert told == []


def test_ranks_count_equal_values_before() -> None:
    assert ranks(pa.array([5, 3, 5, 5, 3]).to_numpy()).tolist() == [0, 0, 1, 2, 1]


def processing(**rest: Any) -> Bench:
    return Bench(spec_of(tumbling(None, "10 ms", time="processing")), RECORDS, returns=RESULTS, **rest)


def test_windows_of_processing_time_fire_by_the_clock() -> None:
    bench = processing()
    bench.clock.now_ms = 107
    bench.feed((1, None, 5), (2, None, 6))
    bench.clock.now_ms = 109
    bench.feed((1, None, 7))
    bench.operator.on_watermark(1_000_000)
    assert bench.out.events == [("watermark", 1_000_000)]
    assert bench.operator.deadline_ms() == 110
    bench.clock.now_ms = 110
    bench.operator.on_time(110)
    assert sorted(bench.out.rows) == [(1, 100, 110, 2, 12), (2, 100, 110, 1, 6)]
    assert bench.operator.deadline_ms() is None


def test_windows_of_processing_time_fire_at_the_end_of_input() -> None:
    bench = processing()
    bench.clock.now_ms = 107
    bench.feed((1, None, 5))
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    assert bench.out.events == [("batch", (1, 100, 110, 1, 5)), ("watermark", MAX_WATERMARK_MS)]


def test_windows_of_processing_time_fire_in_a_micro_batch_whose_time_has_passed_them() -> None:
    clock = Clock(103)
    bench = processing(batch_clock=clock)
    bench.feed((1, None, 5))
    assert bench.operator.deadline_ms() is None
    clock.now_ms = 112
    assert bench.operator.deadline_ms() == AT_ONCE_MS
    bench.operator.on_time(0)
    assert bench.out.rows == [(1, 100, 110, 1, 5)]
