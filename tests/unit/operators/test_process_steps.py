"""A process operator whose steps end after every record and timer: nothing is lost, doubled or out of order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tidegate as tg
from tests.unit.operators.harness import Bench, Clock, Restored
from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.operators.broadcast import BroadcastProcessSpec
from tidegate.dataflow.operators.budget import MOST_BETWEEN_LOOKS, STEP_MS, Budget
from tidegate.dataflow.operators.process import MOST_TIMERS, KeyedProcessSpec
from tidegate.errors import UserFunctionError

ROW = "key string, at long"


class EveryLook:
    """A clock by which every step is over at the first look."""

    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        self.now_ms += STEP_MS
        return self.now_ms


class Timers(tg.KeyedProcess):
    """`at` of a record is when a timer of event time is due; if negative, one of processing time."""

    count = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        if record.at < 0:
            ctx.timers.processing_time(-record.at)
        else:
            ctx.timers.event_time(record.at)
        self.count.set(self.count.get() + 1)
        yield record.key, -1

    def on_timer(self, at: int, ctx: Any) -> Iterator[Any]:
        yield ctx.key, at

    def close(self) -> None:
        type(self).closed = getattr(type(self), "closed", 0) + 1  # type: ignore[attr-defined]


def stepping(
    *, restored: Restored | None = None, batch_clock: Clock | None = None, function: Any = None
) -> tuple[Bench, Budget]:
    budget = Budget(EveryLook())
    spec = KeyedProcessSpec(function or Timers(), ("key",))
    return Bench(spec, ROW, returns=ROW, budget=budget, restored=restored, batch_clock=batch_clock), budget


def finish(bench: Bench, budget: Budget) -> int:
    """Gives steps until nothing is left; their number."""
    steps = 0
    while bench.operator.has_work():
        budget.begin()
        bench.operator.work()
        steps += 1
    return steps


def fired(bench: Bench) -> list[Any]:
    return [row for row in bench.out.rows if row[1] >= 0]


def test_records_and_watermarks_wait_for_the_timers_that_an_earlier_watermark_made_due() -> None:
    bench, budget = stepping()
    bench.feed(("a", 10), ("b", 10), ("c", 20))
    finish(bench, budget)
    bench.operator.on_watermark(10)
    bench.feed(("d", 15))
    bench.operator.on_watermark(20)
    bench.operator.on_idle()
    bench.operator.on_end()
    assert bench.operator.has_work()
    assert finish(bench, budget) >= 4
    assert bench.out.events[3:] == [
        ("batch", ("a", 10)),
        ("batch", ("b", 10)),
        ("watermark", 10),
        ("batch", ("d", -1)),
        ("batch", ("d", 15)),
        ("batch", ("c", 20)),
        ("watermark", 20),
        ("idle",),
        ("end",),
    ]


@pytest.mark.parametrize("watermark", [10, MAX_WATERMARK_MS], ids=["of a record", "the end of time"])
def test_timers_that_have_not_fired_at_a_freeze_fire_after_the_restore_although_no_watermark_comes(watermark: int) -> None:
    bench, budget = stepping()
    bench.feed(("a", 10), ("b", 10), ("c", 10), ("d", 20_000))
    finish(bench, budget)
    bench.operator.on_watermark(watermark)
    budget.begin()
    bench.operator.work()
    assert bench.operator.has_work() and not bench.operator.holds_records()
    before = fired(bench)
    assert 1 <= len(before) < 3
    again, budget = stepping(restored=bench.freeze())
    assert again.operator.has_work() and not again.out.events, "nothing is emitted when it is opened"
    finish(again, budget)
    assert before + fired(again) == [("a", 10), ("b", 10), ("c", 10)], "each once, in order"
    again.operator.on_watermark(20_000)
    finish(again, budget)
    assert fired(again)[-1] == ("d", 20_000)
    finish(bench, budget)
    assert fired(bench)[:3] == [("a", 10), ("b", 10), ("c", 10)], "nor has the freeze changed what goes on"


def test_after_a_restore_records_come_behind_the_timers_that_were_due() -> None:
    bench, budget = stepping()
    bench.feed(("a", 10), ("b", 10))
    finish(bench, budget)
    bench.operator.on_watermark(10)
    again, budget = stepping(restored=bench.freeze())
    again.feed(("c", 11))
    finish(again, budget)
    assert again.out.rows[-1] == ("c", -1) and fired(again) == again.out.rows[:-1]


def test_a_batch_is_held_until_its_last_record_is_done() -> None:
    bench, budget = stepping()
    bench.feed(("a", 10), ("b", 10), ("c", 10))
    steps = 0
    while bench.operator.holds_records():
        budget.begin()
        bench.operator.work()
        steps += 1
    assert steps >= 2 and len(bench.out.rows) == 3 and not bench.operator.has_work()


def test_timers_of_processing_time_fire_in_steps_and_none_is_due_meanwhile() -> None:
    bench, budget = stepping()
    bench.feed(*((key, -5) for key in "abcd"))
    finish(bench, budget)
    assert bench.operator.deadline_ms() == 5
    bench.operator.on_time(7)
    assert bench.operator.has_work() and bench.operator.deadline_ms() is None
    finish(bench, budget)
    assert fired(bench) == [(key, 5) for key in "abcd"] and bench.operator.deadline_ms() is None


def test_at_the_end_of_a_micro_batch_all_that_is_left_is_done() -> None:
    bench, budget = stepping(batch_clock=Clock(100))
    bench.feed(("a", 10), ("b", 10), ("c", -50), ("d", 10))
    finish(bench, budget)
    bench.operator.on_watermark(10)
    assert bench.operator.has_work()
    bench.operator.before_snapshot()
    assert not bench.operator.has_work()
    assert sorted(fired(bench)) == [("a", 10), ("b", 10), ("c", 50), ("d", 10)]


def test_an_ordinary_snapshot_leaves_the_timers_to_later_steps() -> None:
    bench, budget = stepping()
    bench.feed(("a", 10), ("b", 10), ("c", 10))
    finish(bench, budget)
    bench.operator.on_watermark(10)
    bench.operator.before_snapshot()
    assert bench.operator.has_work()


def test_an_operator_with_work_left_is_closed_like_any_other() -> None:
    bench, budget = stepping()
    bench.feed(("a", 10), ("b", 10))
    finish(bench, budget)
    bench.operator.on_watermark(10)
    bench.feed(("c", 20), ("d", 20))
    before = getattr(Timers, "closed", 0)
    bench.operator.close()
    assert Timers.closed == before + 1  # type: ignore[attr-defined]


def test_however_fast_they_are_only_some_timers_fire_in_one_step() -> None:
    bench = Bench(KeyedProcessSpec(Timers(), ("key",)), ROW, returns=ROW, budget=(budget := Budget()))
    bench.feed(*((f"k{number}", 10) for number in range(3 * MOST_TIMERS)))
    bench.operator.on_watermark(10)
    assert MOST_TIMERS <= len(fired(bench)) < MOST_TIMERS + MOST_BETWEEN_LOOKS and not bench.out.others
    assert finish(bench, budget) >= 2
    assert len(fired(bench)) == 3 * MOST_TIMERS and bench.out.others == [("watermark", 10)]


def test_timers_that_are_set_again_and_again_after_the_end_of_time_are_an_error_over_all_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidegate.state.timers.MAX_SET_AT_THE_END", 50)

    class Forever(Timers):
        def on_timer(self, at: int, ctx: Any) -> Iterator[Any]:
            ctx.timers.event_time(at + 1)
            yield ctx.key, at

    bench, budget = stepping(function=Forever())
    bench.feed(("a", 1))
    finish(bench, budget)
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    with pytest.raises(UserFunctionError, match="after the end of all input"):
        finish(bench, budget)
    assert len(fired(bench)) >= 50


def test_between_two_steps_of_a_broadcast_batch_its_state_can_not_be_written() -> None:
    class Rules(tg.BroadcastProcess):
        rules = tg.broadcast_map("string", "long")

        def process(self, record: Any, ctx: Any) -> Iterator[Any]:
            yield record.key, len(self.rules)

        def process_broadcast(self, record: Any, ctx: Any) -> None:
            self.rules.put(record.key, record.at)

        def on_snapshot_complete(self, epoch: int) -> None:
            self.rules.put("no", 0)

    budget = Budget(EveryLook())
    bench = Bench(BroadcastProcessSpec(Rules(), ("key",)), ROW, ROW, returns=ROW, budget=budget)
    bench.feed(("a", 1), ("b", 2), ("c", 3), port=1)
    budget.begin()
    bench.operator.work()
    assert bench.operator.holds_records()
    with pytest.raises(UserFunctionError, match="in process_broadcast only"):
        bench.operator.on_complete(1)
    bench.feed(("x", 0))
    finish(bench, budget)
    assert bench.out.rows == [("x", 3)], "records of the main stream wait for all rules of the batch"
