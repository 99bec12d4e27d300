"""The heap backend's tables for state with a ttl, one for each shape. Their methods are those of heap_tables.py. How they
find what expired is told in heap_ttl.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tidegate.state.descriptors import Descriptor
from tidegate.state.heap_layers import GONE, Cursor
from tidegate.state.heap_ttl import TimedTable, Written
from tidegate.state.sections import StateInfo
from tidegate.state.values import detached

# ------------------------------------------------------------------------------------------------------- one value


class TimedSingle(TimedTable):
    """One value for a key, and one end."""

    __slots__ = ()

    def put(self, key: Any, value: Any, now: int) -> None:
        if now != self.now:
            self.tick(now)
        old = self.main.get(key)
        if old is None:
            self.list_at(key, self.end)
        elif not self.start <= old[1] < self.stop:
            self.move(key, old[1], self.end)
        self.main[key] = self.fresh[key] = (value, self.end)


class TimedValue(TimedSingle):
    __slots__ = ()

    def get(self) -> Any:
        entry = self.main.get(self.cursor.key)
        if entry is None:
            return self.default
        now = self.now_ms()
        if entry[1] <= now:
            self.drop(self.cursor.key)
            return self.default
        if self.by_reads and entry[1] != now + self.ttl_ms:
            self.put(self.cursor.key, entry[0], now)
        return entry[0]

    def set(self, value: Any) -> None:
        if type(value) is not self.plain:
            value = self.keep(value)
        # As `put`, which would be one more call for every record.
        if (now := self.now_ms()) != self.now:
            self.tick(now)
        key = self.cursor.key
        old = self.main.get(key)
        if old is None:
            self.list_at(key, self.end)
        elif not self.start <= old[1] < self.stop:
            self.move(key, old[1], self.end)
        self.main[key] = self.fresh[key] = (value, self.end)


class TimedContainerValue(TimedValue):
    """A value that holds lists or dictionaries: what is handed out is a copy. What comes in is copied by `keep`."""

    __slots__ = ()

    def get(self) -> Any:
        assert self.copied is not None
        return self.copied(super().get())


class TimedReducing(TimedSingle):
    __slots__ = ("function",)

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor, now_ms: Callable[[], int]) -> None:
        super().__init__(descriptor, info, cursor, now_ms)
        assert descriptor.add is not None
        self.function = descriptor.add

    def get(self) -> Any:
        entry = self.main.get(self.cursor.key)
        if entry is None:
            return None
        now = self.now_ms()
        if entry[1] <= now:
            self.drop(self.cursor.key)
            return None
        if self.by_reads and entry[1] != now + self.ttl_ms:
            self.put(self.cursor.key, entry[0], now)
        return entry[0] if self.copied is None or entry[0] is None else self.copied(entry[0])

    def add(self, item: Any) -> None:
        key = self.cursor.key
        entry = self.main.get(key)
        now = self.now_ms()
        if entry is not None and entry[1] > now:
            item = self.function(entry[0] if self.copied is None else self.copied(entry[0]), item)
        if type(item) is not self.plain:
            item = self.keep(item)
        self.put(key, item, now)


class TimedAggregating(TimedSingle):
    """`add` may change an accumulator in place, unless a reader can see it: then it gets a copy."""

    __slots__ = ("create", "function", "long", "result")

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor, now_ms: Callable[[], int]) -> None:
        super().__init__(descriptor, info, cursor, now_ms)
        assert descriptor.add is not None and descriptor.create is not None
        self.create = descriptor.create
        self.function = descriptor.add
        self.result = descriptor.result
        self.long = descriptor.form.long

    def get(self) -> Any:
        key = self.cursor.key
        entry = self.main.get(key)
        if entry is None:
            return None
        now = self.now_ms()
        if entry[1] <= now:
            self.drop(key)
            return None
        accumulator = entry[0]
        if self.by_reads and entry[1] != now + self.ttl_ms:
            self.put(key, accumulator if self.copied is None or self.owned(key) else self.copied(accumulator), now)
        if self.copied is not None:
            accumulator = self.copied(accumulator)
        return accumulator if self.result is None else self.result(accumulator)

    def add(self, item: Any) -> None:
        key = self.cursor.key
        entry = self.main.get(key)
        now = self.now_ms()
        if entry is None or entry[1] <= now:
            accumulator = self.keep(self.create())
        elif self.copied is not None and not self.owned(key):
            accumulator = self.copied(entry[0])
        else:
            accumulator = entry[0]
        accumulator = self.function(accumulator, item if self.copied is None else detached(item))
        kind = type(accumulator)
        if kind is not self.plain and kind is not self.long:
            accumulator = self.keep(accumulator)
        self.put(key, accumulator, now)


# ------------------------------------------------------------------------------------------------------- collections


class TimedCollection(TimedTable):
    """Lists and maps: many ends for a key, none of them before `soonest`."""

    __slots__ = ()

    def ends_at(self, entry: Any) -> int:
        return entry.soonest  # type: ignore[no-any-return]

    def look_at(self, key: Any, now: int) -> int:
        entry = self.main[key]
        self.list_at(key, entry.soonest)  # as everybody expects it
        looked_at = len(entry)
        if entry.soonest <= now:
            self.pruned(key, entry, now)
        return max(1, looked_at)

    def pruned(self, key: Any, entry: Any, now: int) -> Any:
        """The entry without what expired; None where nothing is left. Then the key is gone."""
        left = entry.left(now)
        if left is None:
            self.drop(key)
            return None
        old, soonest = entry.soonest, left.first_end()
        self.move(key, old, soonest)
        left.soonest = soonest
        if left is not entry:
            self.write(key, left)
        return left

    def seen(self) -> Any:
        """What the current key has now; None for nothing."""
        key = self.cursor.key
        entry = self.main.get(key)
        if entry is not None:
            now = self.now_ms()
            if entry.soonest <= now:
                entry = self.pruned(key, entry, now)
        return entry

    def own(self, now: int) -> Any:
        """The key's entry, to be changed in place: something is added that expires at `end`."""
        if now != self.now:
            self.tick(now)
        key = self.cursor.key
        entry = self.main.get(key)
        if entry is None:
            entry = self.empty(self.end)
            self.list_at(key, self.end)
        else:
            if not self.owned(key):
                entry = entry.twin()
            if self.end < entry.soonest:
                self.move(key, entry.soonest, self.end)
                entry.soonest = self.end
        self.main[key] = self.fresh[key] = entry
        return entry

    def empty(self, end: int) -> Any:
        raise AssertionError("of the subclass")

    def written_at(self, now: int) -> Written:
        return WrittenCollections(now)


