"""Mutants of event time: engines that forget how far it had come, or follow it in the wrong place. See mutant.py."""

from __future__ import annotations

from typing import Any

from tests.simulation.mutant import RESCALES, Mutant
from tidegate.dataflow.operators import event_time


def _least_of_the_groups(original: Any) -> Any:
    """A subtask whose key-groups come from several others goes by the one that was furthest behind."""

    def load(self: event_time.OperatorTime, batches: Any) -> None:
        original(self, batches)
        self._ahead = None

    return load


def _greatest_of_the_groups(original: Any) -> Any:
    """… and by the one that was furthest ahead."""

    def load(self: event_time.OperatorTime, batches: Any) -> None:
        original(self, batches)
        if self._ahead is not None and self._groups is not None:
            self._last_ms = self.at_ms = int(self._ahead[self._groups.start : self._groups.stop].max())
            self._ahead = None

    return load


TIME_MUTANTS = (
    Mutant(
        "least watermark of the groups",
        "a window that was emitted opens again after a rescale",
        modes=("unaligned",),
        interruptions=RESCALES,
        job="windows",
        patches=((event_time.OperatorTime, "load", _least_of_the_groups),),
    ),
    Mutant(
        "greatest watermark of the groups",
        "a record is late after a rescale that was in time",
        modes=("unaligned",),
        interruptions=RESCALES,
        job="windows",
        patches=((event_time.OperatorTime, "load", _greatest_of_the_groups),),
    ),
)
