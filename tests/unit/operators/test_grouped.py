"""The grouped operator: a key's records of an epoch in one call, then the timers that expired."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from tests import declaring
from tests.unit.operators.harness import GROUPS, Bench, Restored
from tidegate.dataflow.operators import grouped as module
from tidegate.dataflow.operators.grouped import (
    EventTime,
    GroupedSpec,
    GroupFunction,
    Groups,
    InitialFile,
    InitialFiles,
    Latest,
    SecondPort,
    Times,
    grouped,
    without_late,
)
from tidegate.errors import CorruptFile
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of, key_groups_of
from tidegate.state.descriptors import Descriptor
from tidegate.state.timers import TimeKind, TimerQueue
from tidegate.store.memory import MemoryStore
from tidegate.store.opening import forget_memory_store, open_store
from tidegate.types import batch_of, parse_schema, rows_of

SCHEMA = "key string, amount long"
TIMED = "key string, amount long, at timestamp"
RETURNS = "what string, key string, amount long, now long, watermark long"


class Sum(GroupFunction):
    """The sum of each key's amounts. An amount below zero sets a timer, and expired timers clear the sum."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.closed = False

    @property
    def states(self) -> Sequence[Descriptor]:
        return [declaring.value("long", name="total")]

    def open(self, operator: str, tables: Mapping[str, Any], timers: TimerQueue | None, cursor: Any) -> None:
        self.total, self.timers, self.cursor = tables["total"], timers, cursor

    def take_initial(self, groups: Groups, times: Times) -> None:
        for key, rows in self.by_key(groups):
            self.calls.append(("initial", key, len(rows)))
            self.total.set(sum(row.amount for row in rows))

    def take_records(self, groups: Groups, times: Times) -> Iterator[pa.RecordBatch]:
        for key, rows in self.by_key(groups):
            self.calls.append((key, [row.amount for row in rows]))
            self.total.set((self.total.get() or 0) + sum(row.amount for row in rows))
            for row in rows:
                if row.amount < 0:
                    assert self.timers is not None
                    self.timers.set(-row.amount)
            yield self.row("sum", key, times)

    def take_expired(self, expired: Iterator[int], times: Times) -> Iterator[pa.RecordBatch]:
        for at_ms in expired:
            assert self.timers is not None and at_ms in self.timers.times()
            self.calls.append(("timer", self.cursor.key, at_ms))
            yield self.row("expired", self.cursor.key, times)
            self.total.clear()

    def close(self) -> None:
        self.closed = True

    def by_key(self, groups: Groups) -> Iterator[tuple[Any, list[Any]]]:
        rows = iter(rows_of(groups.rows))
        for key, size in zip(groups.keys, groups.sizes, strict=True):
            self.cursor.key = key
            yield key, [next(rows) for _ in range(size)]

    def row(self, what: str, key: Any, times: Times) -> pa.RecordBatch:
        return batch_of([(what, str(key), self.total.get(), *times)], parse_schema(RETURNS))


def summing(*inputs: str, restored: Restored | None = None, subtask: int = 0, parallelism: int = 1, **spec: Any) -> Bench:
    return Bench(
        GroupedSpec(Sum(), ("key",), **spec),
        *(inputs or (SCHEMA,)),
        returns=RETURNS,
        restored=restored,
        subtask=subtask,
        parallelism=parallelism,
    )


def end_epoch(bench: Bench) -> list[tuple[Any, ...]]:
    before = len(bench.out.rows)
    bench.operator.before_snapshot()
    return bench.out.rows[before:]


def totals(rows: list[tuple[Any, ...]]) -> dict[str, int]:
    return {key: amount for what, key, amount, *_ in rows if what == "sum"}


def calls(bench: Bench) -> list[Any]:
    function: Any = bench.node.spec.function  # type: ignore[attr-defined]
    return list(function.calls)


# --------------------------------------------------------------------------------------------------------------- epochs


def test_the_records_of_a_key_come_in_one_call_when_the_epoch_ends_and_in_their_order() -> None:
    bench = summing()
    assert bench.feed(("a", 1), ("b", 10), ("a", 2)) == []
    assert bench.feed(("a", 4), (None, 7)) == []
    assert totals(end_epoch(bench)) == {"a": 7, "b": 10, "None": 7}
    assert calls(bench) == [("a", [1, 2, 4]), ("b", [10]), (None, [7])]
    bench.feed(("b", 1))
    assert totals(end_epoch(bench)) == {"b": 11}


def test_an_epoch_without_records_calls_nothing() -> None:
    bench = summing()
    assert end_epoch(bench) == [] and calls(bench) == []


def test_at_the_end_of_all_input_what_was_gathered_comes_before_the_end_and_once() -> None:
    bench = summing()
    bench.feed(("a", 1))
    bench.operator.on_watermark(2**63 - 1)
    assert bench.out.events == []
    bench.operator.on_end()
    assert [event[0] for event in bench.out.events] == ["batch", "watermark", "end"]
    bench.operator.before_snapshot()
    assert len(bench.out.rows) == 1


