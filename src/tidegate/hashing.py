"""The one stable hash: Spark's `xxhash64`, vectorised.

Sources, exchange, backends and Spark must agree on the key-group of a key for as long as its state exists. So the hash
depends only on the key's value and its declared type: never on Python's `hash`, on the process or on the batch. It is
exactly the expression `xxhash64(columns…)` of Spark SQL, so in Spark `pmod(xxhash64(key), G)` is the key-group.

Semantics (org.apache.spark.sql.catalyst.expressions.HashExpression, XXH64):
- the seed is 42; each column's hash is the seed of the next, likewise for the fields of a struct and the elements of an
  array;
- a null leaves the seed as it is;
- boolean, byte, short, int and date hash as 32 bits, long and timestamp (microseconds) as 64, so that an int 1 and a
  long 1 differ: the type is part of the key's identity, but it doesn't matter whether Python has 1, True or 1.0;
- float and double hash their bits, -0.0 as 0.0 and every NaN as the canonical one;
- string and binary hash their bytes, without Unicode normalisation: NFC and NFD are different keys, as in Spark;
- decimal of up to 18 digits hashes its unscaled value as a long, above that as big-endian bytes of minimal length.
A map has no order and therefore no hash: `SchemaError`, as in Spark.

All arithmetic is on uint64 arrays, which wrap around silently as Java's long does. The machine must be little-endian, as
Arrow's buffers are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.types import ddl_of, from_list

assert sys.byteorder == "little", "Tidegate reads Arrow buffers as they are, which needs a little-endian machine"

Words: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

SEED = 42

_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_P1, _P2, _P3, _P4, _P5 = map(np.uint64, _PRIMES)
_MASK = (1 << 64) - 1
_LANES = np.array([[sum(_PRIMES[:2]) & _MASK], [_PRIMES[1]], [0], [-_PRIMES[0] & _MASK]], dtype=np.uint64)
_MAX_LONG_DIGITS = 18
_US_PER_UNIT = {"s": 1_000_000, "ms": 1_000, "us": 1}

# From about this many rows on, numpy is faster in spite of its fixed cost for each step. Fewer rows are hashed one by one:
# small batches, and in larger batches the few rows that are much longer than all other rows.
_FEW_ROWS = 16
_MUCH_LONGER_BYTES = 1024


def hash_columns(columns: Sequence[pa.Array]) -> Ints:
    """Return the hash of each row over these columns, in order, as Spark's `xxhash64(column, …)`."""
    assert columns and len({len(column) for column in columns}) == 1
    first = columns[0]
    if len(columns) == 1 and first.type.id == _INT64 and not first.null_count:
        return _hash_longs(first.to_numpy().view(np.uint64), np.uint64(SEED)).view(np.int64)
    for column in columns:
        _refuse_unhashable(column.type)
    hashes = np.full(len(first), SEED, dtype=np.uint64)
    for column in columns:
        hashes = _chain(column, hashes)
    return hashes.view(np.int64)


def hash_value(value: Any, type: pa.DataType) -> int:
    """Return the hash of one value. A key of several columns is a struct: a tuple or dict hashes as its columns do."""
    return int(hash_columns([from_list([value], type)])[0])


_INT64 = pa.int64().id
_STORED_AS = {
    pa.int8().id: np.int8,
    pa.int16().id: np.int16,
    pa.int32().id: np.int32,
    pa.date32().id: np.int32,
    pa.float32().id: np.uint32,
    pa.int64().id: np.uint64,
    pa.float64().id: np.uint64,
    pa.timestamp("us").id: np.int64,
}
_OFFSETS_OF_TEXTS = {
    pa.string().id: np.int32,
    pa.binary().id: np.int32,
    pa.large_string().id: np.int64,
    pa.large_binary().id: np.int64,
}
_NESTED = {pa.struct([]).id, pa.list_(pa.null()).id, pa.large_list(pa.null()).id}
_HASHABLE = {*_STORED_AS, *_OFFSETS_OF_TEXTS, pa.bool_().id, pa.decimal128(1).id, pa.null().id}


