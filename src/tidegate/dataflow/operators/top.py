"""The best records of each key, ranked: the first n in an order of columns.

State is a table for each rank: the record that a key has at that rank. So a key takes as much memory as it has records, and
a record that is worse than the one at the last rank, as most are after a while, costs one look-up.

A batch is first reduced to its own best records. They are merged with those that their keys have, sorted again, and what
has another rank than before is written and emitted. Ranks of a key only fill up, so what is emitted are upserts by key and
rank, and nothing has to be taken back.

Of records that are equal in order, the one that arrived first is first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.changelog import APPEND_OR_RETRACT, Changelog
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.keyed_columns import KeyedColumnsOperator, columns_key_type
from tidegate.dataflow.operators.ordering import Codes, Ordering, before, joined, sorted_order, taken
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.state.batch_keys import Keys, places_in_groups
from tidegate.state.column_table import ColumnTable
from tidegate.state.column_ttl import TOUCHED_FIELD, ColumnTtl
from tidegate.state.descriptors import Columns
from tidegate.state.key_store import IntArray
from tidegate.state.sections import StateInfo
from tidegate.state.vectors import VectorField, column_from, put_column

STATE = "ranks"
MAX_COUNT = 1000
MERGED_ROWS = 65_536
"""A step merges at most about so many records that keys have."""


@dataclass(frozen=True, slots=True)
class TopSpec:
    """The first `count` records of each key, in an order."""

    key: tuple[str, ...]
    ordering: Ordering
    count: int
    ttl_ms: int | None
    fields: tuple[VectorField, ...]
    kind: ClassVar[str] = "top"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True
    changelogs: ClassVar[frozenset[Changelog]] = APPEND_OR_RETRACT  # for changes there is RankChangesSpec

    @property
    def descriptors(self) -> tuple[Columns, ...]:
        fields = self.fields if self.ttl_ms is None else (*self.fields, TOUCHED_FIELD)
        return (Columns(STATE, fields, windowed=True),)

    @property
    def text(self) -> str:
        """What `explain` shows."""
        return f"{self.count} by {self.ordering.text}"

    def create(self, node: Node) -> Operator:
        return TopOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return tuple(each.info(columns_key_type(node, self.key)) for each in self.descriptors)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Records of some keys that have new ranks, from 0."""

    keys: pa.RecordBatch
    values: pa.RecordBatch
    ranks: IntArray


@dataclass(frozen=True, slots=True)
class _Held:
    """What some keys have: for each record the index of its key, its rank, its row in the rank's table, and its codes."""

    groups: IntArray
    ranks: IntArray
    rows: IntArray
    codes: Codes


