"""One side of a regular join: what it keeps of its records, and how they are found again. What ranks changes
(rank_changes.py) keeps its records in the same way.

A record is kept in a state of records (state/record_table.py), by the key of the join. Beside it are as many fields as the
join needs: the number of its matches, if the result depends on whether there are any, and the hash of its columns, if it may
be deleted again.

With a ttl, records that came about the same time are in one window of the state, whose number is the time at which the last
of them can have come. A window is dropped as a whole, in a time that doesn't depend on how many records are in it, when the
ttl of all of them has ended: so a record is forgotten when it is between one ttl and one and a quarter old. Without a ttl
all records are in one window, `NO_END`.

A deletion is looked for among the records of its key, by the hash first. That takes a time that grows with the number of
records that the keys of a batch have, however many deletions of them there are.

Not here: what a join emits (regular_join.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import BoolArray, IntArray
from tidegate.dataflow.aggregates.numpy_columns import ranks
from tidegate.dataflow.operators.base import KeyedBackend
from tidegate.dataflow.operators.keyed_table import plain
from tidegate.dataflow.row_kinds import ROW_KIND, signs_of, takes_back_earlier
from tidegate.hashing import hash_columns
from tidegate.state.descriptors import Records
from tidegate.state.key_index import KeyIndex
from tidegate.state.record_table import RecordTable
from tidegate.state.vectors import VectorField

MATCHES = "__matches"
HASH = "__hash"
UNKNOWN = 0  # the hash of a record from before there were deletions
NO_END = 0
SPANS_IN_TTL = 4
MATCHES_AT_A_TIME = 1 << 15


@dataclass(frozen=True, slots=True)
class JoinSide:
    """What a join knows of one input. `columns` are those beside the key. `counts`: whether the result depends on how many
    matches a record has."""

    name: str
    key: tuple[pa.Field, ...]
    columns: tuple[pa.Field, ...]
    retracts: bool
    counts: bool

    @property
    def descriptor(self) -> Records:
        fields = [VectorField(MATCHES, pa.int64(), 0)] if self.counts else []
        if self.retracts:
            fields.append(VectorField(HASH, pa.int64(), UNKNOWN))
        # The matches of records that were kept without them are not known. So that is another state, and not a field that is
        # added: to make an inner join an outer one loses the records, which has to be allowed by name.
        name = f"{self.name} with matches" if self.counts else self.name
        return Records(name, self.columns, fields, windowed=True)


@dataclass(frozen=True, slots=True)
class Arrived:
    """Records of a batch: their keys, other columns, and whether each is inserted (1) or deleted (-1)."""

    keys: Sequence[pa.Array]
    columns: Sequence[pa.Array]
    signs: IntArray

    def __len__(self) -> int:
        return len(self.signs)

    def at(self, places: IntArray) -> Arrived:
        if len(places) == len(self) and (places == np.arange(len(self))).all():
            return self
        some = pa.array(places)
        return Arrived(
            [each.take(some) for each in self.keys], [each.take(some) for each in self.columns], self.signs[places]
        )

    @property
    def has_null_key(self) -> BoolArray:
        """Whether a column of the key is null, which equals nothing."""
        found = np.zeros(len(self), bool)
        for column in self.keys:
            if column.null_count:
                found |= column.is_null().to_numpy(zero_copy_only=False)
        return found

    @property
    def deleted(self) -> IntArray:
        return np.flatnonzero(self.signs < 0)

    @property
    def inserted(self) -> IntArray:
        return np.flatnonzero(self.signs > 0)


@dataclass(frozen=True, slots=True)
class Found:
    """The stored records that deletions are of: by deletion, its place in the batch, the table, and the row in it."""

    places: IntArray
    tables: IntArray
    rows: IntArray


class StoredSide:
    """The records of one side that are kept."""

    def __init__(self, side: JoinSide, backend: KeyedBackend, ttl_ms: int | None, now_ms: int) -> None:
        self.side = side
        self._state = backend.record_state(side.descriptor)
        self._ttl_ms = ttl_ms
        self._span_ms = 0 if ttl_ms is None else max(1, -(-ttl_ms // SPANS_IN_TTL))
        self._since_ms = now_ms
        self._key_type = self._state.info.schema.field("key").type
        self._identity = pa.struct(
            [pa.field(str(number), field.type) for number, field in enumerate((*side.key, *side.columns))]
        )

    @property
    def table(self) -> RecordTable:
        """The only table, if there is no ttl."""
        assert self._ttl_ms is None
        return self._state.window(NO_END)

    def arrived(self, batch: pa.RecordBatch, *, renews: bool) -> Arrived:
        """Return the records of a batch, deletions first, without those that a later one in it takes back. `renews`:
        whether a record that is deleted and comes again is another one. It is if the former one may have been forgotten, or
        if the order of arrival matters."""
        keys = [plain(batch.column(field.name)).cast(field.type) for field in self.side.key]
        columns = [plain(batch.column(field.name)) for field in self.side.columns]
        if not self.side.retracts:
            return Arrived(keys, columns, np.ones(batch.num_rows, np.int64))
        arrived = Arrived(keys, columns, signs_of(batch.column(ROW_KIND)))
        if not len(arrived.deleted) or not len(arrived.inserted):
            return arrived
        ids, _ = KeyIndex(self._identity).rows_of([*keys, *columns])
        deleted = np.bincount(ids[takes_back_earlier(ids, arrived.signs)], minlength=int(ids.max()) + 1)
        inserted = deleted.copy()
        np.add.at(inserted, ids, arrived.signs)
        if not renews:
            # What is deleted is stored, so it may stay instead of coming back.
            stays = np.minimum(deleted, inserted)
            deleted, inserted = deleted - stays, inserted - stays
        # Of equal records, the last ones, as many as are left.
        counts = np.where(arrived.signs < 0, deleted[ids], inserted[ids])
        places = np.flatnonzero(ranks((ids * 2 + (arrived.signs > 0))[::-1])[::-1] < counts)
        signs = arrived.signs[places]
        return arrived.at(np.concatenate([places[signs < 0], places[signs > 0]]))

    def numbers_of(self, keys: Sequence[pa.Array]) -> IntArray:
        """Return numbers that are the same for equal keys."""
        return KeyIndex(self._key_type).rows_of(keys)[0]

    def tables(self) -> list[RecordTable]:
        """Return the tables with the records that are kept."""
        return [self._state.window(at) for at in self._state.windows()]

    def expire(self, now_ms: int) -> None:
        """Drop the records whose ttl has ended."""
        if self._ttl_ms is None:
            return
        for at in self._state.windows():
            # Records from before there was a ttl are kept for one.
            if (self._since_ms if at == NO_END else at) + self._ttl_ms <= now_ms:
                self._state.drop(at)

    def store(self, records: Arrived, matches: IntArray, now_ms: int) -> None:
        """Keep these records, which have so many matches."""
        if not len(records):
            return
        at = NO_END if self._ttl_ms is None else (now_ms // self._span_ms + 1) * self._span_ms
        table = self._state.window(at)
        rows = table.append(records.keys, records.columns)
        table.change(rows)
        if self.side.counts:
            table.vectors[MATCHES].values[rows] = matches
        if self.side.retracts:
            table.vectors[HASH].values[rows] = self._hashes(records.keys, records.columns)

    def find(self, records: Arrived, tables: Sequence[RecordTable], found: list[Found]) -> Iterator[None]:
        """Append to `found` the stored records that the deletions among these are of, each once. Pauses after each part."""
        places = records.deleted
        if not len(places):
            return
        gone = records.at(places)
        index = KeyIndex(self._identity)
        ids, _ = index.rows_of([*gone.keys, *gone.columns])
        hashes = np.unique(self._hashes(gone.keys, gone.columns))
        key = KeyIndex(self._key_type)
        key.rows_of(gone.keys)
        parts: list[tuple[IntArray, IntArray, IntArray]] = []  # ids, tables and rows
        for number, table in enumerate(tables):
            for _, rows in table.matches(key.keys(np.arange(key.top)), MATCHES_AT_A_TIME):
                held = table.vectors[HASH].values[rows]
                near = np.minimum(np.searchsorted(hashes, held), len(hashes) - 1)
                rows = rows[(hashes[near] == held) | (held == UNKNOWN)]
                if len(rows):
                    columns = [table.column(field.name, rows) for field in self.side.columns]
                    same = index.find([*table.key_columns(rows), *columns])
                    rows, same = rows[same >= 0], same[same >= 0]
                    parts.append((same, np.full(len(rows), number), rows))
                yield
        if not parts:
            return
        there, numbers, rows = (np.concatenate([part[which] for part in parts]) for which in range(3))
        # The first stored records of each identity, for as many deletions.
        wanted, have = np.bincount(ids, minlength=index.top), np.bincount(there, minlength=index.top)
        mine, theirs = np.flatnonzero(ranks(ids) < have[ids]), np.flatnonzero(ranks(there) < wanted[there])
        mine, theirs = mine[np.argsort(ids[mine], kind="stable")], theirs[np.argsort(there[theirs], kind="stable")]
        order = np.argsort(mine)
        found.append(Found(places[mine[order]], numbers[theirs[order]], rows[theirs[order]]))

    def matches_of(self, found: Found, tables: Sequence[RecordTable]) -> IntArray:
        """Return how many matches stored records have."""
        counts = np.zeros(len(found.rows), np.int64)
        for number, table in enumerate(tables):
            here = found.tables == number
            counts[here] = table.vectors[MATCHES].values[found.rows[here]]
        return counts

    def delete(self, found: Found, tables: Sequence[RecordTable]) -> None:
        for number, table in enumerate(tables):
            rows = found.rows[found.tables == number]
            if len(rows):
                table.delete(rows)

    def _hashes(self, keys: Sequence[pa.Array], columns: Sequence[pa.Array]) -> IntArray:
        hashes = np.array(hash_columns([*keys, *columns]))
        hashes[hashes == UNKNOWN] += 1
        return hashes
