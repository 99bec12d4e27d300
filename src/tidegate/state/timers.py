"""Timers: keyed state like any other, with a heap beside it that says which is due.

The state `__event_timers` (and `__processing_timers`) holds, for each key, the tuple of times it is to be called at. The heap is
derived: it is rebuilt from the state at a restore and may hold entries whose timer was deleted; the state decides. A
timer is set at most once per key, kind and time.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Protocol

import pyarrow as pa

from tidegate.state.descriptors import Descriptor
from tidegate.state.sections import StateKind
from tidegate.types import to_list


class TimeKind(Enum):
    EVENT = "event"
    PROCESSING = "processing"


class KeyedTables(Protocol):
    """What timers need of a backend."""

    cursor: Any

    def table(self, descriptor: Descriptor) -> Any: ...

    def load(self, state: str, rows: pa.RecordBatch) -> None: ...


class TimerQueue:
    """The timers of one kind of one operator in one subtask."""

    def __init__(self, kind: TimeKind, backend: KeyedTables) -> None:
        descriptor = timers_descriptor(kind)
        self.state = descriptor.name
        self._backend = backend
        self._cursor = backend.cursor
        self._table = backend.table(descriptor)
        self._heap: list[tuple[int, int, Any]] = []
        self._order = count()

    def set(self, at_ms: int) -> None:
        """For the current key."""
        times = self._table.get()
        if at_ms not in times:
            self._table.set((*times, at_ms))
            heappush(self._heap, (at_ms, next(self._order), self._cursor.key))

    def delete(self, at_ms: int) -> None:
        times = self._table.get()
        if at_ms in times:
            self._keep(tuple(time for time in times if time != at_ms))

    def due(self, now_ms: int) -> Iterator[int]:
        """Takes out what is due, in order of time; the cursor is at the timer's key when its time is yielded."""
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            at_ms, _, key = heappop(heap)
            self._cursor.key = key
            times = self._table.get()
            if at_ms in times:
                self._keep(tuple(time for time in times if time != at_ms))
                yield at_ms

    def next_ms(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def load(self, keys: list[Any], rows: pa.RecordBatch) -> None:
        assert self.state is not None
        self._backend.load(self.state, rows)
        for key, times in zip(keys, to_list(rows.column("value")), strict=True):
            self._heap.extend((at_ms, next(self._order), key) for at_ms in times)
        heapify(self._heap)

    def _keep(self, times: tuple[int, ...]) -> None:
        if times:
            self._table.set(times)
        else:
            self._table.clear()


def timers_descriptor(kind: TimeKind) -> Descriptor:
    return Descriptor(kind=StateKind.KEYED, shape="timers", item=pa.int64(), default=(), name=f"__{kind.value}_timers")


def to_ms(at: int | datetime) -> int:
    """A time that a user gave: milliseconds, or a datetime (taken as UTC where it has no zone)."""
    if isinstance(at, datetime):
        aware = at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
        return round(aware.timestamp() * 1000)
    return at
