"""A subtask: one chain of operators, its inputs and outputs, and the alignment of its markers.

A subtask does one small unit of work at a time (`step`) and never waits. The alignment state machine decides
(protocol/alignment.py); this class carries out its effects. While an output is full nothing is taken from the inputs, so
that back-pressure reaches the sources.

An operator may keep work for later, since a step is bounded. It gets further steps, downstream operators first, before
anything else is taken from the inputs or polled from the source. So markers wait behind work like everything else in a
channel. A marker that doesn't wait in a channel (the trigger of a source, a hurried one) comes between two steps. It finds
a consistent state, unless an operator holds records: then it waits for these. A full epoch, as every last one is, waits for
all work, so that nothing is left to do after it.

The subtask of a source is here, and a subtask with inputs in inner.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.channels.elements import Marker
from tidegate.control.messages import MoveTime, Traffic
from tidegate.dataflow.operators.base import AT_ONCE_MS, Operator
from tidegate.dataflow.operators.budget import Budget
from tidegate.dataflow.operators.source import SourceOperator
from tidegate.dataflow.places import Place
from tidegate.dataflow.plan import Vertex
from tidegate.protocol.alignment import (
    Alignment,
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
from tidegate.protocol.epoch_coordinator import Ending
from tidegate.protocol.ids import ChannelId, SubtaskId
from tidegate.slot.batch_size import BatchSize
from tidegate.slot.exchange import EdgeWriter
from tidegate.slot.in_flight import Logs, Replay
from tidegate.snapshots.stats import SubtaskStats
from tidegate.state.operator_state import FrozenTogether, frozen_in
from tidegate.state.sections import FrozenState

# How many entries a backend may tidy up after every unit of work.
MAINTENANCE_BUDGET = 512


@dataclass(frozen=True, slots=True)
class FrozenPiece:
    """An operator's piece of a snapshot, frozen and not yet written."""

    operator: str
    frozen: FrozenState


@dataclass(slots=True)
class Counters:
    """Counts for status and benchmarks."""

    records_in: int = 0
    taken: int = 0  # from channels: records and control elements
    snapshot_pause_ms: float = 0.0  # the longest freeze
    waited_ms: int = 0  # for the event time of other sources
    last: SubtaskStats = field(default_factory=SubtaskStats)  # times and sizes of the last snapshot


@dataclass(slots=True)
class _Taken:
    """A snapshot between its freeze and the moment when no record of its epoch is in flight any more."""

    marker: Marker
    frozen: dict[str, list[FrozenState]]  # by operator
    logs: Logs
    taken_s: float
    alignment_ms: float
    pause_ms: float


TakeFrozen = Callable[["Subtask", Marker, Sequence[FrozenPiece]], None]


