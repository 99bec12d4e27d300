"""Keys as bytes: how the RocksDB backend spells a key, so that equal keys are equal bytes and key-groups are in order.

A spelled key is its key-group (2 bytes, big-endian), followed by its columns:

- a number, date, timestamp or decimal: 1 and its bytes, big-endian, or 0 for null. -0.0 is 0.0, and there is one NaN;
- a boolean: 0, 1, or 2 for null;
- text and bytes: their length (4 bytes) and their bytes; the length 2³² − 1 is null;
- an array: the number of its elements (4 bytes; 2³² − 1 is null) and its elements;
- a struct: its fields. A null struct is one whose fields are null, as it is to the hash and to the heap's tables.

Invariants:
- two keys have the same bytes if and only if the heap's tables take them for one key (`key_list` in columns.py);
- no spelled key is a prefix of another. So what is stored behind a key (the keys of a map, the numbers of a list's chunks)
  is found by the key as its prefix, and belongs to no other key.

The functions take whole columns, and use numpy if all keys have the same length. The keys of map states are spelled in the
same way, without a key-group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, islice, pairwise
from operator import add
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.hashing import hash_columns
from tidegate.keygroups import groups_of
from tidegate.types import from_list, to_list

GROUP_BYTES = 2
LENGTH_BYTES = 4
_NULL_LENGTH = 0xFFFF_FFFF

Matrix: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"  # one row for each key
# A spelled column: a matrix if all rows have the same length, else a list.
Spelled: TypeAlias = "Matrix | list[bytes]"


class KeySpelling:
    """Keys of one type, to bytes and back."""

    def __init__(self, key_type: pa.DataType, key_group_count: int) -> None:
        self.key_type = key_type
        self.key_group_count = key_group_count

    def spelled(self, keys: pa.Array, *, prefix: bytes = b"") -> Spelled:
        """Return for each key: `prefix`, the key-group, the key."""
        groups: Any = groups_of(hash_columns([keys]), self.key_group_count)
        start = np.empty((len(keys), len(prefix) + GROUP_BYTES), np.uint8)
        start[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
        start[:, len(prefix) :] = groups.astype(">u2").view(np.uint8).reshape(-1, GROUP_BYTES)
        return _joined([start, *_pieces(keys)])

    def read(self, spelled: Sequence[bytes], *, skip: int) -> tuple[pa.Array, list[int]]:
        """Return the keys, and where each ends. `skip`: the number of bytes before the columns."""
        return read_column(spelled, [skip] * len(spelled), self.key_type)


def spelled_column(column: pa.Array) -> list[bytes]:
    """Spell a column without prefix and key-groups."""
    return as_list(_joined(_pieces(column)))


def as_list(spelled: Spelled) -> list[bytes]:
    if isinstance(spelled, list):
        return spelled
    rows: list[bytes] = np.ascontiguousarray(spelled).view(f"V{spelled.shape[1]}").ravel().tolist()
    return rows


def in_order(spelled: Spelled) -> tuple[list[bytes], list[int]]:
    """Return the keys sorted, which RocksDB writes faster, and the position that each had."""
    if isinstance(spelled, list):
        places = sorted(range(len(spelled)), key=spelled.__getitem__)
        return [spelled[place] for place in places], places
    # Numpy compares such texts as C's memcmp does. It takes zeros at their end for padding, which makes no difference as all
    # have the same length.
    order = np.argsort(np.ascontiguousarray(spelled).view(f"S{spelled.shape[1]}").ravel(), kind="stable")
    return as_list(spelled[order]), order.tolist()


# ------------------------------------------------------------------------------------------------------------ writing


def _pieces(column: pa.Array) -> list[Spelled]:
    """Return the column as pieces, which are to be joined row by row."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _pieces(column.dictionary_decode())
    if pa.types.is_struct(kind):
        return [piece for field in column.flatten() for piece in _pieces(field)]
    if pa.types.is_null(kind):
        return []
    if pa.types.is_boolean(kind):
        return [column.cast(pa.uint8()).fill_null(2).to_numpy(zero_copy_only=False).reshape(-1, 1)]
    if _has_length(kind):
        texts = column.cast(pa.large_binary() if kind.id in _LARGE else pa.binary()).to_pylist()
        if not column.null_count:
            return [_lengths(list(map(len, texts))), texts]
        return [_lengths([_NULL_LENGTH if text is None else len(text) for text in texts]), [text or b"" for text in texts]]
    if _is_list(kind):
        return [_lists(column)]
    return [_numbers(column)]


def _numbers(column: pa.Array) -> Spelled:
    width = column.type.bit_width // 8
    numbers = np.frombuffer(column.buffers()[1], f"V{width}")[column.offset : column.offset + len(column)]
    if pa.types.is_floating(column.type):
        floats = numbers.view(f"f{width}") + 0.0  # no -0.0
        floats[np.isnan(floats)] = np.nan
        numbers = floats.view(f"V{width}")
    rows = np.ones((len(column), 1 + width), np.uint8)
    rows[:, 1:] = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, width)[:, ::-1]
    if not column.null_count:
        return rows
    valid = column.is_valid().to_pylist()
    return [row if there else b"\0" for row, there in zip(as_list(rows), valid, strict=True)]


