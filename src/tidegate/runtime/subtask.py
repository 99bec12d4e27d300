"""A subtask: one chain of operators, its inputs and outputs, and the alignment of its markers.

It does one small unit of work at a time (`step`) and never waits. The alignment state machine decides
(protocol/alignment.py); this class carries out its effects. While an output is full nothing is taken from the inputs,
and so the pressure goes back to the sources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tidegate.channels.elements import Element, End, Idle, Marker, Watermark
from tidegate.channels.ports import Inlet
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.operators.source import SourceOperator
from tidegate.dataflow.plan import Vertex
from tidegate.protocol.alignment import Alignment, Block, Effect, ForwardMarker, TakeSnapshot, Unblock
from tidegate.protocol.coordinator import Ending
from tidegate.protocol.ids import SubtaskId
from tidegate.protocol.watermarks import Advanced, WatermarkMerge
from tidegate.runtime.exchange import EdgeWriter
from tidegate.state.sections import FrozenState

# Entries that a backend may tidy up after every unit of work.
MAINTENANCE_BUDGET = 512


@dataclass(frozen=True, slots=True)
class Input:
    """One incoming channel. `timed`: watermarks come on it; an untimed one doesn't hold event time back."""

    inlet: Inlet
    port: int
    timed: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One operator's share of a snapshot, frozen and not yet written."""

    operator: str
    frozen: FrozenState


@dataclass(slots=True)
class Counters:
    """What a subtask has done, for status and benchmarks."""

    records_in: int = 0
    records_out: int = 0
    snapshot_pause_ms: float = 0.0               # the longest freeze
    alignment_ms: float = 0.0                    # the last epoch's
    last: dict[str, Any] = field(default_factory=dict)


TakeParts = Callable[["Subtask", Marker, Sequence[Part]], None]


class Subtask:
    """Base of the two kinds below."""

    def __init__(self, *, vertex: Vertex, index: int, operators: Sequence[Operator], writers: Sequence[EdgeWriter],
                 take_parts: TakeParts) -> None:
        self.id = SubtaskId(vertex.id, index)
        self.vertex = vertex
        self.operators = tuple(operators)
        self.counters = Counters()
        self._writers = tuple(writers)
        self._take_parts = take_parts
        self._alignment: Alignment
        self._marker = Marker(0)                # of the epoch in progress
        self._align_started: float | None = None

    def step(self) -> bool:
        """One unit of work, if there is any that can be done now."""
        raise AssertionError("a subtask is a source or has inputs")

    def wait_until_ms(self) -> int | None:
        """When, on the monotonic clock, this subtask wants to be stepped again though nothing has arrived."""
        return None

    def abort(self, epoch: int) -> None:
        self._run(self._alignment.on_abort(epoch))

    def complete(self, epoch: int) -> None:
        for operator in self.operators:
            operator.on_complete(epoch)

    def on_time(self, now_ms: int) -> None:
        for operator in self.operators:
            deadline_ms = operator.deadline_ms()
            if deadline_ms is not None and deadline_ms <= now_ms:
                operator.on_time(now_ms)

    def deadline_ms(self) -> int | None:
        """The next moment, by the time of day, that an operator waits for."""
        return min((at for operator in self.operators if (at := operator.deadline_ms()) is not None), default=None)

    def close(self) -> None:
        for operator in self.operators:
            operator.close()

    @property
    def full(self) -> bool:
        return any(writer.full for writer in self._writers)

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
                        writer.send_marker(self._marker)
                case Unblock(channels):
                    self._set_blocked(channels, False)

    def _set_blocked(self, channels: Iterable[Any], blocked: bool) -> None:
        raise AssertionError("a source has no channels to block")

    def _snapshot(self, epoch: int) -> None:
        started = time.perf_counter()
        parts = [Part(operator.name, frozen) for operator in self.operators
                 if (frozen := operator.freeze(epoch)) is not None]
        pause_ms = (time.perf_counter() - started) * 1000
        alignment_ms = 0.0 if self._align_started is None else (started - self._align_started) * 1000
        self._align_started = None
        self.counters.snapshot_pause_ms = max(self.counters.snapshot_pause_ms, pause_ms)
        self.counters.alignment_ms = alignment_ms
        self.counters.last = {"alignment_ms": round(alignment_ms, 3), "pause_ms": round(pause_ms, 3)}
        assert self._marker.epoch == epoch
        self._take_parts(self, self._marker, parts)


