"""Functions of whole windows and windowed joins, against every window that could be, with restores in the middle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.operators.harness import Bench, Clock, on_heap
from tests.unit.operators.test_windows_on_rocksdb import on_rocksdb
from tests.unit.operators.window_oracle import Record, windows_of
from tests.unit.operators.windowing import RECORDS, RESULTS, Windows, check_random_run, group, restored_at
from tidegate.dataflow.operators import paned_windows, record_windows, window, window_results
from tidegate.dataflow.operators.budget import Budget
from tidegate.dataflow.operators.record_windows import RecordWindowSpec
from tidegate.dataflow.operators.session_records import SessionRecordSpec
from tidegate.dataflow.operators.window_results import CallFunction, JoinRecords, KeyedWindow, WindowResults
from tidegate.dataflow.windows import Paned, Sessions, Window, cumulating, sliding, tumbling
from tidegate.errors import SchemaError, UserFunctionError
from tidegate.protocol.watermarks import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.types import parse_schema

ASSIGNERS = [tumbling("ts", 10, offset=3), sliding("ts", 20, 5), sliding("ts", 5, 8), cumulating("ts", 30, 10)]
JOINED = "key long, ts long, n long, other_ts long, other_n long, window_start long not null, window_end long not null"
HALF_JOINED = "key long, ts long, n long, window_start long not null, window_end long not null"
OTHERS = "key long, other_ts long, other_n long"


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that windows fire in many steps, and joins are made in many pieces."""
    for module in (paned_windows, window, record_windows):
        monkeypatch.setattr(module, "MAX_ROWS", 3)
    monkeypatch.setattr(window_results, "PAIRS", 3)


