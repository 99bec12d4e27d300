"""The methods of a declared state within a function, the same on every backend.

    class CountBids(tg.KeyedProcess):
        count = tg.value("long", default=0)         # a ValueState[int]

`self.count` is the state of the current key. Values are checked against the declared type when they are given to a state.
To change an object that a state returned doesn't change the state.

These are protocols. The classes are in shapes.py, operator_state.py and column_handles.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.state.batch_keys import Keys

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class ValueState(Protocol[T]):
    """One value for the present key, declared by `tg.value`."""

    def get(self) -> T:
        """Return the value, or the declared default (None without one) if none was set."""

    def set(self, value: T) -> None:
        """Replace the value."""

    def clear(self) -> None:
        """Forget the value."""


class ListState(Protocol[T]):
    """A list for the present key, declared by `tg.list`."""

    def get(self) -> tuple[T, ...]:
        """Return the items in their order; an empty tuple if there are none."""

    def add(self, item: T) -> None:
        """Append an item, without reading the list."""

    def extend(self, items: Iterable[T]) -> None:
        """Append several items."""

    def replace(self, items: Iterable[T]) -> None:
        """Replace the whole list."""

    def clear(self) -> None:
        """Forget the list."""


class MapState(Protocol[K, V]):
    """A dictionary for the present key, declared by `tg.map`."""

    @overload
    def get(self, item: K) -> V | None: ...
    @overload
    def get(self, item: K, default: D) -> V | D: ...
    def get(self, item: K, default: D | None = None) -> V | D | None:
        """Return the entry's value, or `default` if there is no entry."""

    def put(self, item: K, value: V) -> None:
        """Add an entry or replace its value."""

    def remove(self, item: K) -> None:
        """Remove an entry, if it is there."""

    def items(self) -> tuple[tuple[K, V], ...]:
        """Return all entries."""

    def keys(self) -> tuple[K, ...]:
        """Return the keys of all entries."""

    def values(self) -> tuple[V, ...]:
        """Return the values of all entries."""

    def clear(self) -> None:
        """Forget all entries."""

    def __contains__(self, item: object) -> bool: ...
    def __iter__(self) -> Iterator[K]: ...
    def __len__(self) -> int: ...


class AggregatingState(Protocol[In_contra, Out_co]):
    """An accumulator for the present key, declared by `tg.aggregating`."""

    def get(self) -> Out_co | None:
        """Return `result(accumulator)`, or None before the first item."""

    def add(self, item: In_contra) -> None:
        """Add an item to the accumulator."""

    def clear(self) -> None:
        """Forget the accumulator."""


class ReducingState(AggregatingState[T, T], Protocol[T]):
    """All items added for the present key, merged by a function, declared by `tg.reducing`. `get` returns the merged
    item."""


class ColumnsState(Protocol):
    """Columns of state for each key, read and written for many keys at once, declared by `tg.columns`. The keys are those of
    the present batch: `ctx.keys`, or a part of them such as `ctx.keys.where(mask)`."""

    def get_many(self, keys: Keys) -> pa.RecordBatch:
        """Return the columns, with a row for each key in order. A key without state has the declared defaults, or nulls."""

    def contains_many(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return for each key whether it has state."""

    def set_many(self, keys: Keys, columns: Mapping[str, Any] | pa.RecordBatch | None = None, /, **named: Any) -> None:
        """Set columns, `counts.set_many(keys, n=n, total=total)`: each is an Arrow or numpy array with a value for each key,
        or one value for all keys. Columns that are not given stay as they are, and in new keys have their defaults."""

    def delete_many(self, keys: Keys) -> None:
        """Delete the state of these keys, if they have any."""


# The types of keyed states' declarations for a type checker.
KeyedState: TypeAlias = (
    ValueState[Any] | ListState[Any] | MapState[Any, Any] | ReducingState[Any] | AggregatingState[Any, Any]
)


class OperatorListState(ListState[T], Protocol[T]):
    """A list that belongs to a subtask, not to a key, declared by `tg.operator_list`."""

    def __iter__(self) -> Iterator[T]: ...
    def __len__(self) -> int: ...


class BroadcastState(MapState[K, V], Protocol[K, V]):
    """A dictionary that is the same on every subtask, declared by `tg.broadcast_map`.

    Only `process_broadcast` may write it.
    """