class Subtask:
    """What subtasks with inputs and those of sources have in common. Every snapshot has a log of each of the `places`."""

    def __init__(
        self,
        *,
        vertex: Vertex,
        index: int,
        operators: Sequence[Operator],
        writers: Sequence[EdgeWriter],
        take_frozen: TakeFrozen,
        places: Sequence[Place],
        replay: Replay,
        budget: Budget,
        max_batch_rows: int,
        monotonic_ms: Callable[[], int],
        on_done: Callable[[Subtask], None],
    ) -> None:
        self.id = SubtaskId(vertex.id, index)
        self.vertex = vertex
        self.operators = tuple(operators)
        self.counters = Counters()
        self._with_deadlines = [each for each in operators if type(each).deadline_ms is not Operator.deadline_ms]
        self._with_lulls = [each for each in operators if type(each).on_lull is not Operator.on_lull]
        # Downstream first, so that what waits in an operator isn't joined by more from above.
        self._with_work = [each for each in operators[::-1] if type(each).has_work is not Operator.has_work]
        self._writers = tuple(writers)
        self._take_frozen = take_frozen
        self._places = tuple(places)
        self._replay = replay
        self._budget = budget
        self._max_batch_rows = max_batch_rows
        self._monotonic_ms = monotonic_ms
        self._on_done = on_done
        self._alignment: Alignment
        self._marker = Marker(0)  # of the epoch in progress
        self._align_started: float | None = None
        self._taken: _Taken | None = None
        self._has_resumed = False

    @property
    def aligning(self) -> tuple[int, frozenset[ChannelId]]:
        """The newest epoch whose marker came, and the channels that its snapshot still waits for."""
        return self._marker.epoch, self._alignment.missing

    def step(self) -> bool:
        """Do one unit of work, if there is any that can be done now, and return whether there was."""
        if self.full:
            return False
        self._budget.begin()
        if self._give_step():
            if not self.has_work():
                self._on_work_done()
            return True
        if self._replay:
            self.counters.records_in += self._replay.feed()
            return True
        if not self._has_resumed:
            self._has_resumed = True
            for operator in self.operators:
                operator.resume()
        return self.has_work() or self._take_next()

    def _take_next(self) -> bool:
        raise AssertionError("a subtask is a source or has inputs")

    def has_work(self) -> bool:
        """Return whether an operator has kept work for later."""
        for operator in self._with_work:  # noqa: SIM110  (for speed)
            if operator.has_work():
                return True
        return False

    def _holds_records(self) -> bool:
        return any(operator.holds_records() for operator in self._with_work)

    def _give_step(self) -> bool:
        """Let one operator do a step of its work, and return whether one had any."""
        for operator in self._with_work:
            if operator.has_work():
                operator.work()
                return True
        return False

    def _on_work_done(self) -> None:
        """Called when the last step of all work was done."""

    def _note_look(self, *, found_none: bool) -> None:
        """Tell operators with deadlines, which may wait for records, that the subtask has looked for some."""
        for operator in self._with_deadlines:
            operator.on_asked(found_none=found_none)

    def _note_lull(self) -> bool:
        """Tell operators that hold records that all there were have been taken. Return whether one has emitted some."""
        emitted = False
        for operator in self._with_lulls:
            emitted |= operator.on_lull()
        return emitted

    def wait_until_ms(self) -> int | None:
        """Return when, on the monotonic clock, to step this subtask again even if nothing arrives."""
        return None

    def abort(self, epoch: int) -> None:
        self._carry_out(self._alignment.on_abort(epoch))

    def complete(self, epoch: int) -> None:
        for operator in self.operators:
            operator.on_complete(epoch)

    def on_time(self, now_ms: int) -> bool:
        """Call the operators whose deadline has passed, unless an output is full, and return whether there was one."""
        called = False
        if self.full:
            return False
        for operator in self._with_deadlines:
            deadline_ms = operator.deadline_ms()
            if deadline_ms is not None and deadline_ms <= now_ms:
                self._budget.begin()
                operator.on_time(now_ms)
                called = True
        return called

    def deadline_ms(self) -> int | None:
        """Return the next moment, by the time of day, that an operator waits for. While an output is full, none counts."""
        if self.full:
            return None
        return min((at for operator in self._with_deadlines if (at := operator.deadline_ms()) is not None), default=None)

    def alarm_ms(self) -> int | None:
        """Return when an operator needs the next epoch to end although there may be no record for it."""
        return min((at for operator in self.operators if (at := operator.alarm_ms()) is not None), default=None)

    def close(self) -> None:
        self._replay.close()
        for operator in self.operators:
            operator.close()

    @property
    def full(self) -> bool:
        for writer in self._writers:  # noqa: SIM110  (for speed)
            if writer.full:
                return True
        return False

    def traffic(self) -> Traffic:
        due = any(operator.deadline_ms() == AT_ONCE_MS for operator in self._with_deadlines)
        is_busy = bool(self._replay) or due or self.has_work()
        return Traffic(sum(writer.sent_count for writer in self._writers), self.counters.taken, is_busy)

    def move_time(self, order: MoveTime) -> None:
        self._budget.begin()
        for operator in self.operators:
            if order.operator is None:
                operator.fire_due()
            elif operator.name == order.operator:
                (operator.hold_time if order.hold else operator.move_time)()

    def maintain(self) -> None:
        for operator in self.operators:
            operator.maintain(MAINTENANCE_BUDGET)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case TakeSnapshot(epoch):
                    self._snapshot(epoch)
                case ForwardMarker(epoch):
                    assert self._marker.epoch == epoch
                    for writer in self._writers:
                        writer.send(self._marker)
                case FinishSnapshot(epoch):
                    self._finish(epoch)
                case _:
                    self._carry_out_on_channels(effect)

    def _carry_out_on_channels(self, effect: Block | Unblock | StartLog | StopLog | LogOvertaken) -> None:
        raise AssertionError(f"a source has no channels: {effect}")

    def _snapshot(self, epoch: int) -> None:
        assert self._marker.epoch == epoch and self._taken is None
        for operator in self.operators:
            self._budget.begin()
            operator.before_snapshot()
            while operator.holds_records():  # what operators before it have emitted just now
                self._budget.begin()
                operator.work()
        started = time.perf_counter()
        frozen = {operator.name: list(frozen_in(operator.freeze(epoch))) for operator in self.operators}
        logs = Logs(self._places)
        self._replay.log(logs)
        taken = time.perf_counter()
        alignment_ms = 0.0 if self._align_started is None else (started - self._align_started) * 1000
        pause_ms = (taken - started) * 1000
        self._align_started = None
        self._taken = _Taken(self._marker, frozen, logs, taken, alignment_ms, pause_ms)
        self.counters.snapshot_pause_ms = max(self.counters.snapshot_pause_ms, pause_ms)

    def _finish(self, epoch: int) -> None:
        taken, self._taken = self._taken, None
        assert taken is not None and taken.marker.epoch == epoch
        self.counters.last = SubtaskStats(
            alignment_ms=round(taken.alignment_ms, 3),
            pause_ms=round(taken.pause_ms, 3),
            logging_ms=round((time.perf_counter() - taken.taken_s) * 1000, 3),
            in_flight_bytes=taken.logs.byte_count(feedback=False),
            feedback_bytes=taken.logs.byte_count(feedback=True),
        )
        pieces = [
            FrozenPiece(name, FrozenTogether(*whole))
            for name, frozen in taken.frozen.items()
            if (whole := [*frozen, *taken.logs.of(name)])
        ]
        self._take_frozen(self, taken.marker, pieces)


