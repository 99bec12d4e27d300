"""Timers: keyed state like any other, with a calendar beside it that finds the timers that are due.

The state `__event_timers` (and `__processing_timers`) holds, for each key, the list of times at which it is to be called. A
timer is set at most once per key, kind and time. The calendar is derived: it is rebuilt from the state at a restore.

Invariant: what is in the state is in the calendar, except a timer that was removed from the calendar to be called. If they
differ during the call, the state decides.

Limit: the timers of a key are in one list, and each change copies it. So a key should have only a few timers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from enum import Enum
from operator import index
from typing import Any, Protocol

import pyarrow as pa

from tidegate.errors import JobError
from tidegate.state.calendar import Calendar
from tidegate.state.cells import GONE, Cells
from tidegate.state.descriptors import Descriptor
from tidegate.state.sections import StateKind
from tidegate.types import to_list

# At the end of event time every timer is due, so one that is set again by each call would be called forever.
MAX_SET_AT_THE_END = 1_000_000
MIN_MS, MAX_MS = -(2**63), 2**63 - 1

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TimeKind(Enum):
    EVENT = "event"
    PROCESSING = "processing"


class KeyedTables(Protocol):
    """What timers need from a backend."""

    cursor: Any

    def table(self, descriptor: Descriptor) -> Any: ...

    def load(self, state: str, rows: pa.RecordBatch, *, known: bool) -> None: ...


class TimerQueue:
    """The timers of one kind of one operator in one subtask."""

    def __init__(self, kind: TimeKind, backend: KeyedTables) -> None:
        descriptor = timers_descriptor(kind)
        self.state = descriptor.name
        self._backend = backend
        self._cursor = backend.cursor
        self._cells: Cells = backend.table(descriptor).cells
        self._calendar = Calendar()

    def set(self, at_ms: int) -> None:
        """Set a timer for the current key."""
        key = self._cursor.key
        times = self._cells.get(key)
        if times is GONE or at_ms not in times:
            self._cells.set(key, [at_ms] if times is GONE else [*times, at_ms])
            self._calendar.add(at_ms, key)

    def delete(self, at_ms: int) -> None:
        if self._take(at_ms):
            self._calendar.discard(at_ms, self._cursor.key)

    def due(self, now_ms: int) -> Iterator[int]:
        """Takes out what is due, in order of time; the cursor is at the timer's key when its time is yielded.

        Timers that are set meanwhile, and are due as well, are among them.
        """
        most = MAX_SET_AT_THE_END + len(self._calendar) if now_ms == MAX_MS else MAX_MS
        for number, (at_ms, key) in enumerate(self._calendar.due(now_ms)):
            if number >= most:
                raise JobError(
                    f"{MAX_SET_AT_THE_END:,} timers were set in on_timer after the end of all input, and each is "
                    f"due at once: set no more where ctx.watermark_ms is 2**63 - 1"
                )
            self._cursor.key = key
            if self._take(at_ms):
                yield at_ms

    def expired(self, now_ms: int) -> Iterator[int]:
        """The same in Spark's way: those that are due now, whatever is set or deleted meanwhile. A timer is there until it
        was handled; to set it again before that is in vain."""
        for at_ms, key in list(self._calendar.due(now_ms)):
            self._cursor.key = key
            yield at_ms
            self._cursor.key = key
            self.delete(at_ms)

    def times(self) -> list[int]:
        """Return the times of the current key, in order."""
        times = self._cells.get(self._cursor.key)
        return [] if times is GONE else sorted(times)

    def next_ms(self) -> int | None:
        """Return when the next timer is due; None without timers."""
        return self._calendar.first_ms()

    def load(self, batches: Iterable[tuple[list[Any], pa.RecordBatch]], *, known: bool) -> None:
        """Load rows of a snapshot, with their keys. `known` is as in `KeyedBackend.load`."""
        assert self.state is not None
        for keys, rows in batches:
            self._backend.load(self.state, rows, known=known)
            self.queue([(keys, rows)])

    def queue(self, batches: Iterable[tuple[list[Any], pa.RecordBatch]]) -> None:
        """Add the timers of rows that the backend holds already to the calendar."""
        for keys, rows in batches:
            for key, times in zip(keys, to_list(rows.column("value")), strict=True):
                for at_ms in times:
                    self._calendar.add(at_ms, key)

    def _take(self, at_ms: int) -> bool:
        """Remove a timer of the current key from the state; return whether there was one."""
        key = self._cursor.key
        times = self._cells.get(key)
        if times is GONE or at_ms not in times:
            return False
        if len(times) == 1:
            self._cells.delete(key)
        else:
            self._cells.set(key, [time for time in times if time != at_ms])
        return True


def timers_descriptor(kind: TimeKind) -> Descriptor:
    return Descriptor(kind=StateKind.KEYED, shape="timers", item=pa.int64(), name=f"__{kind.value}_timers")


def to_ms(at: int | datetime) -> int:
    """Return the milliseconds of a time that a user gave: milliseconds, or a datetime (in UTC if it has no zone)."""
    if type(at) is int and MIN_MS <= at <= MAX_MS:
        return at
    if isinstance(at, datetime):
        return ((at if at.tzinfo is not None else at.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)
    at_ms = index(at)  # a float isn't accepted
    if not MIN_MS <= at_ms <= MAX_MS:
        raise ValueError(f"a timer at {at_ms} ms is beyond the end of time")
    return at_ms


def instant_ms(at: int | datetime) -> int:
    """Do as `to_ms`, and explain an argument of another kind as one of the user's own call."""
    try:
        return to_ms(at)
    except (TypeError, ValueError):
        raise JobError(
            f"{at!r} is not a time: give milliseconds since 1970 as a whole number below 2^63, such as record.ts + 60_000, "
            f"or a datetime (one without a time zone is in UTC)"
        ) from None
