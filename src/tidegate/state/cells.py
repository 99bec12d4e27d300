"""Cells: what a backend gives for each keyed state. The shapes of state (shapes.py) and time to live (expiring.py) are
written once over them, so a backend implements the three kinds of cells here, and `CellBackend` (backend.py) around them.

- `Cells` hold one thing for each key: a value, an accumulator, a key's timers.
- `ListCells` hold a list for each key. A list grows without being read.
- `MapCells` hold a dictionary for each key. An item is read and written without the others.

What is held has the form of values.py: `column_of` and `held_list` (columns.py) turn it into Arrow columns and back. If the
descriptor that the cells were made for says `as_tuples`, its structs are held as tuples (of their fields, in order).

What every backend guarantees:

- A key is as `key_list` (columns.py) makes it, and None is a key like any other. `NO_KEY` must be refused, which hashing it
  does, so that no state is touched by mistake.
- What is given to cells is theirs: nobody changes it afterwards. What they hand out belongs to them: nobody changes it,
  except a thing in `Cells` that is `owned`. A list or dictionary that they hand out is looked at before the next call.
- An empty list or dictionary is the same as none, and a key that was deleted leaves nothing behind.

Not here: what is frozen, and how rows of a snapshot get in and out (backend.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.errors import JobError


class _Sentinel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


class _NoKey:
    """Where the cursor is when there is no key. Nothing can look it up, so that no state is touched by mistake."""

    def __hash__(self) -> int:
        raise JobError(
            "there is no key here, so there is no keyed state: use it in the methods that are called with a "
            "record of a keyed stream, and in on_timer"
        )

    def __repr__(self) -> str:
        return "NO_KEY"


GONE: Any = _Sentinel("GONE")
ABSENT: Any = _Sentinel("ABSENT")
NO_KEY: Any = _NoKey()


class Cursor:
    """The key that the user's function is at. One for all states of an operator. None is a key like any other."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Any = NO_KEY


class AnyCells(ABC):
    """What the three kinds have in common. `in_memory`: to read costs next to nothing, and there is memory for an index of
    all keys. Cells for which it is False implement `keys_from`."""

    __slots__ = ()
    in_memory: bool = False

    @abstractmethod
    def delete(self, key: Any) -> None:
        """Forget all that the key has."""

    def keys_from(self, place: bytes, count: int) -> tuple[Sequence[Any], bytes]:
        """Return up to `count` keys (one at least) from a place on, and the place behind them. b"" is the beginning, and the
        end. It is for sweeping: a key that was just written may be missing, and one that was just deleted may be there."""
        raise AssertionError("cells that are not in memory have to tell their keys")


class Cells(AnyCells):
    """One thing for each key."""

    __slots__ = ()

    @abstractmethod
    def get(self, key: Any) -> Any:
        """Return the thing, or GONE."""

    @abstractmethod
    def set(self, key: Any, thing: Any) -> None: ...

    def write_back(self, key: Any, thing: Any) -> None:
        """As `set`, for a key that `get` was just asked for."""
        self.set(key, thing)

    @abstractmethod
    def owned(self, key: Any) -> bool:
        """Return whether what `get` returned may be changed in place, if it is written back: no reader of a frozen version
        can see it."""


class ListCells(AnyCells):
    """A list for each key."""

    __slots__ = ()

    @abstractmethod
    def items(self, key: Any) -> Sequence[Any]: ...

    @abstractmethod
    def extend(self, key: Any, items: Sequence[Any]) -> None:
        """Append one item or more."""

    def replace(self, key: Any, items: Sequence[Any]) -> None:
        """One item or more instead of those that are there."""
        self.delete(key)
        self.extend(key, items)


class MapCells(AnyCells):
    """A dictionary for each key. Items keep the order in which they came; one that is put again keeps its place."""

    __slots__ = ()

    @abstractmethod
    def get(self, key: Any, item: Any) -> Any:
        """Return the item's value, or ABSENT. As in a dictionary, the item may be anything hashable."""

    @abstractmethod
    def put(self, key: Any, item: Any, value: Any) -> None: ...

    @abstractmethod
    def remove(self, key: Any, item: Any) -> None:
        """Remove the item, if it is there. It may be anything hashable."""

    @abstractmethod
    def entries(self, key: Any) -> Mapping[Any, Any]: ...

    def count(self, key: Any) -> int:
        return len(self.entries(key))