def _lists(column: pa.Array) -> list[bytes]:
    items = iter(as_list(_joined(_pieces(column.flatten()), len(column.flatten()))))
    counts = column.value_lengths().to_pylist()
    return [
        (_NULL_LENGTH if count is None else count).to_bytes(LENGTH_BYTES) + b"".join(islice(items, count or 0))
        for count in counts
    ]


def _lengths(lengths: list[int]) -> Matrix:
    return np.array(lengths, ">u4").view(np.uint8).reshape(-1, LENGTH_BYTES)


def _joined(pieces: Sequence[Spelled], count: int | None = None) -> Spelled:
    """Return the pieces side by side. `count` is the number of rows, if there may be no pieces."""
    if not pieces:
        return [b""] * (count or 0)
    columns: list[Spelled] = []
    for are_lists, adjacent in groupby(pieces, key=lambda piece: isinstance(piece, list)):
        found = list(adjacent)
        columns += found if are_lists or len(found) == 1 else [np.hstack(found)]
    if len(columns) == 1:
        return columns[0]
    texts = list(map(as_list, columns))
    return list(map(add, *texts)) if len(texts) == 2 else list(map(b"".join, zip(*texts, strict=True)))


# ------------------------------------------------------------------------------------------------------------ reading


def read_column(spelled: Sequence[bytes], at: Sequence[int], kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Read a column that starts at these places in spelled keys; return the column, and where it ends in each."""
    if pa.types.is_struct(kind):
        columns = []
        for field in kind:
            column, at = read_column(spelled, at, field.type)
            columns.append(column)
        return pa.StructArray.from_arrays(columns, fields=list(kind)), list(at)
    if pa.types.is_null(kind):
        return pa.nulls(len(spelled)), list(at)
    if pa.types.is_boolean(kind):
        bools = [_BOOLS[key[place]] for key, place in zip(spelled, at, strict=True)]
        return pa.array(bools, kind), [place + 1 for place in at]
    if _has_length(kind):
        return _read_texts(spelled, at, kind)
    if _is_list(kind):
        return _read_lists(spelled, at, kind)
    return _read_numbers(spelled, at, kind)


def _read_numbers(spelled: Sequence[bytes], at: Sequence[int], kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    width = kind.bit_width // 8
    count = len(spelled)
    there = [key[place] for key, place in zip(spelled, at, strict=True)]
    whole = b"".join(
        [
            key[place + 1 : place + 1 + width] if one else bytes(width)
            for key, place, one in zip(spelled, at, there, strict=True)
        ]
    )
    numbers = np.frombuffer(whole, np.uint8).reshape(count, width)[:, ::-1].tobytes()
    valid = None if all(there) else pa.py_buffer(np.packbits(np.array(there, np.uint8), bitorder="little").tobytes())
    array = pa.Array.from_buffers(kind, count, [valid, pa.py_buffer(numbers)])
    return array, [place + 1 + width * one for place, one in zip(at, there, strict=True)]


def _read_texts(spelled: Sequence[bytes], at: Sequence[int], kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    texts: list[bytes | None] = []
    ends = []
    for key, place in zip(spelled, at, strict=True):
        start = place + LENGTH_BYTES
        length = int.from_bytes(key[place:start])
        end = start if length == _NULL_LENGTH else start + length
        texts.append(None if length == _NULL_LENGTH else key[start:end])
        ends.append(end)
    return pa.array(texts, pa.large_binary() if kind.id in _LARGE else pa.binary()).cast(kind), ends


def _read_lists(spelled: Sequence[bytes], at: Sequence[int], kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Read arrays element by element: as keys they are rare and short."""
    found: list[pa.Array] = []
    counts: list[int | None] = []
    ends = []
    for key, place in zip(spelled, at, strict=True):
        count = int.from_bytes(key[place : place + LENGTH_BYTES])
        place += LENGTH_BYTES
        counts.append(None if count == _NULL_LENGTH else count)
        for _ in range(counts[-1] or 0):
            item, (place,) = read_column([key], [place], kind.value_type)
            found.append(item)
        ends.append(place)
    items = iter(chain.from_iterable(map(to_list, found)))
    return from_list([None if count is None else list(islice(items, count)) for count in counts], kind), ends


_BOOLS = (False, True, None)
_LARGE = (pa.large_string().id, pa.large_binary().id)


def _has_length(kind: pa.DataType) -> bool:
    return kind.id in (pa.string().id, pa.binary().id, *_LARGE)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def group_bounds(spelled: Sequence[bytes], *, skip: int) -> list[tuple[int, int, int]]:
    """Return the key-groups of sorted keys, each with where its keys start and stop. `skip`: the bytes before the group."""
    starts = np.frombuffer(b"".join([key[skip : skip + GROUP_BYTES] for key in spelled]), ">u2").astype(np.int64)
    edges = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(spelled)]
    return [(int(starts[start]), start, stop) for start, stop in pairwise(edges) if start < stop]
