"""Cells: what a backend provides for each keyed state. The shapes of state (shapes.py) and time to live (expiring.py) are
written once over them. So a backend implements the three kinds of cells here, and `CellBackend` (backend.py) around them.

- `Cells` hold one thing for each key: a value, an accumulator, a key's timers.
- `ListCells` hold a list for each key. A list grows without being read.
- `MapCells` hold a dictionary for each key. An item is read and written without the other items.

What is held has the form of values.py: `column_of` and `held_list` (columns.py) turn it into Arrow columns and back. If the
descriptor that the cells were made for says `as_tuples`, its structs are held as tuples (of their fields, in order).

What every backend guarantees:

- A key is as `key_list` (columns.py) makes it, and None is a key like any other. `NO_KEY` must be refused, which hashing it
  does, so that no state is touched by mistake.
- Callers don't change what they gave to cells, nor what cells hand out, except a thing in `Cells` that is `owned`. A caller
  reads a list or dictionary that cells handed out before its next call.
- An empty list or dictionary is the same as none, and a key that was deleted leaves nothing behind.

Not here: what is frozen, and how rows of a snapshot are loaded and written (backend.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from tidegate.errors import JobError


class _Sentinel(Enum):
    GONE = "GONE"
    ABSENT = "ABSENT"


class _NoKey:
    """The cursor's key when there is none. It can't be hashed, so no state is read or written by mistake."""

    def __hash__(self) -> int:
        raise JobError(
            "there is no key here, so there is no keyed state: use keyed state in the methods that are called with a "
            "record of a keyed stream, and in on_timer"
        )


GONE: Any = _Sentinel.GONE
ABSENT: Any = _Sentinel.ABSENT
NO_KEY: Any = _NoKey()


class Cursor:
    """The key that is being processed, shared by all states of an operator. None is a key like any other."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Any = NO_KEY


class AnyCells(ABC):
    """The common part of the three kinds. `in_memory`: reads are cheap, and there is memory for an index of all keys. Cells
    that are not `in_memory` implement `keys_from`."""

    in_memory: bool = False

    @abstractmethod
    def delete(self, key: Any) -> None:
        """Forget all that the key has."""

    def keys_from(self, place: bytes, count: int) -> tuple[Sequence[Any], bytes]:
        """Return up to `count` keys, at least one, from a place on, and the next place. b"" is both the beginning and the
        end. For sweeping: a key that was just written may be missing, and one that was just deleted may be there."""
        raise AssertionError("cells that are not in memory implement keys_from")


class Cells(AnyCells):
    """One thing for each key."""

    @abstractmethod
    def get(self, key: Any) -> Any:
        """Return the thing, or GONE."""

    @abstractmethod
    def set(self, key: Any, thing: Any) -> None: ...

    def write_back(self, key: Any, thing: Any) -> None:
        """Set the thing of a key that `get` was just called for."""
        self.set(key, thing)

    @abstractmethod
    def owned(self, key: Any) -> bool:
        """Return whether what `get` returned may be changed in place and written back, because no reader of a frozen version
        can see it."""


class ListCells(AnyCells):
    """A list for each key."""

    @abstractmethod
    def items(self, key: Any) -> Sequence[Any]: ...

    @abstractmethod
    def extend(self, key: Any, items: Sequence[Any]) -> None:
        """Append one item or more."""

    def replace(self, key: Any, items: Sequence[Any]) -> None:
        """Replace the items by one item or more."""
        self.delete(key)
        self.extend(key, items)


class MapCells(AnyCells):
    """A dictionary for each key. Items keep the order in which they were first put."""

    @abstractmethod
    def get(self, key: Any, item: Any) -> Any:
        """Return the item's value, or ABSENT. The item may be anything hashable, as in a dictionary."""

    @abstractmethod
    def put(self, key: Any, item: Any, value: Any) -> None: ...

    @abstractmethod
    def remove(self, key: Any, item: Any) -> None:
        """Remove the item, if it is there. It may be anything hashable."""

    @abstractmethod
    def entries(self, key: Any) -> Mapping[Any, Any]: ...

    def count(self, key: Any) -> int:
        return len(self.entries(key))
