"""Cells with a time to live, over the cells of any backend (ttl.py says what a ttl is).

Theory of operation. The backend's cells hold pairs of a thing and its end, one pair for each value, list item or map item.
What has ended is never handed out. The call that finds it also deletes it, so that the next snapshot records the deletion,
and a clock that jumps back doesn't bring it back. If reads renew state, a read writes the pair again with a new end.

What nobody reads is swept, a bounded number of keys in a step:

- If the cells are in memory, every key is in an index (`Slices`). Time is cut into slices of a sixteenth of the ttl, and a
  key is listed in the slice of its end. When a slice is over, its keys are examined. A key changes its slice only when a
  write moves its end to another slice, so most writes don't touch the index. A list or map has one end for all of its
  items, `soonest`; no item ends before that, so until then there is nothing to delete.
- If not, the sweep reads the keys from the cells (`keys_from`), all of them at most once in a quarter of the ttl.

Invariant: each key of cells in memory is listed in exactly one slice, that of its end or its `soonest`; no other key is.

What grows with the state: a list or map is read whole if some of it has ended, or if it isn't in memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from tidegate.state.cells import ABSENT, GONE, AnyCells, Cells, ListCells, MapCells
from tidegate.state.ttl import Ttl

SLICES = 16  # in a ttl
SWEPT_KEYS = 64  # in one step over cells that are not in memory, at most
ROUNDS = 4  # over all keys in a ttl, at most


class Slices:
    """The keys by the slice of time in which they end."""

    def __init__(self, ttl_ms: int) -> None:
        self.slice_ms = max(1, ttl_ms // SLICES)
        self.keys: dict[int, dict[Any, None]] = {}  # by the slices' numbers
        self.order: list[int] = []  # the slices' numbers, as a heap
        self.listed = 0  # keys that were listed since the last sweep

    def add(self, key: Any, end: int) -> None:
        number = end // self.slice_ms
        keys = self.keys.get(number)
        if keys is None:
            keys = self.keys[number] = {}
            heappush(self.order, number)
        keys[key] = None
        self.listed += 1

    def remove(self, key: Any, end: int) -> None:
        del self.keys[end // self.slice_ms][key]

    def move(self, key: Any, old: int, new: int) -> None:
        """Move a key from the slice of its old end to that of its new end."""
        if old // self.slice_ms != new // self.slice_ms:
            self.remove(key, old)
            self.add(key, new)

    def take(self, now_ms: int) -> Any:
        """Remove a key whose slice is over and return it; GONE if there is none."""
        while self.order and (self.order[0] + 1) * self.slice_ms <= now_ms:
            keys = self.keys[self.order[0]]
            if keys:
                return keys.popitem()[0]
            del self.keys[heappop(self.order)]
        return GONE


class Expiring(AnyCells):
    """The common part of the three kinds. `cells` hold the pairs."""

    def __init__(self, cells: Any, ttl: Ttl, now_ms: Callable[[], int]) -> None:
        self.cells = cells
        self.in_memory = cells.in_memory
        self.ttl_ms = ttl.ms
        self.by_reads = ttl.by_reads
        self.now_ms = now_ms
        self.index = Slices(ttl.ms) if cells.in_memory else None
        self._place = b""  # of the sweep
        self._began_ms = now_ms()

    def loaded(self, keys: Iterable[Any], ends: Iterable[int]) -> None:
        """Index keys that were loaded into the cells, with the soonest end of each."""
        if self.index is not None:
            for key, end in zip(keys, ends, strict=True):
                self.list_at(key, end)
            self.index.listed = 0

    def sweep(self, budget: int) -> None:
        """Delete what has ended. Examine about `budget` entries, and as many more as were listed since the last sweep, so
        that they don't pile up."""
        now_ms = self.now_ms()
        if self.index is None:
            if budget and (self._place or not 0 <= now_ms - self._began_ms < self.ttl_ms // ROUNDS):
                self._began_ms = self._began_ms if self._place else now_ms
                keys, self._place = self.cells.keys_from(self._place, min(budget, SWEPT_KEYS))
                for key in keys:
                    self.prune(key, now_ms)
            return
        left = budget + self.index.listed
        while left > 0 and (key := self.index.take(now_ms)) is not GONE:
            left -= self.look_at(key, now_ms)
        self.index.listed = 0

    @abstractmethod
    def list_at(self, key: Any, end: int) -> None: ...

    @abstractmethod
    def prune(self, key: Any, now_ms: int) -> Any:
        """Delete what has ended. That doesn't count as a read."""

    @abstractmethod
    def look_at(self, key: Any, now_ms: int) -> int:
        """Prune a key that was removed from its slice; return how many entries were examined."""


class ExpiringThings(Expiring, Cells):
    """One thing and its end for each key. `copied` copies things that are changed in place; None for other things.

    `end` is the end of a thing that is set now, by the clock's last reading. It lies in the slice from `start` to `stop`."""

    def __init__(
        self, cells: Any, ttl: Ttl, now_ms: Callable[[], int], *, copied: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(cells, ttl, now_ms)
        self.copied = copied
        self.now = self.end = self.start = self.stop = -1

    def get(self, key: Any) -> Any:
        if (now := self.now_ms()) != self.now:
            self.tick(now)
        pair = self.cells.get(key)
        if pair is GONE:
            return GONE
        return self.renewed(key, pair) if pair[1] <= now or self.by_reads else pair[0]

    def set(self, key: Any, thing: Any) -> None:
        if (now := self.now_ms()) != self.now:
            self.tick(now)
        self.write_back(key, thing)

    def write_back(self, key: Any, thing: Any) -> None:
        """Set the thing at the time of the last `get`."""
        if self.index is not None:
            old = self.cells.get(key)
            if old is GONE:
                self.index.add(key, self.end)
            elif not self.start <= old[1] < self.stop:
                self.index.move(key, old[1], self.end)
        self.cells.set(key, (thing, self.end))

    def renewed(self, key: Any, pair: tuple[Any, int]) -> Any:
        """Delete a pair that has ended, or renew one that was read."""
        thing, end = pair
        if end <= self.now:
            self.delete(key)
            return GONE
        if end != self.end:
            if self.copied is not None and not self.cells.owned(key):
                thing = self.copied(thing)  # once written back it counts as owned, but a reader can still see it
            self.write_back(key, thing)
        return thing

    def owned(self, key: Any) -> bool:
        return bool(self.cells.owned(key))

    def delete(self, key: Any) -> None:
        if self.index is not None:
            pair = self.cells.get(key)
            if pair is not GONE:
                self.index.remove(key, pair[1])
        self.cells.delete(key)

    def list_at(self, key: Any, end: int) -> None:
        assert self.index is not None
        self.index.add(key, end)

    def prune(self, key: Any, now_ms: int) -> None:
        pair = self.cells.get(key)
        if pair is not GONE and pair[1] <= now_ms:
            self.delete(key)

    def look_at(self, key: Any, now_ms: int) -> int:
        self.cells.delete(key)
        return 1

    def tick(self, now: int) -> None:
        """Take over a new reading of the clock."""
        self.now = now
        self.end = now + self.ttl_ms
        if self.index is not None and not self.start <= self.end < self.stop:
            self.start = self.end // self.index.slice_ms * self.index.slice_ms
            self.stop = self.start + self.index.slice_ms


class ExpiringCollection(Expiring):
    """Lists and maps: many ends for a key. Those in memory have their `soonest`. `pairs` returns all that the cells hold for
    a key, ended or not."""

    def __init__(self, cells: Any, ttl: Ttl, now_ms: Callable[[], int], *, pairs: Callable[[Any], Any]) -> None:
        super().__init__(cells, ttl, now_ms)
        self.pairs = pairs
        self.soonest: dict[Any, int] = {}

    def delete(self, key: Any) -> None:
        self._unlist(key)
        self.cells.delete(key)

    def list_at(self, key: Any, end: int) -> None:
        """Note that something of the key ends then."""
        if self.index is not None:
            soonest = self.soonest.get(key)
            if soonest is None:
                self.index.add(key, end)
                self.soonest[key] = end
            elif end < soonest:
                self._list_again(key, end)

    def prune(self, key: Any, now_ms: int) -> Any:
        """Delete what has ended; return the pairs that are left."""
        there = self.pairs(key)
        if self.soonest.get(key, now_ms) > now_ms:
            return there
        left = self.without_ended(key, there, now_ms)
        if self.index is not None and key in self.soonest:
            if left:
                self._list_again(key, min([end for _, end in self.pairs_in(left)]))
            else:
                self._unlist(key)
        return left

    def look_at(self, key: Any, now_ms: int) -> int:
        assert self.index is not None
        self.index.add(key, self.soonest[key])  # keeps the invariant
        count = len(self.pairs(key))
        self.prune(key, now_ms)
        return max(1, count)

    def pairs_in(self, there: Any) -> Iterable[Any]:
        return there.values() if isinstance(there, Mapping) else there

    @abstractmethod
    def without_ended(self, key: Any, there: Any, now_ms: int) -> Any: ...

    def _list_again(self, key: Any, end: int) -> None:
        if self.index is not None:
            self.index.move(key, self.soonest[key], end)
            self.soonest[key] = end

    def _unlist(self, key: Any) -> None:
        if self.index is not None and (end := self.soonest.pop(key, None)) is not None:
            self.index.remove(key, end)


class ExpiringItems(ExpiringCollection, ListCells):
    def __init__(self, cells: Any, ttl: Ttl, now_ms: Callable[[], int]) -> None:
        super().__init__(cells, ttl, now_ms, pairs=cells.items)

    def items(self, key: Any) -> Sequence[Any]:
        now_ms = self.now_ms()
        pairs = self.cells.items(key) if self.soonest.get(key, now_ms) > now_ms else self.prune(key, now_ms)
        items = [item for item, _ in pairs]
        if items and self.by_reads:
            self.replace(key, items)
        return items

    def extend(self, key: Any, items: Sequence[Any]) -> None:
        end = self.now_ms() + self.ttl_ms
        if self.soonest.get(key, end + 1) > end:
            self.list_at(key, end)
        self.cells.extend(key, [(item, end) for item in items] if len(items) > 1 else ((items[0], end),))

    def replace(self, key: Any, items: Sequence[Any]) -> None:
        end = self.now_ms() + self.ttl_ms
        if key in self.soonest:
            self._list_again(key, end)
        else:
            self.list_at(key, end)
        self.cells.replace(key, [(item, end) for item in items])

    def without_ended(self, key: Any, there: Any, now_ms: int) -> Any:
        left = [pair for pair in there if pair[1] > now_ms]
        if not there:
            return left  # a read of what isn't there must not write
        if not left:
            self.cells.delete(key)
        elif len(left) < len(there):
            self.cells.replace(key, left)
        return left


class ExpiringEntries(ExpiringCollection, MapCells):
    def __init__(self, cells: Any, ttl: Ttl, now_ms: Callable[[], int], *, plain_key: type) -> None:
        super().__init__(cells, ttl, now_ms, pairs=cells.entries)
        self.plain_key = plain_key

    def get(self, key: Any, item: Any) -> Any:
        pair = self.cells.get(key, item)
        if pair is ABSENT:
            return ABSENT
        now_ms = self.now_ms()
        if pair[1] <= now_ms:
            self.remove(key, item)
            return ABSENT
        if self.by_reads and pair[1] != (end := now_ms + self.ttl_ms):
            if type(item) is not self.plain_key and not self.in_memory:  # it may only be equal to the item that is there
                item = next((each for each in self.cells.entries(key) if each is item or each == item), item)
            self.list_at(key, end)
            self.cells.put(key, item, (pair[0], end))
        return pair[0]

    def put(self, key: Any, item: Any, value: Any) -> None:
        now_ms = self.now_ms()
        end = now_ms + self.ttl_ms
        soonest = self.soonest.get(key, now_ms)
        if soonest <= now_ms:
            pair = self.cells.get(key, item)
            if pair is not ABSENT and pair[1] <= now_ms:
                self.cells.remove(key, item)  # the item is new now, and comes last
            self.list_at(key, end)
        elif soonest > end:
            self.list_at(key, end)
        self.cells.put(key, item, (value, end))

    def remove(self, key: Any, item: Any) -> None:
        self.cells.remove(key, item)
        if key in self.soonest and not self.cells.count(key):
            self._unlist(key)

    def entries(self, key: Any) -> Mapping[Any, Any]:
        now_ms = self.now_ms()
        there = self.cells.entries(key) if self.soonest.get(key, now_ms) > now_ms else self.prune(key, now_ms)
        entries = {item: thing for item, (thing, _) in there.items()}
        if self.by_reads and entries:
            end = now_ms + self.ttl_ms
            for item, thing in entries.items():
                self.cells.put(key, item, (thing, end))
            if key in self.soonest:
                self._list_again(key, end)
        return entries

    def count(self, key: Any) -> int:
        """Return how many entries there are. That doesn't count as a read."""
        now_ms = self.now_ms()
        if self.soonest.get(key, now_ms) > now_ms:
            return self.cells.count(key)  # type: ignore[no-any-return]
        return len(self.prune(key, now_ms))

    def without_ended(self, key: Any, there: Any, now_ms: int) -> Any:
        left, ended = {}, []
        for item, pair in there.items():
            if pair[1] > now_ms:
                left[item] = pair
            else:
                ended.append(item)
        for item in ended:
            self.cells.remove(key, item)
        return left