class WrittenCollections(Written):
    def left(self, entries: list[Any]) -> tuple[list[Any], int]:
        left: list[Any] = []
        gone = 0
        for entry in entries:
            if entry is not GONE:
                found = entry.left(self.now)
                gone += found is None
                left.append(GONE if found is None else found)
            else:
                left.append(GONE)
        return left, gone

    def columns(self, entries: list[Any]) -> tuple[list[Any], list[Any]]:
        return [entry.plain() for entry in entries], [entry.ends() for entry in entries]


class TimedItems:
    """A key's list: items, and the end of each."""

    __slots__ = ("expires", "items", "soonest")

    def __init__(self, items: list[Any], expires: list[int], soonest: int) -> None:
        self.items = items
        self.expires = expires
        self.soonest = soonest

    def __len__(self) -> int:
        return len(self.items)

    def left(self, now: int) -> TimedItems | None:
        """What hasn't expired: itself, another one, or None."""
        if self.first_end() > now:
            return self
        stays = [end > now for end in self.expires]
        expires = [end for end in self.expires if end > now]
        items = [item for item, alive in zip(self.items, stays, strict=True) if alive]
        return TimedItems(items, expires, self.soonest) if items else None

    def first_end(self) -> int:
        return min(self.expires)

    def twin(self) -> TimedItems:
        return TimedItems(list(self.items), list(self.expires), self.soonest)

    def plain(self) -> list[Any]:
        return self.items

    def ends(self) -> list[int]:
        return self.expires


class TimedList(TimedCollection):
    __slots__ = ()

    def get(self) -> tuple[Any, ...]:
        entry = self.seen()
        if entry is None:
            return ()
        if self.by_reads:
            entry = self._renewed(entry)
        return tuple(entry.items) if self.copied is None else tuple(map(self.copied, entry.items))

    def add(self, item: Any) -> None:
        if type(item) is not self.plain:
            item = self.keep(item)
        entry = self.own(self.now_ms())
        entry.items.append(item)
        entry.expires.append(self.end)

    def extend(self, items: Iterable[Any]) -> None:
        kept = list(map(self.keep, items))
        if kept:
            entry = self.own(self.now_ms())
            entry.items.extend(kept)
            entry.expires.extend([self.end] * len(kept))

    def replace(self, items: Iterable[Any]) -> None:
        kept = list(map(self.keep, items))
        if not kept:
            self.clear()
            return
        if (now := self.now_ms()) != self.now:
            self.tick(now)
        key = self.cursor.key
        old = self.main.get(key)
        if old is None:
            self.list_at(key, self.end)
        else:
            self.move(key, old.soonest, self.end)
        self.write(key, TimedItems(kept, [self.end] * len(kept), self.end))

    def _renewed(self, entry: TimedItems) -> TimedItems:
        """With another end for all of it."""
        if (now := self.now_ms()) != self.now:
            self.tick(now)
        key = self.cursor.key
        self.move(key, entry.soonest, self.end)
        items = entry.items if self.owned(key) else list(entry.items)
        renewed = TimedItems(items, [self.end] * len(items), self.end)
        self.write(key, renewed)
        return renewed

    def empty(self, end: int) -> TimedItems:
        return TimedItems([], [], end)

    def entry_of(self, value: Any, end: Any) -> TimedItems:
        return TimedItems(value, end, min(end))


