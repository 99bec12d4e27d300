"""Triggers: when a window shows its results before it is complete.

    bids.key_by("auction").window(tg.tumbling("ts", "1 hour"), trigger=tg.every_records(100) | tg.after("10 s"))

There are two kinds. `After` goes by the clock: it fires so long after a window has changed. A `Trigger` goes by the records:
it is like an aggregate of what has come for a key and window since the last firing, and decides after each batch for which
of them to fire. Its accumulators are columns of the window's state, so they are in snapshots and move with their key. When
a result was shown, all triggers by records begin again for its key.

Not here: the result of a window that is complete, which is emitted in any case, and what late records do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate import arguments
from tidegate.arguments import ClockDuration
from tidegate.dataflow.aggregates.base import Accumulator, Aggregate, BoolArray, IntArray, Vectors
from tidegate.errors import GraphError


class Trigger(Aggregate):
    """A trigger that goes by the records, on whole columns. Subclass it for one of your own:

        class Spent(tg.Trigger):
            accumulators = (tg.Accumulator("spent", pa.float64(), 0.0),)

            def add(self, vectors, rows, inputs):
                np.add.at(vectors["spent"].values, rows, inputs[0].to_numpy())

            def fires(self, vectors, rows):
                return vectors["spent"].values[rows] >= 1000

        keyed.window(tg.tumbling("ts", "1 hour"), trigger=Spent("price"))

    `add` is that of an aggregate. `fires` is called after each batch, with the rows of the keys and windows that the batch
    has changed, each once. Where it is true, the result is emitted and the trigger's accumulators get their defaults.
    """

    @abstractmethod
    def fires(self, vectors: Vectors, rows: IntArray) -> BoolArray:
        """Return for each of these rows whether its result is to be emitted now."""

    @property
    def result_type(self) -> pa.DataType:
        return pa.bool_()

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        raise AssertionError("windows with triggers are not merged")

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return pa.array(self.fires(vectors, rows))

    def __or__(self, other: object) -> AnyOf:
        return AnyOf((self,)) | other


class EveryRecords(Trigger):
    """Fires when so many records have come since it last fired."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = arguments.whole_number("every_records", "count", count, at_least=1)

    @property
    def function(self) -> str:
        return "records"

    @property
    def label(self) -> str:
        return f"every {self._count} records"

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return (Accumulator("records", pa.int64(), 0),)

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        np.add.at(vectors["records"].values, rows, 1)

    def fires(self, vectors: Vectors, rows: IntArray) -> BoolArray:
        found: BoolArray = vectors["records"].values[rows] >= self._count
        return found


@dataclass(frozen=True, slots=True)
class After:
    """Fires so long after the first change that was not shown, by the clock."""

    ms: int

    def __or__(self, other: object) -> AnyOf:
        return AnyOf((self,)) | other


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Fires when any of these does. There is at most one `After` among them: the soonest."""

    of: tuple[Trigger | After, ...]

    def __or__(self, other: object) -> AnyOf:
        return AnyOf((*self.of, *parts(other)))

    @property
    def by_records(self) -> tuple[Trigger, ...]:
        return tuple(each for each in self.of if isinstance(each, Trigger))

    @property
    def after_ms(self) -> int | None:
        return min((each.ms for each in self.of if isinstance(each, After)), default=None)


AnyTrigger: TypeAlias = Trigger | After | AnyOf


def parts(given: Any) -> tuple[Trigger | After, ...]:
    """Return the triggers of what a user gave, or raise `GraphError`."""
    if isinstance(given, AnyOf):
        return given.of
    if isinstance(given, type) and issubclass(given, Trigger):
        raise GraphError(f"trigger {given.__name__} is a class; give an instance: {given.__name__}(…)")
    if not isinstance(given, Trigger | After):
        raise GraphError(f"{given!r} is not a trigger; give one such as tg.every_records(100) or tg.after('10 s')")
    return (given,)


def every_records(count: int) -> EveryRecords:
    """Show the results so far of a window whenever `count` records have come for its key since they were last shown.

    Windows are looked at after each batch, so there may be more records than `count` by then. Use
    `tg.global_window(count=100)` for results of exactly 100 records each.
    """
    return EveryRecords(count)


def after(delay: ClockDuration) -> After:
    """Show the results so far of the windows that have changed, so long (of processing time) after the first change:
    `tg.after("10 s")`."""
    return After(arguments.clock_ms("after", "delay", delay, at_least_ms=1))
