"""Tumbling, sliding and cumulating windows, against every window that could be (window_oracle.py)."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.unit.operators.harness import Bench, Collected
from tests.unit.operators.windowing import RECORDS, RESULTS, Windows, check_random_run, spec_of
from tidegate.dataflow.operators import paned_windows, window
from tidegate.dataflow.operators.window import MAX_ROWS, MAX_WINDOWS
from tidegate.dataflow.operators.window_spec import WindowSpec
from tidegate.dataflow.windows import Assigner, Paned, cumulating, sessions, sliding, tumbling

ASSIGNERS = {
    "tumbling": tumbling("ts", 10),
    "tumbling with an offset": tumbling("ts", 10, offset=3),
    "sliding": sliding("ts", 20, 5),
    "sliding, panes shorter than the slide": sliding("ts", 10, 4, offset=1),
    "sliding with gaps": sliding("ts", 5, 8),
    "cumulating": cumulating("ts", 30, 10),
}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that windows fire in many steps."""
    monkeypatch.setattr(paned_windows, "MAX_ROWS", 3)
    monkeypatch.setattr(window, "MAX_ROWS", 3)
    monkeypatch.setattr(paned_windows, "_OVERHEAD_ROWS", 1)


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize("assigner", ASSIGNERS.values(), ids=ASSIGNERS)
def test_results_are_those_of_all_windows_that_could_be(assigner: Paned, lateness_ms: int) -> None:
    for seed in range(12):
        check_random_run(assigner, seed, lateness_ms=lateness_ms, rescales=False)


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize("assigner", ASSIGNERS.values(), ids=ASSIGNERS)
def test_results_are_the_same_with_restores_and_rescales(assigner: Paned, lateness_ms: int) -> None:
    for seed in range(12):
        check_random_run(assigner, seed, lateness_ms=lateness_ms)


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize("assigner", ASSIGNERS.values(), ids=ASSIGNERS)
def test_a_snapshot_may_come_while_windows_fire(assigner: Paned, lateness_ms: int, small_steps: None) -> None:
    for seed in range(12):
        check_random_run(assigner, seed, lateness_ms=lateness_ms, stops_in_the_middle=True)


def test_a_record_in_flight_does_not_open_a_window_again_that_a_snapshot_found_half_fired(small_steps: None) -> None:
    windows = Windows(spec_of(tumbling("ts", 10), late="late"))
    windows.feed([(key, 1, 1) for key in range(8)])
    windows.watermark(0, 20)
    emitted = windows.taken()[0]
    assert 0 < len(emitted) < 8, "a snapshot comes between two steps"
    restored = windows.restored(parallelism=1, resumed=False)
    in_flight = (emitted[0][0], 2, 100)
    restored.feed([in_flight])
    restored.resume()
    restored.finish_work()
    restored.watermark(0, 20)
    restored.finish_work()
    rest, late = restored.taken()
    assert sorted(emitted + rest) == [(key, 0, 10, 1, 1) for key in range(8)]
    assert late == [in_flight]


@pytest.mark.parametrize("assigner", [tumbling("ts", 10), sessions("ts", 10)], ids=lambda each: each.text)
@pytest.mark.parametrize("late", [None, "late"])
def test_late_records_that_go_nowhere_are_counted(assigner: Assigner, late: str | None) -> None:
    windows = Windows(spec_of(assigner, late=late))
    windows.feed([(1, 5, 1)])
    windows.watermark(0, 100)
    windows.feed([(1, 5, 1), (2, 6, 1), (1, 105, 1)])
    assert windows.operator(0).late_dropped == (2 if late is None else 0)
    assert len(windows.taken()[1]) == (0 if late is None else 2)


class Sizes(Collected):
    """Notes how large the batches are, and not what is in them."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        self.events.append(("rows", batch.num_rows))


def fired_in_steps(spec: WindowSpec, keys: np.ndarray[Any, Any], times: np.ndarray[Any, Any]) -> list[list[tuple[Any, ...]]]:
    """What each step emits when the watermark passes everything."""
    bench = Bench(spec, RECORDS, returns=RESULTS)
    bench.operator.consumers[:] = [out := Sizes()]
    bench.operator.on_batch(pa.record_batch([keys, times, keys], schema=bench.schemas[0]), 0)
    steps = []
    bench.operator.on_watermark(10**9)
    while True:
        steps.append(out.events)
        out.events = []
        if not bench.operator.has_work():
            return steps
        bench.operator.work()


@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize(
    "assigner", [tumbling("ts", 10), sliding("ts", 20, 10), sessions("ts", 10)], ids=lambda each: each.text
)
def test_a_million_keys_whose_windows_end_together_fire_in_bounded_steps(assigner: Assigner, lateness_ms: int) -> None:
    count = 1_000_000
    steps = fired_in_steps(spec_of(assigner, lateness_ms=lateness_ms), np.arange(count), np.full(count, 5))
    emitted = [event[1] for step in steps for event in step if event[0] == "rows"]
    windows = 2 if isinstance(assigner, Paned) and assigner.every_ms < assigner.size_ms else 1
    assert sum(emitted) == windows * count
    assert max(sum(event[1] for event in step if event[0] == "rows") for step in steps) < 2 * MAX_ROWS
    assert len(steps) >= windows * count // (2 * MAX_ROWS)
    assert [event for step in steps for event in step][-1] == ("watermark", 10**9), "it goes downstream last"


def test_many_windows_that_end_together_fire_in_bounded_steps() -> None:
    count = 3000
    steps = fired_in_steps(spec_of(tumbling("ts", 1)), np.zeros(count, np.int64), np.arange(count))
    emitted = [event[1] for step in steps for event in step if event[0] == "rows"]
    assert sum(emitted) == count
    assert max(emitted) <= MAX_WINDOWS, "and those of a step are one batch"


def test_windows_that_are_due_are_not_all_in_memory() -> None:
    """A record may be in a hundred thousand windows."""
    bench = Bench(spec_of(sliding("ts", 100_000, 1)), RECORDS, returns=RESULTS)
    bench.feed(*((1, 1000 * pane, 1) for pane in range(2)))
    operator = bench.operator
    assert isinstance(operator, paned_windows.PanedWindowOperator)
    tracemalloc.start()
    due = operator._due(10**9)
    assert [next(due) for _ in range(3)] == [1, 2, 3]
    assert sum(1 for _ in due) == 100_000 + 1000 - 3
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 200_000
