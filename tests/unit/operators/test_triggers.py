"""Triggers: results before a window is complete, of aggregates and of functions of whole windows, against a model batch by
batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.operators.harness import Bench, Clock, on_heap
from tests.unit.operators.test_windows_on_rocksdb import on_rocksdb
from tests.unit.operators.windowing import RECORDS, RESULTS, Windows, spec_of
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import Accumulator, BoolArray, IntArray, Vectors
from tidegate.dataflow.aggregates.declaring import count
from tidegate.dataflow.operators import global_windows, paned_windows, record_windows, window
from tidegate.dataflow.operators.base import AT_ONCE_MS
from tidegate.dataflow.operators.function_windows import FunctionWindowSpec
from tidegate.dataflow.operators.record_windows import RecordWindowSpec
from tidegate.dataflow.operators.showing import Showing
from tidegate.dataflow.operators.window_results import CallFunction, KeyedWindow
from tidegate.dataflow.triggers import Trigger, after, every_records
from tidegate.dataflow.windows import global_window, tumbling
from tidegate.protocol.watermarks import MAX_WATERMARK_MS
from tidegate.types import parse_schema

SIZE = 10
COUNTED = "key long, count long, total long"
Shown = tuple[Any, int, int]


class Sevens(Trigger):
    """Fires when the n of a record was a multiple of seven."""

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return (Accumulator("seen", pa.bool_(), False),)

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        vectors["seen"].values[rows[inputs[0].to_numpy() % 7 == 0]] = True

    def fires(self, vectors: Vectors, rows: IntArray) -> BoolArray:
        found: BoolArray = vectors["seen"].values[rows]
        return found


class Model:
    """What is shown after each batch, in plain Python."""

    def __init__(self, least: int, *, purges: bool, sevens: bool) -> None:
        self._least = least
        self._purges = purges
        self._sevens = sevens
        self._new: defaultdict[Any, list[int]] = defaultdict(list)  # since it was shown
        self._held: defaultdict[Any, list[int]] = defaultdict(list)

    def on_batch(self, records: list[tuple[Any, int]]) -> list[Shown]:
        for what, n in records:
            self._new[what].append(n)
            self._held[what].append(n)
        shown = []
        for what in {what for what, _ in records}:
            new = self._new[what]
            if len(new) >= self._least or (self._sevens and any(n % 7 == 0 for n in new)):
                shown.append(self._shown(what))
        return shown

    def rest(self) -> list[Shown]:
        return [self._shown(what) for what in list(self._held) if self._held[what]]

    def _shown(self, what: Any) -> Shown:
        held = self._held[what]
        result = what, len(held), sum(held)
        self._new[what] = []
        if self._purges:
            self._held[what] = []
        return result


def totals(given: KeyedWindow, records: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The function of whole windows that gives what the aggregates do."""
    assert len(records), "a function is only called with records"
    numbers = [record.n for record in records]
    bounds = () if given.start is None else (given.start, given.end)
    yield given.key, *bounds, len(numbers), sum(numbers)


def function_of(
    assigner: Any,
    *,
    triggers: Sequence[Trigger] = (),
    early_ms: int | None = None,
    purges: bool = False,
    lateness_ms: int = 0,
) -> Any:
    """The same as `spec_of`, of a function."""
    schema = parse_schema(RECORDS)
    named = {"records": count()}
    aggregation = Aggregation("here", named, schema, triggers=triggers) if triggers else None
    showing = Showing(aggregation, early_ms, purges)
    results = CallFunction(totals, True)
    if assigner == global_window():
        return FunctionWindowSpec(assigner, ("key",), results, schema, showing)
    return RecordWindowSpec((assigner,), (("key",),), results, (schema,), pa.int64(), (None,), lateness_ms, showing)


