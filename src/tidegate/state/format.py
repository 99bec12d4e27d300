"""One state file: the sections of an operator's state, cut by key-group, with an index at the end.

    magic (8 bytes, the last is the version)
    section …            each one Arrow IPC record batch message, without a schema, a multiple of 8 bytes long
    index                an Arrow IPC stream: a row for each section; the states with their schemas in its metadata
    trailer (20 bytes)   index length (8), CRC-32 of the index (4), magic (8); little-endian

Sections are ordered by state; those of keyed state by ascending key-group, followed by the deleted keys in the same order.
A section may hold several groups, and a group may have several sections. So a restore of some key-groups reads one range of
the file from front to back, and omits the rows of other groups in its first and last section.

Invariants: no byte is used before its checksum was compared (docs/promises.md, row 14). The manifest holds the checksum of
the index, the index has the checksum of every section, and together they cover the file without a gap. The manifest also
holds the CRC-32 of the whole file, so that files can be verified without decoding them.

Encoding runs on a background thread that shares the interpreter with the hot loop. There is no Python per row. Every long
call into Arrow and zlib releases the interpreter's lock. Small sections are joined before they are checksummed and handed
on, because after each release it may take a while to get the lock back. Memory is bounded by one section and a block.

Not here: files. Bytes are returned as chunks and read through a function.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.errors import CorruptFile, RestoreError, SchemaError
from tidegate.state.sections import Section, StateInfo, StateKind, deleted_schema, within

MAGIC = b"TGSTATE\x02"
BLOCK_BYTES = 256 * 1024
READ_BYTES = 8 * 1024 * 1024

_TRAILER = struct.Struct("<QI8s")
_NO_GROUP = -1
_STATES_KEY = b"tidegate.states"
_GROUP_COUNT_KEY = b"tidegate.key_group_count"
_INDEX_COLUMNS = {
    "state": pa.int32(),
    "deleted": pa.bool_(),
    "group": pa.int32(),
    "stop": pa.int32(),
    "offset": pa.int64(),
    "length": pa.int64(),
    "rows": pa.int64(),
    "crc32": pa.uint32(),
}


@dataclass(frozen=True, slots=True)
class FileSummary:
    """What a manifest holds about the file. `rows` are counts by state; `groups` is the range of the file's key-groups,
    empty if there are none."""

    bytes: int
    checksum: int
    index_bytes: int
    index_checksum: int
    rows: Mapping[str, int]
    groups: range


class StateFileEncoder:
    """Encodes one file. Read all `chunks`, once; then there is a `summary`."""

    def __init__(self, *, key_group_count: int) -> None:
        self._key_group_count = key_group_count
        self._summary: FileSummary | None = None

    @property
    def summary(self) -> FileSummary:
        assert self._summary is not None, "not all chunks have been read"
        return self._summary

    def chunks(self, states: Sequence[StateInfo], sections: Iterable[Section]) -> Iterator[bytes | memoryview]:
        """Return the bytes of the file in order. Sections without rows are omitted."""
        assert self._summary is None, "an encoder makes one file"
        index = _IndexRows(states, self._key_group_count)
        trailer = b""

        def parts() -> Iterator[Any]:
            nonlocal trailer
            yield MAGIC
            offset = len(MAGIC)
            for section in sections:
                if section.rows.num_rows:
                    message = section.rows.serialize()
                    index.append(section, offset=offset, length=message.size, crc32=zlib.crc32(message))
                    offset += message.size
                    yield message
            content = index.encode()
            trailer = _TRAILER.pack(len(content), zlib.crc32(content), MAGIC)
            yield content
            yield trailer

        size_bytes = checksum = 0
        for chunk in _joined(parts()):
            size_bytes += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
            yield chunk
        index_bytes, index_checksum, _ = _TRAILER.unpack(trailer)
        self._summary = FileSummary(
            bytes=size_bytes,
            checksum=checksum,
            index_bytes=index_bytes,
            index_checksum=index_checksum,
            rows=index.rows_by_state(),
            groups=index.groups(),
        )


class StateFileReader:
    """Reads a file by ranges through `read(offset, length)`. The index is read when it is first needed.

    `bytes`, `index_bytes` and `index_checksum` are from the manifest; `name` is for messages. Batches may share the memory
    of one read, up to `READ_BYTES`.
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        *,
        bytes: int,
        index_bytes: int,
        index_checksum: int,
        name: str = "a state file",
    ) -> None:
        self._read = read
        self._name = name
        self._size_bytes = bytes
        self._index_bytes = index_bytes
        self._index_checksum = index_checksum
        self._read_index: _Index | None = None

    @property
    def states(self) -> tuple[StateInfo, ...]:
        return self._index.states

    def row_count(self, state: str) -> int:
        return int(self._index.rows[self._index.sections_of(state)].sum())

    def read_sections(self, state: str, groups: range) -> Iterator[Section]:
        """Return a keyed state's sections in these key-groups; the deleted keys come last."""
        assert groups.step == 1
        index = self._index
        for deleted in (False, True):
            mine = index.sections_of(state, keyed=True, deleted=deleted)
            first = int(np.searchsorted(index.stop[mine], groups.start, side="right"))
            last = int(np.searchsorted(index.group[mine], groups.stop, side="left"))
            for position, rows in self._read_adjacent(mine.start + first, mine.start + last):
                found = range(int(index.group[position]), int(index.stop[position]))
                section = within(Section(state, found, rows, deleted), groups, key_group_count=index.key_group_count)
                if section.rows.num_rows:
                    yield section

    def read_items(self, state: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Return rows start…stop (half-open) of an operator state."""
        index = self._index
        mine = index.sections_of(state, keyed=False)
        ends = np.cumsum(index.rows[mine])
        if not 0 <= start <= stop <= (int(ends[-1]) if len(ends) else 0):
            raise CorruptFile(f"{self._name} doesn't have the rows {start}…{stop} of state {state!r}")
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop, side="left")) + 1 if start < stop else first
        begin = int(ends[first - 1]) if first else 0
        for _, rows in self._read_adjacent(mine.start + first, mine.start + last):
            low, high = max(start - begin, 0), min(stop - begin, rows.num_rows)
            yield rows.slice(low, high - low)
            begin += rows.num_rows

    def verify(self, checksum: int) -> None:
        """Read the whole file and compare it with the manifest's checksum. Raise `CorruptFile` if it differs."""
        found = 0
        for offset in range(0, self._size_bytes, READ_BYTES):
            found = zlib.crc32(self._exactly(offset, min(READ_BYTES, self._size_bytes - offset)), found)
        if found != checksum:
            raise self._corrupt("the checksum of the file doesn't match")
        if self._exactly(0, len(MAGIC)) != MAGIC:
            raise self._corrupt("it doesn't begin as a state file does")
        _ = self._index

    @property
    def _index(self) -> _Index:
        # No `cached_property`: until Python 3.12 it holds one lock for all readers while one of them reads.
        if self._read_index is None:
            self._read_index = self._load_index()
        return self._read_index

    def _load_index(self) -> _Index:
        offset = self._size_bytes - self._index_bytes - _TRAILER.size
        if offset < len(MAGIC):
            raise self._corrupt(f"{self._size_bytes} bytes can't hold an index of {self._index_bytes}")
        content = memoryview(self._exactly(offset, self._index_bytes + _TRAILER.size))
        index, trailer = content[: self._index_bytes], content[self._index_bytes :]
        end = bytes(trailer[-len(MAGIC) :])
        if end != MAGIC and end[:-1] == MAGIC[:-1] and end == self._exactly(0, len(MAGIC)):
            raise RestoreError(
                f"{self._name} has state file format {end[-1]}, and this Tidegate reads format {MAGIC[-1]}: it was "
                f"written by another version. Use that version or a newer one"
            )
        if zlib.crc32(index) != self._index_checksum:
            raise self._corrupt("the checksum of the index doesn't match")
        if trailer != _TRAILER.pack(self._index_bytes, self._index_checksum, MAGIC):
            raise self._corrupt("it doesn't end as a state file of this version does")
        try:
            return _Index.decode(index, sections_stop=offset)
        except (ValueError, KeyError, TypeError, OSError, pa.ArrowException) as error:
            raise self._corrupt(f"the index can't be read: {error}") from error

    def _read_adjacent(self, first: int, last: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Return sections first…last (half-open) of the file, verified, in as few reads of `READ_BYTES` as possible."""
        index = self._index
        while first < last:
            start = int(index.offset[first])
            ends = index.offset[first:last] + index.length[first:last]
            stop = first + max(int(np.searchsorted(ends, start + READ_BYTES, side="right")), 1)
            end = int(ends[stop - first - 1])
            content = memoryview(self._exactly(start, end - start))
            for position in range(first, stop):
                begin = int(index.offset[position]) - start
                yield position, self._decode(position, content[begin : begin + int(index.length[position])])
            first = stop

    def _decode(self, position: int, message: memoryview) -> pa.RecordBatch:
        index = self._index
        info = index.states[int(index.state[position])]
        if zlib.crc32(message) != int(index.crc32[position]):
            raise self._corrupt(f"the checksum of a section of state {info.name!r} doesn't match")
        try:
            schema = deleted_schema(info.schema) if index.deleted[position] else info.schema
            rows = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
        except (ValueError, OSError, pa.ArrowException) as error:
            raise self._corrupt(f"a section of state {info.name!r} can't be decoded: {error}") from error
        if rows.num_rows != int(index.rows[position]):
            raise self._corrupt(f"a section of state {info.name!r} has {rows.num_rows} rows")
        return rows

    def _exactly(self, offset: int, length: int) -> bytes:
        content = self._read(offset, length)
        if len(content) != length:
            raise self._corrupt(f"a read of {length} bytes at {offset} returned {len(content)}")
        return content

    def _corrupt(self, what: str) -> CorruptFile:
        return CorruptFile(f"{self._name}: {what}; that content was not used")


@dataclass(slots=True)
class _IndexRows:
    """The index of a file that is being written."""

    states: Sequence[StateInfo]
    key_group_count: int
    columns: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in _INDEX_COLUMNS})
    positions: dict[str, int] = field(init=False)
    last: tuple[int, bool, int] = (0, False, _NO_GROUP)

    def __post_init__(self) -> None:
        self.positions = {info.name: position for position, info in enumerate(self.states)}
        assert len(self.positions) == len(self.states), "two states have one name"
        for info in self.states:
            if any(_has_dictionary(column.type) for column in info.schema):
                raise SchemaError(
                    f"state {info.name!r} has a dictionary-encoded type, which a snapshot can't keep: {info.schema}"
                )

    def append(self, section: Section, *, offset: int, length: int, crc32: int) -> None:
        position = self.positions[section.state]
        info = self.states[position]
        groups = range(_NO_GROUP, 0) if section.groups is None else section.groups
        assert (section.groups is None) == (info.kind is not StateKind.KEYED), f"{info} with key-groups {groups}"
        assert groups.start < groups.stop <= self.key_group_count, f"state {section.state!r}: key-groups {groups}"
        place = (position, section.deleted, groups.start)
        assert place >= self.last, f"state {section.state!r}, key-groups {groups} come too late"
        schema = deleted_schema(info.schema) if section.deleted else info.schema
        assert section.rows.schema.equals(schema), f"{section.rows.schema} is not the schema of {info}"
        self.last = place
        values = (position, section.deleted, groups.start, groups.stop, offset, length, section.rows.num_rows, crc32)
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def encode(self) -> bytes:
        described = [
            {
                "name": info.name,
                "kind": info.kind.value,
                "shape": info.shape,
                "schema": base64.b64encode(info.schema.serialize()).decode("ascii"),
            }
            for info in self.states
        ]
        schema = pa.schema(
            _INDEX_COLUMNS.items(),
            metadata={_STATES_KEY: json.dumps(described), _GROUP_COUNT_KEY: str(self.key_group_count)},
        )
        arrays = [pa.array(self.columns[column.name], column.type) for column in schema]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as stream:
            stream.write_batch(pa.record_batch(arrays, schema=schema))
        content: bytes = sink.getvalue().to_pybytes()
        return content

    def rows_by_state(self) -> dict[str, int]:
        counts = [0] * len(self.states)
        for position, rows in zip(self.columns["state"], self.columns["rows"], strict=True):
            counts[position] += rows
        return {info.name: count for info, count in zip(self.states, counts, strict=True)}

    def groups(self) -> range:
        keyed = [group for group in self.columns["group"] if group != _NO_GROUP]
        return range(min(keyed), max(self.columns["stop"])) if keyed else range(0)


@dataclass(frozen=True, slots=True)
class _Index:
    """The index of a file that is read, a numpy array for each column."""

    states: tuple[StateInfo, ...]
    key_group_count: int
    state: np.ndarray[Any, Any]
    deleted: np.ndarray[Any, Any]
    group: np.ndarray[Any, Any]
    stop: np.ndarray[Any, Any]
    offset: np.ndarray[Any, Any]
    length: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]
    crc32: np.ndarray[Any, Any]

    @classmethod
    def decode(cls, content: memoryview, *, sections_stop: int) -> _Index:
        table = pa.ipc.open_stream(pa.py_buffer(content)).read_all()
        states = tuple(_state_info(described) for described in json.loads(table.schema.metadata[_STATES_KEY]))
        index = cls(
            states,
            int(table.schema.metadata[_GROUP_COUNT_KEY]),
            **{name: table.column(name).to_numpy() for name in _INDEX_COLUMNS},
        )
        # The sections follow one another without a gap, so that every byte of the file is under some checksum.
        ends = np.append(len(MAGIC), index.offset + index.length)
        if (ends[:-1] != index.offset).any() or ends[-1] != sections_stop:
            raise ValueError("the sections don't fill the file")
        return index

    def sections_of(self, state: str, *, keyed: bool | None = None, deleted: bool | None = None) -> slice:
        """Return where this state's sections are in the index; none if the file doesn't have the state. `keyed`: whether the
        caller takes it for keyed state."""
        position = next((position for position, info in enumerate(self.states) if info.name == state), None)
        if position is None:
            return slice(0, 0)
        assert keyed is None or keyed == (self.states[position].kind is StateKind.KEYED), self.states[position]
        first, last = (int(found) for found in np.searchsorted(self.state, (position, position + 1)))
        live = first + int(np.count_nonzero(~self.deleted[first:last]))
        return slice(live if deleted else first, live if deleted is False else last)


def _state_info(described: Mapping[str, str]) -> StateInfo:
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(described["schema"], validate=True)))
    return StateInfo(described["name"], StateKind(described["kind"]), described["shape"], schema)


def _joined(parts: Iterable[Any]) -> Iterator[bytes | memoryview]:
    """Yield large parts alone, without a copy, and small parts joined to at least `BLOCK_BYTES`."""
    small: list[Any] = []
    small_bytes = 0
    for part in parts:
        is_large = len(part) >= BLOCK_BYTES
        if not is_large:
            small.append(part)
            small_bytes += len(part)
        if small and (is_large or small_bytes >= BLOCK_BYTES):
            yield b"".join(small)
            small, small_bytes = [], 0
        if is_large:
            yield memoryview(part)
    if small:
        yield b"".join(small)


def _has_dictionary(declared: pa.DataType) -> bool:
    if pa.types.is_dictionary(declared):
        return True
    return any(_has_dictionary(declared.field(position).type) for position in range(declared.num_fields))
