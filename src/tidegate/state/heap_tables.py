"""The tables of the heap backend: dictionaries, frozen in O(1).

Theory of operation. What was set since the last freeze is in the dictionary `fresh`, with GONE for keys that were deleted
since. A freeze hands `fresh` over as a `Layer` and begins a new one, which costs the same whatever the size of the state. So
what is frozen is exactly what changed (the paper, section 4.2, copies the table array and shares chains, and calls
incremental snapshots of it conceivable). Nobody writes to a layer any more, so a background thread reads it without a lock,
while the loop goes on.

There are two kinds, for what is at hand in memory makes most of the difference:
- Values that are replaced whole (`LayeredTable`) are in one place only. A read looks into `fresh` first, then into layers,
  then into `main`; a write goes to `fresh`. A layer that was read is moved into `main` in small steps.
- Lists, maps and accumulators, which change in place, and state with a ttl are in `main` always, and in `fresh` as well if
  they have changed: the very same object. GONE in `fresh` is absence in main.

Invariants:
- A key that is GONE in `fresh` or a layer is in something below it.
- A list or dict that a layer holds is never changed in place as long as somebody may read that layer: a copy takes its
  place first. And none is held by the user as well: they are copied on their way in and out (values.py).
- Every entry of main is in some layer or in `fresh`, except those that were loaded as `known`.

What grows with the state even so: a Python dictionary that fills up is copied to twice its size at once, which takes
some milliseconds from a hundred thousand entries on. That happens to main when the state grows, and to `fresh` when as
many keys change between two freezes. The list or dictionary of one key is copied whole when it is changed for the first
time after a freeze, until the layer was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from tidegate.errors import JobError
from tidegate.state.descriptors import Descriptor
from tidegate.state.sections import StateInfo
from tidegate.state.values import detached

# A layer is moved into main in about this many steps.
BACKLOG_STEPS = 128


class _Sentinel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


class _NoKey:
    """Where the cursor is when there is no key. No table can look it up, so that no state is touched by mistake."""

    def __hash__(self) -> int:
        raise JobError("there is no key here, so there is no keyed state: use it in the methods that are called with a "
                       "record of a keyed stream, and in on_timer")

    def __repr__(self) -> str:
        return "NO_KEY"


GONE: Any = _Sentinel("GONE")
NO_KEY: Any = _NoKey()
ABSENT: Any = _Sentinel("ABSENT")
_NO_ITEMS: dict[Any, Any] = {}      # never written to


class Cursor:
    """The key that the user's function is at. One for all states of an operator. None is a key like any other."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Any = NO_KEY


class Layer:
    """What changed between two freezes. `entry_count` is how many entries the table had at the second one.

    Its reader, in another thread, takes the entries out and then sets `read`; the loop looks at that only.
    """

    __slots__ = ("below", "changes", "entry_count", "is_moved", "read", "timed")

    def __init__(self, changes: dict[Any, Any], *, entry_count: int | None = None, below: dict[Any, Any] | None = None,
                 is_moved: bool = False) -> None:
        self.changes = changes
        self.entry_count = entry_count
        self.below = below              # instead of `entry_count`: what the layer lies on, if that is one dictionary
        self.is_moved = is_moved        # into the table's dictionary, once it was read
        self.read = False
        self.timed: TimedEntries | None = None      # of state with a ttl


class TimedEntries(Protocol):
    """How the entries of a state with a ttl become rows (heap_ttl.py)."""

    def left(self, entries: list[Any]) -> tuple[list[Any], int]:
        """The entries, GONE for those that expired, and how many these are."""

    def columns(self, entries: list[Any]) -> tuple[list[Any], list[Any]]:
        """Values, and when they expire."""


