"""Records in stretches of time: each is in the stretch of its time, stretches don't overlap, and there are not too many."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.unit.operators.harness import on_heap
from tests.unit.operators.test_windows_on_rocksdb import on_rocksdb
from tidegate.dataflow.operators import timed_records
from tidegate.dataflow.operators.timed_records import MIN_STRETCH_MS, MOST_OF_LENGTH, TimedRecords
from tidegate.state.descriptors import Records


def records_of(backend: Any, *, kept_ms: int = 0) -> TimedRecords:
    descriptor = Records("near", [pa.field("ts", pa.int64())], windowed=True)
    return TimedRecords(descriptor, backend, time="ts", kept_ms=kept_ms)


def add(records: TimedRecords, times_ms: list[int]) -> None:
    column = pa.array(times_ms, pa.int64())
    seen: list[int] = []
    for table, rows, places in records.append([column], [column], np.array(times_ms, np.int64) * 1000):
        assert table.column("ts", rows).to_pylist() == [times_ms[place] for place in places]
        seen += places.tolist()
    assert sorted(seen) == list(range(len(times_ms))), "each record once"


def check(records: TimedRecords, times_ms: list[int]) -> None:
    stretches, held = records.stretches(), []
    assert all(one.stop_ms <= other.start_ms for one, other in pairwise(stretches)), "they overlap"
    for stretch in stretches:
        inside = stretch.table.column("ts", stretch.table.rows()).to_pylist()
        assert inside and all(stretch.start_ms <= ts < stretch.stop_ms for ts in inside)
        held += inside
    assert sorted(held) == sorted(times_ms)


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
@pytest.mark.parametrize("most", [1, 3, MOST_OF_LENGTH])
def test_stretches_hold_their_times_and_do_not_overlap(
    most: int, make_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_records, "MOST_OF_LENGTH", most)
    monkeypatch.setattr(timed_records, "MIN_STRETCH_MS", 4)
    for seed in range(6):
        rng, backend = Random(seed), make_backend(pa.int64())
        records, times = records_of(backend, kept_ms=rng.choice((0, 1000))), list[int]()
        for _ in range(25):
            reach = 10 ** rng.randrange(1, 7)
            some = [rng.randrange(-reach, reach) for _ in range(rng.choice((1, 2, 30)))]
            add(records, some)
            times += some
            check(records, times)
            if rng.random() < 0.3 and (first := records.stretches()[0]):
                records.drop(first)
                times = [ts for ts in times if not first.start_ms <= ts < first.stop_ms]
        lengths = [stretch.stop_ms - stretch.start_ms for stretch in records.stretches()]
        assert len(lengths) <= 40 * most * len(set(lengths))
        backend.close()


@pytest.mark.parametrize("make_backend", [on_heap, on_rocksdb])
def test_stretches_of_several_lengths_that_come_together_are_joined(
    make_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_records, "MOST_OF_LENGTH", 1)
    monkeypatch.setattr(timed_records, "MIN_STRETCH_MS", 4)
    monkeypatch.setattr(timed_records, "MOVED_ROWS", 3)
    backend, times = make_backend(pa.int64()), list[int]()
    together = records_of(backend)
    for number in range(3):
        of_subtask, rng = records_of(on_heap(pa.int64())), Random(number)
        some = [rng.randrange(400) * 3 + number for _ in range(5 ** (number + 1))]
        add(of_subtask, some)
        times += some
        for rows in of_subtask._state.rows():
            backend.load("near", rows, known=False)
    together.unnest()
    check(together, times)
    more = list(range(0, 1200, 7))
    add(together, more)
    check(together, times + more)
    backend.close()


@pytest.mark.parametrize("batch", [1, 2000])
def test_there_are_few_stretches_however_far_records_are_apart(batch: int) -> None:
    records = records_of(on_heap(pa.int64()))
    times = [number * 10 * MIN_STRETCH_MS for number in range(2000)]
    for start in range(0, len(times), batch):
        add(records, times[start : start + batch])
    assert len(records.stretches()) < 400
    check(records, times)


def test_one_time_that_is_far_away_does_not_make_the_stretches_of_the_others_longer() -> None:
    """Or they would stay as long, and nothing would ever be dropped."""
    records = records_of(on_heap(pa.int64()))
    for now in range(0, 40 * MIN_STRETCH_MS, 100):
        add(records, [now, 10**12])
        for stretch in records.stretches()[:-3]:
            records.drop(stretch)
        assert all(stretch.stop_ms - stretch.start_ms <= 2 * MIN_STRETCH_MS for stretch in records.stretches())