def _refuse_unhashable(type_: pa.DataType) -> None:
    """Check the type, not the data: a job must not fail only at its first non-empty list."""
    if pa.types.is_dictionary(type_):
        _refuse_unhashable(type_.value_type)
    elif type_.id in _NESTED:
        for index in range(type_.num_fields):
            _refuse_unhashable(type_.field(index).type)
    elif type_.id not in _HASHABLE:
        raise SchemaError(f"{ddl_of(type_)} can't be a key or part of one: Spark's xxhash64 isn't defined for it")


def _chain(array: pa.Array, seeds: Words) -> Words:
    """Return the hashes of the array's values under these seeds, one for each row; the seed itself if the value is null."""
    if not len(array) or pa.types.is_null(array.type):
        return seeds
    if pa.types.is_dictionary(array.type):
        return _chain(array.dictionary_decode(), seeds)
    if pa.types.is_struct(array.type):
        for column in array.flatten():  # flatten() makes the fields of a null struct null, so the seed passes
            seeds = _chain(column, seeds)
        return seeds
    hashes = _hash_valid(array, seeds)
    if not array.null_count:
        return hashes
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), hashes, seeds)


def _hash_valid(array: pa.Array, seeds: Words) -> Words:
    """As `_chain`, but the hashes of null values are undefined."""
    type_ = array.type
    if pa.types.is_boolean(type_):
        return _hash_ints(array.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint64), seeds)
    if pa.types.is_decimal128(type_):
        return _hash_decimals(array, seeds)
    if type_.id in _OFFSETS_OF_TEXTS:
        return _hash_texts(array, seeds)
    if type_.id in _NESTED:
        return _hash_lists(array, seeds)
    stored = _stored(array, _STORED_AS[type_.id])
    if pa.types.is_timestamp(type_):
        stored = stored // 1_000 if type_.unit == "ns" else stored * _US_PER_UNIT[type_.unit]
        return _hash_longs(stored.view(np.uint64), seeds)
    if pa.types.is_float32(type_):
        stored = np.where(stored == 0x8000_0000, np.uint32(0), stored)
        stored = np.where(stored & 0x7FFF_FFFF > 0x7F80_0000, np.uint32(0x7FC0_0000), stored)
        return _hash_ints(stored.astype(np.uint64), seeds)
    if pa.types.is_float64(type_):
        stored = np.where(stored == 1 << 63, np.uint64(0), stored)
        stored = np.where(stored & (_MASK >> 1) > 0x7FF0 << 48, np.uint64(0x7FF8 << 48), stored)
    if type_.bit_width == 64:
        return _hash_longs(stored, seeds)
    return _hash_ints(stored.astype(np.int32).view(np.uint32).astype(np.uint64), seeds)


def _stored(array: pa.Array, element: Any, *, extra: int = 0) -> np.ndarray[Any, Any]:
    """Return the array's own part of its first data buffer, including the values under nulls."""
    dtype = np.dtype(element)
    buffer, start_bytes = array.buffers()[1], array.offset * dtype.itemsize
    return np.frombuffer(buffer, dtype=dtype, count=len(array) + extra, offset=start_bytes)


def _rotate(words: Words, bits: int) -> Words:
    rotated: Words = words << np.uint64(bits)
    rotated |= words >> np.uint64(64 - bits)
    return rotated


def _round(words: Words, lanes: Words | None = None) -> Words:
    mixed = words * _P2
    if lanes is not None:
        mixed += lanes
    mixed = _rotate(mixed, 31)
    mixed *= _P1
    return mixed


def _finish(hashes: Words) -> Words:
    """Return the hashes, for which the given array is overwritten."""
    hashes ^= hashes >> np.uint64(33)
    hashes *= _P2
    hashes ^= hashes >> np.uint64(29)
    hashes *= _P3
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _hash_ints(values: Words, seeds: Words) -> Words:
    hashes = (seeds + np.uint64(_PRIMES[4] + 4)) ^ (values * _P1)
    return _finish(_rotate(hashes, 23) * _P2 + _P3)


def _hash_longs(values: Words, seeds: Words | np.uint64) -> Words:
    hashes = _round(values)
    hashes ^= seeds + np.uint64(_PRIMES[4] + 8)
    hashes = _rotate(hashes, 27)
    hashes *= _P1
    hashes += _P4
    return _finish(hashes)


