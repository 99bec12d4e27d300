"""The tables of the heap backend: one dictionary for each state, frozen in O(1).

Theory of operation. A freeze is a number, and costs the same whatever the size of the state. From then on, and until
the frozen version was read, a write doesn't overwrite a value but puts a `Changed` in its place, which holds the new
value and what it `was`. A reader takes what was, if that was changed after its freeze. A background thread reads the
table in small pieces while the loop goes on (the paper, section 4.2, copies the table array and then shares chains:
this is our copy-on-write). It takes no more than references to keys and values; as soon as it has them all, the loop
overwrites again, however long it takes to write them to a store. So a read is one look-up, always; a write costs more
only while there is a reader; and there is little to tidy up afterwards.

The reader and the loop touch the same dictionary from two threads with one interpreter lock between them. Invariants:
- While there are readers, the keys of a part don't change: a new key goes to a new part (`added`), a deleted key stays
  and is `GONE` now. So a part can be iterated while it is written to. `tidy` puts that right when there are no readers.
- What a reader of version n can reach from an entry that it has got never changes: a `Changed` is changed in place only
  by the version that it was made in, and readers of that version don't look at what is `now`.
- A key is in one part only.
- A list or dict that a reader can see is never changed in place: a copy takes its place first. And none is held by the
  user as well: they are copied on their way in and out (values.py).

What grows with the state even so: a Python dictionary that fills up is copied to twice its size at once, which takes
some milliseconds from a hundred thousand entries on. That happens when the state grows, and only then. The list or
dictionary of one key is copied whole when it is changed for the first time while there is a reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tidegate.errors import JobError
from tidegate.state.descriptors import Descriptor
from tidegate.state.sections import StateInfo
from tidegate.state.values import detached


class Changed:
    """Stands in for a value that was changed after freeze `version`, while there were readers.

    `was` is the entry before that: a value, or a `Changed` of an older version.
    """

    __slots__ = ("now", "version", "was")

    def __init__(self, now: Any, was: Any, version: int) -> None:
        self.now = now
        self.was = was
        self.version = version

    def at(self, version: int) -> Any:
        """What the key held at that freeze, which is no older than those that had readers when this was made."""
        entry: Any = self
        while type(entry) is Changed:
            if entry.version < version:
                return entry.now
            entry = entry.was
        return entry

    def needed_since(self, version: int) -> Any:
        """This, without what no reader of that version or a later one needs."""
        if self.version < version:
            return self.now
        oldest = self
        while type(oldest.was) is Changed and oldest.was.version >= version:
            oldest = oldest.was
        if type(oldest.was) is Changed:
            oldest.was = oldest.was.now
        return self

    def __repr__(self) -> str:
        return "GONE" if self is GONE else f"Changed({self.now!r}, was={self.was!r}, version={self.version})"


class _NoKey:
    """Where the cursor is when there is no key. No table can look it up, so that no state is touched by mistake."""

    def __hash__(self) -> int:
        raise JobError("there is no key here, so there is no keyed state: use it in the methods that are called with a "
                       "record of a keyed stream, and in on_timer")

    def __repr__(self) -> str:
        return "NO_KEY"


# No value. It is a `Changed`, so that one look at an entry's type tells whether it is simply the value.
GONE: Any = Changed(None, None, -1)
GONE.now = GONE
NO_KEY: Any = _NoKey()
_ABSENT: Any = object()
_NO_ITEMS: dict[Any, Any] = {}      # never written to


class Cursor:
    """The key that the user's function is at. One for all states of an operator. None is a key like any other."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Any = NO_KEY


class Version:
    """A freeze that is being read. `done` is the only thing in a table that a reader, in another thread, writes."""

    __slots__ = ("done", "has_dead", "number", "parts")

    def __init__(self, number: int, parts: tuple[dict[Any, Any], ...], *, has_dead: bool) -> None:
        self.number = number
        self.parts = parts              # where its keys are
        self.has_dead = has_dead        # whether some of them were deleted and still there at the freeze
        self.done = False


