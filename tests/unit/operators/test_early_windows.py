"""Windows that show their results so far, of aggregates and of functions of whole windows."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import pytest

from tests.unit.operators.harness import Bench, Clock, on_heap
from tests.unit.operators.test_triggers import function_of
from tests.unit.operators.test_windows_on_rocksdb import on_rocksdb
from tests.unit.operators.window_oracle import windows_of
from tests.unit.operators.windowing import RECORDS, RESULTS, Windows, check_random_run, spec_of, subtask_of
from tidegate.dataflow.operators.base import AT_ONCE_MS
from tidegate.dataflow.windows import Paned, Window, cumulating, sliding, tumbling


@pytest.fixture(params=[spec_of, function_of], ids=["aggregates", "function"])
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def opened(make: Any, assigner: Paned, **rest: Any) -> Bench:
    return Bench(make(assigner, early_ms=100), RECORDS, returns=RESULTS, **rest)


def shown(bench: Bench, now_ms: int) -> list[tuple[Any, ...]]:
    bench.clock.now_ms = now_ms
    bench.out.events.clear()
    bench.operator.on_time(now_ms)
    return bench.out.rows


def test_what_has_changed_is_shown_once(make: Any) -> None:
    bench = opened(make, tumbling("ts", 10))
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


def test_all_windows_that_a_record_is_in_are_shown_but_those_that_have_fired(make: Any) -> None:
    bench = opened(make, sliding("ts", 20, 10))
    bench.feed((1, 5, 1), (1, 15, 2))
    bench.operator.on_watermark(9)
    assert shown(bench, 100) == [(1, 0, 20, 2, 3), (1, 10, 30, 1, 2)]


def test_a_window_that_has_fired_for_a_key_is_not_shown_again_after_a_rescale(make: Any) -> None:
    """Event time is kept by key-group: a key that is ahead has its final result, which must stay the last one."""
    two = Windows(make(sliding("ts", 20, 10), early_ms=100), parallelism=2)
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


def test_after_a_restore_all_open_windows_are_shown_again(make: Any) -> None:
    bench = opened(make, tumbling("ts", 10))
    bench.feed((1, 3, 5))
    assert shown(bench, 100) == [(1, 0, 10, 1, 5)]
    again = opened(make, tumbling("ts", 10), restored=bench.freeze())
    assert again.operator.deadline_ms() == 100
    assert shown(again, 100) == [(1, 0, 10, 1, 5)]


def test_in_a_micro_batch_results_are_due_from_the_beginning_or_not_in_this_batch(make: Any) -> None:
    clock = Clock(1000)
    bench = opened(make, tumbling("ts", 10), batch_clock=clock)
    bench.feed((1, 3, 5))
    assert bench.operator.deadline_ms() is None
    clock.now_ms = 1100
    assert bench.operator.deadline_ms() == AT_ONCE_MS
    assert shown(bench, 1) == [(1, 0, 10, 1, 5)]


def test_the_results_at_the_end_are_the_same() -> None:
    for seed in range(10):
        check_random_run(sliding("ts", 20, 5), seed, lateness_ms=17, early_ms=10**9)


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
@pytest.mark.parametrize(
    ("assigner", "purges"),
    [
        (tumbling("ts", 10), False),
        (tumbling("ts", 10), True),
        (sliding("ts", 20, 5), False),
        (cumulating("ts", 30, 10), False),
    ],
    ids=str,
)
def test_the_clock_shows_what_has_changed_and_nothing_is_lost(
    make: Any, assigner: Paned, purges: bool, make_backend: Any
) -> None:
    """Against a model: disordered records, watermarks, and restores at other parallelisms."""
    for seed in range(3):
        rng = Random(seed)
        windows = Windows(make(assigner, early_ms=100, purges=purges), parallelism=2, make_backend=make_backend)
        held: defaultdict[tuple[int, Window], list[int]] = defaultdict(list)
        changed: set[tuple[int, Window]] = set()
        now = reached = 0
        for number in range(30):
            what, expected = rng.random(), []
            if what < 0.5:
                now += rng.choice((0, 1, 8))
                records = [(rng.randrange(4), now + rng.randrange(25), number) for _ in range(rng.choice((1, 6)))]
                for key, ts, n in records:
                    for each in windows_of(assigner, ts):
                        held[key, each].append(n)
                        changed.add((key, each))
                windows.feed(records)
            elif what < 0.7:
                expected, changed = sorted(changed), set()
                for bench in windows.benches:
                    bench.operator.on_time(0)
            elif what < 0.9:
                reached = max(reached, now - 1)
                expected = sorted(each for each in held if each[1].end_ms - 1 <= reached)
                for subtask in range(windows.parallelism):
                    windows.watermark(subtask, reached)
            else:
                windows = windows.restored(parallelism=rng.choice((1, 2, 3)))
                changed = set(held)
            windows.finish_work()
            rows = [(key, *each, len(held[key, each]), sum(held[key, each])) for key, each in expected]
            assert sorted(windows.taken()[0]) == sorted(rows)
            if what < 0.7 and purges:
                for shown_now in expected:
                    del held[shown_now]
            held = defaultdict(list, {each: n for each, n in held.items() if each[1].end_ms - 1 > reached})
            changed &= set(held)
