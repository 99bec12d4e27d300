"""Keys of a columnar table by row number, one store for each leaf column of the key.

A key of several columns, or a struct, is flattened to its leaf columns; a null struct is a struct of nulls, as in `key_list`
(columns.py). Each leaf is kept in one of three forms:

- numbers, dates, timestamps, booleans and decimals: a numpy array by row. Floats are kept as their bits, with one form for
  NaN and one for zero, so that to compare bits is to compare keys;
- text and bytes: Arrow's own layout, offsets and data, in buffers that grow. They are in the order in which they came, so
  a row has the number of its place. Places of freed rows are waste, which is removed when it is more than half;
- lists: Python objects, as `key_list` makes them.

Invariant: what is kept of a row stays where it is until the row is put again, or in buffers that replace the old ones as a
whole. So another thread may take rows that are not put meanwhile. `put` and `free` are the loop's alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.state.columns import column_of, key_list

Array: TypeAlias = "np.ndarray[Any, Any]"
IntArray: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

GROWTH = 1.25
MIN_ROWS = 16


def grown(values: Array, used: int, count: int) -> Array:
    """Return an array of at least `count` elements that begins with the first `used` of `values`: a new one if it grows."""
    if count <= len(values):
        return values
    more = np.empty((max(count, int(len(values) * GROWTH), MIN_ROWS), *values.shape[1:]), values.dtype)
    more[:used] = values[:used]
    return more


def leaves_of(columns: Sequence[pa.Array]) -> list[pa.Array]:
    """Return the leaf columns of key columns."""
    leaves: list[pa.Array] = []
    for column in columns:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_struct(column.type):
            leaves += leaves_of(column.flatten())
        else:
            leaves.append(column)
    return leaves


def leaf_types(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types of `leaves_of` for a key of this type."""
    if pa.types.is_dictionary(kind):
        return leaf_types(kind.value_type)
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in leaf_types(field.type)]
    return [kind]


def struct_of(leaves: list[pa.Array], kind: pa.DataType) -> pa.Array:
    """Return the key column that has these leaves, which are removed from the list."""
    if pa.types.is_dictionary(kind):
        return struct_of(leaves, kind.value_type).cast(kind)
    if not pa.types.is_struct(kind):
        return leaves.pop(0)
    return pa.StructArray.from_arrays([struct_of(leaves, field.type) for field in kind], fields=list(kind))