class HeapTable:
    """The entries of one state. Its subclasses add the methods that the user's function calls.

    `steady`: there is no reader, and all entries are in `main`. The usual case, and the quick one.
    """

    __slots__ = ("added", "copied", "cursor", "default", "dirty", "has_dead", "in_place", "info", "keep", "main", "plain",
                 "steady", "version", "versions")

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        self.info = info
        self.cursor = cursor
        self.default = descriptor.default
        self.keep = descriptor.keeper()
        self.plain = descriptor.form.plain
        self.copied = descriptor.form.copied
        self.in_place = False           # whether values are lists or dicts that are changed in place
        self.main: dict[Any, Any] = {}
        self.steady = True
        self.version = 0                # of the last freeze
        self.versions: list[Version] = []                # those that have readers, oldest first
        self.added: tuple[dict[Any, Any], ...] = ()      # new keys go to the last one while there are readers
        self.dirty: list[Any] = []                       # keys whose entry may be a Changed
        self.has_dead = False                            # whether one of them may be GONE

    # What the subclasses' methods are made of.

    def seen(self, key: Any) -> Any:
        """What the table holds for the key, or GONE."""
        entry = self.main.get(key, GONE)
        return self.sought(key, entry) if type(entry) is Changed else entry

    def sought(self, key: Any, entry: Any) -> Any:
        """The same where main has no plain value, but `entry`."""
        if entry is GONE:
            for part in self.added:
                entry = part.get(key, GONE)
                if entry is not GONE:
                    break
        return entry.now if type(entry) is Changed else entry

    def write(self, key: Any, value: Any) -> None:
        """Sets the key's value, or GONE."""
        if self.steady:
            self.main[key] = value
        elif not self.versions:
            for part in self.added:
                part.pop(key, None)
            self.main[key] = value
        else:
            part = self.main if key in self.main else next((part for part in self.added if key in part), self.added[-1])
            if part is self.added[-1]:
                part[key] = value       # no reader knows of it
            else:
                self._change(part, key, value)

    def clear(self) -> None:
        key = self.cursor.key
        if self.steady:
            if key in self.main:
                del self.main[key]
        elif not self.versions:
            for part in (self.main, *self.added):
                part.pop(key, None)
        elif self.seen(key) is not GONE and self.added[-1].pop(key, _ABSENT) is _ABSENT:
            self.write(key, GONE)
            self.has_dead = True

    def owned(self, key: Any) -> bool:
        """Whether no reader can see the list or dict that the table holds for the key."""
        if not self.versions or key in self.added[-1]:
            return True
        entry = next(part[key] for part in (self.main, *self.added) if key in part)
        return type(entry) is Changed and entry.version == self.version

    def _change(self, part: dict[Any, Any], key: Any, value: Any) -> None:
        entry = part[key]
        if type(entry) is not Changed:
            part[key] = Changed(value, entry, self.version)
            self.dirty.append(key)
        elif entry.version == self.version:
            entry.now = value
        else:
            part[key] = Changed(value, entry.needed_since(self.versions[0].number), self.version)

    # Versions.

    def freeze(self) -> Version:
        """A new version. Whoever reads it says when it is `done`."""
        self.tidy(0)
        full = tuple(part for part in self.added if part)
        self.version += 1
        version = Version(self.version, (self.main, *full), has_dead=self.has_dead)
        self.versions.append(version)
        self.added = (*full, {})
        self.steady = False
        return version

    def tidy(self, budget: int) -> None:
        """Takes some of the steps that are left to do after a freeze. Each kind of step has the budget for itself."""
        if self.versions:
            self.versions = [version for version in self.versions if not version.done]
        if not self.versions:
            self._settle(budget)
            self._take_in(budget)
            self.steady = not self.added

    def load(self, keys: Iterable[Any], values: Iterable[Any]) -> None:
        assert self.steady
        self.main.update(zip(keys, values, strict=True))

    def _settle(self, budget: int) -> None:
        """Puts values in the place of what stands in for them."""
        for _ in range(min(budget, len(self.dirty))):
            key = self.dirty.pop()
            for part in (self.main, *self.added):
                entry = part.get(key)
                if type(entry) is Changed:
                    if entry.now is GONE:
                        del part[key]
                    else:
                        part[key] = entry.now
        if not self.dirty:
            self.has_dead = False

    def _take_in(self, budget: int) -> None:
        """Moves added entries to main. Several parts mean that it falls behind, so then it does more.

        They are taken out one by one: to drop a full dictionary would be a single long step.
        """
        budget *= len(self.added)
        while self.added:
            part, main = self.added[-1], self.main
            if not main:
                self.main, self.added = part, self.added[:-1]
                continue
            take = part.popitem
            steps = min(budget, len(part))
            for _ in range(steps):
                key, entry = take()
                main[key] = entry
            budget -= steps
            if part:
                return
            self.added = self.added[:-1]


