"""The columns of stored records by row: what never changes after a record was added.

A column comes back as it was given, bit for bit: numbers, decimals and times are kept in numpy, text and bytes in buffers
of Arrow's layout, structs as their fields. Only lists and maps are Python objects.

Arrays that grow are replaced as a whole, and a row is put once until it is freed, so another thread may take rows that are
not freed meanwhile. `put` and `free` are the loop's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.state.key_store import Array, IntArray, KeyStore, NumberStore, TextStore, grown
from tidegate.types import from_list, to_list

_TEXTS = (pa.string().id, pa.binary().id, pa.large_string().id, pa.large_binary().id)


class RecordStore:
    """The columns of the records of one table."""

    def __init__(self, columns: Sequence[pa.Field]) -> None:
        self._stores: dict[str, KeyStore] = {column.name: _store_of(column.type) for column in columns}

    def put(self, rows: IntArray, columns: Sequence[pa.Array]) -> None:
        """Keep columns of records, in the order of the declared ones, in these rows."""
        if not len(rows):
            return
        places = np.arange(len(rows))
        for store, column in zip(self._stores.values(), columns, strict=True):
            store.put(rows, store.given(column), places)

    def take(self, name: str, rows: IntArray) -> pa.Array:
        return self._stores[name].take(rows)

    def free(self, rows: IntArray) -> None:
        for store in self._stores.values():
            store.free(rows)

    def renumber(self, rows: IntArray) -> None:
        """Let row i have what `rows[i]` has now."""
        self._stores = {name: store.renumbered(rows) for name, store in self._stores.items()}

    @property
    def names(self) -> Sequence[str]:
        return list(self._stores)

    @property
    def nbytes(self) -> int:
        """The memory of the columns, without Python objects."""
        return sum(store.nbytes for store in self._stores.values())


def _store_of(kind: pa.DataType) -> KeyStore:
    if pa.types.is_dictionary(kind):
        return _store_of(kind.value_type)
    if kind.id in _TEXTS:
        return TextStore(kind)
    if pa.types.is_struct(kind):
        return _StructStore(kind)
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        return _ObjectStore(kind)
    return _ExactStore(kind)


class _ExactStore(NumberStore):
    """Values of a fixed width with all their bits: of a key, -0.0 is 0.0, and there is one NaN."""

    def stored(self, column: pa.Array) -> Array:
        kind = self.kind
        if not pa.types.is_floating(kind) or not len(column):
            return super().stored(column)
        width = kind.bit_width // 8
        return np.frombuffer(column.buffers()[1], self.values.dtype, len(column), column.offset * width)

    def renumbered(self, rows: IntArray) -> NumberStore:
        other = _ExactStore(self.kind)
        other.values = self.values[rows]
        other.valid = None if self.valid is None else self.valid[rows]
        return other


class _StructStore(KeyStore):
    """Structs: their fields, and which structs are not null."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self._there = _ExactStore(pa.bool_())
        self._fields = [_store_of(field.type) for field in kind]

    def given(self, column: pa.Array) -> tuple[Any, list[Any]]:
        there = self._there.given(column.is_valid())
        return there, [store.given(field) for store, field in zip(self._fields, column.flatten(), strict=True)]

    def put(self, rows: IntArray, given: tuple[Any, list[Any]], places: IntArray) -> None:
        there, fields = given
        self._there.put(rows, there, places)
        for store, field in zip(self._fields, fields, strict=True):
            store.put(rows, field, places)

    def equal(self, rows: IntArray, given: Any, places: IntArray) -> Array:
        raise AssertionError("records are not compared in their store")

    def take(self, rows: IntArray) -> pa.Array:
        there = self._there.take(rows)
        if not len(self._fields):
            return pa.array([{} if each else None for each in there.to_pylist()], self.kind)
        fields = [store.take(rows) for store in self._fields]
        mask = pa.array(~np.asarray(there)) if len(rows) and not np.asarray(there).all() else None
        return pa.StructArray.from_arrays(fields, fields=list(self.kind), mask=mask)

    def free(self, rows: IntArray) -> None:
        for store in (self._there, *self._fields):
            store.free(rows)

    def renumbered(self, rows: IntArray) -> _StructStore:
        other = _StructStore(self.kind)
        there = self._there.renumbered(rows)
        assert isinstance(there, _ExactStore)
        other._there, other._fields = there, [store.renumbered(rows) for store in self._fields]
        return other

    @property
    def nbytes(self) -> int:
        return self._there.nbytes + sum(store.nbytes for store in self._fields)


class _ObjectStore(KeyStore):
    """Lists and maps, as Python objects."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self.values = np.empty(0, object)

    def given(self, column: pa.Array) -> Array:
        values = np.empty(len(column), object)
        for place, value in enumerate(to_list(column)):  # numpy would make an array of lists of one length
            values[place] = value
        return values

    def put(self, rows: IntArray, given: Array, places: IntArray) -> None:
        room = grown(self.values, len(self.values), int(rows.max()) + 1)
        room[rows] = given[places]
        self.values = room

    def equal(self, rows: IntArray, given: Any, places: IntArray) -> Array:
        raise AssertionError("records are not compared in their store")

    def take(self, rows: IntArray) -> pa.Array:
        return from_list(self.values[rows].tolist(), self.kind)

    def free(self, rows: IntArray) -> None:
        self.values[rows] = None

    def renumbered(self, rows: IntArray) -> _ObjectStore:
        other = _ObjectStore(self.kind)
        other.values = self.values[rows]
        return other

    @property
    def nbytes(self) -> int:
        return self.values.nbytes
