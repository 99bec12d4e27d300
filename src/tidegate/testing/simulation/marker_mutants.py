"""Mutants of markers, logs, laps and control messages: rows 6 and 7 of docs/promises.md, in every mode of alignment.

Row 7, every record belongs to exactly one epoch: an engine that lets a record be on the wrong side of a marker, or loses
or repeats what was under way. Row 6, control messages: one that believes a message of another epoch, doesn't bear one
that comes twice, or doesn't make up for one that got lost. See mutant.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from tidegate.channels.elements import Marker
from tidegate.dataflow.in_flight import FEEDBACK
from tidegate.dataflow.operators import sink, source
from tidegate.protocol import alignment, epoch_coordinator, iteration
from tidegate.protocol.alignment import AlignmentMode, ForwardMarker, TakeSnapshot
from tidegate.runtime import coordinator, in_flight, slot, subtask
from tidegate.runtime.in_flight import Place
from tidegate.testing.simulation.faults import FaultRates
from tidegate.testing.simulation.mutant import RESTORES, Mutant
from tidegate.testing.simulation.simulation import MODES

ALL = tuple(MODES)
EXACT = tuple(mode for mode in MODES if mode != "at_least_once")
LOGGED = ("unaligned", "alignment_timeout", "chandy_lamport")  # records under way may be in a snapshot
WAITING = ("exactly_once", "at_least_once", "alignment_timeout", "stop_the_world")  # a freeze is at the last marker
ASTRAY = FaultRates(kinds=("message is doubled", "message is lost", "slot dies"), most_faults=20)


# ------------------------------------------------------------------------------------------ the source's side (row 7)


def _freeze_behind_the_marker(original: Any) -> Any:
    def trigger(self: subtask.SourceSubtask, marker: Any, ending: Any) -> None:
        if ending is None and not self._source.ended and not self._stopped:
            for writer in self._writers:
                writer.send(marker)
            self._marker = marker
            self._alignment.on_trigger(marker.epoch)
            self._source.poll(self._max_batch_rows)
            self._snapshot(marker.epoch)
            self._finish(marker.epoch)
        else:
            original(self, marker, ending)

    return trigger


def _offsets_of_before(original: Any) -> Any:
    def freeze(self: source.SourceOperator, epoch: int) -> Any:
        frozen = original(self, epoch)
        earlier, self.__dict__["earlier"] = self.__dict__.get("earlier", frozen), frozen
        return earlier

    return freeze


# ------------------------------------------------------------------------------------------------ the marker (row 7)


def _never_block(original: Any) -> Any:
    def made(channels: Any, *, mode: Any = AlignmentMode.EXACTLY_ONCE, feedback: Any = ()) -> Any:
        return original(channels, mode=AlignmentMode.AT_LEAST_ONCE, feedback=feedback)

    return made


def _marker_too_early(original: Any) -> Any:
    """It overtakes what is queued before it, and nobody keeps that."""

    def take_from(self: subtask.InnerSubtask, source: subtask.Input) -> bool:
        inlet = source.inlet
        if not inlet.blocked and isinstance(inlet.peek(), pa.RecordBatch) and (marker := inlet.marker()) is not None:
            inlet.overtake()
            self._on_marker(inlet.channel, marker, overtook=False)
            return True
        return bool(original(self, source))

    return take_from


def _marker_too_late(original: Any) -> Any:
    """What comes right behind it is processed before it."""

    def take_from(self: subtask.InnerSubtask, source: subtask.Input) -> bool:
        inlet = source.inlet
        if not inlet.blocked and isinstance(inlet.peek(), Marker):
            marker = inlet.take()
            if isinstance(inlet.peek(), pa.RecordBatch):
                self._dispatch(source, inlet.take())
            self._dispatch(source, marker)
            return True
        return bool(original(self, source))

    return take_from


def _forward_at_the_first(original: Any) -> Any:
    """The marker goes on when it has come on one channel, though the freeze waits for the others."""

    def mark(self: alignment.Alignment, channel: Any, *rest: Any) -> list[Any]:
        first, epoch, taken = not self._marked, self._epoch, self._taken
        effects: list[Any] = original(self, channel, *rest)
        if taken:
            return effects
        kept = [effect for effect in effects if not isinstance(effect, ForwardMarker)]
        return [ForwardMarker(epoch), *kept] if first and epoch is not None else kept

    return mark


def _forward_before_the_freeze(original: Any) -> Any:
    """And something is processed between the two."""

    def run(self: subtask.Subtask, effects: Iterable[Any]) -> None:
        effects = list(effects)
        if isinstance(self, subtask.InnerSubtask) and any(isinstance(effect, TakeSnapshot) for effect in effects):
            for writer in self._writers:
                writer.send(self._marker)
            effects = [effect for effect in effects if not isinstance(effect, ForwardMarker)]
            for each in self._inputs:
                if not each.inlet.blocked and isinstance(each.inlet.peek(), pa.RecordBatch):
                    self._dispatch(each, each.inlet.take())
        original(self, effects)

    return run


# ------------------------------------------------------------------------------------------------- the logs (row 7)


def _of_logs(feedback: bool, change: Any) -> Any:
    """Changes what one kind of log does: those of loops, or those of other channels."""

    def mutate(original: Any) -> Any:
        def sections(self: in_flight.FrozenLog) -> Any:
            mine = (self.states[0].name == FEEDBACK) is feedback
            return change(original(self)) if mine else original(self)

        return sections

    return mutate


def _of_replays(feedback: bool, change: Any) -> Any:
    def mutate(original: Any) -> Any:
        def add(self: in_flight.Replay, place: Place, operator: Any, batches: Any) -> None:
            original(self, place, operator, change(list(batches)) if place.is_feedback is feedback else batches)

        return add

    return mutate


def _nothing(_: Any) -> Any:
    return iter(())


def _twice(batches: list[Any]) -> Any:
    return [*batches, *batches]


def _all_but_the_first(batches: list[Any]) -> Any:
    return batches[1:]


def _log_what_is_behind(original: Any) -> Any:
    """What is queued when the marker comes goes into the log, though it is behind the marker or is there already."""

    def on_marker(self: subtask.InnerSubtask, channel: Any, marker: Any, *, overtook: bool) -> None:
        behind = self._by_channel[channel].inlet.peek()
        if channel in self._logged and self._taken is not None and isinstance(behind, pa.RecordBatch):
            self._log(channel, behind)
        original(self, channel, marker, overtook=overtook)

    return on_marker


def _log_all(original: Any) -> Any:
    """Every channel is logged from the freeze until the snapshot is finished, wherever its own marker is."""

    def set_logged(self: subtask.InnerSubtask, channels: Any, logged: bool) -> None:
        placed = {channel for channel, each in self._by_channel.items() if each.place is not None}
        if logged:
            original(self, placed, True)
        elif not self._alignment.logged:
            original(self, placed, False)

    return set_logged


def _miss_the_first(original: Any) -> Any:
    """Logging begins a batch too late."""

    def log(self: subtask.InnerSubtask, channel: Any, batch: Any) -> None:
        if self.__dict__.get("begun") is self._taken:
            original(self, channel, batch)
        self.__dict__["begun"] = self._taken

    return log


# ------------------------------------------------------------------------------------------------------ laps (row 7)


def _end_at_once(original: Any) -> Any:
    def on_lap(self: iteration.LapOrigin, number: int, active: bool) -> Any:
        self._ended = True
        return iteration.LoopEnded()

    return on_lap


def _end_when_quiet(original: Any) -> Any:
    """Together with event time, at the end of which timers make records."""

    def on_lap(self: subtask.InnerSubtask, outcome: Any) -> None:
        original(self, outcome)
        if isinstance(outcome, iteration.LoopQuiet):
            assert self._laps is not None and self._laps._origin is not None
            self._laps._next, self._laps._origin._ended = None, True
            original(self, iteration.LoopEnded())

    return on_lap


def _quiet_relays(original: Any) -> Any:
    """What is stirred inside the loop isn't told."""

    def on_lap(self: iteration.LapRelay, channel: Any, number: int, active: bool) -> Any:
        lap = original(self, channel, number, active)
        return lap if lap is None else iteration.SendLap(lap.number, False)

    return on_lap