def test_state_and_timers_are_restored() -> None:
    bench = summing(timers=TimeKind.PROCESSING)
    bench.feed(("a", 5), ("b", -100))
    end_epoch(bench)
    again = summing(timers=TimeKind.PROCESSING, restored=bench.freeze())
    again.feed(("a", 1))
    assert totals(end_epoch(again)) == {"a": 6}
    again.clock.now_ms = 100
    assert end_epoch(again) == [("expired", "b", -100, 100, 0)]


def test_closing_closes_the_function() -> None:
    bench = summing()
    bench.operator.close()
    function: Any = bench.node.spec.function  # type: ignore[attr-defined]
    assert function.closed


# ----------------------------------------------------------------------------------------------------------------- time


def test_timers_of_processing_time_fire_after_the_records_when_the_clock_has_reached_them() -> None:
    bench = summing(timers=TimeKind.PROCESSING)
    bench.feed(("a", -50), ("b", -51))
    bench.clock.now_ms = 49
    assert [row[0] for row in end_epoch(bench)] == ["sum", "sum"]
    bench.feed(("a", 1))
    bench.clock.now_ms = 51
    assert [row[:3] for row in end_epoch(bench)] == [("sum", "a", -49), ("expired", "a", -49), ("expired", "b", -51)]
    assert end_epoch(bench) == []


def timed(second: int, key: str = "a", amount: int = 1) -> tuple[Any, ...]:
    return key, amount, datetime.fromtimestamp(second, UTC)


def event_time(delay_ms: int = 2000, **more: Any) -> Bench:
    return summing(
        TIMED,
        "latest long",
        timers=TimeKind.EVENT,
        second=SecondPort.LATEST,
        event_time=EventTime("at", delay_ms, drops_late=True),
        **more,
    )


def test_the_watermark_is_that_of_the_epoch_before_and_never_goes_back() -> None:
    bench = event_time()
    found = []
    for latest_s in (10, 30, 20, None):
        bench.feed(timed(1000))
        if latest_s is not None:
            bench.feed((latest_s * 1000,), port=1)
            bench.feed((1000,), port=1)
        found.append(end_epoch(bench)[0][4])
    assert found == [0, 8000, 28_000, 28_000]


def test_records_are_late_by_the_watermark_of_the_epoch_before_their_own() -> None:
    bench = event_time()
    kept = []
    for second in (10, 20, 8, 7, 18, 8, 19):
        bench.feed(timed(second, amount=second))
        bench.feed((second * 1000,), port=1)
        end_epoch(bench)
        kept.append(calls(bench)[-1][1])
    # Watermarks are 0, 8, 18, 18…; the third batch is late by that of the second, 8, and one at 8 is late.
    assert kept == [[10], [20], [20], [20], [20], [20], [19]]


def test_a_record_without_event_time_is_never_late() -> None:
    batch = batch_of([("a", 1, None), timed(5), timed(6)], parse_schema(TIMED))
    assert without_late(batch, "at", 5000).num_rows == 2
    assert without_late(batch, "at", 0) is batch


def test_what_was_before_1970_is_late_from_the_first() -> None:
    bench = event_time()
    bench.feed(timed(0, "a"), timed(1, "b"))
    assert totals(end_epoch(bench)) == {"b": 1}


def test_timers_of_event_time_fire_when_the_watermark_has_reached_them() -> None:
    bench = event_time()
    bench.feed(("a", -8000, datetime.fromtimestamp(10, UTC)))
    bench.feed((10_000,), port=1)
    assert [row[0] for row in end_epoch(bench)] == ["sum"]
    assert [row[:2] for row in end_epoch(bench)] == [("expired", "a")]


def test_the_next_epoch_is_wanted_when_the_first_timer_of_processing_time_is_due() -> None:
    bench = summing(timers=TimeKind.PROCESSING)
    found = []
    for now_ms, rows in ((1, [("a", 1)]), (2, [("a", -51), ("b", -50)]), (50, []), (60, [])):
        bench.feed(*rows)
        bench.clock.now_ms = now_ms
        end_epoch(bench)
        found.append(bench.operator.alarm_ms())
    assert found == [None, 50, 51, None]


def test_the_next_epoch_is_wanted_at_once_when_the_watermark_has_moved() -> None:
    bench = event_time()
    found = []
    for latest_s in (1, 10, 9, 11, None):
        if latest_s is not None:
            bench.feed((latest_s * 1000,), port=1)
        end_epoch(bench)
        found.append(bench.operator.alarm_ms())
    assert found == [None, 0, None, 0, None]


def test_an_operator_without_timers_wants_no_epoch() -> None:
    bench = summing()
    bench.feed(("a", 1))
    end_epoch(bench)
    assert bench.operator.alarm_ms() is None


def test_event_time_goes_on_after_a_restore_on_every_subtask() -> None:
    bench = event_time()
    bench.feed(timed(10))
    bench.feed((10_000,), port=1)
    end_epoch(bench)
    restored = bench.freeze()
    for subtask in range(2):
        again = event_time(restored=restored, subtask=subtask, parallelism=2)
        again.feed(timed(11))
        assert end_epoch(again)[0][4] == 8000


