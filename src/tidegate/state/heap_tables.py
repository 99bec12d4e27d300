"""The tables of the heap backend: one dictionary for each state, frozen in O(1).

Theory of operation. A table is one dictionary, `main`. A freeze opens a `Version`, which costs the same whatever the size
of the state: from then on a write first logs the key and what it held. The frozen state is what the dictionary holds now,
but for the keys in the log, which hold what was logged for them first. A background thread reads it in small pieces while
the loop goes on (the paper, section 4.2, copies the table array and then shares chains: this is our copy-on-write). It
takes no more than references to keys and values; as soon as it has them all, the loop stops logging, however long it
takes to write them to a store. So a read is one look-up, always; a write costs a little more only while there is a
reader; and there is little to tidy up afterwards.

The reader and the loop touch the same dictionary from two threads with one interpreter lock between them. Invariants:
- While there are readers, the keys of a part don't change: a new key goes to a new part (`added`), a deleted key stays
  and is `GONE`. So a part can be iterated while it is written to. `tidy` puts that right when there are no readers.
- What was is logged before it is overwritten, and the reader looks at the part first and at the log then. So it finds
  the value of the freeze, however the two threads take turns.
- A list or dict that a reader can see is never changed in place: a copy takes its place first. And none is held by the
  user as well: they are copied on their way in and out (values.py).
- A key is in one part only.

What grows with the state even so: a Python dictionary that fills up is copied to twice its size at once, which takes
some milliseconds from a hundred thousand entries on. That happens to a part when the state grows, and only then. The
list or dictionary of one key is copied whole when it is changed for the first time while there is a reader. Nothing here
makes an object for each entry that Python's garbage collector would have to walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tidegate.errors import JobError
from tidegate.state.descriptors import Descriptor
from tidegate.state.sections import StateInfo
from tidegate.state.values import NoSuchValue, detached

# What is left to do after a freeze is done in this many steps between batches, more or less. Few would be long ones.
BACKLOG_STEPS = 64


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
_ABSENT: Any = _Sentinel("ABSENT")
_NO_ITEMS: dict[Any, Any] = {}      # never written to


class Cursor:
    """The key that the user's function is at. One for all states of an operator. None is a key like any other."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Any = NO_KEY


class Version:
    """A freeze, and a log of what was changed since then, until the next freeze.

    `taken`: its reader has seen all entries; `released`: it needs the log no more. A reader, in another thread, writes
    nothing but `taken`.
    """

    __slots__ = ("changed_keys", "has_dead", "next", "old_values", "parts", "released", "taken")

    def __init__(self, parts: tuple[dict[Any, Any], ...], *, has_dead: bool) -> None:
        self.parts = parts              # where its keys are
        self.has_dead = has_dead        # whether some of them were deleted and still there at the freeze
        self.changed_keys: list[Any] = []
        self.old_values: list[Any] = []
        self.next: Version | None = None
        self.taken = False
        self.released = False

    def log_so_far(self) -> list[tuple[list[Any], list[Any], int]]:
        """Keys that were changed since the freeze, what they held before, and how many of both there are now; in pieces,
        oldest first. A key may be there again."""
        pieces = []
        version: Version | None = self
        while version is not None:
            pieces.append((version.changed_keys, version.old_values, len(version.old_values)))
            version = version.next
        return pieces


