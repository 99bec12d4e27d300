"""Mutants of laps and of control messages: rows 7 and 6 of docs/promises.md, in every mode of alignment.

Laps end a loop when no record is on it any more. Control messages: an engine that believes a message of another epoch,
fails on one that comes twice, or doesn't make up for one that got lost. See mutant.py.
"""

from __future__ import annotations

from typing import Any

from tests.simulation.mutant import ALL, Mutant
from tidegate.dataflow.operators import sink
from tidegate.driver import epochs
from tidegate.protocol import alignment, epoch_coordinator, iteration
from tidegate.slot import inner, slot
from tidegate.testing.simulation.faults import FaultRates

ASTRAY = FaultRates(kinds=("message is doubled", "message is lost", "slot dies"), most_faults=20)


# ------------------------------------------------------------------------------------------------------ laps (row 7)


def _end_at_once(original: Any) -> Any:
    def on_lap(self: iteration.LapOrigin, number: int, active: bool) -> Any:
        self.ended = True
        return iteration.LoopEnded()

    return on_lap


def _end_when_quiet(original: Any) -> Any:
    """Together with event time, at the end of which timers make records."""

    def on_lap(self: inner.InnerSubtask, outcome: Any) -> None:
        original(self, outcome)
        if isinstance(outcome, iteration.LoopQuiet):
            assert self._laps is not None and self._laps._origin is not None
            self._laps._next, self._laps._origin.ended = None, True
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

    def feed(self: epochs.Epochs, event: Any) -> None:
        if self._coordinator is not None:
            self._coordinator._enders = self._sources
            if isinstance(event, epoch_coordinator.InputEnded) and event.subtask not in self._sources:
                return
        original(self, event)

    return feed


def _ends_are_not_told(original: Any) -> Any:
    def handle(self: slot.Slot, message: Any) -> None:
        for each in self._subtasks:
            if isinstance(each, inner.InnerSubtask):
                each._on_done = lambda done: None
        original(self, message)

    return handle


MESSAGE_MUTANTS = (
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
        patches=((inner.InnerSubtask, "_on_lap", _end_when_quiet),),
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
        patches=((epochs.Epochs, "feed", _final_without_loops),),
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