# ---------------------------------------------------------------------------------------------------- messages (row 6)


def _acknowledged_in_any_epoch(original: Any) -> Any:
    def on_acknowledged(self: epoch_coordinator.EpochCoordinator, event: Any) -> Any:
        if self._active is not None and event.epoch < self._active.epoch:
            event = epoch_coordinator.SnapshotAcknowledged(event.subtask, self._active.epoch, event.payload)
        return original(self, event)

    return on_acknowledged


def _triggered_again(original: Any) -> Any:
    def on_trigger(self: alignment.Alignment, epoch: int) -> Any:
        self._closed = min(self._closed, epoch - 1)
        return original(self, epoch)

    return on_trigger


def _commit_this_one_only(original: Any) -> Any:
    def on_complete(self: sink.SinkOperator, epoch: int) -> None:
        self._take_finished()
        pending = self._pending._pending
        for earlier in [each for each in pending if each < epoch]:
            del pending[earlier]
        original(self, epoch)

    return on_complete


def _final_without_loops(original: Any) -> Any:
    """The job is taken to have ended when its sources have."""

    def feed(self: coordinator.Coordinator, event: Any) -> None:
        if self._epoch_coordinator is not None:
            self._epoch_coordinator._enders = self._sources
            if isinstance(event, epoch_coordinator.InputEnded) and event.subtask not in self._sources:
                return
        original(self, event)

    return feed