class HeapTable:
    """The entries of one state. Its subclasses add the methods that the user's function calls."""

    __slots__ = ("alone", "copied", "cursor", "default", "fresh", "info", "keep", "main", "plain", "shared", "unread")

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        self.info = info
        self.cursor = cursor
        self.default = descriptor.default
        self.keep = descriptor.keeper()
        self.plain = descriptor.form.plain
        self.copied = descriptor.form.copied
        self.main: dict[Any, Any] = {}
        self.fresh: dict[Any, Any] = {}
        self.alone = True               # whether no layer or snapshot below `fresh` can hold anything
        self.unread: list[Layer] = []
        self.shared = False             # whether somebody may be reading what isn't in `fresh`

    def entries(self) -> dict[Any, Any]:
        """All of them. Not to be changed."""
        return self.main

    # What the subclasses' methods are made of.

    def write(self, key: Any, value: Any) -> None:
        self.main[key] = self.fresh[key] = value

    def clear(self) -> None:
        key = self.cursor.key
        if key in self.main:
            self.forget(key)

    def forget(self, key: Any) -> None:
        del self.main[key]
        if self.alone:
            del self.fresh[key]
        else:
            self.fresh[key] = GONE

    def owned(self, key: Any) -> bool:
        """Whether no reader can see the list or dict that the table holds for the key."""
        return not self.shared or key in self.fresh

    # Layers.

    def freeze(self) -> Layer:
        layer = Layer(self.fresh, entry_count=len(self.main))
        self.fresh = {}
        self.alone = False
        self.unread.append(layer)
        self.shared = True
        return layer

    def tidy(self, budget: int) -> None:
        """Notices that layers were read."""
        if self.shared:
            self.unread = [layer for layer in self.unread if not layer.read]
            self.shared = bool(self.unread)

    def load(self, keys: Iterable[Any], values: Iterable[Any], *, known: bool) -> None:
        if known:
            self.alone = False
            self.main.update(zip(keys, values, strict=True))
        else:
            entries = dict(zip(keys, values, strict=True))
            self.main.update(entries)
            self.fresh.update(entries)


class LayeredTable(HeapTable):
    """Entries that are replaced whole, in one place each."""

    __slots__ = ("layers",)

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        self.layers: list[Layer] = []       # not moved into main yet, oldest first

    def below(self, key: Any) -> Any:
        """What there is under `fresh` for the key, or GONE."""
        for layer in reversed(self.layers):
            value = layer.changes.get(key, ABSENT)
            if value is not ABSENT:
                return value
        return self.main.get(key, GONE)

    def entries(self) -> dict[Any, Any]:
        entries = dict(self.main)
        for changes in (*(layer.changes for layer in self.layers), self.fresh):
            entries.update(changes)
        return {key: value for key, value in entries.items() if value is not GONE}

    def clear(self) -> None:
        key = self.cursor.key
        if self.below(key) is not GONE:
            self.fresh[key] = GONE
        elif key in self.fresh:
            del self.fresh[key]

    def freeze(self) -> Layer:
        layer = Layer(self.fresh, below=None if self.layers else self.main, is_moved=True)
        self.layers.append(layer)
        self.fresh = {}
        return layer

    def tidy(self, budget: int) -> None:
        """Moves entries of layers that were read into main: `budget`, and more the more there are."""
        while self.layers and self.layers[0].read and budget > 0:
            changes = self.layers[0].changes
            if not self.main:
                self.main, changes = changes, {}
            budget += len(changes) // BACKLOG_STEPS
            take, main = changes.popitem, self.main
            for _ in range(min(budget, len(changes))):
                key, value = take()
                if value is GONE:
                    main.pop(key, None)
                else:
                    main[key] = value
                budget -= 1
            if changes:
                return
            del self.layers[0]

    def load(self, keys: Iterable[Any], values: Iterable[Any], *, known: bool) -> None:
        (self.main if known else self.fresh).update(zip(keys, values, strict=True))


class HeapValue(LayeredTable):
    __slots__ = ()

    def get(self) -> Any:
        value = self.fresh.get(self.cursor.key, ABSENT)
        if value is ABSENT:
            value = self.below(self.cursor.key)
        return self.default if value is GONE else value

    def set(self, value: Any) -> None:
        if type(value) is not self.plain:
            value = self.keep(value)
        self.fresh[self.cursor.key] = value


class HeapContainerValue(HeapValue):
    """A value that holds lists or dictionaries: what is handed out is a copy. What comes in is copied by `keep`."""

    __slots__ = ()

    def get(self) -> Any:
        assert self.copied is not None
        return self.copied(super().get())


class HeapTimes(HeapValue):
    """A key's timers: lists of times, which only timers.py sets, and never changes in place."""

    __slots__ = ()

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        self.plain = list


class HeapReducing(LayeredTable):
    __slots__ = ("function",)

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        assert descriptor.add is not None
        self.function = descriptor.add

    def get(self) -> Any:
        merged = self._merged(self.cursor.key)
        if merged is GONE or merged is None:
            return None
        return merged if self.copied is None else self.copied(merged)

    def add(self, item: Any) -> None:
        key = self.cursor.key
        merged = self._merged(key)
        if merged is not GONE:
            item = self.function(merged if self.copied is None else self.copied(merged), item)
        if type(item) is not self.plain:
            item = self.keep(item)
        self.fresh[key] = item

    def _merged(self, key: Any) -> Any:
        merged = self.fresh.get(key, ABSENT)
        return self.below(key) if merged is ABSENT else merged


