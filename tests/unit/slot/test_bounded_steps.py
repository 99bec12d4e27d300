"""A slot driven by hand, with a clock that its functions move: steps are short, and what comes between them is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

import tidegate as tg
from tidegate.channels.memory import MemoryChannel
from tidegate.control.messages import Abort, Acknowledge, Deploy, Heartbeat, InputEnded, Message, Start, Trigger
from tidegate.control.settings import JobSettings, Snapshots, Tuning
from tidegate.dataflow.contracts import SinkContext, SinkWriter, SourceContext, SourceReader
from tidegate.dataflow.operators.budget import MOST_BETWEEN_LOOKS, STEP_MS
from tidegate.dataflow.operators.source import WatermarkOperator
from tidegate.dataflow.operators.window import WindowOperator
from tidegate.dataflow.optimiser import make_plan
from tidegate.dataflow.pipeline import Pipeline
from tidegate.protocol.epoch_coordinator import Ending
from tidegate.slot.slot import Slot
from tidegate.slot.subtask import Subtask
from tidegate.slot.world import SlotWorld
from tidegate.store.memory import MemoryStore
from tidegate.types import batch_of, parse_schema

HEARTBEAT = "50 ms"
Row = tuple[Any, ...]


class Clock:
    def __init__(self) -> None:
        self.at_ms = 1_000

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_ms(self) -> int:
        return self.at_ms


class AtOnce:
    """A background that does the work in the call."""

    def submit(self, work: Callable[[], Any], then: Callable[[Any, BaseException | None], None]) -> None:
        then(work(), None)

    def deliver(self) -> bool:
        return False


class NoNetwork:
    """One slot has no channels to others."""

    def connect(self, *, outgoing: Any, incoming: Any) -> None:
        assert not outgoing and not incoming

    def outlet(self, channel: Any) -> Any:
        raise AssertionError(channel)

    inlet = outlet


class Feed(tg.Source):
    """Batches that a test puts in, as (split, rows); the source ends when `ends` is set."""

    schema = parse_schema("key long, at long")
    bounded = True

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[Row]]] = []
        self.live: dict[str, bool] = {}
        self.ends = False
        self.read = 0

    def open(self, context: SourceContext) -> SourceReader:
        return _Reader(self, context)


class _Reader(SourceReader):
    def __init__(self, feed: Feed, context: SourceContext) -> None:
        self._feed = feed
        self._splits = context.splits
        if feed.live:
            self._splits.report()
            for split in feed.live:
                self._splits.discover(split, has_records=True)

    def poll(self, max_rows: int) -> pa.RecordBatch | None:
        if not self._feed.batches:
            return None
        split, rows = self._feed.batches.pop(0)
        if self._feed.live:
            self._splits.read(split)
            if not any(other == split for other, _ in self._feed.batches):
                self._splits.finish(split)
        self._feed.read += len(rows)
        return batch_of(rows, self._feed.schema)

    def offsets(self) -> dict[str, int]:
        return {"": self._feed.read}

    @property
    def finished(self) -> bool:
        return self._feed.ends and not self._feed.batches


class Out(tg.Sink):
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.at_epochs: dict[int, int] = {}  # how many rows had come

    def open(self, context: SinkContext) -> SinkWriter:
        return _Writer(self)


class _Writer(SinkWriter):
    def __init__(self, out: Out) -> None:
        self._out = out

    def write(self, batch: pa.RecordBatch) -> None:
        self._out.rows += [tuple(row.values()) for row in batch.to_pylist()]

    def pre_commit(self, epoch: int) -> Callable[[], list[str]]:
        self._out.at_epochs[epoch] = len(self._out.rows)
        return list


class Hand:
    """One slot. `build` makes the job out of the stream of `feed`; `told` is what the slot has sent."""

    def __init__(self, build: Callable[[Hand, Any], Any], *, feed: Feed | None = None, **snapshots: Any) -> None:
        self.clock = Clock()
        self.feed = feed or Feed()
        self.out = Out()
        self.told: list[Message] = []
        pipeline = Pipeline()
        build(self, pipeline.source("in", self.feed)).to("out", self.out)
        settings = JobSettings(
            name="hand",
            snapshots=Snapshots(to="memory://hand", **snapshots),
            tuning=Tuning(heartbeat=HEARTBEAT, linger=0, key_group_count=4),
        )
        self.slot = Slot(
            0,
            plan=make_plan(pipeline.build(), slots=1, key_group_count=4),
            settings=settings,
            attempt=1,
            world=SlotWorld(
                network=NoNetwork(),
                store=MemoryStore(),
                clock=self.clock,
                background=AtOnce(),
                tell=self.told.append,
            ),
        )
        self.slot.on_message(Deploy((("nowhere", 0),), None, None))
        self.slot.on_message(Start())

    def slowly(self, each_ms: int) -> Callable[[Any], Row]:
        """A function that takes this long for a record."""

        def function(record: Any) -> Row:
            self.clock.at_ms += each_ms
            return tuple(record)

        return function

    def step(self) -> int:
        """One round of the slot's loop. Return how long it took."""
        before_ms = self.clock.at_ms
        self.slot.step()
        assert not self.slot.ended, self.told[-1]
        return self.clock.at_ms - before_ms

    def run(self, until: Callable[[], object], *, most: int = 10_000) -> list[int]:
        """Step until then. Return how long the steps took."""
        steps = []
        while not until():
            steps.append(self.step())
            if not steps[-1]:
                self.clock.at_ms += 1
            assert len(steps) < most, "it never came"
        return steps

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]

    @property
    def subtasks(self) -> list[Subtask]:
        return self.slot._subtasks


