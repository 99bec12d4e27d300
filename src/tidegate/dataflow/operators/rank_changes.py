"""The best records of each key of a stream of changes: a record that is taken back makes room for the next one.

Theory of operation. All records of a key are kept, since each of them may become one of the best. For a batch, the records
of its keys are read from the state, with what decides about their order, and put in order together with the new ones. In
this order each record is counted twice: among those that were there before the batch, and among those that are there after
it. So it has a rank before and one after, and where the two differ within the first n, its row is deleted with the one and
inserted with the other.

The result has one row for each key and rank at any time; or without ranks, one for each key, as `deduplicate` wants it.

The cost of a batch grows with the number of records that its keys have. Some keys are done at a time, with pauses between
them. Of records that are equal in order, the first that arrived is first, or the last one if `latest`.

A key for which nothing has come for the ttl is forgotten with all of its records. Nothing is deleted from the result then,
and later deletions of these records have no effect.

Not here: how a deleted record is found (join_sides.py), and the best of appended records, of which fewer have to be kept
(top.py, deduplicate.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import BoolArray, IntArray
from tidegate.dataflow.changelog import Changelog
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.join_sides import Arrived, Found, JoinSide, StoredSide
from tidegate.dataflow.operators.joined_columns import Columns as ColumnsOf
from tidegate.dataflow.operators.joined_columns import stored_columns
from tidegate.dataflow.operators.keyed_table import touched_fields
from tidegate.dataflow.operators.ordering import Codes, Ordering, joined
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.stepwise import Steps, StepwiseOperator
from tidegate.dataflow.row_kinds import kinds_of
from tidegate.state.column_ttl import ColumnTtl
from tidegate.state.descriptors import Columns, Records
from tidegate.state.key_index import KeyIndex
from tidegate.state.record_table import RecordTable
from tidegate.state.sections import FrozenState, StateInfo

STATE, TOUCHED_STATE = "records", "touched"
RANKED_ROWS = 65_536
"""A step ranks about so many records, unless one key has more."""


@dataclass(frozen=True, slots=True)
class RankChangesSpec:
    """The first `count` records of each key in an order, of changes. `ranked`: whether the result has the rank."""

    key: tuple[str, ...]
    side: JoinSide
    ordering: Ordering
    count: int
    ttl_ms: int | None
    kind: str
    ranked: bool
    latest: bool = False
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True
    changelogs: ClassVar[frozenset[Changelog]] = frozenset({Changelog.RETRACT})

    def create(self, node: Node) -> Operator:
        return RankChangesOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return tuple(each.info(key_type(node.input_schemas[0], self.key)) for each in self.descriptors)

    @property
    def descriptors(self) -> tuple[Records | Columns, ...]:
        if self.ttl_ms is None:
            return (self.side.descriptor,)
        return self.side.descriptor, Columns(TOUCHED_STATE, touched_fields(self.ttl_ms))

    @property
    def text(self) -> str:
        """What `explain` shows."""
        by = self.ordering.text or "arrival"
        return f"{self.count} by {by}" if self.ranked else f"the {'last' if self.latest else 'first'} by {by}"


@dataclass(frozen=True, slots=True)
class _Ranked:
    """Stored records and new ones in one order: for each its place among both, and its rank before and after, or -1."""

    order: IntArray
    before: IntArray
    after: IntArray


class RankChangesOperator(StepwiseOperator):
    """Emits how the best records of each key change."""

    def __init__(self, node: Node, spec: RankChangesSpec) -> None:
        super().__init__(node)
        self._spec = spec
        self._key_type = key_type(node.input_schemas[0], spec.key)
        self._backend: KeyedBackend | None = None
        self._ttl: ColumnTtl | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        spec = self._spec
        self._backend = backend = context.make_backend(self._key_type)
        self._stored = StoredSide(spec.side, backend, None, 0)
        if spec.ttl_ms is not None:
            self._touched = backend.column_state(Columns(TOUCHED_STATE, touched_fields(spec.ttl_ms))).table()
            self._ttl = ColumnTtl(self._touched, spec.ttl_ms, context.user_now_ms, remove=self._forget)
        for state, batches in context.restored.items():
            for rows in batches:
                backend.load(state, rows, known=context.goes_on)
        if self._ttl is not None and context.restored and TOUCHED_STATE not in context.restored:
            self._begin_ttl()

    def maintain(self, budget: int) -> None:
        if not self.has_work():  # work under way knows the numbers of rows, which this may change
            assert self._backend is not None
            if self._ttl is not None:
                self._ttl.sweep(budget)
            self._backend.maintain(budget)

    def freeze(self, epoch: int) -> FrozenState | None:
        assert self._backend is not None
        return self._backend.freeze()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        arrived = self._stored.arrived(batch, renews=True)
        index = KeyIndex(self._key_type)
        groups, _ = index.rows_of(arrived.keys)
        keys = index.keys(np.arange(index.top))
        if self._ttl is not None:
            rows = self._touched.rows_of(keys)
            ended = rows[self._ttl.ended(rows)]
            if len(ended):
                self._forget(ended)
                rows = self._touched.rows_of(keys)
            self._ttl.touch(rows)
        table = self._stored.table
        table.keeps_rows = True
        order = np.argsort(groups, kind="stable")
        for first, stop in _parts(table.counts(keys) + np.bincount(groups, minlength=index.top)):
            here = order[np.searchsorted(groups[order], first) : np.searchsorted(groups[order], stop)]
            some = [column.slice(first, stop - first) for column in keys]
            self._rank(some, groups[here] - first, arrived.at(here))
            if self._budget.is_spent:
                yield
        table.keeps_rows = False

    # Inside.

    def _rank(self, keys: list[pa.Array], groups: IntArray, arrived: Arrived) -> None:
        """Change the records of some keys, and emit what that changes of the best ones."""
        table, found = self._stored.table, list[Found]()
        for _ in self._stored.find(arrived, [table], found):
            pass
        gone = found[0].rows if found else np.empty(0, np.int64)
        pairs = list(table.matches(keys))
        nothing = np.empty(0, np.int64)
        probes, rows = (np.concatenate([nothing, *(pair[which] for pair in pairs)]) for which in range(2))
        new = arrived.at(arrived.inserted)
        stays = ~np.isin(rows, gone)
        ranked = self._ranked(table, rows, new, np.concatenate([probes, groups[arrived.inserted]]), stays)
        changed = ranked.before != ranked.after
        deleted, inserted = (np.flatnonzero(changed & (ranks >= 0)) for ranks in (ranked.before, ranked.after))
        is_stored = ranked.order[inserted] < len(rows)
        inserted = np.concatenate([inserted[is_stored], inserted[~is_stored]])
        self._emit(table, rows, new, ranked, deleted, inserted)
        if found:
            self._stored.delete(found[0], [table])
        self._stored.store(new, np.zeros(len(new), np.int64), 0)

    def _ranked(self, table: RecordTable, rows: IntArray, new: Arrived, groups: IntArray, stays: BoolArray) -> _Ranked:
        """Return the ranks of the stored records, of which some stay, and of the new ones. `groups`: the keys of both."""
        ties = np.concatenate([table.positions(rows), np.iinfo(np.int64).max - np.arange(len(new))[::-1]])
        codes = self._codes(stored_columns(table, rows, self._spec.key), self._of(new))
        order = np.lexsort((-ties if self._spec.latest else ties, *reversed(codes), groups))
        groups, is_stored = groups[order], order < len(rows)
        stays = np.concatenate([stays, np.ones(len(new), bool)])[order]
        return _Ranked(order, self._ranks(groups, is_stored), self._ranks(groups, stays))

    def _codes(self, stored: ColumnsOf, new: ColumnsOf) -> Codes:
        """Return what decides about the order of stored and of new records."""
        names = self._spec.ordering.columns
        if not names:
            return []
        batches = [pa.RecordBatch.from_arrays([of(name) for name in names], names=names) for of in (stored, new)]
        return joined([self._spec.ordering.codes(batch) for batch in batches])

    def _ranks(self, groups: IntArray, there: BoolArray) -> IntArray:
        """Return the rank of each record among those of its key that are there; -1 if it is not there, or not a best one."""
        counts = np.cumsum(there)
        firsts = np.flatnonzero(np.append(True, np.diff(groups) != 0))[: len(groups)]
        sizes = np.diff(np.append(firsts, len(groups)))
        ranks = counts - np.repeat(counts[firsts] - there[firsts], sizes) - 1
        return np.where(there & (ranks < self._spec.count), ranks, -1)

    def _emit(
        self,
        table: RecordTable,
        rows: IntArray,
        new: Arrived,
        ranked: _Ranked,
        deleted: IntArray,
        inserted: IntArray,
    ) -> None:
        """Emit these records: first the deleted ones, which are stored, then the inserted ones, stored ones first."""
        count = len(deleted) + len(inserted)
        if not count:
            return
        places = ranked.order[np.concatenate([deleted, inserted])]
        is_stored = places < len(rows)
        stored = stored_columns(table, rows[places[is_stored]], self._spec.key)
        fresh, some = self._of(new), pa.array(places[~is_stored] - len(rows))
        names = [name for name in self.node.input_schemas[0].names if name in self.node.schema.names[1:]]
        columns = [pa.concat_arrays([stored(name), fresh(name).take(some)]) for name in names]
        if self._spec.ranked:
            columns.append(pa.array(np.concatenate([ranked.before[deleted], ranked.after[inserted]]) + 1))
        kinds = kinds_of(np.arange(count) >= len(deleted))
        self.emit(pa.RecordBatch.from_arrays([kinds, *columns], schema=self.node.schema))

    def _of(self, records: Arrived) -> ColumnsOf:
        """Return the columns of records of a batch."""
        side = self._spec.side
        found = dict(zip((field.name for field in side.key), records.keys, strict=True))
        found |= zip((field.name for field in side.columns), records.columns, strict=True)
        return found.__getitem__

    def _begin_ttl(self) -> None:
        """Note the keys of records from before there was a ttl. Their time begins when the sweep sees them."""
        rows = self._stored.table.rows()
        for start in range(0, len(rows), RANKED_ROWS):
            self._touched.rows_of(self._stored.table.key_columns(rows[start : start + RANKED_ROWS]))

    def _forget(self, rows: IntArray) -> None:
        """Forget keys that the ttl has ended, with their records."""
        table = self._stored.table
        for _, found in list(table.matches(self._touched.keys(rows))):
            table.delete(found)
        self._touched.delete(rows)


def _parts(counts: IntArray) -> Iterator[tuple[int, int]]:
    """Return ranges of keys that have about as many records as a step ranks, or one key that has more."""
    ends, first = np.cumsum(counts), 0
    while first < len(counts):
        done = ends[first - 1] if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, done + RANKED_ROWS, side="right")))
        yield first, stop
        first = stop
