"""Joins and co-groups of sessions, which both inputs make together: against a model record by record, with late records, and
with restores and other parallelisms at any step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.operators.harness import Bench, on_heap
from tests.unit.operators.test_record_windows import JOINED, OTHERS, JoinOracle, check_join, join_spec, of
from tests.unit.operators.test_windows_on_rocksdb import on_rocksdb
from tests.unit.operators.window_oracle import Record
from tests.unit.operators.windowing import RECORDS, RESULTS, group
from tidegate.dataflow.operators import record_windows, session_records, session_windows, window, window_results
from tidegate.dataflow.operators.window_results import CallFunction, KeyedWindow
from tidegate.dataflow.windows import Sessions, sessions

GAP = sessions("ts", 10)


class SessionJoinOracle(JoinOracle):
    """All records of each key that are in no session that has fired."""

    def __init__(self, assigner: Sessions, how: str) -> None:
        super().__init__(assigner, how)
        self._gap_ms = assigner.gap_ms
        self._open: defaultdict[Any, list[tuple[int, int, Record]]] = defaultdict(list)  # time, port and record

    def on_records(self, records: Sequence[Record], port: int) -> list[Record]:
        late = [each for each in records if each[1] is not None and each[1] + self._gap_ms <= self._times[group(each[0])]]
        for each in records:
            if each[1] is not None and each not in late:
                self._open[each[0]].append((each[1], port, each))
        return late

    def on_watermark(self, at_ms: int, groups: range) -> list[tuple[Any, ...]]:
        joined: list[tuple[Any, ...]] = []
        for key, records in self._open.items():
            if group(key) not in groups:
                continue
            sets: list[list[tuple[int, int, Record]]] = []
            for each in sorted(records, key=lambda each: each[0]):
                if not sets or each[0] - sets[-1][-1][0] > self._gap_ms:
                    sets.append([])
                sets[-1].append(each)
            for session in sets:
                bounds = session[0][0], session[-1][0] + self._gap_ms
                if bounds[1] <= at_ms:
                    sides = ([record for _, port, record in session if port == side] for side in (0, 1))
                    joined += self._rows(key, bounds, *sides)
            self._open[key] = [each for session in sets if session[-1][0] + self._gap_ms > at_ms for each in session]
        for number in groups:
            self._times[number] = max(self._times[number], at_ms)
        return joined


@pytest.fixture(params=[False, True], ids=["whole steps", "small steps"])
def step_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        for module in (session_records, session_windows, window, record_windows):
            monkeypatch.setattr(module, "MAX_ROWS", 3)
        monkeypatch.setattr(window_results, "PAIRS", 3)


@pytest.mark.parametrize("how", ["inner", "left", "right", "full", "semi", "anti"])
def test_a_join_is_that_of_the_records_of_each_session(how: str, step_sizes: None) -> None:
    for seed in range(6):
        check_join(GAP, how, seed, make_oracle=SessionJoinOracle)


@pytest.mark.parametrize("how", ["inner", "full"])
def test_a_join_on_rocksdb_is_the_same(how: str, step_sizes: None) -> None:
    for seed in range(3):
        check_join(GAP, how, seed, on_rocksdb, make_oracle=SessionJoinOracle)


def test_a_record_of_one_side_joins_two_sessions_of_the_other() -> None:
    bench = Bench(join_spec(GAP, "left"), RECORDS, OTHERS, returns=JOINED)
    bench.feed((1, 0, 10), (1, 20, 11), (1, 60, 12))
    bench.feed((1, 10, 20), port=1)
    other = Bench(join_spec(GAP, "left"), RECORDS, OTHERS, returns=JOINED, restored=bench.freeze())
    other.operator.on_watermark(100)
    assert other.out.rows == [(1, 0, 10, 10, 20, 0, 30), (1, 20, 11, 10, 20, 0, 30), (1, 60, 12, None, None, 60, 70)]
    state = other.freeze()
    assert not any(batch.num_rows for name in ("windows", "left", "right") for batch in state[name])


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
def test_a_cogroup_gets_both_sides_of_a_session(make_backend: Any) -> None:
    def both(given: KeyedWindow, left: Sequence[Any], right: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(given.key, given.start, given.end, len(left), sum(record.other_n for record in right))]

    spec = of(CallFunction(both, True), (GAP, sessions("other_ts", 10)), (RECORDS, OTHERS))
    bench = Bench(spec, RECORDS, OTHERS, returns=RESULTS, make_backend=make_backend)
    bench.feed((1, 0, 1), (2, 5, 1), (1, 9, 1))
    bench.feed((1, 15, 5), (3, 2, 6), (3, 20, 7), port=1)
    bench.operator.on_watermark(100)
    assert sorted(bench.out.rows) == [(1, 0, 25, 2, 5), (2, 5, 15, 1, 0), (3, 2, 12, 0, 6), (3, 20, 30, 0, 7)]


def test_a_join_of_many_records_of_one_session_is_emitted_in_pieces() -> None:
    bench = Bench(join_spec(GAP, "inner"), RECORDS, OTHERS, returns=JOINED)
    bench.feed(*((1, 1, n) for n in range(1000)))
    bench.feed(*((1, 1, n) for n in range(300)), port=1)
    sizes = []
    bench.operator.on_watermark(100)
    while True:
        sizes.append(len(bench.out.rows))
        bench.out.events.clear()
        if not bench.operator.has_work():
            break
        assert bench.operator.holds_records(), "a snapshot waits for the rest of the session"
        bench.operator.work()
    assert sum(sizes) == 300_000 and max(sizes) < 2 * window_results.PAIRS
