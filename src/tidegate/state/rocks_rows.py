"""How the RocksDB backend spells the rows of columnar state: keys with windows, and values that numpy packs and unpacks.

A key is the state (2 bytes), the key-group (2 bytes), the window if the state has windows (8 bytes, in the order of their
numbers), the key (rocks_keys.py), and the position if the state is of records (8 bytes, likewise). So the rows of a
key-group are together, as the snapshots want them, within a key-group the rows of a window, which are found by their prefix
when the window is dropped, and within these the records of a key, in the order of arrival.

A value is a bit for each field of fixed width that says whether it is not null, these fields, and then the other fields as a
JSON list (rocks_values.py). All rows are packed at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add

import numpy as np
import pyarrow as pa

from tidegate.state.key_store import Array
from tidegate.state.rocks_keys import GROUP_BYTES, KeySpelling, Matrix, Spelled, as_list
from tidegate.state.rocks_values import value_spelling
from tidegate.state.sections import POSITION, WINDOW
from tidegate.state.vectors import VectorField, column_from, stored, structs
from tidegate.types import from_list, to_list

WINDOW_BYTES = POSITION_BYTES = 8
_SIGN = np.uint64(1 << 63)


def window_bytes(at: int) -> bytes:
    """Return a window's number as bytes that are in the order of the numbers."""
    return (at + (1 << 63)).to_bytes(WINDOW_BYTES)


def _in_order(numbers: pa.Array) -> Matrix:
    """Return numbers of 64 bits as bytes that are in their order."""
    bits = numbers.to_numpy().view(np.uint64) ^ _SIGN
    rows: Matrix = bits.astype(">u8").view(np.uint8).reshape(-1, WINDOW_BYTES)
    return rows


def _numbers(spelled: Sequence[bytes]) -> pa.Array:
    return pa.array((np.frombuffer(b"".join(spelled), ">u8").astype(np.uint64) ^ _SIGN).view(np.int64))


class RowSpelling:
    """Rows of one columnar state, to bytes and back."""

    def __init__(self, schema: pa.Schema, prefix: bytes, keys: KeySpelling) -> None:
        fields = [VectorField(field.name, field.type) for field in schema.field("value").type]
        self.schema = schema
        self.windowed = WINDOW in schema.names
        self.positioned = POSITION in schema.names
        self._prefix = prefix
        self._keys = keys
        self._fixed = [field for field in fields if not field.has_objects]
        self._others = [field for field in fields if field.has_objects]
        self._names = [field.name for field in fields]
        self._bits = -(-len(self._fixed) // 8)
        self._width = self._bits + sum(field.element.itemsize for field in self._fixed)
        self._other = value_spelling(pa.struct([field.arrow for field in self._others])) if self._others else None

    # Keys.

    def key_prefix(self, group: int, at: int | None) -> bytes:
        """Return what the keys of a window in a key-group begin with."""
        return self._prefix + group.to_bytes(GROUP_BYTES) + (b"" if at is None else window_bytes(at))

    def row_keys(self, rows: pa.RecordBatch) -> list[bytes]:
        """Return the keys of rows of a snapshot, or of what identifies deleted ones."""
        keys = self.keys(rows.column("key"), rows.column(WINDOW) if self.windowed else None)
        if not self.positioned:
            return keys
        return list(map(add, keys, as_list(_in_order(rows.column(POSITION)))))

    def keys(self, keys: pa.Array, windows: pa.Array | None) -> list[bytes]:
        """Return what the keys of all rows with these keys and windows begin with."""
        spelled: Spelled = self._keys.spelled(keys, prefix=self._prefix)
        if windows is None:
            return as_list(spelled)
        places = _in_order(windows)
        head = len(self._prefix) + GROUP_BYTES
        if isinstance(spelled, list):
            rows = as_list(np.ascontiguousarray(places))
            return [key[:head] + row + key[head:] for key, row in zip(spelled, rows, strict=True)]
        return as_list(np.hstack([spelled[:, :head], places, spelled[:, head:]]))

    def read_keys(self, spelled: Sequence[bytes]) -> list[pa.Array]:
        """Return the columns that identify these rows."""
        head = len(self._prefix) + GROUP_BYTES
        windows = []
        if self.windowed:
            windows = [_numbers([key[head : head + WINDOW_BYTES] for key in spelled])]
            head += WINDOW_BYTES
        positions = [_numbers([key[-POSITION_BYTES:] for key in spelled])] if self.positioned else []
        return [self._keys.read(spelled, skip=head)[0], *windows, *positions]

    # Values.

    def values(self, value: pa.Array) -> list[bytes]:
        """Return the values of a column of structs."""
        count = len(value)
        columns = dict(zip(self._names, value.flatten(), strict=True))
        packed = np.zeros((count, self._width), np.uint8)
        valid = np.ones((count, len(self._fixed)), bool)
        place = self._bits
        for number, field in enumerate(self._fixed):
            column = columns[field.name]
            if column.null_count:
                valid[:, number] = column.is_valid().to_numpy(zero_copy_only=False)
            size = field.element.itemsize
            numbers = np.ascontiguousarray(stored(column, field.element))
            packed[:, place : place + size] = numbers.view(np.uint8).reshape(count, size)
            place += size
        packed[:, : self._bits] = np.packbits(valid, axis=1, bitorder="little")
        fixed = as_list(packed) if self._width else [b""] * count
        if self._other is None:
            return fixed
        lists = [to_list(columns[field.name]) for field in self._others]
        names = [field.name for field in self._others]
        others = self._other.spelled([dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)])
        return [one + other for one, other in zip(fixed, others, strict=True)]

    def read_values(self, spelled: Sequence[bytes]) -> Mapping[str, pa.Array]:
        """Return the fields of these values."""
        width = self._width
        fixed = spelled if self._other is None else [row[:width] for row in spelled]
        packed = np.frombuffer(b"".join(fixed), np.uint8).reshape(len(spelled), width)
        found: dict[str, pa.Array] = {}
        place = self._bits
        valid = np.unpackbits(packed[:, :place], axis=1, count=len(self._fixed), bitorder="little").astype(bool)
        for number, field in enumerate(self._fixed):
            size = field.element.itemsize
            numbers = np.ascontiguousarray(packed[:, place : place + size]).view(field.element).ravel()
            place += size
            found[field.name] = column_from(field, numbers, np.ascontiguousarray(valid[:, number]))
        if self._other is not None:
            rows = self._other.values([row[width:] for row in spelled])
            for field in self._others:
                found[field.name] = from_list([row[field.name] for row in rows], field.type)
        return found

    def read_numbers(self, name: str, spelled: Sequence[bytes]) -> Array:
        """Return one field of these values, which has a fixed width and is never null."""
        place = self._bits
        for field in self._fixed:
            stop = place + field.element.itemsize
            if field.name == name:
                return np.frombuffer(b"".join([row[place:stop] for row in spelled]), field.element)
            place = stop
        raise AssertionError(f"there is no field {name!r} of fixed width")

    def batch(self, keys: Sequence[bytes], values: Sequence[bytes]) -> pa.RecordBatch:
        """Return entries as rows in the schema of the state."""
        fields = self.read_values(values)
        kind = self.schema.field("value").type
        value = structs([fields[field.name] for field in kind], kind, len(keys))
        return pa.RecordBatch.from_arrays([*self.read_keys(keys), value], schema=self.schema)
