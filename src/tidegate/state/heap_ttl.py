"""What the heap backend's tables for state with a ttl have in common (ttl.py says what that is).

Theory of operation. An entry holds its end beside its value: a tuple (value, end) for one value, `TimedItems` for a list,
`TimedMap` for a map. Whoever finds an entry whose end has come takes it out as `clear` would, so that the next snapshot
knows it, and a clock that jumps back doesn't bring it back.

What nobody looks at is found by its *slice*: time is cut into slices of a sixteenth of the ttl, and every key is listed
in the slice of its end. When a slice is over, `sweep` takes keys out of it, as many at a time as it may, and deletes them.
A key changes its list only when a write moves its end to another slice, so most writes don't touch the lists. The ends of a
list or map are looked at together: it is listed under `soonest`, which no item's end is before.

Invariants, beside those of heap_layers.py:
- each key of main is in exactly one slice, that of its end or `soonest`; no other key is in any;
- tuples don't change. `TimedItems` and `TimedMap` are what the lists and dictionaries of other tables are: not changed in
  place as long as somebody may read a layer that holds them. (Their `soonest` may be: it holds for both.)
- an entry whose end has come is never handed out, whether it was swept or not.

What grows with the state even so: a list or map is looked through whole when some of it expired.

The tables themselves are in heap_ttl_tables.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from tidegate.state.descriptors import Descriptor
from tidegate.state.heap_layers import GONE, Cursor, DoubledTable, Layer
from tidegate.state.sections import StateInfo
from tidegate.state.ttl import loaded

SLICES = 16  # of a ttl


class TimedTable(DoubledTable):
    """What tables with a ttl have in common: the clock, and which keys expire when."""

    __slots__ = (
        "by_reads",
        "end",
        "listed",
        "now",
        "now_ms",
        "order",
        "slice_ms",
        "slices",
        "start",
        "stop",
        "ttl",
        "ttl_ms",
    )

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor, now_ms: Callable[[], int]) -> None:
        super().__init__(descriptor, info, cursor)
        assert descriptor.ttl is not None
        self.ttl = descriptor.ttl
        self.ttl_ms = descriptor.ttl.ms
        self.by_reads = descriptor.ttl.by_reads
        self.now_ms = now_ms
        self.slice_ms = max(1, self.ttl_ms // SLICES)
        self.slices: dict[int, dict[Any, None]] = {}
        self.order: list[int] = []  # the slices' numbers, as a heap
        self.listed = 0  # keys that were listed since the last sweep
        self.now = self.end = self.start = self.stop = -1
        self.tick(now_ms())

    # Time. `end` is what is written now expires at; it lies in the slice from `start` to `stop`.

    def tick(self, now: int) -> None:
        """The clock shows another time than before."""
        self.now = now
        self.end = now + self.ttl_ms
        if not self.start <= self.end < self.stop:
            self.start = self.end // self.slice_ms * self.slice_ms
            self.stop = self.start + self.slice_ms

    # Lists of keys.

    def list_at(self, key: Any, end: int) -> None:
        number = end // self.slice_ms
        keys = self.slices.get(number)
        if keys is None:
            keys = self.slices[number] = {}
            heappush(self.order, number)
        keys[key] = None
        self.listed += 1

    def unlist(self, key: Any, end: int) -> None:
        del self.slices[end // self.slice_ms][key]

    def move(self, key: Any, old: int, new: int) -> None:
        """From the slice of one end to the other's."""
        if old // self.slice_ms != new // self.slice_ms:
            self.unlist(key, old)
            self.list_at(key, new)

    # Taking out.

    def ends_at(self, entry: Any) -> int:
        """What the key of this entry is listed under."""
        return entry[1]  # type: ignore[no-any-return]

    def clear(self) -> None:
        key = self.cursor.key
        if key in self.main:
            self.drop(key)

    def drop(self, key: Any) -> None:
        self.unlist(key, self.ends_at(self.main[key]))
        self.forget(key)

    def sweep(self, budget: int) -> None:
        """Deletes what expired: `budget` entries and as many as were listed since, so that they don't pile up."""
        if not self.order:
            return
        now = self.now_ms()
        left = budget + self.listed
        while left > 0 and self.order and (self.order[0] + 1) * self.slice_ms <= now:
            keys = self.slices[self.order[0]]
            while keys and left > 0:
                key, _ = keys.popitem()
                left -= self.look_at(key, now)
            if not keys:
                del self.slices[heappop(self.order)]
        self.listed = 0
        if not self.main:
            self.main = {}  # a dictionary keeps the room that it had
            if self.alone:
                self.fresh = {}

    def look_at(self, key: Any, now: int) -> int:
        """A key whose slice is over, and which isn't listed any more; how many entries that took."""
        assert self.main[key][1] <= now
        self.forget(key)
        return 1

    # Layers.

    def freeze(self) -> Layer:
        layer = super().freeze()
        layer.timed = self.written_at(self.now_ms())
        return layer

    def written_at(self, now: int) -> Written:
        return Written(now)

    def load_timed(self, keys: Sequence[Any], values: Sequence[Any], expires: Sequence[Any] | None, *, known: bool) -> None:
        """Rows of a snapshot. What has expired isn't taken in; if the next one builds on it, it says so."""
        left, gone = loaded(keys, values, expires, shape=self.info.shape, ttl=self.ttl, now_ms=self.now_ms())
        for key, value, end in left:
            entry = self.main[key] = self.entry_of(value, end)
            self.list_at(key, self.ends_at(entry))
            if not known:
                self.fresh[key] = entry
        if known:
            self.alone = False
            self.fresh.update(dict.fromkeys(gone, GONE))
            self.may_hold_gone = bool(gone)
        self.listed = 0

    def entry_of(self, value: Any, end: Any) -> Any:
        return value, end


class Written:
    """How the entries of a layer become rows. Used by another thread; what expired before the freeze isn't written."""

    def __init__(self, now: int) -> None:
        self.now = now

    def left(self, entries: list[Any]) -> tuple[list[Any], int]:
        """The entries, GONE for those that expired, and how many these are."""
        now = self.now
        left = [entry if entry is not GONE and entry[1] > now else GONE for entry in entries]
        return left, _count_gone(left) - _count_gone(entries)

    def columns(self, entries: list[Any]) -> tuple[list[Any], list[Any]]:
        """Values and ends."""
        values, ends = zip(*entries, strict=True)
        return list(values), list(ends)


def _count_gone(entries: list[Any]) -> int:
    return sum(entry is GONE for entry in entries)