def test_the_latest_of_a_batch_is_what_the_others_hear() -> None:
    latest = Latest("at")
    batch = latest(batch_of([timed(3), timed(5), timed(4), ("a", 1, None)], parse_schema(TIMED)))
    assert batch is not None and batch.to_pydict() == {"latest": [5000]}
    assert latest(batch_of([("a", 1, None)], parse_schema(TIMED))) is None


def test_bounded_input_has_no_watermark() -> None:
    bench = summing(is_bounded=True)
    bench.feed(("a", 1))
    assert end_epoch(bench)[0][3:] == (0, -1)


# -------------------------------------------------------------------------------------------------------- initial state


def test_an_initial_state_comes_first_and_in_the_first_epoch_only() -> None:
    bench = summing(SCHEMA, "name string, amount long", second=SecondPort.INITIAL, initial_key=("name",))
    bench.feed(("a", 1))
    bench.feed(("a", 100), ("b", 7), ("b", 8), port=1)
    assert totals(end_epoch(bench)) == {"a": 101}
    assert calls(bench) == [("initial", "a", 1), ("initial", "b", 2), ("a", [1])]
    again = summing(
        SCHEMA, "name string, amount long", second=SecondPort.INITIAL, initial_key=("name",), restored=bench.freeze()
    )
    again.feed(("b", 1))
    again.feed(("b", 1000), port=1)
    assert totals(end_epoch(again)) == {"b": 16}


def test_of_an_initial_state_in_files_each_subtask_takes_its_own_keys() -> None:
    store = open_store("memory://initial-state-test")
    try:
        rows = batch_of([(str(number), number) for number in range(100)], parse_schema("name string, amount long"))
        listed: list[InitialFile] = []
        for index, part in enumerate((rows.slice(0, 60), rows.slice(60))):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, part.schema) as stream:
                stream.write_batch(part)
            content = sink.getvalue().to_pybytes()
            listed.append(InitialFile(f"initial/x/{index}.arrow", len(content), zlib.crc32(content)))
            store.write(listed[-1].name, [content])
        files = InitialFiles(store.address, tuple(listed), rows.schema, ("name",))
        seen = []
        for subtask in range(3):
            bench = summing(initial=files, initial_key=("name",), subtask=subtask, parallelism=3)
            end_epoch(bench)
            keys = [key for _, key, _ in calls(bench)]
            own = key_groups_of(subtask, parallelism=3, key_group_count=GROUPS)
            assert {int(group) in own for group in groups_of(hash_columns([pa.array(keys)]), GROUPS)} == {True}
            seen += keys
        assert sorted(seen, key=int) == [str(number) for number in range(100)]
        assert isinstance(store, MemoryStore)
        for name, whole in list(store.files.items()):
            for damaged in (
                whole[:-1],
                b"",
                *(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(0, len(whole), 97)),
            ):
                store.files[name] = damaged
                with pytest.raises(CorruptFile, match=name):
                    end_epoch(summing(initial=files, initial_key=("name",)))
            store.files[name] = whole
    finally:
        forget_memory_store("initial-state-test")


# ------------------------------------------------------------------------------------------------------------- grouping


def groups_by(key: tuple[str, ...], schema: str, *rows: Any) -> list[tuple[Any, list[Any]]]:
    found = []
    for groups in grouped([batch_of(list(rows), parse_schema(schema))], key):
        values = iter(groups.rows.column(groups.rows.num_columns - 1).to_pylist())
        found += [(key, [next(values) for _ in range(size)]) for key, size in zip(groups.keys, groups.sizes, strict=True)]
    return found


def test_several_columns_are_one_key() -> None:
    found = groups_by(("b", "a"), "a long, b string, n long", (1, "x", 0), (2, "x", 1), (1, "x", 2), (1, None, 3))
    assert sorted(found, key=str) == sorted([(("x", 1), [0, 2]), (("x", 2), [1]), ((None, 1), [3])], key=str)


def test_nan_and_zero_are_one_key_each() -> None:
    found = groups_by(("k",), "k double, n long", (math.nan, 0), (0.0, 1), (-math.nan, 2), (-0.0, 3))
    assert [numbers for _, numbers in found] == [[0, 2], [1, 3]]


def test_an_array_is_a_key() -> None:
    assert groups_by(("k",), "k array<long>, n long", ([1], 0), ([1, 2], 1), ([1], 2)) == [((1,), [0, 2]), ((1, 2), [1])]


@pytest.mark.parametrize("limits", [(2, 1000), (1000, 3), (1, 1)])
def test_groups_come_some_at_a_time_and_are_never_torn(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GROUPS", limits[0])
    monkeypatch.setattr(module, "MAX_ROWS", limits[1])
    rows = [(number % 5, number) for number in range(23)]
    assert groups_by(("k",), "k long, n long", *rows) == [(k, [n for key, n in rows if key == k]) for k in range(5)]