class HeapValue(HeapTable):
    __slots__ = ()

    def get(self) -> Any:
        value = self.main.get(self.cursor.key, GONE)
        if type(value) is Changed:
            value = self.sought(self.cursor.key, value)
            if value is GONE:
                return self.default
        return value

    def set(self, value: Any) -> None:
        if type(value) is not self.plain:
            value = self.keep(value)
        if self.steady:
            self.main[self.cursor.key] = value
        else:
            self.write(self.cursor.key, value)


class HeapContainerValue(HeapValue):
    """A value that holds lists or dictionaries: what is handed out is a copy. What comes in is copied by `keep`."""

    __slots__ = ()

    def get(self) -> Any:
        value = self.seen(self.cursor.key)
        assert self.copied is not None
        return self.copied(self.default if value is GONE else value)


class HeapTimes(HeapValue):
    """A key's timers: tuples of times, which only timers.py sets."""

    __slots__ = ()

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        self.plain = tuple


class HeapReducing(HeapTable):
    __slots__ = ("function",)

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        assert descriptor.add is not None
        self.function = descriptor.add

    def get(self) -> Any:
        merged = self.seen(self.cursor.key)
        if merged is GONE:
            return None
        return merged if self.copied is None else self.copied(merged)

    def add(self, item: Any) -> None:
        key = self.cursor.key
        merged = self.main.get(key, GONE)
        if type(merged) is Changed:
            merged = self.sought(key, merged)
        if merged is not GONE:
            item = self.function(merged if self.copied is None else self.copied(merged), item)
        if type(item) is not self.plain:
            item = self.keep(item)
        if self.steady:
            self.main[key] = item
        else:
            self.write(key, item)


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
        self.in_place = self.copied is not None

    def get(self) -> Any:
        accumulator = self.seen(self.cursor.key)
        if accumulator is GONE:
            return None
        if self.copied is not None:
            accumulator = self.copied(accumulator)
        return accumulator if self.result is None else self.result(accumulator)

    def add(self, item: Any) -> None:
        key = self.cursor.key
        accumulator = self.seen(key)
        if accumulator is GONE:
            accumulator = self.keep(self.create())
        elif self.copied is not None and not (self.steady or self.owned(key)):
            accumulator = self.copied(accumulator)
        accumulator = self.function(accumulator, item if self.copied is None else detached(item))
        kind = type(accumulator)
        if kind is not self.plain and kind is not self.long:
            accumulator = self.keep(accumulator)
        self.write(key, accumulator)


class HeapList(HeapTable):
    __slots__ = ()

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        self.in_place = True

    def get(self) -> tuple[Any, ...]:
        items = self.seen(self.cursor.key)
        if items is GONE:
            return ()
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
        items: list[Any] = self.seen(key)
        if items is GONE:
            items = []
        elif self.steady or self.owned(key):
            return items
        else:
            items = list(items)
        self.write(key, items)
        return items


class HeapMap(HeapTable):
    __slots__ = ("keep_key", "plain_key")

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        self.in_place = True
        self.keep_key = descriptor.key_keeper()
        self.plain_key = descriptor.key_form.plain

    def get(self, item: Any, default: Any = None) -> Any:
        value = self._seen().get(item, _ABSENT)
        if value is _ABSENT:
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
        held = self.seen(self.cursor.key)
        seen: dict[Any, Any] = _NO_ITEMS if held is GONE else held
        return seen

    def _own(self) -> dict[Any, Any]:
        """The key's dictionary, to be changed in place."""
        key = self.cursor.key
        held: dict[Any, Any] = self.seen(key)
        if held is GONE:
            held = {}
        elif self.steady or self.owned(key):
            return held
        else:
            held = dict(held)
        self.write(key, held)
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
