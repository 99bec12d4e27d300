"""Aggregates that keep every value: collect_list, collect_set, count_distinct.

What a row has collected is a view of a buffer that only grows. To add values, a new view takes the place of the old one; a
frozen version keeps the old view, which still ends where it ended. So adding costs as much as what is added, and a freeze
nothing. Only the view that ends where its buffer ends may grow in place: of two views of one buffer, such as after a copy of
a row, one finds its place taken and copies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.dataflow.aggregates.base import Accumulator, Aggregate, IntArray, Vectors, check_input, wrong_type
from tidegate.dataflow.aggregates.numpy_columns import (
    distinct_of,
    dtype_of,
    grouped,
    is_set,
    is_time,
    objects_of,
    only,
    order_of,
    without_nulls,
)
from tidegate.state.columns import column_of as held_column
from tidegate.state.key_index import KeyIndex
from tidegate.types import to_list

_FIRST_ROOM = 4
MANY = 512  # from as many values of a key at once, an index takes less time than a set to find the new ones


class _Buffer:
    """Room for values, the first `used` of which are taken. Once `new_among` was called they are in a set as well, or in an
    index if many came at once."""

    __slots__ = ("index", "members", "room", "used")

    def __init__(self, room: npt.NDArray[Any]) -> None:
        self.room = room
        self.used = 0
        self.members: set[Hashable] | None = None
        self.index: KeyIndex | None = None

    def new_among(self, values: npt.NDArray[Any], identities: Sequence[Hashable]) -> npt.NDArray[Any]:
        """Return the values that are not there, each once. The caller adds them."""
        if self.index is None and len(values) >= MANY and values.dtype.kind in "if":
            self.index, self.members = KeyIndex(pa.from_numpy_dtype(values.dtype)), None
            self.index.rows_of([pa.array(self.room[: self.used])])
        if self.index is not None:
            known = self.index.top
            rows, _ = self.index.rows_of([pa.array(values)])
            unknown = np.flatnonzero(rows >= known)
            _, first = distinct_of(rows[unknown])
            return values[unknown[first]]
        members = self.members
        if members is None:
            members = self.members = set(identities_of(self.room[: self.used]))
        new = []
        for place, identity in enumerate(identities):
            if identity not in members:
                members.add(identity)
                new.append(place)
        return values if len(new) == len(values) else values[new]


class Collected(np.ndarray[Any, Any]):
    """Values that a row has collected: the beginning of a buffer. They never change, so a copy is not needed."""

    buffer: _Buffer

    def __copy__(self) -> Self:
        return self

    @classmethod
    def of(cls, values: Any, kind: np.dtype[Any]) -> Self:
        """Return collected values: these themselves, or a copy if they are a plain list of a snapshot."""
        return values if isinstance(values, cls) else cls.made(_array(values, kind))

    @classmethod
    def made(cls, values: npt.NDArray[Any]) -> Self:
        buffer = _Buffer(np.empty(max(_FIRST_ROOM, len(values)), values.dtype))
        buffer.room[: len(values)] = values
        return cls._view(buffer, len(values))

    @classmethod
    def _view(cls, buffer: _Buffer, end: int) -> Self:
        buffer.used = end
        view = np.ndarray.__new__(cls, end, buffer.room.dtype, buffer.room)  # in half of the time of `room[:end].view(cls)`
        view.buffer = buffer
        return view

    def owned(self) -> Self:
        """Return a view that may grow in place."""
        return self if self.buffer.used == len(self) else type(self).made(np.asarray(self))

    def extended(self, values: npt.NDArray[Any]) -> Self:
        """Return these values and further ones."""
        one = self.owned()
        buffer, end = one.buffer, len(one) + len(values)
        if end > len(buffer.room):
            room = np.empty(2 * end, buffer.room.dtype)
            room[: len(one)] = buffer.room[: len(one)]
            grown = _Buffer(room)
            grown.members, grown.index = buffer.members, buffer.index
            buffer.members = buffer.index = None
            buffer = grown
        buffer.room[len(one) : end] = values
        return self._view(buffer, end)

    def united(self, values: npt.NDArray[Any], identities: Sequence[Hashable]) -> Self:
        """Return these values, which are distinct, and those of the others that are not among them. `identities` are those
        of the others."""
        one = self.owned()
        new = one.buffer.new_among(values, identities)
        return one.extended(new) if len(new) else self


class _Collecting(Aggregate):
    """What these aggregates have in common: a list of all values that are not null, or of the distinct ones."""

    distinct = False
    name = ""

    def __init__(self, text: str) -> None:
        super().__init__(check_input(self.name, text))

    @property
    def function(self) -> str:
        return self.name

    @property
    def accumulators(self) -> Sequence[Accumulator]:
        return (Accumulator(self.name, self._list_type),)

    @property
    def result_type(self) -> pa.DataType:
        if self.distinct and _holds_map(self.types[0]):
            raise wrong_type(self, "values that can be compared", ", and maps can't; take map_entries of it")
        return self._list_type

    @property
    def _list_type(self) -> pa.DataType:
        return pa.list_(self.types[0])

    def add(self, vectors: Vectors, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        rows, (column,) = without_nulls(rows, *inputs)
        groups = grouped(rows)
        values = _collectable(column)[groups.order()]
        ends = np.cumsum(np.bincount(groups.of, minlength=len(groups.rows))).tolist()
        self._extend(vectors, groups.rows, values, ends)

    def merge(self, vectors: Vectors, rows: IntArray, other: Vectors, other_rows: IntArray) -> None:
        source = only(other)
        there = is_set(source, other_rows)
        kind = self.dtype
        pieces = [_array(each, kind) for each in source.values[other_rows[there]]]
        if pieces:
            self._extend(vectors, rows[there], np.concatenate(pieces), np.cumsum(list(map(len, pieces))).tolist())

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        empty = np.empty(0, self.dtype)
        found = only(vectors).values[rows]
        return held_column([empty if each is None else np.asarray(each) for each in found], self._list_type)

    @property
    def dtype(self) -> np.dtype[Any]:
        """What collected values are in numpy."""
        return _collected_dtype(self.types[0])

    def _extend(self, vectors: Vectors, rows: IntArray, values: npt.NDArray[Any], ends: Sequence[int]) -> None:
        """Add values to what these rows have collected. Those of a row end at its place in `ends`, and begin at the end
        before that."""
        held = only(vectors).values
        kind = self.dtype
        nothing = np.empty(0, kind)
        identities = identities_of(values) if self.distinct else []
        start = 0
        for row, end in zip(rows.tolist(), ends, strict=True):
            found = held[row]
            before = found if type(found) is Collected else Collected.of(nothing if found is None else found, kind)
            piece = values[start:end]
            held[row] = before.united(piece, identities[start:end]) if self.distinct else before.extended(piece)
            start = end


class CollectList(_Collecting):
    """All values that are not null, in the order in which they arrived."""

    name = "collect_list"


class CollectSet(_Collecting):
    """All distinct values that are not null."""

    name = "collect_set"
    distinct = True


class CountDistinct(_Collecting):
    """The number of distinct values that are not null: exact, and so as large as these values."""

    name = "count_distinct"
    distinct = True

    @property
    def result_type(self) -> pa.DataType:
        _ = super().result_type
        return pa.int64()

    def result(self, vectors: Vectors, rows: IntArray) -> pa.Array:
        return pa.array([0 if each is None else len(each) for each in only(vectors).values[rows]], pa.int64())


def _collected_dtype(kind: pa.DataType) -> np.dtype[Any]:
    """Times are collected as Python's, since a snapshot is made of these."""
    return np.dtype(object) if is_time(kind) else dtype_of(kind)


def _collectable(column: pa.Array) -> npt.NDArray[Any]:
    if _collected_dtype(column.type).kind == "O":
        return objects_of(to_list(column))
    found: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return found


def _array(values: Any, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray):
        return np.asarray(values).astype(kind, copy=False)
    return objects_of(values) if kind.kind == "O" else np.array(values, kind)


def identities_of(values: npt.NDArray[Any]) -> list[Hashable]:
    """Return what is equal for equal values. NaN equals NaN, and -0.0 equals 0.0, as in Spark."""
    if values.dtype.kind == "f":
        found: list[Hashable] = order_of(values).tolist()
        return found
    return list(map(_identity, values)) if values.dtype.kind == "O" else values.tolist()


def _identity(value: Any) -> Hashable:
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(map(_identity, value))
    if isinstance(value, dict):
        return tuple(map(_identity, value.values()))
    if isinstance(value, float):
        return "NaN" if value != value else value + 0.0
    found: Hashable = value
    return found


def _holds_map(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) or any(_holds_map(kind.field(index).type) for index in range(kind.num_fields))
