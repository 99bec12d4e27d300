"""A subtask: one chain of operators, its inputs and outputs, and the alignment of its markers.

It does one small unit of work at a time (`step`) and never waits. The alignment state machine decides
(protocol/alignment.py); this class carries out its effects. While an output is full nothing is taken from the inputs,
and so the pressure goes back to the sources.

The one thing that pressure doesn't hold up is the marker of an epoch that is hurried: it is looked for in the inputs'
queues at every step, and passes what is queued before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tidegate.channels.elements import Element, End, Held, Idle, Lap, Marker, Watermark
from tidegate.channels.feedback import FeedbackChannel
from tidegate.channels.ports import Inlet
from tidegate.dataflow.operators.base import AT_ONCE_MS, Operator
from tidegate.dataflow.operators.source import SourceOperator
from tidegate.dataflow.plan import Vertex
from tidegate.protocol.alignment import (
    Alignment,
    AlignmentMode,
    Block,
    Effect,
    FinishSnapshot,
    ForwardMarker,
    LogOvertaken,
    StartLog,
    StopLog,
    TakeSnapshot,
    Unblock,
)
from tidegate.protocol.coordinator import Ending
from tidegate.protocol.ids import ChannelId, SubtaskId
from tidegate.protocol.iteration import LoopEnded, LoopQuiet
from tidegate.protocol.watermarks import MAX_WATERMARK_MS, Advanced, BecameHeld, WatermarkMerge
from tidegate.runtime.exchange import EdgeWriter, Traffic
from tidegate.runtime.in_flight import Logs, Place, Replay
from tidegate.runtime.laps import Laps
from tidegate.runtime.messages import MoveTime
from tidegate.state.operator_state import FrozenParts, parts_of
from tidegate.state.sections import FrozenState

# Entries that a backend may tidy up after every unit of work.
MAINTENANCE_BUDGET = 512


@dataclass(frozen=True, slots=True)
class Input:
    """One incoming channel. `timed`: watermarks come on it; an untimed one doesn't hold event time back. `place` is where
    its records wait, if they may be part of a snapshot."""

    inlet: Inlet
    port: int
    timed: bool
    place: Place | None = None

    @property
    def is_feedback(self) -> bool:
        return isinstance(self.inlet, FeedbackChannel)

    @property
    def is_crowded(self) -> bool:
        return isinstance(self.inlet, FeedbackChannel) and self.inlet.crowded


@dataclass(frozen=True, slots=True)
class Part:
    """One operator's share of a snapshot, frozen and not yet written."""

    operator: str
    frozen: FrozenState


@dataclass(slots=True)
class Counters:
    """What a subtask has done, for status and benchmarks."""

    records_in: int = 0
    taken: int = 0                               # from channels: records and control elements
    records_out: int = 0
    snapshot_pause_ms: float = 0.0               # the longest freeze
    last: dict[str, Any] = field(default_factory=dict)      # of the last snapshot


@dataclass(slots=True)
class _Taken:
    """A snapshot between its freeze and the moment when nothing of its epoch is under way any more."""

    marker: Marker
    frozen: dict[str, list[FrozenState]]        # by operator
    logs: Logs
    taken_s: float
    times: dict[str, float]


TakeParts = Callable[["Subtask", Marker, Sequence[Part]], None]