class InnerSubtask(Subtask):
    """A subtask with inputs. It takes from its channels in turn, whole runs of small batches at once."""

    def __init__(self, *, inputs: Sequence[Input], max_batch_rows: int, **rest: Any) -> None:
        super().__init__(**rest)
        assert inputs
        self._inputs = tuple(inputs)
        self._by_channel = {each.inlet.channel: each for each in inputs}
        self._max_batch_rows = max_batch_rows
        self._turn = 0
        self._ended: set[Any] = set()
        self._alignment = Alignment(self._by_channel)
        # Untimed inputs (rules without event time, say) don't hold event time back, unless there is nothing else.
        timed = [each.inlet.channel for each in inputs if each.timed] or list(self._by_channel)
        self._timed = frozenset(timed)
        self._watermarks = WatermarkMerge(timed)

    def step(self) -> bool:
        if self.full:
            return False
        inputs = self._inputs
        for _ in range(len(inputs)):
            each = inputs[self._turn]
            self._turn = (self._turn + 1) % len(inputs)
            if not each.inlet.blocked and len(each.inlet):
                self._dispatch(each, each.inlet.take())
                return True
        return False

    def _dispatch(self, source: Input, element: Element) -> None:
        head, channel = self.operators[0], source.inlet.channel
        if isinstance(element, pa.RecordBatch):
            batch = self._joined(source.inlet, element)
            self.counters.records_in += batch.num_rows
            if channel in self._timed:
                self._advance(self._watermarks.on_batch(channel))
            head.on_batch(batch, source.port)
        elif isinstance(element, Marker):
            if self._alignment.epoch_in_progress is None:
                self._align_started = time.perf_counter()
            if element.epoch > self._marker.epoch:
                self._marker = element
            self._run(self._alignment.on_marker(channel, element.epoch))
        elif isinstance(element, Watermark):
            if channel in self._timed:
                self._advance(self._watermarks.on_watermark(channel, element.at_ms))
        elif isinstance(element, Idle):
            if channel in self._timed:
                self._advance(self._watermarks.on_idle(channel))
        else:
            assert isinstance(element, End) and channel not in self._ended
            self._ended.add(channel)
            if len(self._ended) == len(self._inputs):
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
            self.operators[0].on_watermark(outcome.at_ms)
        elif outcome is not None:
            self.operators[0].on_idle()

    def _set_blocked(self, channels: Iterable[Any], blocked: bool) -> None:
        for channel in channels:
            inlet = self._by_channel[channel].inlet
            if blocked:
                inlet.block()
            else:
                inlet.unblock()


class SourceSubtask(Subtask):
    """A subtask whose head is a source. It starts epochs: the master's trigger takes the place of a marker."""

    def __init__(self, *, max_batch_rows: int, linger_ms: int, monotonic_ms: Callable[[], int],
                 on_done: Callable[[Subtask], None], **rest: Any) -> None:
        super().__init__(**rest)
        source = self.operators[0]
        assert isinstance(source, SourceOperator)
        self._source = source
        self._max_batch_rows = max_batch_rows
        self._linger_ms = linger_ms
        self._monotonic_ms = monotonic_ms
        self._on_done = on_done
        self._stopped = False
        self._not_before_ms = 0
        self._alignment = Alignment(())

    def step(self) -> bool:
        if self._source.ended or self._stopped or self.full:
            return False
        now_ms = self._monotonic_ms()
        if now_ms < self._not_before_ms:
            return False
        count = self._source.poll(self._max_batch_rows)
        self.counters.records_in += count
        if self._source.finished:
            self._source.end()
            self._on_done(self)
            return True
        if count < self._max_batch_rows:
            # There was no more: let records gather for a moment, so that batches are not tiny under load.
            self._not_before_ms = now_ms + max(1, self._linger_ms)
        return count > 0

    def wait_until_ms(self) -> int | None:
        return None if self._source.ended or self._stopped or self.full else self._not_before_ms

    def trigger(self, marker: Marker, ending: Ending | None) -> None:
        if ending is Ending.DRAIN and not self._source.ended:
            self._source.end()
        self._marker = marker
        self._run(self._alignment.on_trigger(marker.epoch))
        if ending is Ending.STOP:
            self._stopped = True