class SourceSubtask(Subtask):
    """A subtask whose first operator is a source. It starts epochs: the coordinator's trigger takes the place of a marker.

    `halts`: it reads nothing between its marker and the end of the epoch (the experimental stop-the-world protocol).
    """

    def __init__(self, *, linger_ms: int, halts: bool, batch_size: BatchSize, **rest: Any) -> None:
        super().__init__(**rest)
        self._batch_size = batch_size
        source = self.operators[0]
        assert isinstance(source, SourceOperator)
        self._source = source
        self._linger_ms = linger_ms
        self._halts = halts
        self._halted: int | None = None
        self._to_end = False
        self._stopped = False
        self._not_before_ms = 0
        self._alignment = Alignment(())
        self._waiting: Marker | None = None  # triggered, and waits for work
        self._is_polled = False  # whether a batch that was polled is still worked on
        self._is_done = False
        source.is_busy = self.has_work

    def step(self) -> bool:
        triggered = self._waiting is not None and self._begin_epoch()
        return super().step() or triggered

    def _take_next(self) -> bool:
        if self._is_polled or (self._source.ended and not self._is_done):
            self._on_work_done()  # the last work was done by another call than a step, such as before a snapshot
            return True
        if self._source.ended or self._halted is not None:
            return False
        if self._to_end:
            return self._end()
        if self._stopped:
            return False
        now_ms = self._monotonic_ms()
        if now_ms < self._not_before_ms:
            return False
        count = self._source.poll(self._batch_size.rows)
        if count or not self._source.splits.must_wait:
            self._note_look(found_none=not count)
        self.counters.records_in += count
        has_work = self.has_work()
        self._batch_size.on_batch(count, None if has_work else self._monotonic_ms() - now_ms)
        if has_work:
            self._is_polled = True
        elif self._source.finished:
            return self._end()
        if count < self._batch_size.least:
            # All available records were read: wait for more for a moment, so that batches aren't tiny under load.
            self._not_before_ms = now_ms + (self._linger_ms if count else max(1, self._linger_ms))
            return self._note_lull() or count > 0
        return True

    def _on_work_done(self) -> None:
        if self._is_polled:
            self._is_polled = False
            self._source.settle()
            if not self.has_work() and not self._source.ended and self._source.finished:
                self._end()
        if self._source.ended and not self.has_work() and not self._is_done:
            self._is_done = True
            self._on_done(self)

    def _end(self) -> bool:
        self._source.end()
        if not self.has_work():
            self._on_work_done()
        return True

    def wait_until_ms(self) -> int | None:
        idle = self._source.ended or self._halted is not None or self.full or (self._stopped and not self._to_end)
        return None if idle else self._not_before_ms

    def trigger(self, marker: Marker, ending: Ending | None) -> None:
        self._waiting = marker
        self._begin_epoch()
        if self._halts:
            self._halted = marker.epoch
        if ending is Ending.STOP:
            self._stopped = True

    def _begin_epoch(self) -> bool:
        """Take the snapshot of the epoch that was triggered, unless it has to wait for work. Return whether it didn't."""
        assert self._waiting is not None
        if self.has_work() if self._waiting.full else self._holds_records():
            return False
        self._marker, self._waiting = self._waiting, None
        self._carry_out(self._alignment.on_trigger(self._marker.epoch))
        return True

    def end_input(self) -> None:
        """End the input after what was read so far."""
        self._to_end = True
        self._not_before_ms = 0

    def abort(self, epoch: int) -> None:
        if self._waiting is not None and self._waiting.epoch <= epoch:
            self._waiting = None
        super().abort(epoch)
        self._resume(epoch)

    def complete(self, epoch: int) -> None:
        super().complete(epoch)
        self._resume(epoch)

    def _resume(self, epoch: int) -> None:
        if self._halted is not None and self._halted <= epoch:
            self._halted = None
