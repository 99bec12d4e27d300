"""Records by key in stretches of time: the buffers of joins that are bounded by event time.

A state of records (state/record_table.py) has a table for each *stretch*: a span of event time whose length is a power of
two in milliseconds, and whose start is a multiple of it. What nobody needs any more is dropped by the stretch, in a time
that doesn't depend on how many records are in it, and a look-up visits only the stretches in which a match may be.

The number of a stretch holds its length and its place. So stretches of several lengths may be in one state: if a program
changes how long records are kept, those of its snapshots stay where they are.

A stretch is a table, which costs as much as a hundred records. If records are far apart, or the watermark is far behind,
there would be very many with few records each. So of each length there are at most `MOST_OF_LENGTH`: further records go to
new stretches of twice the length, which stay accordingly longer. However far records are spread, the number of stretches
grows with the logarithm of it. Stretches that are there keep their records, and new ones are so small that none overlap.
Those of several subtasks may have different lengths, so one may lie inside another when they come together at another
parallelism. Then the shorter one is moved into the longer one (`unnest`), or records would leave in another order than that
of their times.

Not here: which records match, and which nobody needs (interval_join.py, temporal_join.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.numpy_columns import copy_rows
from tidegate.dataflow.operators.base import KeyedBackend
from tidegate.errors import JobError
from tidegate.state.descriptors import Records
from tidegate.state.key_store import IntArray
from tidegate.state.record_table import RecordTable

_BITS = 6  # of a stretch's number, which say how long it is
MIN_STRETCH_MS = 1 << 10
MOST_STRETCHES = 16  # about how many there are in the time for which records are kept
MOST_OF_LENGTH = 32  # of one length, before longer ones are made
MOVED_ROWS = 65_536  # at a time
LONGEST_BITS = 52  # which all times have
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
        self._columns = [column.name for column in descriptor.columns]
        self._name = str(descriptor.name)
        self._time = time
        length_ms = max(MIN_STRETCH_MS, kept_ms // MOST_STRETCHES)
        self._bits = (length_ms - 1).bit_length()
        self._live: Sequence[Stretch] | None = None  # until stretches come or go

    def append(
        self, keys: Sequence[pa.Array], columns: Sequence[pa.Array], times_us: IntArray
    ) -> Iterator[tuple[RecordTable, IntArray, IntArray]]:
        """Keep records. Yield each table that got some, their rows in it, and their places among the given ones."""
        if not len(times_us):
            return
        for number, here in self._placed(times_us // 1000):
            if not self._state.has_window(number):
                self._live = None
            table = self._state.window(number)
            if len(here) == len(times_us):
                yield table, table.append(keys, columns), here
                continue
            some = pa.array(here)
            yield table, table.append([each.take(some) for each in keys], [each.take(some) for each in columns]), here

    def stretches(self) -> Sequence[Stretch]:
        """Return the stretches that have records, in the order of their starts."""
        if self._live is None:
            found = []
            for number in self._state.windows():
                bits, place = number & (1 << _BITS) - 1, number >> _BITS
                found.append(Stretch(place << bits, place + 1 << bits, number, self._state.window(number)))
            self._live = sorted(found, key=lambda stretch: stretch[:3])
        return self._live

    def drop(self, stretch: Stretch) -> None:
        self._live = None
        self._state.drop(stretch.number)

    def unnest(self) -> None:
        """Move the records of stretches that lie inside others to these. Call this when the restored state is loaded."""
        around: Stretch | None = None
        for each in sorted(self.stretches(), key=lambda stretch: (stretch.start_ms, -stretch.stop_ms)):
            if around is None or around.stop_ms <= each.start_ms:
                around = each
            else:
                self._move(each.table, around.table)
                self.drop(each)

    def _move(self, table: RecordTable, to: RecordTable) -> None:
        """Copy all records, in the order of their arrival. They are of other keys than those that are there."""
        rows = table.rows()
        rows = rows[np.argsort(table.positions(rows))]
        for start in range(0, len(rows), MOVED_ROWS):
            some = rows[start : start + MOVED_ROWS]
            moved = to.append(table.key_columns(some), [table.column(name, some) for name in self._columns])
            to.change(moved)
            copy_rows(to.vectors, moved, table.vectors, some)

    def _placed(self, times_ms: IntArray) -> Iterator[tuple[int, IntArray]]:
        """Yield the number of each stretch that gets some of these times, and which."""
        live, everywhere = self.stretches(), np.arange(len(times_ms))
        at = bisect_right(live, int(times_ms.min()), key=lambda stretch: stretch.start_ms)
        if at and int(times_ms.max()) < live[at - 1].stop_ms:
            return iter([(live[at - 1].number, everywhere)])
        return _placed(times_ms, everywhere, self._bits_of_new(times_ms, live), live)

    def _bits_of_new(self, times_ms: IntArray, live: Sequence[Stretch]) -> int:
        """Return how long new stretches for these times are to be."""
        places = _distinct(times_ms >> self._bits)
        starts, stops = (np.array([each[bound] for each in live], np.int64) for bound in range(2))
        before = np.searchsorted(starts, places << self._bits, side="right")
        if len(live):  # only places where there is none
            places = places[(before == 0) | (places << self._bits >= stops[before - 1])]
        of_length = Counter(each.number & (1 << _BITS) - 1 for each in live)
        bits = self._bits
        while len(places) and len(places) + of_length[bits] > MOST_OF_LENGTH and bits < LONGEST_BITS:
            bits += 1
            places = np.unique(places >> 1)
        return bits

    def times_us(self, table: RecordTable, rows: IntArray) -> IntArray:
        """Return the times of records, which are never null."""
        return times_us_of(self._name, table.column(self._time, rows))


def _placed(times_ms: IntArray, of: IntArray, bits: int, live: Sequence[Stretch]) -> Iterator[tuple[int, IntArray]]:
    """Yield the number of each stretch that gets some of these times, and which. Where stretches are there, new ones are
    shorter than `bits` says."""
    for place, here in _by_place(times_ms, of, bits):
        start, stop = place << bits, place + 1 << bits
        near = [each for each in live if each.start_ms < stop and start < each.stop_ms]
        around = next((each for each in near if each.start_ms <= start and stop <= each.stop_ms), None)
        if around is not None:
            yield around.number, here
        elif near:
            yield from _placed(times_ms, here, bits - 1, near)
        else:
            yield place << _BITS | bits, here


def _distinct(places: IntArray) -> IntArray:
    """Return these numbers in order, each once. Usually they are near one another, and needn't be sorted."""
    first = int(places.min())
    if int(places.max()) - first < len(places):
        found: IntArray = np.flatnonzero(np.bincount(places - first)) + first
        return found
    return np.unique(places)


def _by_place(times_ms: IntArray, of: IntArray, bits: int) -> Iterator[tuple[int, IntArray]]:
    """Yield the spans of this length in which some of these times are, in order, and which."""
    places = times_ms[of] >> bits
    first, last = int(places.min()), int(places.max())
    if last - first < MOST_STRETCHES:  # usually the records of a batch are near one another: there is nothing to sort
        for place in range(first, last + 1):
            here = of[places == place]
            if len(here):
                yield place, here
        return
    order = np.argsort(places, kind="stable")
    begins = np.flatnonzero(np.diff(places[order])) + 1
    for here in np.split(order, begins):
        yield int(places[here[0]]), of[here]


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
