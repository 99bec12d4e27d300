"""What an operator's watermark is after a restore, at any parallelism."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.operators.harness import GROUPS, Bench, Restored
from tidegate.channels.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.dataflow.operators.process import KeyedProcessSpec, ProcessSpec
from tidegate.dataflow.operators.source import WatermarkSpec
from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of


class Look(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield record.key, ctx.watermark_ms
        if record.at is not None:
            ctx.timers.event_time(record.at)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield ctx.key, ctx.watermark_ms


class LookAtOne(tg.Process):
    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield record.key, ctx.watermark_ms


def keyed(**more: Any) -> Bench:
    return Bench(KeyedProcessSpec(Look(), ("key",)), "key long, at long", returns="key long, watermark long", **more)


def plain(**more: Any) -> Bench:
    return Bench(ProcessSpec(LookAtOne()), "key long, at long", returns="key long, watermark long", **more)


def together(*benches: Bench) -> Restored:
    """The `union` of what the subtasks have frozen."""
    return {"__watermark": [rows for bench in benches for rows in bench.freeze()["__watermark"]]}


KEYS = list(range(40))
FIRST_HALF = [group < GROUPS // 2 for group in groups_of(hash_columns([pa.array(KEYS)]), GROUPS).tolist()]


@pytest.mark.parametrize("make", [keyed, plain])
def test_the_watermark_is_there_before_the_first_record(make: Any) -> None:
    first = make()
    first.operator.on_watermark(70)
    again = make(restored=together(first))
    assert again.feed((1, None)) == [(1, 70)]
    again.operator.on_watermark(50)
    assert again.feed((1, None)) == [(1, 70)]
    again.operator.on_watermark(90)
    assert again.feed((1, None)) == [(1, 90)]
    assert again.out.others == [("watermark", 70), ("watermark", 90)], "what was promised isn't taken back downstream"


def test_subtasks_that_did_not_agree_are_told_apart_by_the_key_until_event_time_has_passed_both() -> None:
    subtasks = [keyed(subtask=subtask, parallelism=2) for subtask in range(2)]
    subtasks[0].operator.on_watermark(100)
    subtasks[1].operator.on_watermark(50)
    one = keyed(restored=together(*subtasks))
    for _ in range(2):
        assert one.feed(*((key, None) for key in KEYS)) == [
            (key, 100 if first else 50) for key, first in zip(KEYS, FIRST_HALF, strict=True)
        ]
        one = keyed(restored=together(one))
    one.operator.on_watermark(60)
    low = 60
    assert one.feed((KEYS[0], None), (KEYS[1], None)) == [
        (KEYS[0], 100 if FIRST_HALF[0] else low),
        (KEYS[1], 100 if FIRST_HALF[1] else low),
    ]
    third = [keyed(restored=together(one), subtask=subtask, parallelism=4) for subtask in range(4)]
    assert [
        [row["value"]["at_ms"] for rows in each["__watermark"] for row in rows.to_pylist()] for each in map(together, third)
    ] == [[100], [100], [60], [60]]
    one.operator.on_watermark(100)
    assert one.feed(*((key, None) for key in KEYS)) == [(key, 100) for key in KEYS]
    assert [row["value"] for rows in together(one)["__watermark"] for row in rows.to_pylist()] == [
        {"first": 0, "stop": GROUPS, "of": GROUPS, "at_ms": 100}
    ]


def test_a_batch_whose_keys_have_several_watermarks_stays_whole() -> None:
    """Pieces with one watermark each would be nearly as many as the records."""
    subtasks = [keyed(subtask=subtask, parallelism=2) for subtask in range(2)]
    subtasks[0].operator.on_watermark(100)
    one = keyed(restored=together(*subtasks), open=False)
    begun: list[int] = []
    make_backend = one.context.make_backend

    def noted(key_type: pa.DataType) -> Any:
        backend = make_backend(key_type)
        begin_batch = backend.begin_batch

        def counted(keys: Sequence[Any]) -> None:
            begun.append(len(keys))
            begin_batch(keys)

        backend.begin_batch = counted  # type: ignore[method-assign]
        return backend

    one.operator.open(dataclasses.replace(one.context, make_backend=noted))
    assert one.feed(*((key, None) for key in KEYS)) == [
        (key, 100 if first else MIN_WATERMARK_MS) for key, first in zip(KEYS, FIRST_HALF, strict=True)
    ]
    assert begun == [len(KEYS)] and len(one.out.events) == 1
    assert one.operator._context.watermark_ms == MIN_WATERMARK_MS  # type: ignore[attr-defined]


class TellLate(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        yield record.key, int(record.at <= ctx.watermark_ms)


def test_whether_a_record_is_late_is_decided_by_its_key() -> None:
    def make(**more: Any) -> Bench:
        return Bench(KeyedProcessSpec(TellLate(), ("key",)), "key long, at long", returns="key long, late long", **more)

    subtasks = [make(subtask=subtask, parallelism=2) for subtask in range(2)]
    subtasks[0].operator.on_watermark(100)
    subtasks[1].operator.on_watermark(50)
    one = make(restored=together(*subtasks))
    for at, late_in in ((40, {True, False}), (70, {True}), (120, set())):
        assert one.feed(*((key, at) for key in KEYS)) == [
            (key, int(first in late_in)) for key, first in zip(KEYS, FIRST_HALF, strict=True)
        ]


def test_a_timer_sees_the_watermark_of_its_key_too() -> None:
    subtasks = [keyed(subtask=subtask, parallelism=2) for subtask in range(2)]
    subtasks[0].operator.on_watermark(100)
    one = keyed(restored=together(*subtasks))
    one.feed(*((key, 10) for key in KEYS))
    before = len(one.out.rows)
    one.operator.on_watermark(20)
    assert dict(one.out.rows[before:]) == {key: 100 if first else 20 for key, first in zip(KEYS, FIRST_HALF, strict=True)}
    assert one.feed((1, None))[0][1] in (20, 100)


def test_without_keys_a_subtask_goes_on_with_its_own_and_otherwise_with_the_least() -> None:
    two = [plain(subtask=subtask, parallelism=2) for subtask in range(2)]
    two[0].operator.on_watermark(100)
    two[1].operator.on_watermark(50)
    kept = together(*two)
    again = [plain(restored=kept, subtask=subtask, parallelism=2) for subtask in range(2)]
    assert [each.feed((1, None)) for each in again] == [[(1, 100)], [(1, 50)]]
    assert [plain(restored=kept, subtask=subtask, parallelism=3).feed((1, None)) for subtask in range(3)] == 3 * [[(1, 50)]]


def test_a_subtask_that_had_no_watermark_counts_as_the_least() -> None:
    for make in (keyed, plain):
        two = [make(subtask=subtask, parallelism=2) for subtask in range(2)]
        two[1].operator.on_watermark(50)
        kept = together(*two)
        assert make(restored=kept, subtask=0, parallelism=2).feed((1, None)) == [(1, MIN_WATERMARK_MS)]
        assert make(restored=kept, subtask=1, parallelism=2).feed((1, None)) == [(1, 50)]
    assert plain(restored=kept).feed((1, None)) == [(1, MIN_WATERMARK_MS)]


def test_the_end_of_time_is_not_kept() -> None:
    ended = keyed()
    ended.operator.on_watermark(70)
    ended.operator.on_watermark(MAX_WATERMARK_MS)
    assert ended.feed((1, None)) == [(1, MAX_WATERMARK_MS)]
    assert keyed(restored=together(ended)).feed((1, None)) == [(1, 70)]


def test_state_of_before_there_was_any_of_event_time_is_taken_in() -> None:
    assert keyed(restored={}).feed((1, None)) == [(1, MIN_WATERMARK_MS)]


# ------------------------------------------------------------------------------------------------ watermark operators


def timed(**more: Any) -> Bench:
    spec = WatermarkSpec("ts", 5, None, more.pop("sources", ("in",)), more.pop("by_epoch", False))
    return Bench(spec, "ts long", returns="ts long", **more)


def latest(*benches: Bench) -> Restored:
    return {"__split_watermarks": [rows for bench in benches for rows in bench.freeze()["__split_watermarks"]]}


def test_a_restored_watermark_operator_announces_what_it_had_promised() -> None:
    first = timed()
    first.feed((100,))
    again = timed(restored=latest(first))
    assert again.out.events == [], "none may be emitted while it is opened"
    again.operator.resume()
    assert again.out.events == [("watermark", 94)]
    again.feed((90,), (99,))
    assert again.out.others == [("watermark", 94)]


def test_at_another_parallelism_the_least_of_all_subtasks_counts() -> None:
    two = [timed(subtask=subtask, parallelism=2) for subtask in range(2)]
    for bench, at in zip(two, (100, 60), strict=True):
        bench.feed((at,))
    for subtask, parallelism, expected in ((0, 2, 94), (1, 2, 54), (0, 1, 54), (2, 3, 54)):
        bench = timed(restored=latest(*two), subtask=subtask, parallelism=parallelism)
        bench.operator.resume()
        assert bench.out.events == [("watermark", expected)]
    two[1] = timed(subtask=1, parallelism=2)
    bench = timed(restored=latest(*two))
    bench.operator.resume()
    assert bench.out.events == [], "one of them had seen no record"


def test_what_was_kept_of_another_stream_is_left_alone() -> None:
    first = timed()
    first.feed((100,))
    other = timed(restored=latest(first), sources=("another",))
    other.operator.resume()
    assert other.out.events == []


def test_by_epochs_time_moves_when_one_ends_and_who_had_no_record_is_idle() -> None:
    bench = timed(by_epoch=True)
    bench.feed((100,))
    bench.feed((50,))
    assert bench.out.others == []
    bench.operator.before_snapshot()
    assert bench.out.others == [("watermark", 94)]
    bench.operator.on_complete(1)
    bench.operator.before_snapshot()
    assert bench.out.others == [("watermark", 94), ("idle",)]
    bench.operator.on_complete(2)
    bench.feed((20,))
    bench.operator.before_snapshot()
    assert bench.out.others == [("watermark", 94), ("idle",), ("watermark", 94)]
    bench.feed((120,))
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    bench.operator.before_snapshot()
    assert bench.out.others[3:] == [("watermark", 114), ("watermark", MAX_WATERMARK_MS)]


def test_an_epoch_that_is_aborted_and_ends_again_moves_time_once() -> None:
    """Were this subtask idle at the second end, the others would take time further than its records are."""
    bench = timed(by_epoch=True)
    bench.feed((100,))
    for _ in range(3):
        bench.operator.before_snapshot()
    assert bench.out.others == 3 * [("watermark", 94)]
    bench.operator.on_complete(3)
    for _ in range(2):
        bench.operator.before_snapshot()
    assert bench.out.others[3:] == 2 * [("idle",)], "it is said in every epoch, since idleness ends with the epoch"


def test_by_order_time_moves_once_in_a_micro_batch_and_what_comes_behind_it_counts_in_the_next() -> None:
    bench = timed(by_epoch=True, name="watermark")
    bench.feed((100,))
    bench.operator.hold_time()
    bench.feed((120,))  # round a loop, from a subtask that has moved time already
    bench.operator.move_time()
    assert bench.out.others == [("watermark", 94)]
    for _ in range(2):  # the epoch is aborted, and ends again
        bench.operator.before_snapshot()
    assert bench.out.others == [("watermark", 94)]
    kept = latest(bench)
    again = timed(by_epoch=True, restored=kept)
    for each in (bench, again):
        each.operator.on_complete(2)
        each.operator.resume()
        each.feed((90,))
        each.operator.move_time()
        assert each.out.others[-2:] == [("watermark", 94), ("watermark", 114)]
        each.operator.move_time()
        assert each.out.others[-1] == ("idle",)
    other = timed(by_epoch=True, restored=kept, parallelism=2)
    other.operator.move_time()
    assert other.out.others == [("idle",)], "at another parallelism nobody knows whose records they were"


def test_records_of_the_next_epoch_may_come_before_it_is_known_that_the_last_one_is_complete() -> None:
    bench = timed(by_epoch=True)
    bench.feed((100,))
    bench.operator.before_snapshot()
    bench.feed((120,))
    bench.operator.on_complete(1)
    bench.operator.before_snapshot()
    assert bench.out.others == [("watermark", 94), ("watermark", 114)]


# ------------------------------------------------------------------------------------------------------ the end of time


def test_after_the_end_of_time_it_is_as_late_as_the_last_timer_that_fired() -> None:
    ended = keyed()
    ended.feed((1, 500), (2, 90))
    ended.operator.on_watermark(70)
    ended.operator.on_watermark(MAX_WATERMARK_MS)
    assert [row for row in ended.out.rows if row[1] == MAX_WATERMARK_MS] == [(2, MAX_WATERMARK_MS), (1, MAX_WATERMARK_MS)]
    again = keyed(restored=together(ended))
    assert again.feed((1, None)) == [(1, 500)]
    again.operator.on_watermark(120)
    assert again.feed((1, None)) == [(1, 500)]
    again.operator.on_watermark(600)
    assert again.feed((1, None)) == [(1, 600)]
    last = keyed()
    last.feed((1, MAX_WATERMARK_MS))
    last.operator.on_watermark(MAX_WATERMARK_MS)
    assert keyed(restored=together(last)).feed((1, None)) == [(1, MAX_WATERMARK_MS - 1)], "there may be more input"


def test_the_end_of_time_does_not_take_key_groups_back_that_were_ahead() -> None:
    subtasks = [keyed(subtask=subtask, parallelism=2) for subtask in range(2)]
    subtasks[0].operator.on_watermark(100)
    subtasks[1].operator.on_watermark(50)
    one = keyed(restored=together(*subtasks))
    one.operator.on_watermark(MAX_WATERMARK_MS)
    assert one.feed((1, None)) == [(1, MAX_WATERMARK_MS)]
    assert keyed(restored=together(one)).feed(*((key, None) for key in KEYS)) == [
        (key, 100 if first else 50) for key, first in zip(KEYS, FIRST_HALF, strict=True)
    ]