def _hash_decimals(array: pa.Array, seeds: Words) -> Words:
    stored = _stored(array, "V16")
    if array.type.precision <= _MAX_LONG_DIGITS:
        return _hash_longs(stored.view(np.uint64).reshape(-1, 2)[:, 0], seeds)
    # Java's BigInteger.toByteArray: big-endian two's complement without the leading bytes that only repeat the sign.
    big_endian = np.ascontiguousarray(stored.view(np.uint8).reshape(-1, 16)[:, ::-1])
    signs = np.where(big_endian[:, :1] >= 0x80, np.uint8(0xFF), np.uint8(0))
    repeats_sign = (big_endian[:, :-1] == signs) & ((big_endian[:, 1:] ^ signs) < 0x80)
    skipped = np.cumprod(repeats_sign, axis=1, dtype=np.int64).sum(axis=1)
    return _hash_bytes(big_endian.ravel(), np.arange(len(array)) * 16 + skipped, 16 - skipped, seeds)


def _hash_lists(array: pa.Array, seeds: Words) -> Words:
    starts = array.offsets.to_numpy()
    lengths = np.diff(starts)
    hashes = seeds.copy()
    for index in range(int(lengths.max())):
        rows = np.flatnonzero(lengths > index)
        hashes[rows] = _chain(array.values.take(pa.array(starts[rows] + index)), hashes[rows])
    return hashes


def _hash_texts(array: pa.Array, seeds: Words) -> Words:
    offsets = _stored(array, _OFFSETS_OF_TEXTS[array.type.id], extra=1).astype(np.int64)
    buffer = array.buffers()[2]
    data = np.frombuffer(b"" if buffer is None else buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets)
    if len(lengths) > _FEW_ROWS and lengths[0] and (lengths == lengths[0]).all():
        return _hash_even(data, int(lengths[0]), seeds)
    return _hash_bytes(data, offsets[:-1] - offsets[0], lengths, seeds)


def _hash_bytes(data: np.ndarray[Any, Any], starts: Ints, lengths: Ints, seeds: Words) -> Words:
    """Return XXH64 of the bytes [start, start + length) of `data` for each row."""
    if len(lengths) <= _FEW_ROWS:
        alone = np.arange(len(lengths))
        hashes = np.empty_like(seeds)
    else:
        alone = _few_much_longer(lengths)
        shared = lengths.copy()
        shared[alone] = 0
        hashes = _hash_many(data, starts, shared, seeds)
    for row in alone.tolist():
        start = int(starts[row])
        hashes[row] = _hash_one(data[start : start + int(lengths[row])].tobytes(), int(seeds[row]))
    return hashes


def _hash_even(data: np.ndarray[Any, Any], length: int, seeds: Words) -> Words:
    """Return XXH64 of bytes that are cut into rows of one length, at a third of the general cost: nothing is gathered."""

    def at(start: int, element: Any) -> Words:
        return np.ndarray(len(seeds), element, data, offset=start, strides=(length,)).astype(np.uint64, copy=False)

    start = length & ~31
    if start:
        lanes = list(seeds + _LANES)
        for stripe in range(0, start, 32):
            for lane in range(4):
                lanes[lane] = _round(at(stripe + 8 * lane, np.uint64), lanes[lane])
        hashes = _joined(lanes)
    else:
        hashes = seeds + _P5
    hashes += np.uint64(length)
    for word in range(start, length & ~7, 8):
        hashes = _rotate(hashes ^ _round(at(word, np.uint64)), 27) * _P1 + _P4
    if length & 4:
        hashes = _rotate(hashes ^ (at(length & ~7, np.uint32) * _P1), 23) * _P2 + _P3
    for byte in range(length & ~3, length):
        hashes = _rotate(hashes ^ (at(byte, np.uint8) * _P5), 11) * _P1
    return _finish(hashes)


def _few_much_longer(lengths: Ints) -> Ints:
    """Return the few rows that are much longer than the rest: a key of 1 MB would take 30,000 steps for this one row."""
    if lengths.max() <= _MUCH_LONGER_BYTES:
        return np.empty(0, dtype=np.int64)
    usual = np.partition(lengths, -_FEW_ROWS)[-_FEW_ROWS]
    return np.flatnonzero(lengths > usual + _MUCH_LONGER_BYTES)


