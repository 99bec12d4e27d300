"""The tables of the heap backend: dictionaries that are frozen in O(1).

Theory of operation. What was set since the last freeze is in the dictionary `fresh`, with GONE for keys that were deleted
since. A freeze hands `fresh` over as a `Layer` and begins a new dictionary, in a time that doesn't depend on the size of the
state. So what is frozen is exactly what changed (the paper, section 4.2, copies the table array and shares chains, and calls
incremental snapshots of it conceivable). The loop never writes to a layer before it was read, so a background thread reads
it without a lock, while the loop continues.

There are two kinds of tables:
- `LayeredTable` is for values that are replaced whole. Each is in one place only. A read looks into `fresh` first, then into
  the layers, then into `main`; a write goes to `fresh`. A layer that was read is moved into `main` in small steps.
- `DoubledTable` is for lists, maps and accumulators, which change in place, and for state with a ttl, which is read whenever
  it is written. They are always in `main`, and if they have changed in `fresh` as well: the same object. A key that is GONE
  in `fresh` is not in `main`.

If nearly everything changes between two freezes, a new `fresh` would soon hold all the keys of the old one, and to insert
them one by one costs more than to copy the dictionary. So such a `fresh`, if it isn't large, is *reused*: the layer is a
copy of it, and the next layer holds all of it again, changed or not. From time to time it isn't reused, to measure how much
changes.

Invariants:
- A key that is GONE in `fresh` or a layer is in something below it, or was in `fresh` when that was reused.
- A list or dict that a layer holds is never changed in place while a reader may read that layer: it is replaced by a copy
  first. The user holds none of them: they are copied on their way in and out (values.py).
- Every entry of `main` is in some layer or in `fresh`, except those that were loaded as `known`.

What grows with the state: a Python dictionary that fills up is copied to twice its size at once, which takes some
milliseconds from a hundred thousand entries on. That happens to `main` when the state grows, and to `fresh` when as many
keys change between two freezes. The list or dictionary of one key is copied whole when it is changed for the first time
after a freeze, until the layer was read. Keys that are added and deleted after `fresh` was reused stay in it as GONE until
the next freeze.

The cells over them are in heap_cells.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat, starmap
from typing import Any

from tidegate.state.cells import ABSENT, GONE, AnyCells
from tidegate.state.sections import StateInfo

# A layer is moved into main in about this many steps.
BACKLOG_STEPS = 1024
# `fresh` is reused if its size differs by no more than this share from that of `main`, if it has no more than this number of
# entries (a copy of them takes about a millisecond), and if it was reused no more often than this in a row.
MAX_MISSING_SHARE = 0.125
MAX_REUSED_ENTRIES = 1 << 16
MAX_REUSES = 15


@dataclass(slots=True, eq=False)
class Layer:
    """What changed between two freezes.

    Its reader, in another thread, takes the entries out and then sets `read`; the loop checks `read` first.
    """

    changes: dict[Any, Any]
    may_hold_gone: bool
    is_private: bool  # belongs to the reader: the table doesn't need it
    entry_count: int | None = None  # how many entries the table had at the freeze
    below: dict[Any, Any] | None = None  # instead of `entry_count`: what is below the layer, if that is one dictionary
    missing: dict[Any, Any] | None = None  # what only `below` holds, if the reader found that it is little
    read: bool = False


class HeapTable(AnyCells):
    """The entries of one state. There are two kinds, the subclasses below."""

    in_memory = True

    def __init__(self, info: StateInfo, *, as_tuples: bool = False) -> None:
        self.info = info
        self.as_tuples = as_tuples
        self.main: dict[Any, Any] = {}
        self.fresh: dict[Any, Any] = {}
        self.may_hold_gone = False  # whether something was deleted since the last freeze

    @abstractmethod
    def held(self) -> dict[Any, Any]:
        """Return all entries. The caller doesn't change them."""

    @abstractmethod
    def freeze(self) -> Layer: ...

    @abstractmethod
    def tidy(self, budget: int) -> None:
        """Do a step of the work on layers that were read. `budget` is in entries."""

    @abstractmethod
    def load(self, keys: Iterable[Any], values: Iterable[Any], *, known: bool) -> None: ...


