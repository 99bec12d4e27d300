"""Mutants of markers and logs: row 7 of docs/promises.md, in every mode of alignment.

Every record belongs to exactly one epoch. These engines let a record be on the wrong side of a marker, or lose or repeat
what was under way. See mutant.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from tests.simulation.mutant import ALL, RESTORES, Mutant
from tidegate.channels.elements import Marker
from tidegate.dataflow.in_flight import FEEDBACK
from tidegate.dataflow.operators import source, stepwise
from tidegate.dataflow.places import Place
from tidegate.protocol import alignment
from tidegate.protocol.alignment import AlignmentMode, ForwardMarker, TakeSnapshot
from tidegate.slot import in_flight, inner, subtask
from tidegate.testing.simulation.simulation import MODES

EXACT = tuple(mode for mode in MODES if mode != "at_least_once")
LOGGED = ("unaligned", "alignment_timeout", "chandy_lamport")  # records under way may be in a snapshot
WAITING = ("exactly_once", "at_least_once", "alignment_timeout", "stop_the_world")  # a freeze is at the last marker


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

    def take_from(self: inner.InnerSubtask, source: inner.Input) -> bool:
        inlet = source.inlet
        if not inlet.blocked and isinstance(inlet.peek(), pa.RecordBatch) and (marker := inlet.marker()) is not None:
            inlet.overtake()
            self._on_marker(inlet.channel, marker, overtook=False)
            return True
        return bool(original(self, source))

    return take_from


def _marker_too_late(original: Any) -> Any:
    """What comes right behind it is processed before it."""

    def take_from(self: inner.InnerSubtask, source: inner.Input) -> bool:
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
        first, epoch, taken = not self._marked, self.epoch_in_progress, self._taken
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
        if isinstance(self, inner.InnerSubtask) and any(isinstance(effect, TakeSnapshot) for effect in effects):
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

    def on_marker(self: inner.InnerSubtask, channel: Any, marker: Any, *, overtook: bool) -> None:
        behind = self._by_channel[channel].inlet.peek()
        if channel in self._logged and self._taken is not None and isinstance(behind, pa.RecordBatch):
            self._log(channel, behind)
        original(self, channel, marker, overtook=overtook)

    return on_marker


def _log_all(original: Any) -> Any:
    """Every channel is logged from the freeze until the snapshot is finished, wherever its own marker is."""

    def set_logged(self: inner.InnerSubtask, channels: Any, logged: bool) -> None:
        placed = {channel for channel, each in self._by_channel.items() if each.place is not None}
        if logged:
            original(self, placed, True)
        elif not self._alignment.logged:
            original(self, placed, False)

    return set_logged


def _miss_the_first(original: Any) -> Any:
    """Logging begins a batch too late."""

    def log(self: inner.InnerSubtask, channel: Any, batch: Any) -> None:
        if self.__dict__.get("begun") is self._taken:
            original(self, channel, batch)
        self.__dict__["begun"] = self._taken

    return log


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
        "held records forgotten",
        "a snapshot doesn't wait for the records that an operator holds between two steps",
        row=7,
        modes=EXACT,
        job="crowds",
        rates=RESTORES,
        ends_steps=True,
        patches=((stepwise.StepwiseOperator, "holds_records", lambda original: lambda operator: False),),
    ),
    Mutant(
        "no alignment",
        "channels that are ahead aren't blocked",
        row=7,
        rates=RESTORES,
        patches=((inner, "Alignment", _never_block),),
    ),
    Mutant(
        "marker too early",
        "a marker passes records, which are in no log",
        row=7,
        modes=ALL,
        rates=RESTORES,
        patches=((inner.InnerSubtask, "_take_from", _marker_too_early),),
    ),
    Mutant(
        "marker too late",
        "a record behind the marker is processed before it",
        row=7,
        modes=EXACT,
        rates=RESTORES,
        patches=((inner.InnerSubtask, "_take_from", _marker_too_late),),
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
        patches=((subtask.Subtask, "_carry_out", _forward_before_the_freeze),),
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
        patches=((inner.InnerSubtask, "_log_overtaken", lambda original: lambda self, channel: None),),
    ),
    Mutant(
        "log what is behind",
        "a record behind the marker is in the log",
        row=7,
        job="retries",
        rates=RESTORES,
        modes=("exactly_once", *LOGGED),
        patches=((inner.InnerSubtask, "_on_marker", _log_what_is_behind),),
    ),
    Mutant(
        "log all",
        "a channel is logged on behind its marker",
        row=7,
        modes=LOGGED,
        rates=RESTORES,
        patches=((inner.InnerSubtask, "_set_logged", _log_all),),
    ),
    Mutant(
        "log begins late",
        "the first record of a log is missing",
        row=7,
        modes=ALL,
        job="retries",
        rates=RESTORES,
        patches=((inner.InnerSubtask, "_log", _miss_the_first),),
    ),
)
