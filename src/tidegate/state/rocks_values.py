"""Values as bytes: how the RocksDB backend writes what a state holds, and reads it back exactly as it was.

Three spellings, by the Arrow type:

- numbers, dates, timestamps and decimals: Arrow's bytes for them (8 for a long), no bytes for null;
- text is UTF-8, and null is the byte 0xFF, which isn't UTF-8; bytes follow a 1, and null is empty; booleans are one byte;
- nested types are JSON without spaces. Structs are lists by position and maps are lists of pairs, to be compact; leaves that
  JSON doesn't have are numbers (date, timestamp) or text (decimal, bytes in base64).

All functions take lists of values, since a batch needs them; for the first two kinds C code handles the whole list.
`from_list` checks what is written, so a value that doesn't fit its type is a `SchemaError` here.

Not here: evolution. Bytes are read with the type with which they were written; rocks_meta.py keeps that type.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.types import from_list, to_list

Turn = Callable[[Any], Any]
Turns: TypeAlias = "tuple[Turn | None, Turn | None]"  # to what JSON has, and back; None if the value stays as it is


class ValueSpelling(ABC):
    """How values of one type are spelled. A value takes about `fixed_bytes` of memory in Python, and `byte_factor` times as
    many bytes as on disk."""

    fixed_bytes: ClassVar[float]
    byte_factor: ClassVar[float] = 0

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind

    @abstractmethod
    def spelled(self, values: Sequence[Any]) -> list[bytes]: ...

    @abstractmethod
    def value(self, spelled: bytes) -> Any: ...

    def values(self, spelled: Sequence[bytes]) -> list[Any]:
        return list(map(self.value, spelled))

    def column(self, spelled: Sequence[bytes]) -> pa.Array:
        return from_list(self.values(spelled), self._kind)

    def held_bytes(self, spelled_bytes: float) -> float:
        return self.fixed_bytes + self.byte_factor * spelled_bytes


@lru_cache(maxsize=1024)
def value_spelling(kind: pa.DataType, *, as_tuples: bool = False) -> ValueSpelling:
    """Return the spelling of a type. With `as_tuples` structs, or those in a list, are tuples in Python (cells.py); their
    bytes are the same."""
    if as_tuples:
        return _Nested(kind, _turns_of_tuples(kind))
    if pa.types.is_dictionary(kind):
        return value_spelling(kind.value_type)
    if pa.types.is_boolean(kind):
        return _Booleans(kind)
    if kind.id in (pa.string().id, pa.large_string().id):
        return _Texts(kind)
    if kind.id in (pa.binary().id, pa.large_binary().id):
        return _Bytes(kind)
    if kind.num_fields or pa.types.is_null(kind):
        return _Nested(kind, _turns(kind))
    return _Numbers(kind)


class _Numbers(ValueSpelling):
    fixed_bytes = 32

    def __init__(self, kind: pa.DataType) -> None:
        super().__init__(kind)
        self._width = kind.bit_width // 8
        code = _STRUCT_CODES.get(kind.id)
        self._unpack = None if code is None else struct.Struct(f"<{code}").unpack

    def spelled(self, values: Sequence[Any]) -> list[bytes]:
        array = from_list(values, self._kind)
        spelled: list[bytes] = np.frombuffer(array.buffers()[1], f"V{self._width}", count=len(values)).tolist()
        if array.null_count:
            for place in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
                spelled[place] = b""
        return spelled

    def values(self, spelled: Sequence[bytes]) -> list[Any]:
        return to_list(self.column(spelled))

    def value(self, spelled: bytes) -> Any:
        if not spelled:
            return None
        return self.values([spelled])[0] if self._unpack is None else self._unpack(spelled)[0]

    def column(self, spelled: Sequence[bytes]) -> pa.Array:
        whole = b"".join(spelled)
        valid = None
        if len(whole) != self._width * len(spelled):
            there = np.array(list(map(bool, spelled)), np.uint8)
            valid = pa.py_buffer(np.packbits(there, bitorder="little").tobytes())
            whole = b"".join([number or bytes(self._width) for number in spelled])
        return pa.Array.from_buffers(self._kind, len(spelled), [valid, pa.py_buffer(whole)])


class _Booleans(ValueSpelling):
    fixed_bytes = 0

    def spelled(self, values: Sequence[Any]) -> list[bytes]:
        return [b"" if value is None else b"\1" if value else b"\0" for value in values]

    def value(self, spelled: bytes) -> Any:
        return spelled == b"\1" if spelled else None


class _Texts(ValueSpelling):
    fixed_bytes, byte_factor = 56, 1

    def spelled(self, values: Sequence[Any]) -> list[bytes]:
        try:
            return [_NO_TEXT if value is None else value.encode() for value in values]
        except UnicodeEncodeError as error:
            raise SchemaError(f"{error.object!r} is not text: {error}") from None

    def value(self, spelled: bytes) -> Any:
        return None if spelled == _NO_TEXT else spelled.decode()


class _Bytes(ValueSpelling):
    fixed_bytes, byte_factor = 40, 1

    def spelled(self, values: Sequence[Any]) -> list[bytes]:
        return [b"" if value is None else b"\1" + value for value in values]

    def value(self, spelled: bytes) -> Any:
        return spelled[1:] if spelled else None


class _Nested(ValueSpelling):
    fixed_bytes, byte_factor = 120, 8

    def __init__(self, kind: pa.DataType, turns: Turns) -> None:
        super().__init__(kind)
        self._pack, self._unpack = turns

    def spelled(self, values: Sequence[Any]) -> list[bytes]:
        pack = self._pack
        try:
            return [_to_json(value if pack is None or value is None else pack(value)).encode() for value in values]
        except (TypeError, ValueError, KeyError, AttributeError):
            from_list(values, self._kind)  # its error describes the value that doesn't fit
            raise

    def value(self, spelled: bytes) -> Any:
        value = json.loads(spelled)
        return value if self._unpack is None or value is None else self._unpack(value)


_NO_TEXT = b"\xff"
_STRUCT_CODES = {
    pa.int8().id: "b",
    pa.int16().id: "h",
    pa.int32().id: "i",
    pa.int64().id: "q",
    pa.float32().id: "f",
    pa.float64().id: "d",
}
_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False).encode
_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)


def _turns(kind: pa.DataType) -> Turns:
    """Return what converts values of a type for JSON and back. Neither function is called with None."""
    if pa.types.is_dictionary(kind):
        return _turns(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_turns(_turns(kind.value_type))
    if pa.types.is_map(kind):
        return _map_turns(kind)
    if pa.types.is_struct(kind):
        return _struct_turns(kind)
    if kind.id in (pa.binary().id, pa.large_binary().id):
        return lambda value: b64encode(value).decode(), b64decode
    if pa.types.is_date(kind):
        return date.toordinal, date.fromordinal
    if pa.types.is_decimal(kind):
        return str, Decimal
    if pa.types.is_timestamp(kind):
        zone = None if kind.tz is None else UTC
        return (
            lambda value: (value.replace(tzinfo=None) - _EPOCH) // _MICROSECOND,
            lambda number: (_EPOCH + number * _MICROSECOND).replace(tzinfo=zone),
        )
    return None, None


def _list_turns(item: Turns) -> Turns:
    pack, unpack = map(_or_none, item)
    return (
        None if pack is None else lambda value: list(map(pack, value)),
        None if unpack is None else lambda value: list(map(unpack, value)),
    )


def _map_turns(kind: pa.DataType) -> Turns:
    (pack_key, unpack_key), (pack, unpack) = (map(_or_same, _turns(each)) for each in (kind.key_type, kind.item_type))
    return (
        lambda value: [[pack_key(key), pack(item)] for key, item in value.items()],
        lambda pairs: {_hashable(unpack_key(key)): unpack(item) for key, item in pairs},
    )


def _struct_turns(kind: pa.DataType) -> Turns:
    names = [field.name for field in kind]
    turns = [_turns(field.type) for field in kind]
    packs, unpacks = [_or_same(pack) for pack, _ in turns], [_or_same(unpack) for _, unpack in turns]
    if not any(pack for pack, _ in turns):
        return (lambda value: [value[name] for name in names], lambda fields: dict(zip(names, fields, strict=True)))
    return (
        lambda value: [pack(value[name]) for name, pack in zip(names, packs, strict=True)],
        lambda fields: {name: unpack(field) for name, unpack, field in zip(names, unpacks, fields, strict=True)},
    )


def _turns_of_tuples(kind: pa.DataType) -> Turns:
    if pa.types.is_list(kind):
        return _list_turns(_turns_of_tuples(kind.value_type))
    turns = [_turns(field.type) for field in kind]
    if not any(pack for pack, _ in turns):
        return None, tuple  # to JSON, a tuple is a list
    packs, unpacks = [_or_same(pack) for pack, _ in turns], [_or_same(unpack) for _, unpack in turns]
    return (
        lambda fields: [pack(field) for pack, field in zip(packs, fields, strict=True)],
        lambda fields: tuple([unpack(field) for unpack, field in zip(unpacks, fields, strict=True)]),
    )


def _or_none(turn: Turn | None) -> Turn | None:
    """Return the conversion for values that may be None."""
    return None if turn is None else lambda value: None if value is None else turn(value)


def _or_same(turn: Turn | None) -> Turn:
    return _or_none(turn) or (lambda value: value)


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