class HeapAggregating(HeapTable):
    """`add` may change an accumulator in place, unless a reader can see it: then it gets a copy."""

    __slots__ = ("create", "function", "long", "result")

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        assert descriptor.add is not None and descriptor.create is not None
        self.create = descriptor.create
        self.function = descriptor.add
        self.result = descriptor.result
        self.long = descriptor.form.long

    def get(self) -> Any:
        accumulator = self.main.get(self.cursor.key, GONE)
        if accumulator is GONE:
            return None
        if self.copied is not None:
            accumulator = self.copied(accumulator)
        return accumulator if self.result is None else self.result(accumulator)

    def add(self, item: Any) -> None:
        key = self.cursor.key
        accumulator = self.main.get(key, GONE)
        if accumulator is GONE:
            accumulator = self.keep(self.create())
        elif self.copied is not None and not self.owned(key):
            accumulator = self.copied(accumulator)
        accumulator = self.function(accumulator, item if self.copied is None else detached(item))
        kind = type(accumulator)
        if kind is not self.plain and kind is not self.long:
            accumulator = self.keep(accumulator)
        self.write(key, accumulator)


class HeapList(HeapTable):
    __slots__ = ()

    def get(self) -> tuple[Any, ...]:
        items = self.main.get(self.cursor.key, ())
        return tuple(items) if self.copied is None else tuple(map(self.copied, items))

    def add(self, item: Any) -> None:
        if type(item) is not self.plain:
            item = self.keep(item)
        self._own().append(item)

    def extend(self, items: Iterable[Any]) -> None:
        kept = list(map(self.keep, items))
        if kept:
            self._own().extend(kept)

    def replace(self, items: Iterable[Any]) -> None:
        kept = list(map(self.keep, items))
        if kept:
            self.write(self.cursor.key, kept)
        else:
            self.clear()

    def _own(self) -> list[Any]:
        """The key's list, to be changed in place."""
        key = self.cursor.key
        items = self.main.get(key)
        if items is None:
            items = []
        elif not self.owned(key):
            items = list(items)
        self.main[key] = self.fresh[key] = items
        return items


class HeapMap(HeapTable):
    __slots__ = ("keep_key", "plain_key")

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        self.keep_key = descriptor.key_keeper()
        self.plain_key = descriptor.key_form.plain

    def get(self, item: Any, default: Any = None) -> Any:
        value = self._seen().get(item, ABSENT)
        if value is ABSENT:
            return default
        return value if self.copied is None else self.copied(value)

    def put(self, item: Any, value: Any) -> None:
        if type(item) is not self.plain_key:
            item = self.keep_key(item)
        if type(value) is not self.plain:
            value = self.keep(value)
        self._own()[item] = value

    def remove(self, item: Any) -> None:
        seen = self._seen()
        if item in seen:
            if len(seen) == 1:
                self.clear()
            else:
                del self._own()[item]

    def items(self) -> Iterable[tuple[Any, Any]]:
        return tuple(zip(self._seen(), self.values(), strict=True))

    def keys(self) -> Iterable[Any]:
        return tuple(self._seen())

    def values(self) -> Iterable[Any]:
        values = self._seen().values()
        return tuple(values) if self.copied is None else tuple(map(self.copied, values))

    def __contains__(self, item: Any) -> bool:
        return item in self._seen()

    def __len__(self) -> int:
        return len(self._seen())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def _seen(self) -> dict[Any, Any]:
        seen: dict[Any, Any] = self.main.get(self.cursor.key, _NO_ITEMS)
        return seen

    def _own(self) -> dict[Any, Any]:
        """The key's dictionary, to be changed in place."""
        key = self.cursor.key
        held = self.main.get(key)
        if held is None:
            held = {}
        elif not self.owned(key):
            held = dict(held)
        self.main[key] = self.fresh[key] = held
        return held


_TABLES: dict[str, type[HeapTable]] = {
    "value": HeapValue, "list": HeapList, "map": HeapMap, "reducing": HeapReducing, "aggregating": HeapAggregating,
    "timers": HeapTimes,
}


def make_table(descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> HeapTable:
    kind = _TABLES[descriptor.shape]
    if kind is HeapValue and descriptor.form.copied is not None:
        kind = HeapContainerValue
    return kind(descriptor, info, cursor)
