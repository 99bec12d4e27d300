"""Process operators: the function sees its record, key, state and timers; the engine sees what it gave."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.operators.harness import Bench, Clock
from tidegate.channels.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.dataflow.operators.process import CoProcessSpec, KeyedProcessSpec, ProcessSpec, key_type
from tidegate.errors import SchemaError, UserFunctionError
from tidegate.types import parse_type


class Sum(tg.KeyedProcess):
    total = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        self.total.set(self.total.get() + record.amount)
        yield ctx.key, self.total.get()


def summing(key: str = "string", **more: Any) -> Bench:
    return Bench(KeyedProcessSpec(Sum(), ("key",)), f"key {key}, amount long", returns=f"key {key}, total long", **more)


# ----------------------------------------------------------------------------------------------------------- keys


def test_state_is_kept_by_key() -> None:
    bench = summing()
    assert bench.feed(("a", 1), ("b", 10), ("a", 2), (None, 5)) == [("a", 1), ("b", 10), ("a", 3), (None, 5)]
    assert bench.feed((None, 1), ("b", 1)) == [(None, 6), ("b", 11)]


def test_nan_is_one_key_and_so_is_zero() -> None:
    bench = summing("double")
    got = bench.feed((math.nan, 1), (0.0, 1), (-math.nan, 1), (-0.0, 1))
    assert [total for _, total in got] == [1, 1, 2, 2]
    assert str(got[3][0]) == "0.0"


def test_several_columns_are_a_tuple() -> None:
    seen = []

    class Look(Sum):
        def process(self, record: Any, ctx: Any) -> Iterator[Any]:
            seen.append(ctx.key)
            for _, total in super().process(record, ctx):
                yield record.a, total

    bench = Bench(KeyedProcessSpec(Look(), ("b", "a")), "a string, amount long, b double", returns="a string, total long")
    got = bench.feed(("x", 1, 0.0), ("x", 1, -0.0), ("x", 1, None), ("y", 1, 0.0))
    assert got == [("x", 1), ("x", 2), ("x", 1), ("y", 1)]
    assert seen == [(0.0, "x"), (0.0, "x"), (None, "x"), (0.0, "y")]
    assert bench.node.spec.states(bench.node)[0].schema.field("key").type == parse_type("struct<b: double, a: string>")


def test_the_type_of_a_key_leaves_its_encoding_out() -> None:
    schema = pa.schema([("a", pa.dictionary(pa.int32(), pa.string())), ("b", pa.int64())])
    assert key_type(schema, ("a",)) == pa.string()
    assert key_type(schema, ("b", "a")) == parse_type("struct<b: long, a: string>")


def test_a_dictionary_encoded_key_is_the_same_key() -> None:
    bench = summing()
    bench.feed(("a", 1))
    encoded = pa.record_batch([pa.array(["a", None, "a"]).dictionary_encode(), pa.array([1, 1, 1])], names=["key", "amount"])
    bench.operator.on_batch(encoded, 0)
    assert bench.out.rows == [("a", 1), ("a", 2), (None, 1), ("a", 3)]


def test_records_are_named_tuples() -> None:
    class Look(tg.KeyedProcess):
        def process(self, record: Any, ctx: Any) -> Iterator[Any]:
            yield record.key, record[1] + record.amount, repr(record)

    bench = Bench(KeyedProcessSpec(Look(), ("key",)), "key long, amount long", returns="key long, x long, shown string")
    assert bench.feed((1, 2)) == [(1, 4, "Row(key=1, amount=2)")]


# -------------------------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize(
    ("gives", "rows"),
    [
        (None, []),
        ([], []),
        ([(1, 2), [3, 4]], [(1, 2), (3, 4)]),
        (((1, 2) for _ in range(2)), [(1, 2), (1, 2)]),
        ([{"y": 2, "x": 1}], [(1, 2)]),
    ],
)
def test_a_function_gives_none_a_list_or_a_generator(gives: Any, rows: list[Any]) -> None:
    class Gives(tg.Process):
        def process(self, record: Any, ctx: Any) -> Any:
            return gives

    assert Bench(ProcessSpec(Gives()), "a long", returns="x long, y long").feed((0,)) == rows


def test_side_outputs_go_their_own_way() -> None:
    class Split(tg.Process):
        def process(self, record: Any, ctx: Any) -> Iterator[Any]:
            if record.a % 2:
                ctx.side("odd", (record.a,))
            else:
                yield (record.a,)

    bench = Bench(ProcessSpec(Split()), "a long", returns="a long", sides={"odd": "a long", "none": "a long"})
    assert bench.feed((1,), (2,), (3,), (4,)) == [(2,), (4,)]
    assert (bench.sides["odd"].rows, bench.sides["none"].events) == ([(1,), (3,)], [])
    bench.feed((5,))
    assert bench.sides["odd"].rows == [(1,), (3,), (5,)]


def test_nothing_is_emitted_for_nothing() -> None:
    bench = summing()
    assert bench.feed() == [] and bench.out.events == []


def test_what_passes_passes_on_every_output() -> None:
    bench = summing(sides={"late": "key long"})
    bench.operator.on_watermark(5)
    bench.operator.on_idle()
    bench.operator.on_end()
    assert bench.out.events == bench.sides["late"].events == [("watermark", 5), ("idle",), ("end",)]


# --------------------------------------------------------------------------------------------------------- timers


class Timed(tg.KeyedProcess):
    """Sets, deletes and notes timers as its records say."""

    fired_count = tg.value("long", default=0)

    def process(self, record: Any, ctx: Any) -> Iterator[Any] | None:
        getattr(ctx.timers, record.call)(record.at)
        return None

    def on_timer(self, at: int, ctx: Any) -> Iterator[Any]:
        self.fired_count.set(self.fired_count.get() + 1)
        yield ctx.key, at, ctx.watermark_ms, self.fired_count.get()


def timed(function: tg.KeyedProcess | None = None, **more: Any) -> Bench:
    return Bench(
        KeyedProcessSpec(function or Timed(), ("key",)),
        "key string, call string, at long",
        returns="key string, at long, watermark long, n long",
        **more,
    )


def test_event_timers_fire_before_the_watermark_that_makes_them_due_goes_on() -> None:
    bench = timed()
    bench.feed(("a", "event_time", 30), ("b", "event_time", 10), ("a", "event_time", 20), ("a", "event_time", 20))
    bench.operator.on_watermark(9)
    bench.operator.on_watermark(25)
    bench.operator.on_watermark(25)
    assert bench.out.events == [
        ("watermark", 9),
        ("batch", ("b", 10, 25, 1), ("a", 20, 25, 1)),
        ("watermark", 25),
        ("watermark", 25),
    ]
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    assert bench.out.events[-2:] == [("batch", ("a", 30, MAX_WATERMARK_MS, 2)), ("watermark", MAX_WATERMARK_MS)]


def test_a_timer_in_the_past_fires_when_the_watermark_moves_next() -> None:
    bench = timed()
    bench.operator.on_watermark(100)
    assert bench.feed(("a", "event_time", 50)) == []
    bench.operator.on_watermark(101)
    assert bench.out.rows == [("a", 50, 101, 1)]


def test_processing_timers_fire_by_the_clock() -> None:
    bench = timed()
    assert bench.operator.deadline_ms() is None
    bench.feed(("a", "processing_time", 30), ("b", "processing_time", 10))
    assert bench.operator.deadline_ms() == 10
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    assert bench.out.rows == [], "the other kind"
    bench.operator.on_time(10)
    assert (bench.out.rows, bench.operator.deadline_ms()) == ([("b", 10, MAX_WATERMARK_MS, 1)], 30)
    bench.operator.on_time(99)
    assert bench.out.rows[1:] == [("a", 30, MAX_WATERMARK_MS, 1)] and bench.operator.deadline_ms() is None


def test_in_a_micro_batch_time_is_that_of_the_batch_for_all_that_users_see() -> None:
    class Look(Timed):
        def process(self, record: Any, ctx: Any) -> Iterator[Any]:
            super().process(record, ctx)
            yield ctx.key, ctx.now_ms(), 0, 0

    batch_clock = Clock(100)
    bench = timed(Look(), batch_clock=batch_clock)
    bench.clock.now_ms = 500
    assert bench.feed(("a", "processing_time", 101), ("b", "processing_time", 100)) == [("a", 100, 0, 0), ("b", 100, 0, 0)]
    assert bench.operator.deadline_ms() == 0, "one of them is due, whatever the slot's clock says"
    bench.operator.on_time(bench.clock())
    assert bench.out.rows[2:] == [("b", 100, MIN_WATERMARK_MS, 1)]
    assert bench.operator.deadline_ms() is None, "nothing more is due in this batch"
    bench.operator.before_snapshot()
    bench.operator.on_time(bench.clock())
    assert len(bench.out.rows) == 3
    batch_clock.now_ms = 101
    bench.operator.on_time(0)
    assert bench.out.rows[3:] == [("a", 101, MIN_WATERMARK_MS, 1)], "the next batch, on a host whose clock is slow"


def test_a_timer_that_a_micro_batch_has_reached_belongs_to_it() -> None:
    bench = timed(batch_clock=Clock(100))
    bench.feed(("a", "processing_time", 99))
    bench.operator.before_snapshot()
    assert bench.out.rows == [("a", 99, MIN_WATERMARK_MS, 1)]


def test_at_the_end_of_a_micro_batch_event_timers_fire_that_are_due_already() -> None:
    bench = timed(batch_clock=Clock(100))
    bench.operator.on_watermark(20)
    bench.feed(("a", "event_time", 20), ("a", "event_time", 21))
    bench.operator.before_snapshot()
    assert bench.out.rows == [("a", 20, 20, 1)]
    continuous = timed()
    continuous.operator.on_watermark(20)
    continuous.feed(("a", "event_time", 20))
    continuous.operator.before_snapshot()
    assert continuous.out.rows == [], "there it fires when the watermark moves next"


def test_a_deleted_timer_does_not_fire() -> None:
    bench = timed()
    bench.feed(
        ("a", "event_time", 1),
        ("a", "event_time", 2),
        ("a", "delete_event_time", 1),
        ("b", "delete_event_time", 2),
        ("a", "processing_time", 3),
        ("a", "delete_processing_time", 3),
    )
    bench.operator.on_watermark(10)
    bench.operator.on_time(10)
    assert bench.out.rows == [("a", 2, 10, 1)]


def test_timers_set_by_a_timer_fire_in_their_turn() -> None:
    class Chain(Timed):
        def on_timer(self, at: int, ctx: Any) -> Iterator[Any]:
            if at < 30:
                ctx.timers.event_time(at + 10)
            yield from super().on_timer(at, ctx)

    bench = timed(Chain())
    bench.feed(("a", "event_time", 10), ("b", "event_time", 25))
    bench.operator.on_watermark(28)
    assert [row[:2] for row in bench.out.rows] == [("a", 10), ("a", 20), ("b", 25)]


def test_a_time_may_be_a_datetime() -> None:
    class Dated(Timed):
        def process(self, record: Any, ctx: Any) -> None:
            ctx.timers.event_time(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))

    bench = timed(Dated())
    bench.feed(("a", "", 0))
    bench.operator.on_watermark(1000)
    assert [row[:2] for row in bench.out.rows] == [("a", 1000)]


# ---------------------------------------------------------------------------------------------- freeze and restore


def test_what_is_restored_goes_on() -> None:
    first, second = timed(), None
    first.feed(("a", "event_time", 10), ("b", "event_time", 20), ("a", "processing_time", 5))
    first.operator.on_watermark(10)
    second = timed(restored=first.freeze())
    assert second.operator.deadline_ms() == 5
    second.feed(("a", "event_time", 15))
    second.operator.on_watermark(30)
    assert second.out.rows == [("a", 15, 30, 2), ("b", 20, 30, 1)]


def test_a_frozen_state_is_that_of_the_marker() -> None:
    bench = summing()
    bench.feed(("a", 1), ("b", 2))
    bench.freeze(1)
    bench.feed(("a", 100))
    frozen = bench.operator.freeze(2)
    assert frozen is not None
    bench.feed(("a", 100), ("c", 100))
    rows = [row for section in frozen.sections() for row in section.rows.to_pylist()]
    frozen.release()
    assert rows == [{"key": "a", "value": 101}], "what changed before the marker"


def test_every_freeze_adds_what_changed_to_those_before() -> None:
    bench = summing()
    bench.feed(("a", 1), ("b", 2))
    bench.freeze(1)
    bench.feed(("a", 100), ("c", 100))
    assert summing(restored=bench.freeze(2)).feed(("a", 0), ("b", 0), ("c", 0)) == [("a", 101), ("b", 2), ("c", 100)]


def test_operator_state_belongs_to_the_subtask() -> None:
    class Buffer(tg.Process):
        waiting = tg.operator_list("long")

        def process(self, record: Any, ctx: Any) -> Iterator[Any]:
            self.waiting.add(record.a)
            if len(self.waiting) == 3:
                yield (list(self.waiting),)
                self.waiting.clear()

    spec = ProcessSpec(Buffer())
    assert spec.stateful
    first = Bench(spec, "a long", returns="all array<long>")
    assert first.feed((1,), (2,)) == []
    second = Bench(spec, "a long", returns="all array<long>", restored=first.freeze())
    assert second.feed((3,), (4,)) == [([1, 2, 3],)]


def test_a_function_without_state_has_nothing_to_freeze_but_event_time() -> None:
    class Plain(tg.Process):
        def process(self, record: Any, ctx: Any) -> None: ...

    spec = ProcessSpec(Plain())
    assert not spec.stateful
    assert Bench(spec, "a long").freeze() == {"__watermark": []}


def test_the_states_of_a_function_are_known_without_running_it() -> None:
    bench = summing()
    assert [info.name for info in bench.node.spec.states(bench.node)] == [
        "total",
        "__event_timers",
        "__processing_timers",
        "__watermark",
    ]
    frozen = bench.operator.freeze(1)
    assert frozen is not None
    assert {info.name: info.schema for info in frozen.states} == {
        info.name: info.schema for info in bench.node.spec.states(bench.node)
    }


def test_two_subtasks_of_one_function_have_states_of_their_own() -> None:
    """As in a test where several slots share a process, and so the plan."""
    spec = KeyedProcessSpec(Sum(), ("key",))
    one, two = (Bench(spec, "key string, amount long", returns="key string, total long") for _ in range(2))
    assert (one.feed(("a", 1)), two.feed(("a", 1)), one.feed(("a", 1))) == ([("a", 1)], [("a", 1)], [("a", 2)])
    assert isinstance(spec.function.total, type(Sum.__dict__["total"])), "and the function itself is as it was"


# ------------------------------------------------------------------------------------------------------ life cycle


class Life(tg.KeyedProcess):
    count = tg.value("long", default=0)

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def open(self, ctx: Any) -> None:
        self.calls.append(("open", ctx.subtask, ctx.parallelism, ctx.now_ms(), ctx.key, ctx.watermark_ms))

    def process(self, record: Any, ctx: Any) -> None:
        self.calls.append(("process", ctx.key))

    def on_snapshot_complete(self, epoch: int) -> None:
        self.calls.append(("complete", epoch))

    def close(self) -> None:
        self.calls.append(("close",))


def test_a_function_is_opened_told_of_complete_snapshots_and_closed() -> None:
    life = Life()
    bench = Bench(KeyedProcessSpec(life, ("key",)), "key long", subtask=2, parallelism=3)
    bench.feed((5,))
    bench.operator.on_complete(9)
    bench.operator.close()
    assert life.calls == [("open", 2, 3, 0, None, MIN_WATERMARK_MS), ("process", 5), ("complete", 9), ("close",)]


class Careless(tg.KeyedProcess):
    """Uses keyed state or timers in a method that has no key."""

    count = tg.value("long", default=0)

    def __init__(self, method: str, use: str) -> None:
        self.method = method
        self.use = use

    def open(self, ctx: Any) -> None:
        self.ctx = ctx
        self.misuse("open")

    def process(self, record: Any, ctx: Any) -> None: ...

    def on_snapshot_complete(self, epoch: int) -> None:
        self.misuse("on_snapshot_complete")

    def close(self) -> None:
        self.misuse("close")

    def misuse(self, method: str) -> None:
        if method == self.method:
            assert self.ctx.key is None
            self.count.get() if self.use == "state" else self.ctx.timers.event_time(5)


def live(bench: Bench) -> None:
    bench.operator.open(bench.context)
    bench.feed((1,))
    bench.operator.on_complete(1)
    bench.operator.close()


@pytest.mark.parametrize("method", ["open", "on_snapshot_complete", "close"])
@pytest.mark.parametrize("use", ["state", "timers"])
def test_keyed_state_and_timers_can_t_be_used_where_there_is_no_key(method: str, use: str) -> None:
    bench = Bench(KeyedProcessSpec(Careless(method, use), ("key",)), "key long", open=False)
    with pytest.raises(UserFunctionError, match="no key here") as failed:
        live(bench)
    assert f"in {method}" in failed.value.user_traceback
    live(Bench(KeyedProcessSpec(Careless("", use), ("key",)), "key long", open=False))


def test_a_stream_without_key_has_no_timers() -> None:
    class Wants(tg.Process):
        def process(self, record: Any, ctx: Any) -> None:
            assert ctx.key is None
            ctx.timers.event_time(1)

    with pytest.raises(UserFunctionError, match="timers belong to keys: use key_by"):
        Bench(ProcessSpec(Wants()), "a long").feed((1,))


# --------------------------------------------------------------------------------------------------------- errors


class Fails(tg.KeyedProcess):
    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        if record.amount == 3:
            self.helper(record)
        if record.amount < 0:
            ctx.timers.event_time(5)
        yield record.key, record.amount

    def helper(self, record: Any) -> None:
        try:
            dict[str, int]()["price"]
        except KeyError as error:
            raise ValueError(f"no price for {record.key}") from error

    def on_timer(self, at: int, ctx: Any) -> None:
        raise ZeroDivisionError


def failing() -> Bench:
    return Bench(
        KeyedProcessSpec(Fails(), ("key",)), "key string, amount long", returns="key string, amount long", name="pay out"
    )


def test_an_error_tells_the_operator_the_record_and_the_user_s_own_traceback() -> None:
    bench = failing()
    with pytest.raises(UserFunctionError) as failed:
        bench.feed(("a", 1), ("b", 3), ("c", 4))
    error = failed.value
    assert (error.operator, error.record) == ("pay out", "Row(key='b', amount=3)")
    assert "in process" in error.user_traceback and "in helper" in error.user_traceback
    assert "src/tidegate" not in error.user_traceback
    assert error.user_traceback.rstrip().endswith("ValueError: no price for b")
    assert "KeyError: 'price'" in error.user_traceback, "what led to it is told, too"
    assert isinstance(error.__cause__, ValueError)
    assert "pay out" in str(error) and "amount=3" in str(error)
    assert bench.out.events == []


def test_an_error_in_a_timer_tells_its_time_and_key() -> None:
    bench = failing()
    bench.feed(("a", -1))
    with pytest.raises(UserFunctionError) as failed:
        bench.operator.on_watermark(10)
    assert failed.value.record == "the timer at 5 of key 'a'"
    assert "in on_timer" in failed.value.user_traceback


@pytest.mark.parametrize(
    ("row", "complaint"),
    [(("a", "1"), "column 'total'"), (("a", 1.5), "column 'total'"), (("a",), "has 1 values"), (5, "of type int")],
)
def test_rows_that_don_t_fit_name_operator_and_declaration(row: Any, complaint: str) -> None:
    class Misfit(tg.Process):
        def process(self, record: Any, ctx: Any) -> Any:
            return [row]

    with pytest.raises(SchemaError) as failed:
        Bench(ProcessSpec(Misfit()), "a long", returns="key string, total long", name="tally").feed((1,))
    for told in ("operator 'tally'", "returns='key string, total long'", complaint):
        assert told in str(failed.value)


def test_side_rows_that_don_t_fit_name_the_side_output() -> None:
    class Misfit(tg.Process):
        def process(self, record: Any, ctx: Any) -> None:
            ctx.side("late", ("x", "y"))

    with pytest.raises(SchemaError) as failed:
        Bench(ProcessSpec(Misfit()), "a long", sides={"late": "key string, n long"}, name="tally").feed((1,))
    for told in ("operator 'tally'", "side_outputs['late']='key string, n long'", "column 'n'"):
        assert told in str(failed.value)


def test_an_undeclared_side_output_is_an_error_at_the_user_s_line() -> None:
    class Unknown(tg.Process):
        def process(self, record: Any, ctx: Any) -> None:
            ctx.side("lat", (1,))

    with pytest.raises(UserFunctionError, match=r"no side output 'lat'.*side_outputs") as failed:
        Bench(ProcessSpec(Unknown()), "a long", sides={"late": "key long"}).feed((1,))
    assert 'ctx.side("lat", (1,))' in failed.value.user_traceback


def test_a_value_that_doesn_t_fit_its_state_is_an_error_at_the_user_s_line() -> None:
    class Wrong(Sum):
        def process(self, record: Any, ctx: Any) -> Iterator[Any]:
            self.total.set(str(record.amount))
            yield from ()

    bench = Bench(KeyedProcessSpec(Wrong(), ("key",)), "key string, amount long", returns="key string, total long")
    with pytest.raises(UserFunctionError, match="state 'total' is declared with 'long'") as failed:
        bench.feed(("a", 1))
    assert "self.total.set(str(record.amount))" in failed.value.user_traceback


def test_a_timer_without_on_timer_says_so() -> None:
    class Forgot(tg.KeyedProcess):
        def process(self, record: Any, ctx: Any) -> None:
            ctx.timers.event_time(1)

    bench = Bench(KeyedProcessSpec(Forgot(), ("key",)), "key long")
    bench.feed((1,))
    with pytest.raises(UserFunctionError, match="Forgot has set a timer but has no on_timer"):
        bench.operator.on_watermark(1)


# ----------------------------------------------------------------------------------------------------- two inputs


class Match(tg.CoProcess):
    order = tg.value("struct<id: long, total: double>")

    def process_left(self, order: Any, ctx: Any) -> None:
        self.order.set(order)
        ctx.timers.event_time(100)

    def process_right(self, payment: Any, ctx: Any) -> Iterator[Any]:
        order = self.order.get()
        if order is not None:
            yield order["id"], order["total"] - payment.amount

    def on_timer(self, at: int, ctx: Any) -> Iterator[Any]:
        yield ctx.key, None


def matching(**more: Any) -> Bench:
    return Bench(
        CoProcessSpec(Match(), (("id",), ("order",))),
        "id long, total double",
        "amount double, order long",
        returns="id long, open double",
        **more,
    )


def test_two_streams_share_state_by_their_keys() -> None:
    bench = matching()
    assert bench.feed((1.0, 7), port=1) == []
    assert bench.feed((7, 10.0), port=0) == []
    assert bench.feed((4.0, 7), (4.0, 8), port=1) == [(7, 6.0)]
    bench.operator.on_watermark(100)
    assert bench.out.rows[1:] == [(7, None)]


def test_a_record_kept_in_state_is_the_same_before_and_after_a_restore() -> None:
    first = matching()
    first.feed((7, 10.0), port=0)
    assert first.feed((4.0, 7), port=1) == matching(restored=first.freeze()).feed((4.0, 7), port=1) == [(7, 6.0)]


def test_two_streams_without_key_share_operator_state() -> None:
    class Both(tg.CoProcess):
        seen = tg.operator_list("string")

        def process_left(self, record: Any, ctx: Any) -> None:
            self.seen.add(record.a)

        def process_right(self, record: Any, ctx: Any) -> Iterator[Any]:
            yield (",".join(self.seen),)

    bench = Bench(CoProcessSpec(Both(), None), "a string", "b long", returns="seen string")
    bench.feed(("x",), ("y",))
    assert bench.feed((1,), port=1) == [("x,y",)]


def test_rows_without_a_declared_output_are_an_error() -> None:
    class Emits(tg.Process):
        def process(self, record: Any, ctx: Any) -> Iterator[Any]:
            yield (1,)

    with pytest.raises(SchemaError, match="the operator"):
        Bench(ProcessSpec(Emits()), "a long").feed((1,))