class DoubledTable(HeapTable):
    """Entries that change in place: in `main`, and in `fresh` as well if they have changed."""

    def __init__(self, info: StateInfo, *, as_tuples: bool = False) -> None:
        super().__init__(info, as_tuples=as_tuples)
        self.alone = True  # whether no layer or snapshot below `fresh` can hold anything
        self.unread: list[Layer] = []
        self.shared = False  # whether a thread may be reading what isn't in `fresh`

    def held(self) -> dict[Any, Any]:
        return self.main

    def delete(self, key: Any) -> None:
        if key in self.main:
            del self.main[key]
            if self.alone:
                del self.fresh[key]
            else:
                self.fresh[key] = GONE
                self.may_hold_gone = True

    def owned(self, key: Any) -> bool:
        """Return whether no reader can see what the table holds for the key."""
        return not self.shared or key in self.fresh

    def freeze(self) -> Layer:
        layer = Layer(self.fresh, may_hold_gone=self.may_hold_gone, is_private=True, entry_count=len(self.main))
        self.fresh, self.may_hold_gone = {}, False
        self.alone = False
        self.unread.append(layer)
        self.shared = True
        return layer

    def tidy(self, budget: int) -> None:
        """Forget layers that were read."""
        if self.shared:
            self.unread = [layer for layer in self.unread if not layer.read]
            self.shared = bool(self.unread)
        if not self.main:
            self.main = {}  # an emptied dictionary keeps its memory
            if self.alone:
                self.fresh = {}

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

    def __init__(self, info: StateInfo, *, as_tuples: bool = False) -> None:
        super().__init__(info, as_tuples=as_tuples)
        self.layers: list[Layer] = []  # not moved into main yet, oldest first
        self.reuse_count = 0  # how many freezes `fresh` has lived through

    def below(self, key: Any) -> Any:
        """Return what is below `fresh` for the key, or GONE."""
        for layer in reversed(self.layers):
            value = layer.changes.get(key, ABSENT)
            if value is not ABSENT:
                return value
        return self.main.get(key, GONE)

    def held(self) -> dict[Any, Any]:
        entries = dict(self.main)
        for changes in (*(layer.changes for layer in self.layers), self.fresh):
            entries.update(changes)
        return {key: value for key, value in entries.items() if value is not GONE}

    def delete(self, key: Any) -> None:
        if self.below(key) is not GONE or (self.reuse_count and key in self.fresh):
            self.fresh[key] = GONE
            self.may_hold_gone = True
        elif key in self.fresh:
            del self.fresh[key]

    def freeze(self) -> Layer:
        layer = Layer(
            self.fresh,
            may_hold_gone=self.may_hold_gone,
            is_private=self._is_reusable(),
            below=None if self.layers else self.main,
        )
        if layer.is_private:
            layer.changes = self.fresh.copy()
            self.reuse_count += 1
        else:
            self.fresh, self.reuse_count = {}, 0
        self.may_hold_gone = False
        self.layers.append(layer)
        return layer

    def _is_reusable(self) -> bool:
        if self.may_hold_gone or len(self.fresh) > MAX_REUSED_ENTRIES:
            return False
        if self.reuse_count:
            return self.reuse_count < MAX_REUSES
        # If there is much less in `main`, most of `fresh` is new, and how much of it will change again isn't known.
        return bool(self.main) and nearly_covers(self.fresh, self.main) and nearly_covers(self.main, self.fresh)

    def tidy(self, budget: int) -> None:
        """Move entries of layers that were read into `main`: `budget` entries, and a share of the rest."""
        while self.layers and self.layers[0].read and budget > 0:
            layer = self.layers[0]
            if not layer.is_private:
                budget = self._move(layer, budget)
                if layer.changes:
                    return
            elif layer.missing is not None and len(self.layers) == 1:
                # After this all of `main` is in the `fresh` that was reused.
                for key, value in layer.missing.items():
                    self.fresh.setdefault(key, value)
                self.main = {}
            del self.layers[0]

    def _move(self, layer: Layer, budget: int) -> int:
        """Move entries of a layer into `main`; return what is left of the budget."""
        changes = layer.changes
        if not self.main and not layer.may_hold_gone:
            self.main, layer.changes = changes, {}
            return budget
        budget += len(changes) // BACKLOG_STEPS
        count = min(budget, len(changes))
        if layer.may_hold_gone:
            for _ in range(count):
                key, value = changes.popitem()
                if value is GONE:
                    self.main.pop(key, None)
                else:
                    self.main[key] = value
        else:
            self.main.update(starmap(changes.popitem, repeat((), count)))
        return budget - count

    def load(self, keys: Iterable[Any], values: Iterable[Any], *, known: bool) -> None:
        (self.main if known else self.fresh).update(zip(keys, values, strict=True))


def nearly_covers(changes: dict[Any, Any], below: dict[Any, Any]) -> bool:
    """Return whether `changes` could hold nearly all keys of `below`, by their sizes."""
    return len(changes) >= (1 - MAX_MISSING_SHARE) * len(below)