def _hash_many(data: np.ndarray[Any, Any], starts: Ints, lengths: Ints, seeds: Words) -> Words:
    """Hash all rows at once, word by word; each step covers the rows that are long enough for it."""
    padded = np.concatenate((data, np.zeros(8, dtype=np.uint8)))
    words = np.ndarray(shape=(len(data) + 1,), dtype=np.uint64, buffer=padded, strides=(1,))  # one at every byte
    hashes = seeds + _P5
    long = np.flatnonzero(lengths >= 32)
    if long.size:
        hashes[long] = _hash_stripes(words, starts[long], lengths[long] // 32, seeds[long])
    hashes += lengths.astype(np.uint64)
    at = starts + (lengths & ~31)
    for index in range(3):
        rows = np.flatnonzero((lengths & 31) >= 8 * (index + 1))
        if rows.size:
            hashes[rows] = _rotate(hashes[rows] ^ _round(words[at[rows] + 8 * index]), 27) * _P1 + _P4
    rows = np.flatnonzero(lengths & 4)
    if rows.size:
        halves = words[starts[rows] + (lengths[rows] & ~7)] & np.uint64(0xFFFF_FFFF)
        hashes[rows] = _rotate(hashes[rows] ^ (halves * _P1), 23) * _P2 + _P3
    at = starts + (lengths & ~3)
    for index in range(3):
        rows = np.flatnonzero((lengths & 3) > index)
        if rows.size:
            hashes[rows] = _rotate(hashes[rows] ^ (padded[at[rows] + index] * _P5), 11) * _P1
    return _finish(hashes)


def _hash_stripes(words: Words, starts: Ints, stripe_counts: Ints, seeds: Words) -> Words:
    """Compute the first part of XXH64, for rows of 32 bytes and more: four lanes, each over every fourth word."""
    lanes = seeds + _LANES
    shortest = int(stripe_counts.min())
    for stripe in range(int(stripe_counts.max())):
        rows = slice(None) if stripe < shortest else np.flatnonzero(stripe_counts > stripe)
        at = starts[rows] + 32 * stripe
        for lane in range(4):
            lanes[lane, rows] = _round(words[at + 8 * lane], lanes[lane, rows])
    return _joined(list(lanes))


def _joined(lanes: list[Words]) -> Words:
    hashes = _rotate(lanes[0], 1) + _rotate(lanes[1], 7) + _rotate(lanes[2], 12) + _rotate(lanes[3], 18)
    for lane in lanes:
        hashes = (hashes ^ _round(lane)) * _P1 + _P4
    return hashes


def _hash_one(data: bytes, seed: int) -> int:
    """Return XXH64, in plain Python."""
    p1, p2, p3, p4, p5 = _PRIMES

    def rotate(word: int, bits: int) -> int:
        word &= _MASK
        return (word << bits | word >> (64 - bits)) & _MASK

    def round_(lane: int, word: int) -> int:
        return rotate(lane + word * p2, 31) * p1 & _MASK

    whole, size = len(data) & ~7, len(data)
    words = np.frombuffer(data, dtype=np.uint64, count=whole // 8).tolist()
    striped = size // 32 * 4
    value = seed + p5
    if striped:
        lanes = [seed + p1 + p2, seed + p2, seed, seed - p1]
        for index in range(striped):
            lanes[index & 3] = round_(lanes[index & 3], words[index])
        value = sum(map(rotate, lanes, (1, 7, 12, 18)))
        for lane in lanes:
            value = (value ^ round_(0, lane)) * p1 + p4 & _MASK
    value = value + size & _MASK
    for word in words[striped:]:
        value = rotate(value ^ round_(0, word), 27) * p1 + p4 & _MASK
    if size & 4:
        value = rotate(value ^ int.from_bytes(data[whole : whole + 4], "little") * p1 & _MASK, 23) * p2 + p3 & _MASK
        whole += 4
    for byte in data[whole:]:
        value = rotate(value ^ byte * p5 & _MASK, 11) * p1 & _MASK
    value = (value ^ value >> 33) * p2 & _MASK
    value = (value ^ value >> 29) * p3 & _MASK
    return value ^ value >> 32