def _ends_are_not_told(original: Any) -> Any:
    def handle(self: slot.Slot, message: Any) -> None:
        for each in self._subtasks:
            if isinstance(each, subtask.InnerSubtask):
                each._on_done = lambda done: None
        original(self, message)

    return handle


MARKER_MUTANTS = (
    Mutant(
        "freeze behind the marker",
        "a source goes on between marker and freeze",
        row=7,
        modes=ALL,
        rates=RESTORES,
        patches=((subtask.SourceSubtask, "trigger", _freeze_behind_the_marker),),
    ),
    Mutant(
        "offsets of before",
        "a snapshot has the offsets of the one before it",
        row=7,
        modes=EXACT,
        rates=RESTORES,
        patches=((source.SourceOperator, "freeze", _offsets_of_before),),
    ),
    Mutant(
        "no alignment",
        "channels that are ahead aren't blocked",
        row=7,
        rates=RESTORES,
        patches=((subtask, "Alignment", _never_block),),
    ),
    Mutant(
        "marker too early",
        "a marker passes records, which are in no log",
        row=7,
        modes=ALL,
        rates=RESTORES,
        patches=((subtask.InnerSubtask, "_take_from", _marker_too_early),),
    ),
    Mutant(
        "marker too late",
        "a record behind the marker is processed before it",
        row=7,
        modes=EXACT,
        rates=RESTORES,
        patches=((subtask.InnerSubtask, "_take_from", _marker_too_late),),
    ),
    Mutant(
        "forward at the first",
        "the marker goes on at the first channel, the freeze is at the last",
        row=7,
        modes=WAITING,
        rates=RESTORES,
        patches=((alignment.Alignment, "_mark", _forward_at_the_first),),
    ),
    Mutant(
        "forward before the freeze",
        "something is processed between the two",
        row=7,
        modes=LOGGED,
        rates=RESTORES,
        patches=((subtask.Subtask, "_run", _forward_before_the_freeze),),
    ),
    Mutant(
        "log dropped",
        "the records under way aren't in the snapshot",
        row=7,
        modes=LOGGED,
        rates=RESTORES,
        patches=((in_flight.FrozenLog, "sections", _of_logs(False, _nothing)),),
    ),
    Mutant(
        "log not replayed",
        "they are, but nobody feeds them in",
        row=7,
        modes=LOGGED,
        rates=RESTORES,
        patches=((in_flight.Replay, "add", _of_replays(False, _nothing)),),
    ),
    Mutant(
        "log replayed twice",
        "they are fed in twice",
        row=7,
        modes=LOGGED,
        rates=RESTORES,
        patches=((in_flight.Replay, "add", _of_replays(False, _twice)),),
    ),
    Mutant(
        "feedback dropped",
        "what is on the loop isn't in the snapshot",
        row=7,
        modes=ALL,
        job="retries",
        patches=((in_flight.FrozenLog, "sections", _of_logs(True, _nothing)),),
    ),
    Mutant(
        "feedback not replayed",
        "it is, but nobody feeds it in",
        row=7,
        modes=ALL,
        rates=RESTORES,
        job="retries",
        patches=((in_flight.Replay, "add", _of_replays(True, _nothing)),),
    ),
    Mutant(
        "feedback replayed in part",
        "but for its first records",
        row=7,
        modes=ALL,
        rates=RESTORES,
        job="retries",
        patches=((in_flight.Replay, "add", _of_replays(True, _all_but_the_first)),),
    ),
    Mutant(
        "feedback replayed twice",
        "it is fed in twice",
        row=7,
        modes=EXACT,
        rates=RESTORES,
        job="retries",
        patches=((in_flight.Replay, "add", _of_replays(True, _twice)),),
    ),
    Mutant(
        "overtaken not logged",
        "what the marker has overtaken isn't in the log",
        row=7,
        modes=("unaligned", "alignment_timeout"),
        rates=RESTORES,
        patches=((subtask.InnerSubtask, "_log_overtaken", lambda original: lambda self, channel: None),),
    ),
    Mutant(
        "log what is behind",
        "a record behind the marker is in the log",
        row=7,
        job="retries",
        rates=RESTORES,
        modes=("exactly_once", *LOGGED),
        patches=((subtask.InnerSubtask, "_on_marker", _log_what_is_behind),),
    ),
    Mutant(
        "log all",
        "a channel is logged on behind its marker",
        row=7,
        modes=LOGGED,
        rates=RESTORES,
        patches=((subtask.InnerSubtask, "_set_logged", _log_all),),
    ),
    Mutant(
        "log begins late",
        "the first record of a log is missing",
        row=7,
        modes=ALL,
        job="retries",
        rates=RESTORES,
        patches=((subtask.InnerSubtask, "_log", _miss_the_first),),
    ),
    Mutant(
        "loop ends at once",
        "a loop ends when a lap has returned",
        row=7,
        modes=ALL,
        job="retries",
        patches=((iteration.LapOrigin, "on_lap", _end_at_once),),
    ),
    Mutant(
        "loop ends a lap too early",
        "a loop ends though records came back since the last lap",
        row=7,
        modes=ALL,
        job="retries",
        patches=((iteration.LapOrigin, "on_feedback_records", lambda original: lambda self: None),),
    ),
    Mutant(
        "inner laps don't count",
        "a loop ends though records are on one within it",
        row=7,
        modes=ALL,
        job="nested loops",
        patches=((iteration.LapRelay, "on_feedback_records", lambda original: lambda self: None),),
    ),
    Mutant(
        "loop ends with time",
        "a loop ends before its timers have fired",
        row=7,
        modes=ALL,
        job="bills",
        patches=((subtask.InnerSubtask, "_on_lap", _end_when_quiet),),
    ),
    Mutant(
        "quiet relays",
        "nobody is told of records that the body still gets",
        row=7,
        job="components",
        modes=("exactly_once", "at_least_once", "stop_the_world"),  # in the others sources end too soon for it
        patches=((iteration.LapRelay, "on_lap", _quiet_relays),),
    ),
    Mutant(
        "acknowledged in any epoch",
        "an acknowledgement of an aborted epoch counts for the next",
        row=6,
        rates=FaultRates(kinds=("background stalls", "slot dies"), most_faults=24),
        patches=((epoch_coordinator.EpochCoordinator, "_on_acknowledged", _acknowledged_in_any_epoch),),
    ),
    Mutant(
        "triggered again",
        "a trigger that comes twice ends an epoch twice",
        row=6,
        modes=ALL,
        rates=ASTRAY,
        patches=((alignment.Alignment, "on_trigger", _triggered_again),),
    ),
    Mutant(
        "commit this one only",
        "an epoch whose completion got lost is never committed",
        row=6,
        modes=ALL,
        rates=ASTRAY,
        patches=((sink.SinkOperator, "on_complete", _commit_this_one_only),),
    ),
    Mutant(
        "final without loops",
        "the final epoch doesn't wait for the loops",
        row=6,
        modes=ALL,
        job="retries",
        patches=((coordinator.Coordinator, "_feed", _final_without_loops),),
    ),
    Mutant(
        "ends are not told",
        "nobody hears that a loop has ended",
        row=6,
        modes=ALL,
        job="retries",
        patches=((slot.Slot, "_handle", _ends_are_not_told),),
    ),
)