MAKERS = pytest.mark.parametrize("make", [spec_of, function_of], ids=["aggregates", "function"])


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (global_windows, paned_windows, record_windows, window):
        monkeypatch.setattr(module, "MAX_ROWS", 3)


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
@pytest.mark.parametrize("purges", [False, True])
@pytest.mark.parametrize("sevens", [False, True])
@MAKERS
def test_tumbling_windows_are_shown_when_enough_records_have_come(
    purges: bool, sevens: bool, make_backend: Any, make: Any, small_steps: None
) -> None:
    for seed in range(3):
        rng = Random(seed)
        triggers = [every_records(4), *([Sevens("n")] if sevens else [])]
        spec = make(tumbling("ts", SIZE), triggers=triggers, purges=purges)
        windows, model = Windows(spec, parallelism=2, make_backend=make_backend), Model(4, purges=purges, sevens=sevens)
        for _ in range(15):
            records = [(rng.randrange(4), rng.randrange(30), rng.randrange(50)) for _ in range(rng.choice((1, 5, 20)))]
            windows.feed(records)
            windows.finish_work()
            shown = model.on_batch([((key, ts // SIZE), n) for key, ts, n in records])
            assert sorted(windows.taken()[0]) == sorted(map(as_result, shown))
            if rng.random() < 0.3:
                windows = windows.restored(parallelism=rng.choice((1, 2, 3)))
        windows = windows.restored(parallelism=1)
        windows.watermark(0, 1000)
        windows.finish_work()
        assert sorted(windows.taken()[0]) == sorted(map(as_result, model.rest()))
        assert not any(
            batch.num_rows
            for batches in windows.benches[0].freeze().values()
            for batch in batches
            if "key" in batch.schema.names
        )


def as_result(shown: Shown) -> tuple[Any, ...]:
    (key, pane), count, total = shown
    return key, pane * SIZE, (pane + 1) * SIZE, count, total


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
@pytest.mark.parametrize("purges", [False, True])
@MAKERS
def test_the_global_window_is_shown_when_enough_records_of_a_key_have_come(
    purges: bool, make_backend: Any, make: Any
) -> None:
    spec = make(global_window(), triggers=[every_records(4), Sevens("n")], purges=purges)
    for seed in range(3):
        rng = Random(seed)
        bench = Bench(spec, RECORDS, returns=COUNTED, make_backend=make_backend)
        model = Model(4, purges=purges, sevens=True)
        for _ in range(20):
            records = [(rng.randrange(4), None, rng.randrange(100)) for _ in range(rng.choice((1, 5, 20)))]
            assert sorted(bench.feed(*records)) == sorted(model.on_batch([(key, n) for key, _, n in records]))
            if rng.random() < 0.3:
                bench = Bench(spec, RECORDS, returns=COUNTED, restored=bench.freeze(), make_backend=make_backend)
        bench.out.events.clear()
        bench.operator.on_watermark(MAX_WATERMARK_MS)
        assert not bench.out.rows, "what no trigger has fired for stays in the state"


def shown_at(bench: Bench, now_ms: int) -> list[tuple[Any, ...]]:
    bench.clock.now_ms = now_ms
    bench.out.events.clear()
    bench.operator.on_time(now_ms)
    return sorted(bench.out.rows)


@MAKERS
def test_the_global_window_is_shown_by_the_clock(make: Any) -> None:
    spec = make(global_window(), early_ms=100)
    bench = Bench(spec, RECORDS, returns=COUNTED)
    assert bench.operator.deadline_ms() is None
    assert bench.feed((1, None, 5), (2, None, 6)) == []
    assert bench.operator.deadline_ms() == 100
    assert shown_at(bench, 100) == [(1, 1, 5), (2, 1, 6)]
    bench.feed((2, None, 7))
    assert shown_at(bench, 200) == [(2, 2, 13)], "what has changed since"
    again = Bench(spec, RECORDS, returns=COUNTED, restored=bench.freeze())
    assert again.operator.deadline_ms() == 100
    assert shown_at(again, 100) == [(1, 1, 5), (2, 2, 13)], "after a restore all keys count as changed"
    again.feed((1, None, 1))
    again.out.events.clear()
    again.operator.on_watermark(MAX_WATERMARK_MS)
    assert again.out.events[0] == ("batch", (1, 2, 6)), "at the end of input nothing waits for the clock"


@pytest.mark.parametrize("assigner", [tumbling("ts", SIZE), global_window()], ids=lambda each: each.text)
@MAKERS
def test_what_was_purged_by_one_trigger_is_not_shown_by_the_other(assigner: Any, make: Any) -> None:
    spec = make(assigner, early_ms=100, triggers=[every_records(3)], purges=True)
    bench = Bench(spec, RECORDS, returns=COUNTED if assigner == global_window() else RESULTS)
    bench.feed((1, 5, 1), (2, 5, 1))
    bench.feed((1, 5, 1), (1, 5, 1))
    assert [(row[0], *row[-2:]) for row in bench.out.rows] == [(1, 3, 3)]
    assert [(row[0], *row[-2:]) for row in shown_at(bench, 100)] == [(2, 1, 1)]
    bench.feed((2, 5, 4))
    bench.out.events.clear()
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    assert [(row[0], *row[-2:]) for row in bench.out.rows] == [(2, 1, 4)]


@MAKERS
def test_in_a_micro_batch_the_global_window_is_due_from_the_beginning_or_not_in_this_batch(make: Any) -> None:
    clock = Clock(1000)
    bench = Bench(make(global_window(), early_ms=100), RECORDS, returns=COUNTED, batch_clock=clock)
    bench.feed((1, None, 5))
    assert bench.operator.deadline_ms() is None
    clock.now_ms = 1100
    assert bench.operator.deadline_ms() == AT_ONCE_MS
    assert shown_at(bench, 1) == [(1, 1, 5)]


@MAKERS
def test_a_late_record_fires_its_window_again_once_and_not_by_the_trigger_as_well(make: Any) -> None:
    windows = Windows(make(tumbling("ts", SIZE), triggers=[every_records(1)], lateness_ms=20))
    windows.feed([(1, 5, 1)])
    windows.watermark(0, 15)
    windows.feed([(1, 6, 1)])
    assert windows.taken()[0] == [(1, 0, 10, 1, 1), (1, 0, 10, 1, 1), (1, 0, 10, 2, 2)]


def test_triggers_are_joined() -> None:
    both = after("10 s") | every_records(5) | after("2 s")
    assert both.after_ms == 2000 and [each.label for each in both.by_records] == ["every 5 records"]
    assert (every_records(5) | after("1 s")).after_ms == 1000
    assert (Sevens("n") | every_records(2)).after_ms is None
