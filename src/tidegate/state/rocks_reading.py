"""From RocksDB's entries to sections of Arrow rows: the rows that the heap would write for the same state.

A database is read in the order of its keys, so rows come by key-group, and nothing has to be sorted or kept. A background
thread reads it beside a busy loop, in chunks with rests between them (`Pace` of cutting.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa

from tidegate.errors import SchemaError
from tidegate.state.cutting import BATCH_ROWS, SECTION_ROWS, Pace, in_batches
from tidegate.state.rocks_collections import NUMBER_BYTES
from tidegate.state.rocks_db import scan_range
from tidegate.state.rocks_keys import GROUP_BYTES, KeySpelling, group_bounds, read_column
from tidegate.state.rocks_rows import RowSpelling
from tidegate.state.rocks_values import value_spelling
from tidegate.state.sections import Section, StateInfo
from tidegate.types import ddl_of, from_list, limits, to_list

REST = 4.0  # times as long as the work before it

Entry: TypeAlias = tuple[bytes, bytes]


class StateReader:
    """Reads one state, whose keys begin with `prefix`. `rest_factor` is 0 if no loop is busy in the process."""

    def __init__(self, db: Any, info: StateInfo, prefix: bytes, spelling: KeySpelling, *, rest_factor: float = REST) -> None:
        self._db = db
        self._info = info
        self._prefix = prefix
        self._skip = len(prefix) + GROUP_BYTES
        self._spelling = spelling
        self._rest_factor = rest_factor
        self._value_type = info.schema.field("value").type
        self._columnar = RowSpelling(info.schema, prefix, spelling) if info.shape in ("columns", "records") else None

    def sections(self, groups: range) -> Iterator[Section]:
        """Return the rows of these key-groups. A section is whole groups, or a part of one large group."""
        return _cut(self._info.name, self._pieces(groups))

    def rows(self, groups: range) -> Iterator[pa.RecordBatch]:
        return map(itemgetter(1), self._pieces(groups))

    def _pieces(self, groups: range) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Return rows, each batch with its key-group."""
        start, stop = (self._prefix + group.to_bytes(GROUP_BYTES) for group in (groups.start, groups.stop))
        entries = scan_range(self._db, start, stop)
        make = {"list": self._lists, "map": self._maps}.get(self._info.shape, self._values)
        split = self._info.shape in ("list", "map")
        pace = Pace(rest_factor=self._rest_factor)
        rest: list[Entry] = []
        while True:
            chunk = _some(entries, pace.entries)
            if not chunk:
                break
            chunk, rest = self._whole_keys(rest + chunk) if split else (chunk, rest)
            if chunk:
                yield from self._by_group(*make(chunk))
            pace.rest_if_due()
        if rest:
            yield from self._by_group(*make(rest))

    def _by_group(self, keys: Sequence[bytes], rows: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        for group, start, stop in group_bounds(keys, skip=len(self._prefix)):
            yield group, rows.slice(start, stop - start)

    def _whole_keys(self, entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Split off the entries of the last key, which may continue in the next chunk."""
        last = entries[-1][0]
        _, (end,) = self._spelling.read([last], skip=self._skip)
        place = len(entries) - 1
        while place and entries[place - 1][0].startswith(last[:end]):
            place -= 1
        return entries[:place], entries[place:]

    # What the entries hold, by the shape of the state: the spelled keys, and rows.

    def _values(self, entries: list[Entry]) -> tuple[Sequence[bytes], pa.RecordBatch]:
        keys, values = zip(*entries, strict=True)
        if self._columnar is not None:
            return keys, self._columnar.batch(keys, values)
        return self._batch(keys, value_spelling(self._value_type).column(values))

    def _lists(self, entries: list[Entry]) -> tuple[Sequence[bytes], pa.RecordBatch]:
        chunks = value_spelling(self._value_type).values([value for _, value in entries])
        found: dict[bytes, list[Any]] = {}
        for (key, _), chunk in zip(entries, chunks, strict=True):
            found.setdefault(key[:-NUMBER_BYTES], []).extend(chunk)
        return self._collected(found)

    def _maps(self, entries: list[Entry]) -> tuple[Sequence[bytes], pa.RecordBatch]:
        spelled = [key for key, _ in entries]
        _, ends = self._spelling.read(spelled, skip=self._skip)
        items = to_list(read_column(spelled, ends, self._value_type.key_type)[0])
        values = value_spelling(self._value_type.item_type).values([value[NUMBER_BYTES:] for _, value in entries])
        found: dict[bytes, list[tuple[bytes, Any, Any]]] = {}
        for (key, spelled_value), end, item, value in zip(entries, ends, items, values, strict=True):
            found.setdefault(key[:end], []).append((spelled_value[:NUMBER_BYTES], item, value))
        return self._collected(
            {key: {item: value for _, item, value in sorted(those, key=itemgetter(0))} for key, those in found.items()}
        )

    def _collected(self, found: dict[bytes, Any]) -> tuple[Sequence[bytes], pa.RecordBatch]:
        try:
            values = from_list(list(found.values()), self._value_type)
        except SchemaError as error:
            raise SchemaError(
                f"state {self._info.name!r} is declared as {ddl_of(self._value_type)}, and holds something "
                f"else: {error}. Change the function or the declaration."
            ) from error
        return self._batch(list(found), values)

    def _batch(self, keys: Sequence[bytes], values: pa.Array) -> tuple[Sequence[bytes], pa.RecordBatch]:
        columns = [self._spelling.read(keys, skip=self._skip)[0], values]
        return keys, pa.RecordBatch.from_arrays(columns, schema=self._info.schema)


def _some(entries: Iterator[Entry], count: int) -> list[Entry]:
    """Take so many entries, or fewer if they have many bytes."""
    taken: list[Entry] = []
    size_bytes = 0
    for entry in islice(entries, count):
        taken.append(entry)
        size_bytes += len(entry[1])
        if size_bytes > limits.JOINED_BYTES:
            break
    return taken


def _cut(state: str, pieces: Iterable[tuple[int, pa.RecordBatch]]) -> Iterator[Section]:
    small: dict[int, pa.RecordBatch] = {}  # rows of small groups, to be one section
    small_bytes = 0

    def together() -> Iterator[Section]:
        if small:
            yield Section(state, range(min(small), max(small) + 1), pa.concat_batches(small.values()))
            small.clear()

    for group, of_group in groupby(pieces, key=itemgetter(0)):
        batches = in_batches(rows for _, rows in of_group)
        rows = next(batches)
        behind = next(batches, None)
        is_large = behind is not None or rows.num_rows >= BATCH_ROWS
        small_bytes += rows.nbytes
        if is_large or small_bytes > limits.JOINED_BYTES or sum(each.num_rows for each in small.values()) >= SECTION_ROWS:
            yield from together()
            small_bytes = rows.nbytes
        if is_large:
            for part in chain([rows] if behind is None else [rows, behind], batches):
                yield Section(state, range(group, group + 1), part)
        else:
            small[group] = rows
    yield from together()