class RankedTables:
    """The tables of all ranks. `table_at` returns that of a rank, which is made if it is not there; `is_there` says whether
    it is."""

    def __init__(
        self,
        ordering: Ordering,
        fields: tuple[VectorField, ...],
        count: int,
        *,
        table_at: Callable[[int], ColumnTable],
        is_there: Callable[[int], bool],
    ) -> None:
        self._ordering = ordering
        self._fields = fields
        self._schema = pa.schema([field.arrow for field in fields])
        self._count = count
        self._table_at = table_at
        self._is_there = is_there

    def add(self, batch: pa.RecordBatch, keys: Keys) -> Iterator[Ranked]:
        """Rank the records of a batch, and yield what has new ranks, for some keys after the other. Between two of them the
        state is consistent but for the rest of the batch."""
        codes = self._ordering.codes(batch)
        records = self._candidates(codes, keys)
        order = records[sorted_order(keys.of[records], taken(codes, records))]
        order = order[places_in_groups(keys.of[order]) < self._count]
        of = keys.of[order]
        values = batch.select(self._schema.names)
        begins = np.flatnonzero(np.append(True, np.diff(of) > 0)) if len(of) else of
        step = max(1, MERGED_ROWS // self._count)
        for first in range(0, len(begins), step):
            stop = begins[first + step] if first + step < len(begins) else len(of)
            some, of_some = order[begins[first] : stop], of[begins[first] : stop]
            distinct = of[begins[first : first + step]]
            part = keys.columns.take(pa.array(distinct))
            new = values.take(pa.array(some))
            changed = self._merge(part, np.searchsorted(distinct, of_some), new, taken(codes, some))
            if len(changed.ranks):
                yield changed

    def delete(self, keys: list[pa.Array]) -> None:
        """Delete all that these keys have."""
        for rank in range(self._count):
            if not len(keys[0]) or not self._is_there(rank):
                return
            table = self._table_at(rank)
            rows = table.find(keys)
            there = rows >= 0
            table.delete(rows[there])
            if not there.all():  # a key without a record at this rank has none at the next ones
                keys = [column.filter(pa.array(there)) for column in keys]

    # Inside.

    def _candidates(self, codes: Codes, keys: Keys) -> IntArray:
        """Return the records that are better than the last one that their key has, if it has a record at the last rank."""
        if not self._is_there(self._count - 1):
            return np.arange(len(keys.of))
        table = self._table_at(self._count - 1)
        rows = table.find(keys.columns.columns)
        is_full = rows >= 0
        if not is_full.any():
            return np.arange(len(keys.of))
        worst: Codes = []
        for held in self._ordering.codes_of_rows(table.vectors, rows[is_full]):
            each = np.zeros(len(keys), np.int64)
            each[is_full] = held
            worst.append(each[keys.of])
        return np.flatnonzero(~is_full[keys.of] | before(codes, worst))

    def _merge(self, keys: pa.RecordBatch, of: IntArray, new: pa.RecordBatch, codes: Codes) -> Ranked:
        """Merge new records, the best of their keys first, with those that the keys have."""
        held = self._held(keys)
        old_count = len(held.groups)
        groups = np.concatenate([held.groups, of])
        places = np.concatenate([held.ranks, np.full(len(of), -1)])
        order = sorted_order(groups, joined([held.codes, codes]) if old_count else codes)
        ranks = places_in_groups(groups[order])
        is_changed = (ranks < self._count) & (places[order] != ranks)
        order, ranks = order[is_changed], ranks[is_changed]
        is_old = order < old_count
        moved, fresh = order[is_old], new.take(pa.array(order[~is_old] - old_count))
        number = np.where(is_old, np.cumsum(is_old), np.cumsum(~is_old)) - 1  # among those that moved, or that are new
        at = pa.array(np.where(is_old, number, number + len(moved)))
        # Read before anything is written.
        values = {field.name: self._gathered(field.name, held.ranks[moved], held.rows[moved]) for field in self._fields}
        columns = [
            pa.concat_arrays([column_from(field, *values[field.name]), fresh.column(field.name).cast(field.type)]).take(at)
            for field in self._fields
        ]
        self._write(keys, groups[order], ranks, held, (is_old, number), values, fresh)
        changed = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        return Ranked(keys.take(pa.array(groups[order])), changed, ranks)

    def _gathered(self, name: str, ranks: IntArray, rows: IntArray) -> tuple[Any, Any]:
        """Return what a column has at these rows of these ranks: the values, and which of them are not null."""
        vectors = [self._table_at(rank).vectors[name] for rank in range(int(ranks.max()) + 1 if len(ranks) else 1)]
        values = np.empty(len(rows), vectors[0].values.dtype)
        valid = None if vectors[0].valid is None else np.empty(len(rows), bool)
        for rank, vector in enumerate(vectors):
            here = np.flatnonzero(ranks == rank)
            values[here] = vector.values[rows[here]]
            if valid is not None and vector.valid is not None:
                valid[here] = vector.valid[rows[here]]
        return values, valid

    def _write(
        self,
        keys: pa.RecordBatch,
        groups: IntArray,
        ranks: IntArray,
        held: _Held,
        origin: tuple[Any, IntArray],
        values: Mapping[str, tuple[Any, Any]],
        fresh: pa.RecordBatch,
    ) -> None:
        """Write records to their new ranks. `origin`: which of them a key had before, and their numbers among those that
        moved (`values`) or among the new ones (`fresh`)."""
        is_old, number = origin
        row_of = np.full((keys.num_rows, self._count), -1)
        row_of[held.groups, held.ranks] = held.rows
        for rank in np.unique(ranks).tolist():
            here = np.flatnonzero(ranks == rank)
            table, rows = self._table_at(rank), row_of[groups[here], rank]
            added = np.flatnonzero(rows < 0)
            if len(added):
                rows[added] = table.rows_of(keys.take(pa.array(groups[here[added]])).columns)
            table.change(rows)
            old = is_old[here]
            from_moved, from_fresh = number[here[old]], pa.array(number[here[~old]])
            for field in self._fields:
                vector, (moved, valid) = table.vectors[field.name], values[field.name]
                vector.values[rows[old]] = moved[from_moved]
                if vector.valid is not None and valid is not None:
                    vector.valid[rows[old]] = valid[from_moved]
                put_column(vector, rows[~old], fresh.column(field.name).take(from_fresh).cast(field.type))

    def _held(self, keys: pa.RecordBatch) -> _Held:
        """Return what keys have, in the order of ranks."""
        left = np.arange(keys.num_rows)
        groups: list[IntArray] = [left[:0]]
        ranks: list[IntArray] = [left[:0]]
        found: list[IntArray] = [left[:0]]
        codes: list[Codes] = []
        for rank in range(self._count):
            if not len(left) or not self._is_there(rank):
                break
            table = self._table_at(rank)
            rows = table.find(keys.take(pa.array(left)).columns)
            left, rows = left[rows >= 0], rows[rows >= 0]
            groups.append(left)
            ranks.append(np.full(len(left), rank))
            found.append(rows)
            codes.append(self._ordering.codes_of_rows(table.vectors, rows))
        return _Held(np.concatenate(groups), np.concatenate(ranks), np.concatenate(found), joined(codes) if codes else [])

    def values(self, table: ColumnTable, rows: IntArray) -> pa.RecordBatch:
        """Return the columns of rows of a table."""
        columns: list[Any] = []
        for field in self._fields:
            vector = table.vectors[field.name]
            columns.append(column_from(field, vector.values[rows], None if vector.valid is None else vector.valid[rows]))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


class TopOperator(KeyedColumnsOperator):
    """Emits every record that has a new rank."""

    def __init__(self, node: Node, spec: TopSpec) -> None:
        super().__init__(node, spec.key, spec.descriptors[0])
        self._spec = spec
        self._ttl: ColumnTtl | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        state, count = self._state, self._spec.count
        for rank in state.windows():
            if rank > count:  # the program kept more before
                state.drop(rank)
        self._tables = RankedTables(
            self._spec.ordering,
            self._spec.fields,
            count,
            table_at=lambda rank: state.window(rank + 1),
            is_there=lambda rank: state.has_window(rank + 1),
        )
        if self._spec.ttl_ms is not None:
            first = state.window(1)
            self._ttl = ColumnTtl(
                first, self._spec.ttl_ms, context.user_now_ms, remove=lambda rows: self._tables.delete(first.keys(rows))
            )

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        keys = self._keys(batch)
        if self._ttl is not None:
            self._remove_ended_of(keys)
        for changed in self._tables.add(batch, keys):
            self._emit(changed)
            if self._budget.is_spent:
                yield

    # Inside.

    def _emit(self, changed: Ranked) -> None:
        if self._ttl is not None:
            first = self._state.window(1)
            self._ttl.touch(np.unique(first.find(changed.keys.columns)))
        given = {
            **dict(zip(self._spec.key, changed.keys.columns, strict=True)),
            **dict(zip(changed.values.schema.names, changed.values.columns, strict=True)),
        }
        names = self.node.input_schemas[0].names
        self.emit(
            pa.RecordBatch.from_arrays(
                [*(given[name] for name in names), pa.array(changed.ranks + 1)], schema=self.node.schema
            )
        )

    def _remove_ended_of(self, keys: Keys) -> None:
        assert self._ttl is not None
        rows = self._state.window(1).find(keys.columns.columns)
        there = rows[rows >= 0]
        ended = there[self._ttl.ended(there)]
        if len(ended):
            self._tables.delete(self._state.window(1).keys(ended))

    def _remove_ended(self, budget: int) -> None:
        if self._ttl is not None:
            self._ttl.sweep(budget)
