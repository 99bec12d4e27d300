"""A subtask with inputs: it chooses the input of the next element, and processes the element.

Back-pressure holds up everything but the marker of a hurried epoch. The subtask looks for that marker in the queues of its
inputs at every step, and lets it overtake what is queued before it. Records that an operator holds are in no queue: the
marker waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from tidegate.channels.elements import Element, End, Held, Idle, Lap, Marker, Watermark
from tidegate.channels.feedback import FeedbackChannel
from tidegate.channels.ports import Inlet
from tidegate.dataflow.places import Place
from tidegate.protocol.alignment import (
    Alignment,
    AlignmentMode,
    Block,
    LogOvertaken,
    StartLog,
    StopLog,
    Unblock,
)
from tidegate.protocol.ids import ChannelId
from tidegate.protocol.iteration import LoopEnded, LoopQuiet
from tidegate.protocol.watermarks import MAX_WATERMARK_MS, Advanced, BecameHeld, WatermarkMerge
from tidegate.slot.laps import Laps
from tidegate.slot.subtask import Subtask
from tidegate.types import limits


@dataclass(frozen=True, slots=True)
class Input:
    """An incoming channel. Without `has_event_time` no watermark comes on it, and it doesn't hold event time back. `place`
    is where its records wait, if they may be part of a snapshot."""

    inlet: Inlet
    port: int
    has_event_time: bool
    place: Place | None = None

    @property
    def is_feedback(self) -> bool:
        return isinstance(self.inlet, FeedbackChannel)

    @property
    def is_crowded(self) -> bool:
        return isinstance(self.inlet, FeedbackChannel) and self.inlet.crowded


class InnerSubtask(Subtask):
    """A subtask with inputs. It takes from its channels in turn, and joins small batches that wait there.

    `hurries`: markers may overtake records; `laps` is given if the subtask is in a loop; `time_by_epoch`: watermarks come at
    the end of epochs.
    """

    def __init__(
        self,
        *,
        inputs: Sequence[Input],
        mode: AlignmentMode,
        hurries: bool,
        laps: Laps | None,
        time_by_epoch: bool,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        assert inputs
        self._inputs = tuple(inputs)
        self._by_channel = {each.inlet.channel: each for each in inputs}
        self._feedback = next((each for each in inputs if each.is_feedback), None)
        self._regular = frozenset(each.inlet.channel for each in inputs if not each.is_feedback)
        self._turn = 0
        self._ended: set[ChannelId] = set()
        self._laps = laps
        self._alignment = Alignment(self._by_channel, mode=mode, feedback=self._by_channel.keys() - self._regular)
        self._hurries = hurries
        self._hurry_at: tuple[int, int] | None = None  # the epoch that was triggered, and when it is to be hurried
        self._hurried: int | None = None
        self._logged: set[ChannelId] = set()
        self._overtaken: list[pa.RecordBatch] = []
        # Inputs without event time (rules, for example) don't hold event time back, unless there are no other inputs.
        with_event_time = frozenset(each.inlet.channel for each in inputs if each.has_event_time) or self._regular
        # An operator that makes event time from the records of all inputs must not take the end of one for the end of all.
        self._makes_time = any(operator.makes_time for operator in self.operators)
        without_event_time = self._regular - with_event_time if self._makes_time else frozenset()
        self._merged = with_event_time | without_event_time
        self._watermarks = WatermarkMerge(with_event_time, without_event_time=without_event_time)
        self._time_held = False
        self._held_in: int | None = None  # the loop in which an input is held
        self._time_by_epoch = time_by_epoch

    def step(self) -> bool:
        hurries = self._hurry_at is not None or self._hurried is not None
        hurried = hurries and not self._holds_records() and self._hurry()
        return super().step() or hurried

    def wait_until_ms(self) -> int | None:
        due = () if self._hurry_at is None or self._holds_records() else (self._hurry_at[1],)
        lap = () if self._laps is None or self._laps.due_ms is None else (self._laps.due_ms,)
        return min((*due, *lap), default=None)

    def expect(self, epoch: int, *, hurry_after_ms: int) -> None:
        """Note that the epoch was triggered. If it isn't finished here after the given time, its marker overtakes."""
        if self._hurries:
            self._hurry_at = epoch, self._monotonic_ms() + hurry_after_ms

    def on_time(self, now_ms: int) -> bool:
        return super().on_time(now_ms) if self._laps is None else self._counted(self._laps, partial(super().on_time, now_ms))

    def _give_step(self) -> bool:
        # The work may be that of a timer of processing time.
        return super()._give_step() if self._laps is None else self._counted(self._laps, super()._give_step)

    def _counted(self, laps: Laps, call: Callable[[], bool]) -> bool:
        """Make a call that may make records which no lap could count on its way here."""
        before = sum([writer.batch_count for writer in self._writers])
        called = call()
        if called and sum([writer.batch_count for writer in self._writers]) > before:
            laps.on_own_records()
        return called

    def abort(self, epoch: int) -> None:
        super().abort(epoch)
        self._end_hurry(epoch)

    def _take_next(self) -> bool:
        if self._laps is not None and self._laps.send_due(self._monotonic_ms(), self._writers):
            return True
        # New records wait while there are too many in the loop.
        if self._feedback is not None and self._feedback.is_crowded and self._take_from(self._feedback):
            return True
        inputs, count = self._inputs, len(self._inputs)
        for _ in inputs:
            each = inputs[self._turn]
            self._turn = (self._turn + 1) % count
            if len(each.inlet) and self._take_from(each):
                self._note_look(found_none=False)
                return True
        if not self._alignment.missing:  # or records may wait in a channel that is blocked
            self._note_look(found_none=True)
        return self._note_lull()

    def _take_from(self, source: Input) -> bool:
        inlet = source.inlet
        if not len(inlet) or inlet.blocked:
            return False
        self._dispatch(source, inlet.take())
        return True

    def _dispatch(self, source: Input, element: Element) -> None:
        first, channel = self.operators[0], source.inlet.channel
        self.counters.taken += 1
        if isinstance(element, pa.RecordBatch):
            batch = self._joined(source.inlet, element)
            self.counters.records_in += batch.num_rows
            self.counters.taken += batch.num_rows - 1
            if self._laps is not None and source.is_feedback:
                if self._laps.ended:
                    return  # a timer of processing time made it after the loop had ended, and doesn't prolong the loop
                self._laps.on_feedback_records()
            if channel in self._logged:
                self._log(channel, batch)
            first.on_batch(batch, source.port)
        elif isinstance(element, Marker):
            self._on_marker(channel, element, overtook=False)
        elif isinstance(element, Watermark):
            if channel in self._merged:
                self._advance(self._watermarks.on_watermark(channel, element.at_ms))
        elif isinstance(element, Idle):
            if channel in self._merged:
                self._advance(self._watermarks.on_idle(channel))
        elif isinstance(element, Held):
            if channel in self._merged:
                inside = self._laps is not None and self._laps.inside(element.loop)
                self._held_in = element.loop if inside else self._held_in
                self._advance(self._watermarks.on_held(channel, inside=inside))
        elif isinstance(element, Lap):
            assert self._laps is not None, f"{element} outside of its loop"
            self._on_lap(self._laps.on_lap(channel, element, self._monotonic_ms(), self._writers))
        else:
            assert isinstance(element, End) and channel not in self._ended
            self._ended.add(channel)
            if self._laps is not None:
                self._laps.on_end(channel, self._writers)
            if self._ended == self._regular and (self._laps is None or not self._laps.is_head):
                first.on_end()

    def _joined(self, inlet: Inlet, first: pa.RecordBatch) -> pa.RecordBatch:
        """Join the first batch with those that wait right behind it, up to the batch size. So batches are large under
        load, and nothing waits otherwise. Together they have no more bytes than a column can hold."""
        rows, batches = first.num_rows, [first]
        room_bytes: int | None = None
        while rows < self._max_batch_rows and isinstance(behind := inlet.peek(), pa.RecordBatch):
            if room_bytes is None:
                room_bytes = limits.JOINED_BYTES - first.get_total_buffer_size()
            room_bytes -= behind.get_total_buffer_size()
            if room_bytes < 0:
                break
            rows += behind.num_rows
            batches.append(inlet.take())
        return first if len(batches) == 1 else pa.concat_batches(batches)

    def _advance(self, outcome: object) -> None:
        if isinstance(outcome, Advanced):
            if outcome.at_ms == MAX_WATERMARK_MS and self._laps is not None and self._laps.holds_time:
                self._time_held = True  # records may still leave the loop
                self._hold_time(self._laps, None)
            else:
                self.operators[0].on_watermark(outcome.at_ms)
        elif isinstance(outcome, BecameHeld):
            assert self._laps is not None, "held outside of a loop"
            self._hold_time(self._laps, self._held_in)
        elif outcome is not None:
            self.operators[0].on_idle()

    def _hold_time(self, laps: Laps, loop: int | None) -> None:
        if not self._makes_time:  # else event time behind this subtask comes from the records that still arrive
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
        self._carry_out(self._alignment.on_marker(channel, marker.epoch, overtook=overtook, full=marker.full))

    def _hurry(self) -> bool:
        """Let markers of the hurried epoch overtake. Return whether any did."""
        if self._hurry_at is not None and self._monotonic_ms() >= self._hurry_at[1]:
            epoch, self._hurry_at = self._hurry_at[0], None
            effects = self._alignment.on_hurry(epoch)
            if self._alignment.is_hurried(epoch):  # else the epoch is finished here: its marker came before the trigger
                self._hurried = epoch
                for each in self._inputs:
                    each.inlet.hurry(True)
                self._carry_out(effects)
        return sum(self._overtake(each.inlet) for each in self._inputs if self._hurried is not None) > 0

    def _overtake(self, inlet: Inlet) -> bool:
        found = False
        while (
            self._hurried is not None
            and (marker := inlet.marker()) is not None
            and self._alignment.may_overtake(marker.epoch)
        ):
            found = True
            self._overtaken = inlet.overtake()
            if marker.epoch == self._hurried:
                inlet.hurry(False)
            self._on_marker(inlet.channel, marker, overtook=True)
            self._overtaken = []
        return found

    def _end_hurry(self, epoch: int) -> None:
        if self._hurry_at is not None and self._hurry_at[0] <= epoch:
            self._hurry_at = None
        if self._hurried is not None and self._hurried <= epoch:
            self._hurried = None
            for each in self._inputs:
                each.inlet.hurry(False)

    def _snapshot(self, epoch: int) -> None:
        super()._snapshot(epoch)
        if self._time_by_epoch:
            self._watermarks.on_epoch()

    def _finish(self, epoch: int) -> None:
        super()._finish(epoch)
        self._end_hurry(epoch)

    def _log(self, channel: ChannelId, batch: pa.RecordBatch) -> None:
        place = self._by_channel[channel].place
        assert self._taken is not None and place is not None
        self._taken.logs.append(place, batch)

    def _log_overtaken(self, channel: ChannelId) -> None:
        for batch in self._overtaken:
            self._log(channel, batch)

    def _set_logged(self, channels: Iterable[ChannelId], logged: bool) -> None:
        (self._logged.update if logged else self._logged.difference_update)(channels)

    def _carry_out_on_channels(self, effect: Block | Unblock | StartLog | StopLog | LogOvertaken) -> None:
        match effect:
            case Block(channel):
                self._by_channel[channel].inlet.block()
            case Unblock(channels):
                for channel in channels:
                    self._by_channel[channel].inlet.unblock()
            case StartLog(channels):
                self._set_logged(channels, True)
            case StopLog(channels):
                self._set_logged(channels, False)
            case LogOvertaken(channel):
                self._log_overtaken(channel)