class Subtask:
    """Base of the two kinds below. `places` are those that every snapshot has a log of."""

    def __init__(self, *, vertex: Vertex, index: int, operators: Sequence[Operator], writers: Sequence[EdgeWriter],
                 take_parts: TakeParts, places: Sequence[Place], replay: Replay) -> None:
        self.id = SubtaskId(vertex.id, index)
        self.vertex = vertex
        self.operators = tuple(operators)
        self.counters = Counters()
        self._timed_operators = [each for each in operators if type(each).deadline_ms is not Operator.deadline_ms]
        self._writers = tuple(writers)
        self._take_parts = take_parts
        self._places = tuple(places)
        self._replay = replay
        self._alignment: Alignment
        self._marker = Marker(0)                # of the epoch in progress
        self._align_started: float | None = None
        self._taken: _Taken | None = None
        self._has_resumed = False

    def step(self) -> bool:
        """One unit of work, if there is any that can be done now."""
        if self.full:
            return False
        if self._replay:
            self.counters.records_in += self._replay.feed()
            return True
        if not self._has_resumed:
            self._has_resumed = True
            for operator in self.operators:
                operator.resume()
        return self._work()

    def _work(self) -> bool:
        raise AssertionError("a subtask is a source or has inputs")

    def wait_until_ms(self) -> int | None:
        """When, on the monotonic clock, this subtask wants to be stepped again though nothing has arrived."""
        return None

    def abort(self, epoch: int) -> None:
        self._run(self._alignment.on_abort(epoch))

    def complete(self, epoch: int) -> None:
        for operator in self.operators:
            operator.on_complete(epoch)

    def on_time(self, now_ms: int) -> bool:
        """Whether it was time for any operator."""
        called = False
        for operator in self._timed_operators:
            deadline_ms = operator.deadline_ms()
            if deadline_ms is not None and deadline_ms <= now_ms:
                operator.on_time(now_ms)
                called = True
        return called

    def deadline_ms(self) -> int | None:
        """The next moment, by the time of day, that an operator waits for."""
        return min((at for operator in self._timed_operators if (at := operator.deadline_ms()) is not None), default=None)

    def wake_ms(self) -> int | None:
        """When an operator wants the next epoch to end though no record may come."""
        return min((at for operator in self.operators if (at := operator.wake_ms()) is not None), default=None)

    def close(self) -> None:
        self._replay.close()
        for operator in self.operators:
            operator.close()

    @property
    def full(self) -> bool:
        for writer in self._writers:        # noqa: SIM110  (for its speed)
            if writer.full:
                return True
        return False

    def traffic(self) -> Traffic:
        due = any(operator.deadline_ms() == AT_ONCE_MS for operator in self._timed_operators)
        return Traffic(sum(writer.sent_count for writer in self._writers), self.counters.taken, bool(self._replay) or due)

    def move_time(self, order: MoveTime) -> None:
        for operator in self.operators:
            if order.operator is None:
                operator.fire_due()
            elif operator.name == order.operator:
                (operator.hold_time if order.hold else operator.move_time)()

    def maintain(self) -> None:
        for operator in self.operators:
            operator.maintain(MAINTENANCE_BUDGET)

    def _run(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Block(channel):
                    self._set_blocked((channel,), True)
                case TakeSnapshot(epoch):
                    self._snapshot(epoch)
                case ForwardMarker(epoch):
                    assert self._marker.epoch == epoch
                    for writer in self._writers:
                        writer.send(self._marker)
                case StartLog(channels):
                    self._set_logged(channels, True)
                case StopLog(channels):
                    self._set_logged(channels, False)
                case LogOvertaken(channel):
                    self._log_overtaken(channel)
                case Unblock(channels):
                    self._set_blocked(channels, False)
                case FinishSnapshot(epoch):
                    self._finish(epoch)

    def _set_blocked(self, channels: Iterable[ChannelId], blocked: bool) -> None:
        raise AssertionError("a source has no channels to block")

    def _set_logged(self, channels: Iterable[ChannelId], logged: bool) -> None:
        raise AssertionError("a source has no channels to log")

    def _log_overtaken(self, channel: ChannelId) -> None:
        raise AssertionError("a source has no channels to log")

    def _snapshot(self, epoch: int) -> None:
        assert self._marker.epoch == epoch and self._taken is None
        for operator in self.operators:
            operator.before_snapshot()
        started = time.perf_counter()
        frozen = {operator.name: list(parts_of(operator.freeze(epoch))) for operator in self.operators}
        logs = Logs(self._places)
        self._replay.log(logs)
        taken = time.perf_counter()
        times = {"alignment_ms": 0.0 if self._align_started is None else (started - self._align_started) * 1000,
                 "pause_ms": (taken - started) * 1000}
        self._align_started = None
        self._taken = _Taken(self._marker, frozen, logs, taken, times)
        self.counters.snapshot_pause_ms = max(self.counters.snapshot_pause_ms, times["pause_ms"])

    def _finish(self, epoch: int) -> None:
        taken, self._taken = self._taken, None
        assert taken is not None and taken.marker.epoch == epoch
        taken.times["logging_ms"] = (time.perf_counter() - taken.taken_s) * 1000
        self.counters.last = {name: round(took_ms, 3) for name, took_ms in taken.times.items()} | taken.logs.byte_counts()
        parts = [Part(name, FrozenParts(*whole)) for name, frozen in taken.frozen.items()
                 if (whole := [*frozen, *taken.logs.of(name)])]
        self._take_parts(self, taken.marker, parts)


class InnerSubtask(Subtask):
    """A subtask with inputs. It takes from its channels in turn, whole runs of small batches at once.

    `hurries`: the markers of its epochs may overtake; `laps` is given where it is inside a loop; `time_by_epoch`: watermarks
    come at the end of epochs.
    """

    def __init__(self, *, inputs: Sequence[Input], max_batch_rows: int, monotonic_ms: Callable[[], int],
                 on_done: Callable[[Subtask], None], mode: AlignmentMode, hurries: bool, laps: Laps | None,
                 time_by_epoch: bool, **rest: Any) -> None:
        super().__init__(**rest)
        assert inputs
        self._inputs = tuple(inputs)
        self._by_channel = {each.inlet.channel: each for each in inputs}
        self._feedback = next((each for each in inputs if each.is_feedback), None)
        self._regular = frozenset(each.inlet.channel for each in inputs if not each.is_feedback)
        self._max_batch_rows = max_batch_rows
        self._monotonic_ms = monotonic_ms
        self._on_done = on_done
        self._turn = 0
        self._ended: set[ChannelId] = set()
        self._laps = laps
        self._alignment = Alignment(self._by_channel, mode=mode, feedback=self._by_channel.keys() - self._regular)
        self._hurries = hurries
        self._hurry_at: tuple[int, int] | None = None       # the epoch that was triggered, and when it is to be hurried
        self._hurried: int | None = None
        self._logged: set[ChannelId] = set()
        self._overtaken: list[pa.RecordBatch] = []
        # Untimed inputs (rules without event time, say) don't hold event time back, unless there is nothing else.
        timed = frozenset(each.inlet.channel for each in inputs if each.timed) or self._regular
        # Who makes event time of the records of all inputs must not take the end of one for the end of all.
        self._makes_time = any(operator.makes_time for operator in self.operators)
        untimed = self._regular - timed if self._makes_time else ()
        self._timed = timed.union(untimed)
        self._watermarks = WatermarkMerge(timed, untimed=untimed)
        self._time_held = False
        self._held_in: int | None = None        # the loop in which an input is held
        self._time_by_epoch = time_by_epoch

    def step(self) -> bool:
        hurried = (self._hurry_at is not None or self._hurried is not None) and self._hurry()
        return super().step() or hurried

    def wait_until_ms(self) -> int | None:
        due = () if self._hurry_at is None else (self._hurry_at[1],)
        lap = () if self._laps is None or self._laps.due_ms is None else (self._laps.due_ms,)
        return min((*due, *lap), default=None)

    def expect(self, epoch: int, *, hurry_after_ms: int) -> None:
        """The epoch was triggered. What isn't done with it after this time lets its marker overtake."""
        if self._hurries:
            self._hurry_at = epoch, self._monotonic_ms() + hurry_after_ms

    def on_time(self, now_ms: int) -> bool:
        if self._laps is None:
            return super().on_time(now_ms)
        before = sum([writer.batch_count for writer in self._writers])
        called = super().on_time(now_ms)
        if called and sum([writer.batch_count for writer in self._writers]) > before:
            self._laps.on_own_records()
        return called

    def abort(self, epoch: int) -> None:
        super().abort(epoch)
        if self._hurry_at is not None and self._hurry_at[0] <= epoch:
            self._hurry_at = None
        if self._hurried is not None and self._hurried <= epoch:
            self._end_hurry()

    def _work(self) -> bool:
        if self._laps is not None and self._laps.send_due(self._monotonic_ms(), self._writers):
            return True
        # New records wait while those that go round are too many.
        if self._feedback is not None and self._feedback.is_crowded and self._take_from(self._feedback):
            return True
        inputs, count = self._inputs, len(self._inputs)
        for _ in inputs:
            each = inputs[self._turn]
            self._turn = (self._turn + 1) % count
            if len(each.inlet) and self._take_from(each):
                return True
        return False

    def _take_from(self, source: Input) -> bool:
        inlet = source.inlet
        if not len(inlet) or inlet.blocked:
            return False
        self._dispatch(source, inlet.take())
        return True

    def _dispatch(self, source: Input, element: Element) -> None:
        head, channel = self.operators[0], source.inlet.channel
        self.counters.taken += 1
        if isinstance(element, pa.RecordBatch):
            batch = self._joined(source.inlet, element)
            self.counters.records_in += batch.num_rows
            self.counters.taken += batch.num_rows - 1
            if self._laps is not None and source.is_feedback:
                if self._laps.ended:
                    return      # made by a timer of the clock when all was over: those don't keep a loop going
                self._laps.on_feedback_records()
            if channel in self._logged:
                self._log(channel, batch)
            head.on_batch(batch, source.port)
        elif isinstance(element, Marker):
            self._on_marker(channel, element, overtook=False)
        elif isinstance(element, Watermark):
            if channel in self._timed:
                self._advance(self._watermarks.on_watermark(channel, element.at_ms))
        elif isinstance(element, Idle):
            if channel in self._timed:
                self._advance(self._watermarks.on_idle(channel))
        elif isinstance(element, Held):
            if channel in self._timed:
                self._held_in = element.loop
                self._advance(self._watermarks.on_held(channel))
        elif isinstance(element, Lap):
            assert self._laps is not None, f"{element} outside of its loop"
            self._on_lap(self._laps.on_lap(channel, element, self._monotonic_ms(), self._writers))
        else:
            assert isinstance(element, End) and channel not in self._ended
            self._ended.add(channel)
            if self._laps is not None:
                self._laps.on_end(channel, self._writers)
            if self._ended == self._regular and (self._laps is None or not self._laps.is_head):
                head.on_end()

    def _joined(self, inlet: Inlet, first: pa.RecordBatch) -> pa.RecordBatch:
        """The first batch and those that wait right behind it, up to the batch size: big batches under load, none at
        rest."""
        rows, run = first.num_rows, [first]
        while rows < self._max_batch_rows and isinstance(behind := inlet.peek(), pa.RecordBatch):
            rows += behind.num_rows
            run.append(inlet.take())
        return first if len(run) == 1 else pa.concat_batches(run)

    def _advance(self, outcome: object) -> None:
        if isinstance(outcome, Advanced):
            if outcome.at_ms == MAX_WATERMARK_MS and self._laps is not None and self._laps.holds_time:
                self._time_held = True      # records may still leave the loop
                self._hold_time(self._laps, None)
            else:
                self.operators[0].on_watermark(outcome.at_ms)
        elif isinstance(outcome, BecameHeld):
            assert self._laps is not None, "held outside of a loop"
            self._hold_time(self._laps, self._held_in)
        elif outcome is not None:
            self.operators[0].on_idle()

    def _hold_time(self, laps: Laps, loop: int | None) -> None:
        if not self._makes_time:        # else time behind this goes by the records that still come
            laps.hold_time(self._writers, loop)

    def _on_lap(self, outcome: LoopQuiet | LoopEnded | None) -> None:
        if isinstance(outcome, LoopQuiet) and self._time_held:
            self._time_held = False
            self.operators[0].on_watermark(MAX_WATERMARK_MS)
        elif isinstance(outcome, LoopEnded):
            self.operators[0].on_end()
            self._on_done(self)

    # Snapshots.

    def _on_marker(self, channel: ChannelId, marker: Marker, *, overtook: bool) -> None:
        if self._alignment.epoch_in_progress is None:
            self._align_started = time.perf_counter()
        if marker.epoch > self._marker.epoch:
            self._marker = marker
        self._run(self._alignment.on_marker(channel, marker.epoch, overtook=overtook, full=marker.full))

    def _hurry(self) -> bool:
        """Whether anything came of it."""
        if self._hurry_at is not None and self._monotonic_ms() >= self._hurry_at[1]:
            epoch, self._hurry_at = self._hurry_at[0], None
            effects = self._alignment.on_hurry(epoch)
            if self._alignment.is_hurried(epoch):       # else it is over here: the marker came before the trigger
                self._hurried = epoch
                for each in self._inputs:
                    each.inlet.hurry(True)
                self._run(effects)
        return sum(self._overtake(each.inlet) for each in self._inputs if self._hurried is not None) > 0

    def _overtake(self, inlet: Inlet) -> bool:
        found = False
        while self._hurried is not None and (marker := inlet.marker()) is not None and (
                self._alignment.may_overtake(marker.epoch)):
            found = True
            self._overtaken = inlet.overtake()
            if marker.epoch == self._hurried:
                inlet.hurry(False)
            self._on_marker(inlet.channel, marker, overtook=True)
            self._overtaken = []
        return found

    def _end_hurry(self) -> None:
        self._hurried = None
        for each in self._inputs:
            each.inlet.hurry(False)

    def _snapshot(self, epoch: int) -> None:
        super()._snapshot(epoch)
        if self._time_by_epoch:
            self._watermarks.on_epoch()

    def _finish(self, epoch: int) -> None:
        super()._finish(epoch)
        if self._hurry_at is not None and self._hurry_at[0] <= epoch:
            self._hurry_at = None
        if self._hurried is not None and self._hurried <= epoch:
            self._end_hurry()

    def _log(self, channel: ChannelId, batch: pa.RecordBatch) -> None:
        place = self._by_channel[channel].place
        assert self._taken is not None and place is not None
        self._taken.logs.append(place, batch)

    def _log_overtaken(self, channel: ChannelId) -> None:
        for batch in self._overtaken:
            self._log(channel, batch)

    def _set_logged(self, channels: Iterable[ChannelId], logged: bool) -> None:
        (self._logged.update if logged else self._logged.difference_update)(channels)

    def _set_blocked(self, channels: Iterable[ChannelId], blocked: bool) -> None:
        for channel in channels:
            inlet = self._by_channel[channel].inlet
            if blocked:
                inlet.block()
            else:
                inlet.unblock()


class SourceSubtask(Subtask):
    """A subtask whose head is a source. It starts epochs: the master's trigger takes the place of a marker.

    `halts`: it reads nothing between its marker and the end of the epoch (the experimental stop-the-world protocol).
    """

    def __init__(self, *, max_batch_rows: int, linger_ms: int, monotonic_ms: Callable[[], int],
                 on_done: Callable[[Subtask], None], halts: bool, **rest: Any) -> None:
        super().__init__(**rest)
        source = self.operators[0]
        assert isinstance(source, SourceOperator)
        self._source = source
        self._max_batch_rows = max_batch_rows
        self._linger_ms = linger_ms
        self._monotonic_ms = monotonic_ms
        self._on_done = on_done
        self._halts = halts
        self._halted: int | None = None
        self._to_end = False
        self._stopped = False
        self._not_before_ms = 0
        self._alignment = Alignment(())

    def _work(self) -> bool:
        if self._source.ended or self._halted is not None:
            return False
        if self._to_end:
            return self._end()
        if self._stopped:
            return False
        now_ms = self._monotonic_ms()
        if now_ms < self._not_before_ms:
            return False
        count = self._source.poll(self._max_batch_rows)
        self.counters.records_in += count
        if self._source.finished:
            return self._end()
        if count < self._max_batch_rows:
            # There was no more: let records gather for a moment, so that batches are not tiny under load.
            self._not_before_ms = now_ms + (self._linger_ms if count else max(1, self._linger_ms))
        return count > 0

    def _end(self) -> bool:
        self._source.end()
        self._on_done(self)
        return True

    def wait_until_ms(self) -> int | None:
        idle = self._source.ended or self._halted is not None or self.full or (self._stopped and not self._to_end)
        return None if idle else self._not_before_ms

    def trigger(self, marker: Marker, ending: Ending | None) -> None:
        self._marker = marker
        self._run(self._alignment.on_trigger(marker.epoch))
        if self._halts:
            self._halted = marker.epoch
        if ending is Ending.STOP:
            self._stopped = True

    def end_input(self) -> None:
        """What was read so far is all there is."""
        self._to_end = True
        self._not_before_ms = 0

    def abort(self, epoch: int) -> None:
        super().abort(epoch)
        self._resume(epoch)

    def complete(self, epoch: int) -> None:
        super().complete(epoch)
        self._resume(epoch)

    def _resume(self, epoch: int) -> None:
        if self._halted is not None and self._halted <= epoch:
            self._halted = None
