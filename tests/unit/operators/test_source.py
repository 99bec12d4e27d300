"""Sources: offsets are those behind the last record emitted. Watermarks: from the records, never back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tests.unit.operators.harness import Bench
from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.contracts import Offset, Source, SourceContext, SourceReader
from tidegate.dataflow.operators.source import (
    OFFSETS,
    SourceOperator,
    SourceSpec,
    WatermarkOperator,
    WatermarkSpec,
    event_times_ms,
    follow_splits,
)
from tidegate.errors import JobError, RestoreError, SchemaError, UserFunctionError
from tidegate.types import batch_of, parse_schema

ROWS = [(number, f"r{number}") for number in range(10)]


@dataclass
class Scripted(Source):
    """Gives what the script says, one step at each poll: a number of rows, None, a batch or an error."""

    script: list[Any]
    contexts: list[SourceContext] = field(default_factory=list)
    fail_at: str = ""

    @property
    def schema(self) -> pa.Schema:
        return parse_schema("a long, b string")

    @property
    def bounded(self) -> bool:
        return True

    def open(self, context: SourceContext) -> SourceReader:
        self.contexts.append(context)
        self.fail("open")
        return ScriptedReader(self, context)

    def fail(self, where: str) -> None:
        if where == self.fail_at:
            raise ConnectionError(f"no broker in {where}")


class ScriptedReader(SourceReader):
    def __init__(self, source: Scripted, context: SourceContext) -> None:
        self.source = source
        self.script = list(source.script)
        self.position = context.restored.get("split", {"row": 0})["row"]
        self.closed = False

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        self.source.fail("poll")
        step = self.script.pop(0)
        if not isinstance(step, int):
            return step
        rows = ROWS[self.position : self.position + step]
        self.position += len(rows)
        return batch_of(rows, self.source.schema)

    def offsets(self) -> Mapping[str, Offset]:
        self.source.fail("offsets")
        return {"split": {"row": self.position}}

    @property
    def finished(self) -> bool:
        self.source.fail("finished")
        return not self.script

    def close(self) -> None:
        self.source.fail("close")


def reading(source: Source, **more: Any) -> tuple[Bench, SourceOperator]:
    bench = Bench(SourceSpec(source), returns="a long, b string", name="the source", **more)
    assert isinstance(bench.operator, SourceOperator)
    return bench, bench.operator


def offsets(bench: Bench) -> list[Any]:
    return [row["value"] for rows in bench.freeze()[OFFSETS.name] for row in rows.to_pylist()]


def test_offsets_are_those_behind_the_last_record_emitted() -> None:
    bench, operator = reading(Scripted([3, None, 0, 2]))
    assert offsets(bench) == [{"split": "split", "offset": '{"row": 0}'}]
    assert [operator.poll(100) for _ in range(3)] == [3, 0, 0]
    assert offsets(bench) == [{"split": "split", "offset": '{"row": 3}'}]
    assert bench.out.rows == ROWS[:3] and not operator.finished
    assert operator.poll(100) == 2 and operator.finished
    assert bench.out.rows == ROWS[:5]


def test_a_restored_reader_goes_on_where_the_snapshot_was_taken() -> None:
    first, operator = reading(Scripted([3]))
    operator.poll(100)
    source = Scripted([2])
    second, operator = reading(source, restored=first.freeze(), subtask=1, parallelism=2)
    operator.poll(100)
    assert second.out.rows == ROWS[3:5]
    (context,) = source.contexts
    assert (context.subtask, context.parallelism, context.restored) == (1, 2, {"split": {"row": 3}})


def test_a_reader_is_given_the_offsets_of_all_splits() -> None:
    source = tg.sources.rows(ROWS, "a long, b string", splits=3)
    parts = [reading(source, subtask=subtask, parallelism=2) for subtask in range(2)]
    for _, operator in parts:
        operator.poll(2)
    restored = [batch for bench, _ in parts for batch in bench.freeze()[OFFSETS.name]]
    again, operator = reading(source, restored={OFFSETS.name: restored})
    while not operator.finished:
        operator.poll(100)
    assert sorted([*parts[0][0].out.rows, *parts[1][0].out.rows, *again.out.rows]) == ROWS


def test_the_end_is_the_end_of_time_and_then_of_records() -> None:
    bench, operator = reading(Scripted([1]))
    operator.poll(10)
    operator.end()
    assert operator.ended and bench.out.others == [("watermark", MAX_WATERMARK_MS), ("end",)]
    assert offsets(bench) == [{"split": "split", "offset": '{"row": 1}'}], "it still takes part in snapshots"


def test_an_offset_that_json_can_t_carry_is_an_error_with_names() -> None:
    class Odd(Scripted):
        def open(self, context: SourceContext) -> SourceReader:
            reader = super().open(context)
            reader.offsets = lambda: {"split": {1, 2}}  # type: ignore[method-assign]
            return reader

    bench, _ = reading(Odd([]))
    with pytest.raises(JobError, match=r"source 'the source': the offset of split 'split' is \{1, 2\}"):
        bench.operator.freeze(1)


@pytest.mark.parametrize("schema", ["b string, a long", "a int, b string", "a long NOT NULL, b string", "a long"])
def test_a_batch_of_another_schema_is_an_error_with_names(schema: str) -> None:
    bench, operator = reading(Scripted([pa.RecordBatch.from_pylist([{"a": 1, "b": "x"}], schema=parse_schema(schema))]))
    with pytest.raises(SchemaError, match="source 'the source' declares the schema 'a long, b string'"):
        operator.poll(10)
    assert bench.out.events == []


@pytest.mark.parametrize("where", ["open", "poll", "finished", "offsets", "close"])
def test_an_error_in_a_reader_names_the_source(where: str) -> None:
    bench = Bench(SourceSpec(Scripted([1], fail_at=where)), returns="a long, b string", name="the source", open=False)
    operator = bench.operator
    assert isinstance(operator, SourceOperator)
    with pytest.raises(UserFunctionError, match=f"no broker in {where}") as failed:
        live(bench, operator)
    assert failed.value.operator == "the source"


def live(bench: Bench, operator: SourceOperator) -> None:
    operator.open(bench.context)
    operator.poll(1)
    _ = operator.finished
    operator.freeze(1)
    operator.close()


def test_an_error_of_the_engine_s_own_passes_as_it_is() -> None:
    class Moved(Scripted):
        def fail(self, where: str) -> None:
            raise RestoreError("the file is gone: bring it back")

    with pytest.raises(RestoreError, match="bring it back"):
        reading(Moved([]))


# ------------------------------------------------------------------------------------------------------ watermarks


def timed(*, delay_ms: int = 0, idle_after_ms: int | None = None, column: str = "ts long") -> Bench:
    return Bench(WatermarkSpec("ts", delay_ms, idle_after_ms), f"k string, {column}", returns=f"k string, {column}")


def test_the_watermark_follows_the_latest_record_at_a_distance() -> None:
    bench = timed(delay_ms=5)
    bench.feed(("a", 100), ("b", 120), ("c", 90))
    bench.feed(("d", 110))
    bench.feed(("e", 130))
    assert bench.out.events == [
        ("batch", ("a", 100), ("b", 120), ("c", 90)),
        ("watermark", 114),
        ("batch", ("d", 110)),
        ("batch", ("e", 130)),
        ("watermark", 124),
    ], "behind its batch, and only where it moves"


def test_records_without_a_time_move_nothing() -> None:
    bench = timed()
    bench.feed(("a", None))
    assert bench.out.others == []
    bench.feed(("a", None), ("b", 5))
    assert bench.out.others == [("watermark", 4)]


def test_event_time_begins_here_and_ends_with_the_input() -> None:
    bench = timed()
    bench.operator.on_watermark(50)
    bench.operator.on_idle()
    assert bench.out.events == []
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    bench.operator.on_end()
    assert bench.out.events == [("watermark", MAX_WATERMARK_MS), ("end",)]


def test_a_stream_without_records_becomes_idle_once_and_wakes_up() -> None:
    bench = timed(idle_after_ms=30)
    assert bench.operator.deadline_ms() == 30, "counted from the start"
    bench.clock.now_ms = 10
    bench.feed(("a", 100))
    assert bench.operator.deadline_ms() == 40
    bench.operator.on_asked(found_none=True)
    bench.operator.on_time(39)
    assert bench.out.others == [("watermark", 99)]
    bench.operator.on_time(40)
    bench.operator.on_time(1000)
    assert bench.out.others == [("watermark", 99), ("idle",)]
    assert bench.operator.deadline_ms() is None, "or the loop would never sleep again"
    bench.clock.now_ms = 50
    bench.feed(("b", 90))
    assert bench.out.events[-2:] == [("watermark", 99), ("batch", ("b", 90))], "what woke it up may be filtered away"
    assert bench.out.others == [("watermark", 99), ("idle",), ("watermark", 99)]
    assert bench.operator.deadline_ms() == 80


def test_a_stream_does_not_become_idle_while_nobody_looks_for_its_records() -> None:
    bench = timed(idle_after_ms=30)
    bench.operator.on_asked(found_none=True)
    bench.feed(("a", 100))
    for now_ms in (40, 80, 120):
        bench.operator.on_time(now_ms)
        assert bench.operator.deadline_ms() == now_ms + 30, "it has work, or a full output"
    bench.operator.on_asked(found_none=False)
    bench.operator.on_time(150)
    assert bench.out.others == [("watermark", 99)], "what was found may have been something else, such as a watermark"
    bench.operator.on_asked(found_none=True)
    bench.operator.on_time(180)
    assert bench.out.others == [("watermark", 99), ("idle",)]


def test_after_the_end_nothing_becomes_idle() -> None:
    bench = timed(idle_after_ms=30)
    bench.operator.on_watermark(MAX_WATERMARK_MS)
    assert bench.operator.deadline_ms() is None
    bench.operator.on_time(100)
    assert bench.out.events == [("watermark", MAX_WATERMARK_MS)]


def test_a_stream_that_never_becomes_idle_waits_for_nothing() -> None:
    bench = timed()
    assert bench.operator.deadline_ms() is None
    assert bench.freeze()["__split_watermarks"] == [], "there is nothing to keep yet"


@pytest.mark.parametrize(
    ("column", "times_ms"),
    [
        (pa.array([1500, None], pa.int64()), [1500, None]),
        (pa.array([datetime(1970, 1, 1, 0, 0, 1, 500_999)], pa.timestamp("us", "UTC")), [1500]),
        (pa.array([datetime(1970, 1, 1, 0, 0, 1, 500_999)], pa.timestamp("us")), [1500]),
        (pa.array([1_500_999_999], pa.timestamp("ns", "Europe/Berlin")), [1500]),
        (pa.array([2], pa.timestamp("s")), [2000]),
        (pa.array([date(1970, 1, 2), None], pa.date32()), [86_400_000, None]),
    ],
)
def test_event_times_are_milliseconds(column: pa.Array, times_ms: list[int | None]) -> None:
    assert event_times_ms(column).to_pylist() == times_ms


def test_a_timestamp_column_makes_watermarks() -> None:
    bench = timed(column="ts timestamp_ntz")
    bench.feed(("a", datetime(1970, 1, 1, 0, 0, 2)))
    assert bench.out.others == [("watermark", 1999)]


def timed_by(function: Any) -> Bench:
    bench = Bench(WatermarkSpec(None, 0, None, by=function), "key string, ts long", returns="key string, ts long")
    bench.operator.resume()
    return bench


def test_a_function_of_a_batch_makes_watermarks_where_it_returns_one() -> None:
    """As of a stream in which a record says that all records up to its time have come."""

    def punctuated(batch: pa.RecordBatch) -> int | None:
        return max((ts for key, ts in zip(*batch.to_pydict().values(), strict=True) if key == "all came"), default=None)

    bench = timed_by(punctuated)
    bench.feed(("a", 500))
    bench.feed(("a", 50), ("all came", 40))
    bench.feed(("all came", 30))
    bench.feed(("all came", 700))
    assert bench.out.others == [("watermark", 40), ("watermark", 700)], "what was promised isn't taken back"
    again = Bench(bench.node.spec, "key string, ts long", returns="key string, ts long", restored=bench.freeze())
    again.operator.resume()
    assert again.out.others == [("watermark", 700)]


def test_a_watermark_by_a_function_may_be_a_datetime_but_nothing_else() -> None:
    bench = timed_by(lambda batch: datetime(1970, 1, 1, 0, 0, 2))
    bench.feed(("a", 1))
    assert bench.out.others == [("watermark", 2000)]
    for wrong in ("soon", 1.5):
        with pytest.raises(JobError, match=r"is not a time: give milliseconds since 1970"):
            timed_by(lambda batch, wrong=wrong: wrong).feed(("a", 1))


def test_an_error_of_the_function_is_the_users() -> None:
    with pytest.raises(UserFunctionError, match="ZeroDivisionError"):
        timed_by(lambda batch: 1 // 0).feed(("a", 1))


class _Grouped:
    """A source of four records in two splits, whose reader can hold back a split or not, and its watermark operator."""

    def __init__(self, *, holds_back: bool) -> None:
        class Own(Scripted):
            def open(self, context: SourceContext) -> SourceReader:
                return _OwnReader(self, context, discovers=("a", "b"), calls=[[("read", split)] for split in "abab"])

        self.bench, self.source = reading(Own([1, 1, 1, 1]), open=False)
        spec = WatermarkSpec("a", 0, 10, group="all", max_ahead_ms=1)
        operator = spec.create(replace(self.bench.node, spec=spec))
        assert isinstance(operator, WatermarkOperator)
        self.watermark = operator
        self.source.consumers[:] = [self.watermark]
        follow_splits([self.source, self.watermark])
        self.source.open(self.bench.context)
        self.source.splits.holds_back = holds_back
        self.watermark.open(self.bench.context)


def test_a_source_whose_reader_can_not_hold_back_splits_waits_as_a_whole() -> None:
    grouped = _Grouped(holds_back=False)
    assert grouped.source.poll(1) == 1, "until it has a watermark, it reads"
    assert grouped.watermark.reached_ms() == -1, "of the other split nobody knows whether it ever has a record"
    assert grouped.watermark.waits and grouped.source.poll(1) == 0, "nor how far the others are"
    grouped.watermark.on_least(-2)
    assert not grouped.watermark.waits and grouped.source.poll(1) == 1
    assert grouped.source.poll(1) == 1 and grouped.watermark.reached_ms() == 0
    assert grouped.source.poll(1) == 0, "more than max_ahead ahead of the others"
    grouped.watermark.on_least(None)
    assert grouped.source.poll(1) == 1, "there is nobody to wait for"


def test_a_split_that_is_held_back_does_not_become_idle() -> None:
    grouped = _Grouped(holds_back=True)
    grouped.source.poll(1)
    assert grouped.source.splits.is_ahead("a") and not grouped.source.splits.is_ahead("b")
    grouped.bench.clock.now_ms = 100
    grouped.watermark.on_asked(found_none=True)
    grouped.watermark.on_time(100)
    assert grouped.watermark.reached_ms() == -1, "b is idle, a is held back"
    grouped.watermark.on_least(-1)
    grouped.bench.clock.now_ms = 200
    grouped.watermark.on_time(200)
    assert grouped.watermark.reached_ms() is None


def test_a_split_without_records_becomes_idle_when_many_looks_have_found_records_of_others() -> None:
    grouped = _Grouped(holds_back=True)
    grouped.watermark.consumers.append(grouped.bench.out)
    grouped.watermark.on_least(1000)
    assert grouped.source.poll(1) == 1
    grouped.watermark.on_asked(found_none=False)
    idle_after, schema = [], grouped.source.node.schema
    for looks in range(1, 10):
        grouped.source.emit(pa.record_batch([[looks], ["x"]], schema=schema))  # of a
        grouped.watermark.on_asked(found_none=False)
        grouped.bench.clock.now_ms += 100
        grouped.watermark.on_time(grouped.bench.clock.now_ms)
        if grouped.bench.out.others:
            idle_after.append(looks)
    assert idle_after[0] == 5, "b was not found by six looks, for two splits"


class _OwnReader(ScriptedReader):
    """A reader of the user's own: `calls` are what it says of its splits before its batches, poll by poll."""

    def __init__(self, source: Scripted, context: SourceContext, *, discovers: tuple[str, ...], calls: list[Any]) -> None:
        super().__init__(source, context)
        self.splits = context.splits.report()
        for split in discovers:
            self.splits.discover(split)
        self.calls = list(calls)

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        for method, split in self.calls.pop(0):
            getattr(self.splits, method)(split)
        return super().poll(max_rows)


