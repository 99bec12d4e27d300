"""Timers: keyed state like any other, with a heap beside it that says which is due.

The state `__event_timers` (and `__processing_timers`) holds, for each key, the list of times it is to be called at. A
timer is set at most once per key, kind and time. The heap is derived: it is rebuilt from the state at a restore, and may
hold entries whose timer was deleted; the state decides. Those are noted (`_deleted`), and thrown out when they are more than
the others. A timer that is set again before that has its old entry back.

What it doesn't do: many timers of one key are kept in one list, and each change copies it. Timers are for a few times
per key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from operator import index
from typing import Any, Protocol

import pyarrow as pa

from tidegate.errors import JobError
from tidegate.state.descriptors import Descriptor
from tidegate.state.sections import StateKind
from tidegate.types import to_list

# Below this many entries of deleted timers the heap isn't worth rebuilding.
MIN_DELETED_COUNT = 1024
# At the end of event time every timer is due, and one that is set again and again would be for ever.
MAX_SET_AT_THE_END = 1_000_000
MIN_MS, MAX_MS = -(2**63), 2**63 - 1

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TimeKind(Enum):
    EVENT = "event"
    PROCESSING = "processing"


class KeyedTables(Protocol):
    """What timers need of a backend."""

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
        self._table = backend.table(descriptor)
        self._heap: list[tuple[int, int, Any]] = []      # time, order in which it was set, key
        self._order = count()
        self._deleted: set[tuple[int, Any]] = set()         # time and key, of entries that are in the heap
        self._handled: dict[tuple[int, Any], None] = {}     # of those that aren't any more, while their timers still are

    def set(self, at_ms: int) -> None:
        """For the current key."""
        times, key = self._table.get(), self._cursor.key
        if at_ms in times:
            return
        self._table.set([*times, at_ms])
        if (at_ms, key) in self._deleted:
            self._deleted.remove((at_ms, key))
        else:
            heappush(self._heap, (at_ms, next(self._order), key))

    def delete(self, at_ms: int) -> None:
        if self._take(at_ms) and (at_ms, self._cursor.key) not in self._handled:
            self._deleted.add((at_ms, self._cursor.key))
            if len(self._deleted) > max(MIN_DELETED_COUNT, len(self._heap) // 2):
                self._rebuild()

    def due(self, now_ms: int) -> Iterator[int]:
        """Takes out what is due, in order of time; the cursor is at the timer's key when its time is yielded.

        Timers that are set meanwhile, and are due as well, are among them.
        """
        last_order = next(self._order) + (MAX_SET_AT_THE_END if now_ms == MAX_MS else MAX_MS)
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, order, self._cursor.key = heappop(self._heap)
            if order > last_order:
                raise JobError(f"{MAX_SET_AT_THE_END:,} timers were set in on_timer after the end of all input, and each is "
                               f"due at once: set no more where ctx.watermark_ms is 2**63 - 1")
            if self._is_deleted(at_ms) or not self._take(at_ms):
                continue
            yield at_ms

    def expired(self, now_ms: int) -> Iterator[int]:
        """The same in Spark's way: those that are due now, whatever is set or deleted meanwhile. A timer is there until it
        was handled; to set it again before that is in vain."""
        handled = self._handled
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, _, self._cursor.key = heappop(self._heap)
            if not self._is_deleted(at_ms) and at_ms in self._table.get():
                handled[at_ms, self._cursor.key] = None
        for at_ms, key in list(handled):
            self._cursor.key = key
            yield at_ms
            self._cursor.key = key
            self._take(at_ms)
            del handled[at_ms, key]

    def times(self) -> list[int]:
        """Of the current key, in order."""
        return sorted(self._table.get())

    def next_ms(self) -> int | None:
        """When there may be something due. A deleted timer may make it too early, never too late."""
        return self._heap[0][0] if self._heap else None

    def load(self, batches: Iterable[tuple[list[Any], pa.RecordBatch]], *, known: bool) -> None:
        """Takes rows of a snapshot in, with their keys. `known` is as in `KeyedBackend.load`."""
        assert self.state is not None
        for keys, rows in batches:
            self._backend.load(self.state, rows, known=known)
            self.queue([(keys, rows)])

    def queue(self, batches: Iterable[tuple[list[Any], pa.RecordBatch]]) -> None:
        """The same for rows that the backend holds already."""
        for keys, rows in batches:
            for key, times in zip(keys, to_list(rows.column("value")), strict=True):
                self._heap.extend((at_ms, next(self._order), key) for at_ms in times)
        heapify(self._heap)

    def _take(self, at_ms: int) -> bool:
        """Takes a timer of the current key out of the state; whether it was there."""
        times = self._table.get()
        if at_ms not in times:
            return False
        if len(times) == 1:
            self._table.clear()
        else:
            self._table.set([time for time in times if time != at_ms])
        return True

    def _is_deleted(self, at_ms: int) -> bool:
        """Of an entry of the current key that was taken out of the heap."""
        entry = at_ms, self._cursor.key
        if entry not in self._deleted:
            return False
        self._deleted.remove(entry)
        return True

    def _rebuild(self) -> None:
        deleted = self._deleted
        self._heap = [entry for entry in self._heap if (entry[0], entry[2]) not in deleted]
        heapify(self._heap)
        deleted.clear()


def timers_descriptor(kind: TimeKind) -> Descriptor:
    return Descriptor(kind=StateKind.KEYED, shape="timers", item=pa.int64(), default=(), name=f"__{kind.value}_timers")


def to_ms(at: int | datetime) -> int:
    """A time that a user gave: milliseconds, or a datetime (taken as UTC where it has no zone)."""
    if type(at) is int and MIN_MS <= at <= MAX_MS:
        return at
    if isinstance(at, datetime):
        aware = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return (aware - _EPOCH) // timedelta(milliseconds=1)
    at_ms = index(at)       # a float is no time
    if not MIN_MS <= at_ms <= MAX_MS:
        raise ValueError(f"a timer at {at_ms} ms is beyond the end of time")
    return at_ms
