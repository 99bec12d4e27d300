"""Records by key of the RocksDB backend, as a cache over RocksDB (rocks_tables.py).

A table that isn't complete knows of each key whether all its records are here (`RecordIndex.whole`). The records of keys
that are asked for and not whole are read by their common prefix, all records of the keys of one batch, which therefore have
to fit into memory. Adding a record reads nothing.

Positions are the backend's numbers, which continue after a restore from its own files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tidegate.state.key_index import KeyIndex
from tidegate.state.key_store import IntArray
from tidegate.state.record_table import MATCHES, RecordState, RecordTable
from tidegate.state.rocks_db import scan_prefix
from tidegate.state.rocks_tables import READ_ENTRIES, RocksTable, RocksTables
from tidegate.state.sections import POSITION, StateInfo
from tidegate.state.vectors import VectorField

if TYPE_CHECKING:
    from tidegate.state.rocksdb import RocksBackend


class RocksRecordTable(RocksTable, RecordTable):
    """A table of records that may have more of them in RocksDB, unless it is `complete`."""

    def __init__(self, state: RocksRecords, at: int | None, *, complete: bool) -> None:
        RecordTable.__init__(
            self,
            state.key_type,
            state.record_columns,
            state.record_fields,
            positions=state.host.take_numbers,
            touched=partial(state.touch, at),
            writes_all=False,
        )
        key_type = state.key_type
        of_key = list(key_type) if pa.types.is_struct(key_type) else [pa.field("key", key_type)]
        # A column of the key may have any name.
        identity = [pa.field(str(number), each.type) for number, each in enumerate(of_key)]
        gone_type = pa.struct([*identity, pa.field(POSITION, pa.int64())])
        self._cache(gone_type, complete=complete, resized=partial(state.resized, at))
        self._state = state
        self._at = at

    def append(self, keys: Sequence[pa.Array], columns: Sequence[pa.Array], positions: IntArray | None = None) -> IntArray:
        return self._add(keys, columns, positions, whole=self.complete)

    def matches(self, keys: Sequence[pa.Array], limit: int = MATCHES) -> Iterator[tuple[IntArray, IntArray]]:
        self._fetch(keys)
        return super().matches(keys, limit)

    def counts(self, keys: Sequence[pa.Array]) -> IntArray:
        self._fetch(keys)
        return super().counts(keys)

    def _fetch(self, keys: Sequence[pa.Array]) -> None:
        """Read the records of keys that are not whole."""
        if self.complete:
            return
        index = self._index
        numbers = index.numbers(keys)
        wanted = np.flatnonzero(numbers < 0)
        known = np.flatnonzero(numbers >= 0)
        wanted = np.concatenate([wanted, known[~index.whole[numbers[known]]]])
        if not len(wanted):
            return
        distinct = KeyIndex(self._state.key_type)
        distinct.rows_of([column.take(pa.array(wanted)) for column in keys])
        asked = distinct.keys(np.arange(distinct.top))
        entries = (
            entry for start in self._state.starts(asked, self._at) for entry in scan_prefix(self._state.host.db, start)
        )
        here = self._identities(index.rows_of(index.numbers(asked)))
        while some := list(islice(entries, READ_ENTRIES)):
            self._take_in(some, here)
        found = index.numbers(asked)
        found = found[found >= 0]
        index.relink(found)
        index.whole[found] = True
        self._resized()

    def _identities(self, rows: IntArray) -> KeyIndex:
        """Return what identifies these rows."""
        here = KeyIndex(self._gone_type)
        here.rows_of(self.keys(rows))
        return here

    def _take_in(self, entries: list[tuple[bytes, bytes]], here: KeyIndex) -> None:
        """Load entries of RocksDB that were neither here before the first ones were read, nor deleted."""
        spelling = self._state.spelling
        rows = spelling.batch([key for key, _ in entries], [value for _, value in entries])
        key = rows.column("key")
        keys = key.flatten() if pa.types.is_struct(key.type) else [key]
        identity = [*keys, rows.column(POSITION)]
        wanted = np.flatnonzero(~self._is_gone(identity) & (here.find(identity) < 0))
        if len(wanted):
            rows = rows.take(pa.array(wanted))
            value, positions = rows.column("value"), rows.column(POSITION).to_numpy()
            values = {field.name: value.field(field.name) for field in self._state.fields}
            self.load([rows.column("key")], positions, values, known=True, relinked=True)

    def _fetch_all(self) -> None:
        if self.complete:
            return
        here = self._identities(self._rows())
        for entries in self._state.entries_of(self._at):
            self._take_in(entries, here)
        self._index.relink(self._index.numbers_in_use())
        self.complete = True
        self._index.whole[:] = True
        self._resized()


class RocksRecords(RocksTables[RecordTable], RecordState):
    """The records of one state over RocksDB."""

    def __init__(
        self,
        info: StateInfo,
        columns: Sequence[pa.Field],
        fields: Sequence[VectorField],
        host: RocksBackend,
        prefix: bytes,
    ) -> None:
        self._open(info, host, prefix)
        RecordState.__init__(self, info, columns, fields)
        self._find_windows()

    def load(self, rows: pa.RecordBatch, *, known: bool) -> None:
        if rows.num_rows:
            self.host.reached_number(int(rows.column(POSITION).to_numpy().max()))
        super().load(rows, known=known)

    def starts(self, keys: list[pa.Array], at: int | None) -> list[bytes]:
        """Return what the entries of these keys begin with."""
        key = pa.StructArray.from_arrays(keys, fields=list(self.key_type)) if pa.types.is_struct(self.key_type) else keys[0]
        windows = None if at is None else pa.array(np.full(len(key), at, np.int64))
        return sorted(self.spelling.keys(key, windows))

    def _has_objects(self, field: VectorField) -> bool:
        kind = field.type
        return bool(pa.types.is_list(kind) or pa.types.is_map(kind))

    def _make_table(self, at: int | None) -> RecordTable:
        # A window is new, or was found when the state was made: `_find_windows` and `load` make these incomplete.
        return RocksRecordTable(self, at, complete=True)