def of_its_own(script: list[Any], **reader: Any) -> tuple[Bench, SourceOperator]:
    class Own(Scripted):
        def open(self, context: SourceContext) -> SourceReader:
            return _OwnReader(self, context, **reader)

    bench, operator = reading(Own(script), open=False)
    operator.splits.is_followed = True  # there is a watermark operator in its chain
    operator.open(bench.context)
    return bench, operator


@pytest.mark.parametrize(
    ("discovers", "calls"),
    [
        ((), [[("read", "a")]]),
        (("a",), [[("read", "b")]]),
        (("a",), [[]]),
        (("a",), [[("read", "a"), ("finish", "a")], [("read", "a")]]),
    ],
)
def test_a_batch_of_a_split_that_is_not_discovered_is_an_error_that_says_what_to_do(
    discovers: tuple[str, ...], calls: list[Any]
) -> None:
    bench, operator = of_its_own([2] * len(calls), discovers=discovers, calls=calls)
    for _ in calls[1:]:
        operator.poll(1)
    with pytest.raises(
        JobError,
        match=r"source 'the source': its reader gave a batch of split '\w?', which it has not "
        r"discovered, or has finished before\. Call splits\.discover",
    ):
        operator.poll(1)
    assert len(bench.out.rows) == 2 * (len(calls) - 1), "nothing of that batch was passed on"


def test_a_split_may_be_finished_with_its_last_batch_before_or_after_it_is_read() -> None:
    for calls in ([("finish", "a"), ("read", "a")], [("read", "a"), ("finish", "a")]):
        bench, operator = of_its_own([2], discovers=("a",), calls=[calls])
        assert operator.poll(2) == 2 and len(bench.out.rows) == 2
    bench, operator = of_its_own([2], discovers=("a",), calls=[[("read", "b")]])
    operator.splits.is_followed = False
    assert operator.poll(2) == 2, "where nobody goes by event time it makes no difference"