class HeapTable:
    """The entries of one state. Its subclasses add the methods that the user's function calls.

    `steady`: there is no reader, and all entries are in `main`. The usual case, and the quick one: a value of the Python
    type `quick` is simply set then.
    """

    __slots__ = ("added", "copied", "cursor", "dead", "default", "in_place", "info", "keep", "main", "own", "plain", "quick",
                 "read", "steady", "versions", "waste")

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
        self.quick = self.plain         # as long as the table is steady
        self.read = False               # whether there is a reader
        self.versions: list[Version] = []                # those that were not released yet, oldest first
        self.added: tuple[dict[Any, Any], ...] = ()      # new keys go to the last one while there are readers
        self.dead: list[Any] = []                        # keys deleted while there were readers
        self.own: set[Any] = set()                       # keys whose list or dict no reader can see, while there are any
        self.waste: list[list[Any]] = []                 # logs that nobody needs any more

    # What the subclasses' methods are made of.

    def seen(self, key: Any) -> Any:
        """What the table holds for the key, or GONE."""
        value = self.main.get(key, GONE)
        return self.sought(key) if value is GONE else value

    def sought(self, key: Any) -> Any:
        """The same for a key that main doesn't hold."""
        for part in self.added:
            value = part.get(key, GONE)
            if value is not GONE:
                return value
        return GONE

    def write(self, key: Any, value: Any) -> None:
        """Sets the key's value, or GONE."""
        if self.steady:
            self.main[key] = value
        elif self.read:
            part = self.main
            old = part.get(key, _ABSENT)
            if old is _ABSENT:
                part = next((part for part in self.added if key in part), self.added[-1])
                old = part.get(key, _ABSENT)
            if part is not self.added[-1]:      # or no reader knows of it
                newest = self.versions[-1]
                newest.changed_keys.append(key)
                newest.old_values.append(old)
            part[key] = value
            if self.in_place:
                self.own.add(key)
        else:
            for part in self.added:
                part.pop(key, None)
            self.main[key] = value

    def clear(self) -> None:
        key = self.cursor.key
        if self.steady:
            if key in self.main:
                del self.main[key]
        elif not self.read:
            for part in (self.main, *self.added):
                part.pop(key, None)
        elif self.seen(key) is not GONE and self.added[-1].pop(key, _ABSENT) is _ABSENT:
            self.write(key, GONE)
            self.dead.append(key)

    def owned(self, key: Any) -> bool:
        """Whether no reader can see the list or dict that the table holds for the key."""
        return not self.read or key in self.own

    # Versions.

    def freeze(self) -> Version:
        """A new version. It is to be `taken` or `released`."""
        self.tidy(0)
        full = tuple(part for part in self.added if part)
        version = Version((self.main, *full), has_dead=bool(self.dead))
        if self.versions:
            self.versions[-1].next = version
        self.versions.append(version)
        self.added = (*full, {})
        self.own = set()
        self.read, self.steady, self.quick = True, False, NoSuchValue
        return version

    def tidy(self, budget: int) -> None:
        """Takes some of the steps that are left to do after a freeze: `budget`, and more the more there are left."""
        versions = self.versions
        while versions and versions[0].released:
            oldest = versions.pop(0)
            self.waste += [log for log in (oldest.changed_keys, oldest.old_values) if log]
        self.read = not all(version.taken or version.released for version in versions)
        if not self.read and not self.steady:
            self.own = set()
            self._bury(budget)
            self._take_in(budget)
            if not self.dead and not self.added:
                self.steady, self.quick = True, self.plain
        self._throw_away(budget)

    def load(self, keys: Iterable[Any], values: Iterable[Any]) -> None:
        assert self.steady
        self.main.update(zip(keys, values, strict=True))

    # Dictionaries and lists are emptied bit by bit: to drop a full one would be a single long step.

    def _bury(self, budget: int) -> None:
        """Takes deleted keys out."""
        for _ in range(min(budget + len(self.dead) // BACKLOG_STEPS, len(self.dead))):
            key = self.dead.pop()
            for part in (self.main, *self.added):
                if part.get(key, _ABSENT) is GONE:
                    del part[key]

    def _take_in(self, budget: int) -> None:
        """Moves added entries to main."""
        budget += sum(map(len, self.added)) // BACKLOG_STEPS
        while self.added and not self.dead:
            part, main = self.added[-1], self.main
            if not main:
                self.main, self.added = part, self.added[:-1]
                continue
            take = part.popitem
            steps = min(budget, len(part))
            for _ in range(steps):
                key, value = take()
                main[key] = value
            budget -= steps
            if part:
                return
            self.added = self.added[:-1]

    def _throw_away(self, budget: int) -> None:
        """Drops logs."""
        budget += sum(map(len, self.waste)) // BACKLOG_STEPS
        while self.waste and budget > 0:
            log = self.waste[-1]
            steps = min(budget, len(log))
            del log[len(log) - steps:]
            budget -= steps
            if not log:
                self.waste.pop()


class HeapValue(HeapTable):
    __slots__ = ()

    def get(self) -> Any:
        value = self.main.get(self.cursor.key, GONE)
        if value is GONE:
            value = self.sought(self.cursor.key)
            if value is GONE:
                return self.default
        return value

    def set(self, value: Any) -> None:
        if type(value) is self.quick:
            self.main[self.cursor.key] = value
        else:
            self.write(self.cursor.key, value if type(value) is self.plain else self.keep(value))


class HeapContainerValue(HeapValue):
    """A value that holds lists or dictionaries: what is handed out is a copy. What comes in is copied by `keep`."""

    __slots__ = ()

    def get(self) -> Any:
        value = self.seen(self.cursor.key)
        assert self.copied is not None
        return self.copied(self.default if value is GONE else value)


class HeapTimes(HeapValue):
    """A key's timers: lists of times, which only timers.py sets, and never changes in place."""

    __slots__ = ()

    def __init__(self, descriptor: Descriptor, info: StateInfo, cursor: Cursor) -> None:
        super().__init__(descriptor, info, cursor)
        self.plain = self.quick = list


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
        if merged is GONE:
            merged = self.sought(key)
        if merged is not GONE:
            item = self.function(merged if self.copied is None else self.copied(merged), item)
        if type(item) is self.quick:
            self.main[key] = item
        else:
            self.write(key, item if type(item) is self.plain else self.keep(item))


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