class TimedMap:
    """A key's map: for each item its value and its end."""

    __slots__ = ("held", "soonest")

    def __init__(self, held: dict[Any, tuple[Any, int]], soonest: int) -> None:
        self.held = held
        self.soonest = soonest

    def __len__(self) -> int:
        return len(self.held)

    def left(self, now: int) -> TimedMap | None:
        """What hasn't expired: itself, another one, or None."""
        if self.first_end() > now:
            return self
        held = {item: pair for item, pair in self.held.items() if pair[1] > now}
        return TimedMap(held, self.soonest) if held else None

    def first_end(self) -> int:
        return min([end for _, end in self.held.values()])

    def twin(self) -> TimedMap:
        return TimedMap(dict(self.held), self.soonest)

    def plain(self) -> dict[Any, Any]:
        return {item: value for item, (value, _) in self.held.items()}

    def ends(self) -> list[int]:
        return [end for _, end in self.held.values()]


class TimedMapTable(TimedCollection):
    __slots__ = ("keep_key", "plain_key")

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor, now_ms: Callable[[], int]) -> None:
        super().__init__(descriptor, info, cursor, now_ms)
        self.keep_key = descriptor.key_keeper()
        self.plain_key = descriptor.key_form.plain

    def get(self, item: Any, default: Any = None) -> Any:
        pair = self._found(item)
        if pair is None:
            return default
        return pair[0] if self.copied is None else self.copied(pair[0])

    def put(self, item: Any, value: Any) -> None:
        if type(item) is not self.plain_key:
            item = self.keep_key(item)
        if type(value) is not self.plain:
            value = self.keep(value)
        now = self.now_ms()
        held = self.own(now).held
        pair = held.get(item)
        if pair is not None and pair[1] <= now:
            del held[item]  # what is put now is new, and comes last
        held[item] = (value, self.end)

    def remove(self, item: Any) -> None:
        key = self.cursor.key
        entry = self.main.get(key)
        if entry is None or item not in entry.held:
            hash(item)  # as a dictionary would
        elif len(entry.held) == 1:
            self.drop(key)
        else:
            if not self.owned(key):
                entry = entry.twin()
            del entry.held[item]
            self.write(key, entry)

    def items(self) -> Iterable[tuple[Any, Any]]:
        held = self._all()
        if self.copied is None:
            return tuple([(item, value) for item, (value, _) in held.items()])
        return tuple([(item, self.copied(value)) for item, (value, _) in held.items()])

    def keys(self) -> Iterable[Any]:
        return tuple(self._all())

    def values(self) -> Iterable[Any]:
        values = [value for value, _ in self._all().values()]
        return tuple(values) if self.copied is None else tuple(map(self.copied, values))

    def __contains__(self, item: Any) -> bool:
        return self._found(item) is not None

    def __len__(self) -> int:
        entry = self.seen()
        return 0 if entry is None else len(entry.held)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def _found(self, item: Any) -> tuple[Any, int] | None:
        """An item's value and end, None where it isn't there. That is reading it."""
        entry = self.main.get(self.cursor.key)
        if entry is None:
            hash(item)  # as a dictionary would
            return None
        pair: tuple[Any, int] | None = entry.held.get(item)
        if pair is None:
            return None
        now = self.now_ms()
        if pair[1] <= now:
            self.remove(item)
            return None
        if self.by_reads and pair[1] != now + self.ttl_ms:
            entry = self.own(now)
            entry.held[item] = (pair[0], self.end)
        return pair

    def _all(self) -> dict[Any, tuple[Any, int]]:
        """All that the key has. That is reading it."""
        entry = self.seen()
        if entry is None:
            return {}
        if self.by_reads:
            if (now := self.now_ms()) != self.now:
                self.tick(now)
            key = self.cursor.key
            self.move(key, entry.soonest, self.end)
            entry = TimedMap({item: (value, self.end) for item, (value, _) in entry.held.items()}, self.end)
            self.write(key, entry)
        held: dict[Any, tuple[Any, int]] = entry.held
        return held

    def empty(self, end: int) -> TimedMap:
        return TimedMap({}, end)

    def entry_of(self, value: Any, end: Any) -> TimedMap:
        return TimedMap(dict(zip(value, zip(value.values(), end, strict=True), strict=True)), min(end))


_TABLES: dict[str, type[TimedTable]] = {
    "value": TimedValue,
    "list": TimedList,
    "map": TimedMapTable,
    "reducing": TimedReducing,
    "aggregating": TimedAggregating,
}


def make_timed_table(descriptor: Descriptor, info: StateInfo, cursor: Cursor, now_ms: Callable[[], int]) -> TimedTable:
    kind = _TABLES[descriptor.shape]
    if kind is TimedValue and descriptor.form.copied is not None:
        kind = TimedContainerValue
    return kind(descriptor, info, cursor, now_ms)