class KeyStore(ABC):
    """The values of one leaf column by row."""

    @abstractmethod
    def given(self, column: pa.Array) -> Any:
        """Prepare a column for `put` and `equal`."""

    @abstractmethod
    def put(self, rows: IntArray, given: Any, places: IntArray) -> None:
        """Keep what is at these places of a prepared column, in these rows."""

    @abstractmethod
    def equal(self, rows: IntArray, given: Any, places: IntArray) -> Array:
        """Return whether these rows have what is at these places of a prepared column."""

    @abstractmethod
    def take(self, rows: IntArray) -> pa.Array: ...

    @abstractmethod
    def free(self, rows: IntArray) -> None:
        """Forget what these rows have."""

    @abstractmethod
    def renumbered(self, rows: IntArray) -> KeyStore:
        """Return a store in which row i has what `rows[i]` has here."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...


def store_of(kind: pa.DataType) -> KeyStore:
    if kind.id in _TEXTS:
        return TextStore(kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_null(kind):
        return ObjectStore(kind)
    return NumberStore(kind)


_TEXTS = {pa.string().id, pa.binary().id, pa.large_string().id, pa.large_binary().id}


class NumberStore(KeyStore):
    """Values of a fixed width. `has_code`: a value is an integer of 64 bits or fewer."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        width = max(kind.bit_width // 8, 1)
        self.has_code = width <= 8
        self.values = np.empty(0, f"i{width}") if self.has_code else np.empty((0, width // 8), "u8")
        self.valid: Array | None = None  # until there is a null

    def given(self, column: pa.Array) -> tuple[Array, Array | None]:
        return self.stored(column), column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None

    def stored(self, column: pa.Array) -> Array:
        """Return a column's values as they are kept; those of nulls mean nothing, and are not always the same."""
        kind = self.kind
        if not len(column):
            return self.values[:0]
        if pa.types.is_boolean(kind):
            flags: Array = column.fill_null(False).to_numpy(zero_copy_only=False)
            return flags.view(np.int8)
        if pa.types.is_floating(kind):
            width = kind.bit_width // 8
            floats = np.frombuffer(column.buffers()[1], f"f{width}", len(column), column.offset * width) + 0.0
            floats[np.isnan(floats)] = np.nan
            bits: Array = floats.view(self.values.dtype)
            return bits
        width = kind.bit_width // 8
        if self.has_code:
            return np.frombuffer(column.buffers()[1], self.values.dtype, len(column), column.offset * width)
        words = np.frombuffer(column.buffers()[1], "u8", len(column) * width // 8, column.offset * width)
        return words.reshape(len(column), width // 8)

    def put(self, rows: IntArray, given: tuple[Array, Array | None], places: IntArray) -> None:
        values, valid = given
        count = int(rows.max()) + 1
        used = len(self.values)
        room = grown(self.values, used, count)
        room[rows] = values[places]
        self.values = room
        if valid is not None and self.valid is None:
            self.valid = np.ones(len(room), bool)
        if self.valid is not None:
            flags = self.valid
            if len(flags) < len(room):
                flags = np.ones(len(room), bool)
                flags[: len(self.valid)] = self.valid
            flags[rows] = True if valid is None else valid[places]
            self.valid = flags

    def equal(self, rows: IntArray, given: tuple[Array, Array | None], places: IntArray) -> Array:
        values, valid = given
        same: Array = self.values[rows] == values[places]
        if same.ndim == 2:
            same = np.all(same, axis=1)
        if valid is None and self.valid is None:
            return same
        mine = np.ones(len(rows), bool) if self.valid is None else self.valid[rows]
        theirs = np.ones(len(rows), bool) if valid is None else valid[places]
        both: Array = (mine == theirs) & (same | ~mine)
        return both

    def take(self, rows: IntArray) -> pa.Array:
        values, valid = self.values.take(rows, axis=0), None if self.valid is None else self.valid.take(rows)
        if valid is not None and valid.all():
            valid = None
        if pa.types.is_boolean(self.kind):
            return pa.array(values.view(bool), mask=None if valid is None else ~valid)
        bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
        return pa.Array.from_buffers(self.kind, len(rows), [bits, pa.py_buffer(values)])

    def free(self, rows: IntArray) -> None:
        """What is left is of a fixed width: the next key in the row replaces it."""

    def renumbered(self, rows: IntArray) -> NumberStore:
        other = NumberStore(self.kind)
        other.values = self.values[rows]
        other.valid = None if self.valid is None else self.valid[rows]
        return other

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.valid is None else self.valid.nbytes)


class ObjectStore(KeyStore):
    """Keys that only Python can compare: lists."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self.values = np.empty(0, object)

    def given(self, column: pa.Array) -> Array:
        values = np.empty(len(column), object)
        for place, value in enumerate(key_list(column)):  # numpy would make an array of tuples of one length
            values[place] = value
        return values

    def put(self, rows: IntArray, given: Array, places: IntArray) -> None:
        room = grown(self.values, len(self.values), int(rows.max()) + 1)
        room[rows] = given[places]
        self.values = room

    def equal(self, rows: IntArray, given: Array, places: IntArray) -> Array:
        # In a tuple, NaN is equal to itself, and `key_list` has only one.
        pairs = zip(self.values[rows].tolist(), given[places].tolist(), strict=True)
        return np.fromiter(((one,) == (other,) for one, other in pairs), bool, len(rows))

    def take(self, rows: IntArray) -> pa.Array:
        return column_of([None if key is None else _listed(key) for key in self.values[rows].tolist()], self.kind)

    def free(self, rows: IntArray) -> None:
        self.values[rows] = None

    def renumbered(self, rows: IntArray) -> ObjectStore:
        other = ObjectStore(self.kind)
        other.values = self.values[rows]
        return other

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


def _listed(key: Any) -> Any:
    return list(map(_listed, key)) if isinstance(key, tuple) else key


class TextStore(KeyStore):
    """Text or bytes. `_held` is (place of each row, where each place starts, data), which other threads read as one."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        large = pa.large_binary() if kind.id in (pa.binary().id, pa.large_binary().id) else pa.large_string()
        self._large = large
        self._held = (np.empty(0, np.int32), np.zeros(MIN_ROWS, np.int64), np.zeros(64, np.uint8))
        self._places = 0  # how many are taken, waste included
        self._waste = 0
        self._valid: Array | None = None

    def given(self, column: pa.Array) -> _Texts:
        return _Texts(column, self._large)

    def put(self, rows: IntArray, given: _Texts, places: IntArray) -> None:
        column = given.column.take(pa.array(places))
        lengths = np.diff(_offsets(column, np.int64))
        count, first = len(rows), self._places
        place_of, starts, data = self._held
        known = len(place_of)
        place_of = grown(place_of, known, int(rows.max()) + 1)
        place_of[known:] = -1
        starts = grown(starts, first + 1, first + count + 1)
        begin = int(starts[first])
        starts[first + 1 : first + count + 1] = begin + np.cumsum(lengths)
        end = int(starts[first + count])
        data = grown(data, begin, end)
        offsets = _offsets(column, np.int64)
        if end > begin:
            data[begin:end] = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
        place_of[rows] = np.arange(first, first + count, dtype=np.int32)
        if given.valid is not None and self._valid is None:
            self._valid = np.ones(len(place_of), bool)
        if self._valid is not None:
            flags = self._valid
            if len(flags) < len(place_of):
                flags = np.ones(len(place_of), bool)
                flags[: len(self._valid)] = self._valid
            flags[rows] = True if given.valid is None else given.valid[places]
            self._valid = flags
        self._held = (place_of, starts, data)
        self._places += count

    def equal(self, rows: IntArray, given: _Texts, places: IntArray) -> Array:
        # Arrow takes and compares texts several times as fast as numpy, which has to do it word by word.
        place_of, starts, data = self._held
        mine = self._whole(starts, data, self._places).take(pa.array(place_of.take(rows)))
        theirs = given.column if len(places) == len(given.column) else given.column.take(pa.array(places))
        same: Array = pc.equal(mine, theirs).to_numpy(zero_copy_only=False)
        if given.valid is None and self._valid is None:
            return same
        is_text = np.ones(len(rows), bool) if self._valid is None else self._valid[rows]
        is_given = np.ones(len(rows), bool) if given.valid is None else given.valid[places]
        both: Array = (is_text == is_given) & (~is_given | (same == True))  # noqa: E712  (None where a text is null)
        return both

    def take(self, rows: IntArray) -> pa.Array:
        place_of, starts, data = self._held
        flags = self._valid
        at = place_of.take(rows)
        whole = self._whole(starts, data, int(at.max(initial=-1)) + 1)
        if len(at) and int(at[-1]) - int(at[0]) == len(at) - 1 and (np.diff(at) == 1).all():
            found = whole.slice(int(at[0]), len(at))
        else:
            found = whole.take(pa.array(at))
        if flags is not None and not (valid := flags[rows]).all():
            found = pc.if_else(pa.array(valid), found, pa.scalar(None, self._large))
        return found.cast(self.kind)

    def _whole(self, starts: Array, data: Array, count: int) -> pa.Array:
        """Return the first places as an Arrow array over the buffers themselves."""
        return pa.Array.from_buffers(self._large, count, [None, pa.py_buffer(starts), pa.py_buffer(data)])

    def free(self, rows: IntArray) -> None:
        place_of, _, _ = self._held
        place_of[rows] = -1
        self._waste += len(rows)
        if self._waste * 2 <= self._places or self._places < MIN_ROWS:
            return
        used = np.flatnonzero(place_of >= 0)
        order = used[np.argsort(place_of[used])]
        self._replace(order, order, len(place_of))

    def _replace(self, old_rows: IntArray, new_rows: IntArray, count: int) -> None:
        place_of, starts, data = self._held
        kept = self._whole(starts, data, self._places).take(pa.array(place_of[old_rows]))
        offsets = _offsets(kept, np.int64)
        fresh = np.full(count, -1, np.int32)
        fresh[new_rows] = np.arange(len(new_rows), dtype=np.int32)
        size = int(offsets[-1] - offsets[0])
        room = np.zeros(size, np.uint8)
        if size:
            room[:size] = np.frombuffer(kept.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
        self._held = (fresh, offsets - offsets[0], room)
        self._places, self._waste = len(new_rows), 0

    def renumbered(self, rows: IntArray) -> TextStore:
        other = TextStore(self.kind)
        other._held, other._places = self._held, self._places
        other._replace(rows, np.arange(len(rows)), len(rows))
        other._valid = None if self._valid is None else self._valid[rows]
        return other

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._held) + (0 if self._valid is None else self._valid.nbytes)


class _Texts:
    """A prepared column of text or bytes."""

    def __init__(self, column: pa.Array, large: pa.DataType) -> None:
        self.column = column.cast(large)
        self.valid = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None


def _offsets(column: pa.Array, element: Any) -> Array:
    itemsize = np.dtype(element).itemsize
    if not len(column) and column.buffers()[1] is None:
        return np.zeros(1, element)
    return np.frombuffer(column.buffers()[1], element, len(column) + 1, column.offset * itemsize)