def totals(given: KeyedWindow, records: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    numbers = [record.n for record in records]
    assert numbers == sorted(numbers), "records are in the order in which they arrived"
    assert {record.key for record in records} == {given.key}
    yield given.key, given.start, given.end, len(numbers), sum(numbers)


def batch_totals(given: KeyedWindow, records: pa.RecordBatch) -> pa.RecordBatch:
    numbers = records["n"].to_pylist()
    row = [given.key, given.start, given.end, len(numbers), sum(numbers)]
    return pa.RecordBatch.from_arrays([pa.array([each], pa.int64()) for each in row], schema=parse_schema(RESULTS))


def function_spec(assigner: Paned, function: Any = totals, *, as_rows: bool = True, **rest: Any) -> Any:
    return of(CallFunction(function, as_rows), (assigner,), (RECORDS,), **rest)


def of(
    results: WindowResults,
    assigners: tuple[Any, ...],
    records: tuple[str, ...],
    *,
    late: str | None = None,
    lateness_ms: int = 0,
) -> Any:
    schemas = tuple(map(parse_schema, records))
    return (SessionRecordSpec if isinstance(assigners[0], Sessions) else RecordWindowSpec)(
        assigners,
        tuple(("key",) for _ in schemas),
        results,
        schemas,
        pa.int64(),
        (late, None)[: len(schemas)],
        lateness_ms,
    )


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
@pytest.mark.parametrize("lateness_ms", [0, 17])
@pytest.mark.parametrize("assigner", ASSIGNERS, ids=lambda each: each.text)
def test_a_function_gets_the_records_of_each_window(
    assigner: Paned, lateness_ms: int, make_backend: Any, small_steps: None
) -> None:
    for seed in range(4):
        check_random_run(
            assigner,
            seed,
            lateness_ms=lateness_ms,
            stops_in_the_middle=seed % 2 == 0,
            make_backend=make_backend,
            make_spec=function_spec,
        )


def test_a_function_may_take_and_return_batches() -> None:
    def make_spec(assigner: Paned, **rest: Any) -> Any:
        return function_spec(assigner, batch_totals, as_rows=False, **rest)

    for seed in range(4):
        check_random_run(sliding("ts", 20, 5), seed, lateness_ms=0, make_spec=make_spec)


def test_nothing_is_left_of_windows_that_have_fired() -> None:
    for assigner in ASSIGNERS:
        bench = Bench(function_spec(assigner), RECORDS, returns=RESULTS)
        bench.feed(*((key, ts, ts) for key in range(5) for ts in range(0, 100, 3)))
        assert sum(map(len, bench.freeze()["records"])) > 0
        bench.operator.on_watermark(10**6)
        assert sum(map(len, bench.freeze()["records"])) == 0


def test_a_slow_function_is_called_in_bounded_steps() -> None:
    clock = Clock()

    def slow(given: KeyedWindow, records: Any) -> list[tuple[Any, ...]]:
        clock.now_ms += 40
        return [(given.key, given.start, given.end, len(records), 0)]

    bench = Bench(function_spec(tumbling("ts", 10), slow), RECORDS, returns=RESULTS, budget=Budget(clock))
    bench.feed(*((key, 1, 1) for key in range(100)))
    bench.context.budget.begin()
    bench.operator.on_watermark(100)
    steps = 1
    while bench.operator.has_work():
        before = clock.now_ms
        bench.context.budget.begin()
        bench.operator.work()
        assert clock.now_ms - before <= 8 * 40, (
            "a step of 100 ms, and the calls that were made before the clock was looked at"
        )
        steps += 1
    assert steps > 12 and len(bench.out.rows) == 100


def test_what_is_left_of_a_window_is_not_lost_when_a_subtask_gets_keys_of_another_one() -> None:
    class OfSlowFunction:
        portion = 1

        def is_over(self) -> bool:
            return True

    windows = Windows(function_spec(tumbling("ts", 10)), parallelism=2)
    windows.feed([(key, 1, 1) for key in range(30)])
    operator = windows.operator(0)
    assert isinstance(operator, record_windows.RecordWindowOperator)
    operator._pace = OfSlowFunction()  # type: ignore[assignment]
    windows.watermark(0, 9)
    while len(windows.benches[0].out.rows) < 3:
        operator.work()
    assert operator.has_work() and not operator.holds_records()
    rows: list[Any] = []
    windows = restored_at(windows, 1, rows)
    windows.watermark(0, MAX_WATERMARK_MS)
    windows.finish_work()
    assert sorted(row[0] for row in rows + windows.taken()[0]) == list(range(30))


def test_what_a_function_raises_names_the_window() -> None:
    def fails(given: KeyedWindow, records: Any) -> None:
        raise ValueError("no such thing")

    bench = Bench(function_spec(tumbling("ts", 10), fails), RECORDS, returns=RESULTS)
    bench.feed((7, 1, 1))
    with pytest.raises(UserFunctionError, match="no such thing") as raised:
        bench.operator.on_watermark(100)
    assert raised.value.record == "the window from 0 to 10 of key 7"


def test_one_row_that_is_not_in_a_list_is_an_error_that_says_so() -> None:
    def one(given: KeyedWindow, records: Any) -> Any:
        return given.key, given.start, given.end, 1, 1

    bench = Bench(function_spec(tumbling("ts", 10), one), RECORDS, returns=RESULTS)
    bench.feed((7, 1, 1))
    with pytest.raises(UserFunctionError, match=r"one returned .*, and not several rows"):
        bench.operator.on_watermark(100)


@pytest.mark.parametrize("given", [[(1, 2)], pa.record_batch({"x": [1]})], ids=["a row", "a batch"])
def test_what_a_function_returns_has_to_fit(given: Any) -> None:
    bench = Bench(function_spec(tumbling("ts", 10), lambda _window, _records: given), RECORDS, returns=RESULTS)
    bench.feed((7, 1, 1))
    with pytest.raises(SchemaError, match="'the operator' is declared with returns="):
        bench.operator.on_watermark(100)


# ------------------------------------------------------------------------------------------------------------ joins


class JoinOracle:
    """All records by key and window, and their join when the watermark comes. Time is kept by key-group."""

    def __init__(self, assigner: Any, how: str) -> None:
        self._assigner = assigner
        self._how = how
        self._times = dict.fromkeys(range(16), MIN_WATERMARK_MS)
        self._inside: defaultdict[tuple[Any, Window], tuple[list[Record], list[Record]]] = defaultdict(lambda: ([], []))

    def on_records(self, records: Sequence[Record], port: int) -> list[Record]:
        late: list[Record] = []
        for key, ts, n in records:
            if ts is None:
                continue
            windows = windows_of(self._assigner, ts)
            in_time = [each for each in windows if each.end_ms - 1 > self._times[group(key)]]
            if windows and not in_time:
                late.append((key, ts, n))
            for each in in_time:
                self._inside[key, each][port].append((key, ts, n))
        return late

    def on_watermark(self, at_ms: int, groups: range) -> list[tuple[Any, ...]]:
        joined: list[tuple[Any, ...]] = []
        for (key, each), (left, right) in self._inside.items():
            if group(key) in groups and self._times[group(key)] < each.end_ms - 1 <= at_ms:
                joined += self._rows(key, each, left, right)
        for number in groups:
            self._times[number] = max(self._times[number], at_ms)
        return joined

    def _rows(self, key: Any, bounds: tuple[int, int], left: list[Record], right: list[Record]) -> list[tuple[Any, ...]]:
        # Null equals nothing.
        pairs: list[tuple[list[Record], list[Record]]] = [(left, right)] if key is not None else [(left, []), ([], right)]
        return [(*row, *bounds) for pair in pairs for row in self._joined(*pair)]

    def _joined(self, left: list[Record], right: list[Record]) -> list[tuple[Any, ...]]:
        if self._how in ("semi", "anti"):
            return list(left) if bool(right) == (self._how == "semi") else []
        rows: list[tuple[Any, ...]] = [(*one, *other[1:]) for one in left for other in right]
        if self._how in ("left", "full") and not right:
            rows += [(*one, None, None) for one in left]
        if self._how in ("right", "full") and not left:
            rows += [(other[0], None, None, *other[1:]) for other in right]
        return rows


def join_spec(assigner: Any, how: str, *, late: str | None = None) -> Any:
    is_half = how in ("semi", "anti")
    results = JoinRecords(
        how, ("key", "ts", "n"), () if is_half else ("key", "other_ts", "other_n"), () if is_half else (("key", 0),)
    )
    return of(results, (assigner, replace(assigner, column="other_ts")), (RECORDS, OTHERS), late=late)


def check_join(
    assigner: Any, how: str, seed: int, make_backend: Any = on_heap, make_oracle: Callable[[Any, str], Any] = JoinOracle
) -> None:
    rng = Random(seed)
    returns = HALF_JOINED if how in ("semi", "anti") else JOINED
    windows = Windows(
        join_spec(assigner, how, late="late"),
        inputs=(RECORDS, OTHERS),
        returns=returns,
        parallelism=rng.choice((1, 2, 3)),
        make_backend=make_backend,
    )
    oracle = make_oracle(assigner, how)
    now, number = rng.randrange(-50, 50), 0
    reached = [now - 1000] * windows.parallelism
    for _ in range(rng.randrange(5, 30)):
        what = rng.random()
        if what < 0.6:
            port, records = rng.randrange(2), []
            for _ in range(rng.choice((1, 3, 15))):
                number += 1
                ts = None if rng.random() < 0.03 else now - rng.choice((0, 2, 5, 12, 40))
                records.append((rng.choice((None, *range(5))), ts, number))
            now += rng.choice((0, 1, 3, 30))
            late = oracle.on_records(records, port)
            windows.feed(records, port)
            found, found_late = windows.taken()
            assert not found and sorted(found_late, key=repr) == (sorted(late, key=repr) if port == 0 else [])
        elif what < 0.9:
            subtask = rng.randrange(windows.parallelism)
            at_ms = reached[subtask] = max(reached[subtask], now - rng.randrange(15))
            expected = oracle.on_watermark(at_ms, windows.groups(subtask))
            windows.watermark(subtask, at_ms)
            rows: list[Any] = []
            while windows.operator(subtask).has_work():
                rows += windows.taken()[0]
                if rng.random() < 0.3:
                    windows = restored_at(windows, windows.parallelism, rows)
                    windows.watermark(subtask, at_ms)
                elif windows.operator(subtask).has_work():
                    windows.operator(subtask).work()
            rows += windows.taken()[0]
            assert sorted(rows, key=repr) == sorted(expected, key=repr)
        else:
            windows = restored_at(windows, rng.choice((1, 2, 3)), [])
            reached = [now - 1000] * windows.parallelism
    windows = restored_at(windows, 1, [])
    expected = oracle.on_watermark(MAX_WATERMARK_MS, windows.groups(0))
    windows.watermark(0, MAX_WATERMARK_MS)
    windows.finish_work()
    assert sorted(windows.taken()[0], key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize("how", ["inner", "left", "right", "full", "semi", "anti"])
@pytest.mark.parametrize("assigner", [ASSIGNERS[0], ASSIGNERS[1]], ids=lambda each: each.text)
def test_a_join_is_that_of_the_records_of_each_window(assigner: Paned, how: str, small_steps: None) -> None:
    for seed in range(4):
        check_join(assigner, how, seed)


@pytest.mark.parametrize("how", ["inner", "full"])
def test_a_join_on_rocksdb_is_the_same(how: str, small_steps: None) -> None:
    for seed in range(3):
        check_join(sliding("ts", 20, 5), how, seed, on_rocksdb)


def test_a_join_of_many_records_of_one_key_is_emitted_in_pieces() -> None:
    bench = Bench(join_spec(tumbling("ts", 10), "inner"), RECORDS, OTHERS, returns=JOINED)
    bench.feed(*((1, 1, n) for n in range(1000)))
    bench.feed(*((1, 1, n) for n in range(300)), port=1)
    sizes = []
    bench.operator.on_watermark(100)
    while True:
        sizes.append(len(bench.out.rows))
        bench.out.events.clear()
        if not bench.operator.has_work():
            break
        assert bench.operator.holds_records(), "a snapshot waits for the rest of the key"
        bench.operator.work()
    assert sum(sizes) == 300_000 and max(sizes) < 2 * window_results.PAIRS


def test_without_a_key_all_records_of_a_window_belong_together() -> None:
    joined = replace(join_spec(tumbling("ts", 10), "full"), keys=((), ()))
    results = replace(joined.results, right=("other_ts", "other_n"), key_columns=())
    bench = Bench(replace(joined, results=results), RECORDS, OTHERS, returns=JOINED)
    bench.feed((1, 1, 10), (2, 12, 20))
    bench.feed((3, 4, 30), (4, 5, 31), (5, 25, 32), port=1)
    again = Bench(replace(joined, results=results), RECORDS, OTHERS, returns=JOINED, restored=bench.freeze())
    again.operator.on_watermark(100)
    assert again.out.rows == [
        (1, 1, 10, 4, 30, 0, 10),
        (1, 1, 10, 5, 31, 0, 10),
        (2, 12, 20, None, None, 10, 20),
        (None, None, None, 25, 32, 20, 30),
    ]

    def counted(given: KeyedWindow, records: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        yield given.key, given.start, given.end, len(records), sum(record.n for record in records)

    spec = replace(function_spec(sliding("ts", 20, 10), counted), keys=((),))
    bench = Bench(spec, RECORDS, returns=RESULTS)
    bench.feed((1, 1, 10), (2, 12, 20))
    bench.operator.on_watermark(100)
    assert bench.out.rows == [(None, -10, 10, 1, 10), (None, 0, 20, 2, 30), (None, 10, 30, 1, 20)]


def test_a_cogroup_gets_both_sides_of_a_key_also_if_one_is_empty() -> None:
    def both(given: KeyedWindow, left: Sequence[Any], right: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        yield given.key, given.start, given.end, len(left), sum(record.other_n for record in right)

    spec = of(CallFunction(both, True), (tumbling("ts", 10), tumbling("other_ts", 10)), (RECORDS, OTHERS))
    bench = Bench(spec, RECORDS, OTHERS, returns=RESULTS)
    bench.feed((1, 1, 10), (2, 1, 10), (1, 9, 10))
    bench.feed((1, 1, 5), (3, 2, 6), (3, 2, 7), port=1)
    bench.operator.on_watermark(100)
    assert sorted(bench.out.rows) == [(1, 0, 10, 2, 5), (2, 0, 10, 1, 0), (3, 0, 10, 0, 13)]
