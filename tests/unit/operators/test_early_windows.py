"""Windows that show their results so far."""

from __future__ import annotations

from typing import Any

from tests.unit.operators.harness import Bench, Clock
from tests.unit.operators.windowing import RECORDS, RESULTS, Windows, check_random_run, spec_of, subtask_of
from tidegate.dataflow.operators.base import AT_ONCE_MS
from tidegate.dataflow.windows import Assigner, sliding, tumbling

SPEC = spec_of(tumbling("ts", 10), early_ms=100)


def opened(assigner: Assigner, **rest: Any) -> Bench:
    return Bench(spec_of(assigner, early_ms=100), RECORDS, returns=RESULTS, **rest)


def shown(bench: Bench, now_ms: int) -> list[tuple[Any, ...]]:
    bench.clock.now_ms = now_ms
    bench.out.events.clear()
    bench.operator.on_time(now_ms)
    return bench.out.rows


def test_what_has_changed_is_shown_once() -> None:
    bench = opened(tumbling("ts", 10))
    bench.clock.now_ms = 1000
    assert bench.operator.deadline_ms() is None
    bench.feed((1, 3, 5), (2, 14, 6))
    bench.clock.now_ms = 1050
    bench.feed((1, 4, 5))
    assert bench.operator.deadline_ms() == 1100
    assert shown(bench, 1100) == [(1, 0, 10, 2, 10), (2, 10, 20, 1, 6)]
    assert bench.operator.deadline_ms() is None
    bench.feed((2, 15, 1))
    assert shown(bench, 1200) == [(2, 10, 20, 2, 7)]
    bench.out.events.clear()
    bench.operator.on_watermark(100)
    assert bench.out.rows == [(1, 0, 10, 2, 10), (2, 10, 20, 2, 7)], "and all results at the end"


def test_all_windows_that_a_record_is_in_are_shown_but_those_that_have_fired() -> None:
    bench = opened(sliding("ts", 20, 10))
    bench.feed((1, 5, 1), (1, 15, 2))
    bench.operator.on_watermark(9)
    assert shown(bench, 100) == [(1, 0, 20, 2, 3), (1, 10, 30, 1, 2)]


def test_a_window_that_has_fired_for_a_key_is_not_shown_again_after_a_rescale() -> None:
    """Event time is kept by key-group: a key that is ahead has its final result, which must stay the last one."""
    two = Windows(spec_of(sliding("ts", 20, 10), early_ms=100), parallelism=2)
    ahead, behind = (next(key for key in range(100) if subtask_of(key, 2) == subtask) for subtask in (0, 1))
    two.feed([(ahead, 25, 1), (behind, 25, 1)])
    two.watermark(0, 29)
    one = two.restored(parallelism=1)
    one.taken()
    one.feed([(ahead, 26, 1), (behind, 26, 1)])
    bench = one.benches[0]
    assert sorted(shown(bench, 100)) == sorted([(ahead, 20, 40, 2, 2), (behind, 10, 30, 2, 2), (behind, 20, 40, 2, 2)]), (
        "and not the window of 10 to 30 of the key that is ahead"
    )


def test_after_a_restore_all_open_windows_are_shown_again() -> None:
    bench = opened(tumbling("ts", 10))
    bench.feed((1, 3, 5))
    assert shown(bench, 100) == [(1, 0, 10, 1, 5)]
    again = opened(tumbling("ts", 10), restored=bench.freeze())
    assert again.operator.deadline_ms() == 100
    assert shown(again, 100) == [(1, 0, 10, 1, 5)]


def test_in_a_micro_batch_results_are_due_from_the_beginning_or_not_in_this_batch() -> None:
    clock = Clock(1000)
    bench = opened(tumbling("ts", 10), batch_clock=clock)
    bench.feed((1, 3, 5))
    assert bench.operator.deadline_ms() is None
    clock.now_ms = 1100
    assert bench.operator.deadline_ms() == AT_ONCE_MS
    assert shown(bench, 1) == [(1, 0, 10, 1, 5)]


def test_the_results_at_the_end_are_the_same() -> None:
    for seed in range(10):
        check_random_run(sliding("ts", 20, 5), seed, lateness_ms=17, early_ms=10**9)