class AtTheEnd(tg.KeyedProcess):
    """A timer for each record, which takes a while."""

    def __init__(self, hand: Hand, each_ms: int) -> None:
        self._hand = hand
        self._each_ms = each_ms

    def __copy__(self) -> AtTheEnd:
        return AtTheEnd(self._hand, self._each_ms)

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.event_time(record.at)

    def on_timer(self, at: int, ctx: Any) -> Iterator[Row]:
        self._hand.clock.at_ms += self._each_ms
        yield ctx.key, at


ROWS = [(key, 100 + key) for key in range(500)]
LAST = [(1_000, 10_000)]  # makes the timers of all others due


def timers(hand: Hand, stream: Any, each_ms: int = 10) -> Any:
    return (
        stream.with_watermark("at", "0 s")
        .key_by("key")
        .process("timers", AtTheEnd(hand, each_ms), returns="key long, at long")
    )


def test_a_slow_function_has_heartbeats_between_its_steps() -> None:
    hand = Hand(lambda hand, stream: stream.map(hand.slowly(10), returns="key long, at long", name="slow"))
    hand.feed.batches = [("", ROWS)]
    steps = hand.run(lambda: len(hand.out.rows) == len(ROWS))
    assert hand.out.rows == ROWS, "all, in order"
    assert max(steps) <= 3 * STEP_MS and len(steps) >= 20, steps
    assert len(hand.of(Heartbeat)) >= 20


def test_a_function_that_becomes_slow_is_noticed_within_some_records() -> None:
    def build(hand: Hand, stream: Any) -> Any:
        def function(record: Any) -> Row:
            hand.clock.at_ms += 10 if record.key >= 5_000 else 0
            return tuple(record)

        return stream.map(function, returns="key long, at long", name="slow")

    hand = Hand(build)
    rows = [(key, key) for key in range(6_000)]
    hand.feed.batches = [("", rows)]
    steps = hand.run(lambda: len(hand.out.rows) == len(rows))
    assert hand.out.rows == rows
    assert max(steps) <= 10 * MOST_BETWEEN_LOOKS + STEP_MS and sorted(steps)[-2] <= 4 * STEP_MS


def test_timers_that_are_due_together_fire_in_steps_in_order_and_then_the_watermark_goes_on() -> None:
    hand = Hand(timers)
    hand.feed.batches = [("", ROWS[::-1]), ("", LAST)]
    steps = hand.run(lambda: len(hand.out.rows) == len(ROWS))
    assert hand.out.rows == ROWS
    assert max(steps) <= 3 * STEP_MS and len(hand.of(Heartbeat)) >= 20
    assert not hand.of(InputEnded)


def test_the_input_ends_when_all_work_is_done() -> None:
    hand = Hand(lambda hand, stream: stream.map(hand.slowly(10), returns="key long, at long", name="slow"))
    hand.feed.batches, hand.feed.ends = [("", ROWS)], True
    hand.run(lambda: hand.of(InputEnded))
    assert hand.out.rows == ROWS


def test_the_input_ends_if_the_last_work_is_done_between_two_steps() -> None:
    """As before a snapshot, if epochs are micro-batches."""

    def build(hand: Hand, stream: Any) -> Any:
        windows = stream.with_watermark("at", "1 day").window(tg.tumbling("at", "1 ms"))
        return windows.aggregate("windows", n=tg.count())

    hand = Hand(build)
    rows = [(key, key) for key in range(1_000)]
    hand.feed.batches, hand.feed.ends = [("", rows)], True
    source = hand.subtasks[-1]
    windows = next(each for each in source.operators if isinstance(each, WindowOperator))
    hand.run(lambda: hand.out.rows)
    assert source.has_work() and len(hand.out.rows) < len(rows)
    windows._finish()
    hand.run(lambda: hand.of(InputEnded))
    assert len(hand.out.rows) == len(rows)


