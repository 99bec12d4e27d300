"""Records by key in stretches of time: the buffers of joins that are bounded by event time.

A state of records (state/record_table.py) has a table for each *stretch*: a span of event time whose length is a power of
two in milliseconds, and whose start is a multiple of it. What nobody needs any more is dropped by the stretch, in a time
that doesn't depend on how many records are in it, and a look-up visits only the stretches in which a match may be.

The number of a stretch holds its length and its place. So stretches of several lengths may be in one state: if a program
changes how long records are kept, those of its snapshots stay where they are.

Not here: which records match, and which nobody needs (interval_join.py, temporal_join.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.dataflow.operators.base import KeyedBackend
from tidegate.errors import JobError
from tidegate.state.descriptors import Records
from tidegate.state.key_store import IntArray
from tidegate.state.record_table import RecordTable

_BITS = 6  # of a stretch's number, which say how long it is
MIN_STRETCH_MS = 1 << 10
MOST_STRETCHES = 16  # about how many there are in the time for which records are kept
FARTHEST_US = 2**62
"""Times beyond this are refused, since they don't fit into 64 bits when they are added."""


class Stretch(NamedTuple):
    """A span of time, and the records in it: those from `start_ms` up to `stop_ms`, exclusive."""

    start_ms: int
    stop_ms: int
    number: int
    table: RecordTable


class TimedRecords:
    """The records of one input, in stretches."""

    def __init__(self, descriptor: Records, backend: KeyedBackend, *, time: str, kept_ms: int) -> None:
        """`time` is the column of a record's time. `kept_ms`: about how long records are kept."""
        self._state = backend.record_state(descriptor)
        self._name = str(descriptor.name)
        self._time = time
        length_ms = max(MIN_STRETCH_MS, kept_ms // MOST_STRETCHES)
        self._bits = (length_ms - 1).bit_length()

    def append(
        self, keys: Sequence[pa.Array], columns: Sequence[pa.Array], times_us: IntArray
    ) -> Iterator[tuple[RecordTable, IntArray, IntArray]]:
        """Keep records. Yield each table that got some, their rows in it, and their places among the given ones."""
        if not len(times_us):
            return
        places_in_time = times_us // 1000 >> self._bits
        first, last = int(places_in_time.min()), int(places_in_time.max())
        parts: Iterable[tuple[int, IntArray]]
        if last - first < MOST_STRETCHES:  # usually the records of a batch are near one another: there is nothing to sort
            parts = ((place, np.flatnonzero(places_in_time == place)) for place in range(first, last + 1))
        else:
            order = np.argsort(places_in_time, kind="stable")
            begins = np.flatnonzero(np.diff(places_in_time[order])) + 1
            parts = ((int(places_in_time[here[0]]), here) for here in np.split(order, begins))
        for place, here in parts:
            if not len(here):
                continue
            table = self._state.window(place << _BITS | self._bits)
            if len(here) == len(times_us):
                yield table, table.append(keys, columns), here
                continue
            some = pa.array(here)
            yield table, table.append([each.take(some) for each in keys], [each.take(some) for each in columns]), here

    def stretches(self) -> list[Stretch]:
        """Return the stretches that have records, in the order of their starts."""
        found = []
        for number in self._state.windows():
            bits, place = number & (1 << _BITS) - 1, number >> _BITS
            found.append(Stretch(place << bits, place + 1 << bits, number, self._state.window(number)))
        return sorted(found, key=lambda stretch: stretch[:3])

    def drop(self, stretch: Stretch) -> None:
        self._state.drop(stretch.number)

    def times_us(self, table: RecordTable, rows: IntArray) -> IntArray:
        """Return the times of records, which are never null."""
        return times_us_of(self._name, table.column(self._time, rows))


def times_us_of(operator: str, column: pa.Array) -> IntArray:
    """Return the event times of a column in microseconds, rounded down. Those of nulls mean nothing."""
    kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("us")), pa.timestamp("us")
    if column.null_count:
        column = column.fill_null(pa.scalar(0, pa.int64()).cast(kind))
    ticks = np.asarray(column.cast(pa.int64()))
    unit = kind.unit if pa.types.is_timestamp(kind) else "ms"
    if unit in ("us", "ns"):
        return ticks if unit == "us" else ticks // 1000
    factor = 1000 if unit == "ms" else 1_000_000
    limit = FARTHEST_US // factor
    if len(ticks) and not -limit < ticks.min() <= ticks.max() < limit:
        raise JobError(
            f"operator {operator!r}: a record has the time {ticks[np.abs(ticks).argmax()]} {unit}, and a join can have "
            f"times up to ±{limit} {unit}. Filter such records out before the join"
        )
    times: IntArray = ticks * factor
    return times