def test_at_the_end_of_the_input_timers_fire_in_steps_before_the_last_epoch() -> None:
    hand = Hand(timers)
    hand.feed.batches, hand.feed.ends = [("", ROWS)], True
    hand.run(lambda: hand.of(InputEnded))
    hand.slot.on_message(Trigger(1, Ending.INPUT_ENDED.value, True, 0))
    hand.run(lambda: len(hand.of(Acknowledge)) == len(hand.subtasks))
    assert hand.out.rows == ROWS


def test_a_trigger_waits_for_records_that_the_chain_of_a_source_holds() -> None:
    """The source has passed them on, so they are in its offsets, and they are in no state yet."""
    hand = Hand(lambda hand, stream: stream.map(hand.slowly(10), returns="key long, at long", name="slow"))
    hand.feed.batches = [("", ROWS), ("", ROWS)]
    hand.run(lambda: hand.out.rows)
    assert len(hand.out.rows) < len(ROWS)
    hand.slot.on_message(Trigger(1, None, False, 0))
    assert not hand.of(Acknowledge)
    hand.run(lambda: hand.of(Acknowledge))
    assert hand.out.at_epochs == {1: len(ROWS)}, "all of the first batch, and none of the second"


def test_a_trigger_that_waits_is_forgotten_when_its_epoch_is_aborted() -> None:
    hand = Hand(lambda hand, stream: stream.map(hand.slowly(10), returns="key long, at long", name="slow"))
    hand.feed.batches = [("", ROWS)]
    hand.run(lambda: hand.out.rows)
    hand.slot.on_message(Trigger(1, None, False, 0))
    hand.slot.on_message(Abort(1))
    hand.slot.on_message(Trigger(2, None, False, 0))
    hand.run(lambda: hand.of(Acknowledge))
    assert [message.epoch for message in hand.of(Acknowledge)] == [2]


def test_every_record_moves_the_watermark_of_the_split_it_came_from() -> None:
    """A slow map stands between the source and the watermark: the next split is read when the batch has passed both."""
    feed = Feed()
    feed.live = {"early": True, "late": True}
    feed.batches = [("late", [(1, 1_000), (2, 1_001)]), ("early", [(3, 1), (4, 2)])]
    seen: list[tuple[int, int]] = []

    class Look(tg.KeyedProcess):
        def __copy__(self) -> Look:
            return self

        def process(self, record: Any, ctx: Any) -> Iterator[Row]:
            seen.append((record.key, ctx.watermark_ms))
            yield tuple(record)

    def build(hand: Hand, stream: Any) -> Any:
        slow = stream.map(hand.slowly(STEP_MS), returns="key long, at long", name="slow")
        return slow.with_watermark("at", "0 s").key_by("key").process("look", Look(), returns="key long, at long")

    hand = Hand(build, feed=feed)
    hand.run(lambda: len(seen) == 4)
    assert all(at_ms < 1_000 for _, at_ms in seen), f"the early split holds time back: {seen}"


def test_a_stream_is_not_idle_while_its_batch_is_worked_on() -> None:
    """Nobody asks the source for more meanwhile. Downstream would let other inputs run ahead, and the next batch be late."""

    def build(hand: Hand, stream: Any) -> Any:
        watched = stream.with_watermark("at", "0 s", idle_after="1 s")
        return watched.map(hand.slowly(10), returns="key long, at long", name="slow")

    hand = Hand(build)
    hand.feed.batches = [("", ROWS), ("", ROWS)]
    operator = hand.subtasks[0].operators[1]
    assert isinstance(operator, WatermarkOperator)
    idle: list[int] = []
    operator.consumers[0].on_idle = lambda: idle.append(len(hand.out.rows))  # type: ignore[method-assign]
    hand.run(lambda: len(hand.out.rows) == 2 * len(ROWS))
    assert not idle
    hand.run(lambda: idle)


def test_no_step_of_work_is_done_while_an_output_is_full() -> None:
    hand = Hand(lambda hand, stream: timers(hand, stream).rebalance().map(tuple, returns="key long, at long", name="after"))
    hand.feed.batches = [("", ROWS), ("", LAST)]
    busy = next(each for each in hand.subtasks if each.vertex.first.name == "timers")
    hand.run(busy.has_work)
    (outlet,) = busy._writers[0]._outlets
    assert isinstance(outlet, MemoryChannel)
    outlet._max_elements = -1
    hand.step()  # what was emitted is passed on
    before = list(hand.out.rows)
    assert sum(hand.step() for _ in range(10)) == 0 and hand.out.rows == before
    assert busy.has_work() and hand.slot.wait_ms() > 0, "it sleeps, though there is work"
    outlet._max_elements = 64
    hand.run(lambda: len(hand.out.rows) == len(ROWS))
