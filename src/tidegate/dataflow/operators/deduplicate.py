"""One record of each key: the first or the last one, by arrival or by the order of a column.

The first one by arrival is emitted at once and stays the only one: the state is the set of keys that were seen. All others
may be replaced later, so they are upserts. A record that is emitted carries all of its columns, so the state needs only what
decides about the next one: the value of the ordering column. The last one by arrival needs no state at all: every batch's
last record of a key replaces the one before.

Of records that are equal in order, the first one that arrived is the first, and the last one that arrived is the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.changelog import APPEND_OR_RETRACT, Changelog
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.keyed_columns import KeyedColumnsOperator, columns_key_type
from tidegate.dataflow.operators.ordering import Ordering
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.state.batch_keys import Keys, keys_of
from tidegate.state.column_ttl import TOUCHED_FIELD, ColumnTtl
from tidegate.state.descriptors import Columns
from tidegate.state.sections import StateInfo
from tidegate.state.vectors import VectorField, put_column

STATE = "seen"


@dataclass(frozen=True, slots=True)
class DeduplicateSpec:
    """The first record of each key or the last one; by arrival if `order_by` is None."""

    key: tuple[str, ...]
    keep_last: bool
    order_by: str | None
    order_type: pa.DataType | None
    ttl_ms: int | None
    kind: ClassVar[str] = "deduplicate"
    in_columns: ClassVar[bool] = True
    changelogs: ClassVar[frozenset[Changelog]] = APPEND_OR_RETRACT  # for changes there is RankChangesSpec

    @property
    def stateful(self) -> bool:
        return not self.is_last_by_arrival

    @property
    def is_last_by_arrival(self) -> bool:
        return self.keep_last and self.order_by is None

    @property
    def descriptors(self) -> tuple[Columns, ...]:
        if self.is_last_by_arrival:
            return ()
        fields = [] if self.order_by is None else [VectorField(self.order_by, self.order_type)]
        return (Columns(STATE, fields if self.ttl_ms is None else [*fields, TOUCHED_FIELD]),)

    @property
    def text(self) -> str:
        """What `explain` shows."""
        return f"the {'last' if self.keep_last else 'first'} by {self.order_by or 'arrival'}"

    def create(self, node: Node) -> Operator:
        return LastByArrivalOperator(node, self.key) if self.is_last_by_arrival else DeduplicateOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return tuple(each.info(columns_key_type(node, self.key)) for each in self.descriptors)


class LastByArrivalOperator(Operator):
    """Emits the last record of each key in a batch."""

    def __init__(self, node: Node, key: tuple[str, ...]) -> None:
        super().__init__(node)
        self._key = key

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        keys = keys_of(self._key, [batch.column(name) for name in self._key])
        self.emit(batch if len(keys) == batch.num_rows else batch.take(pa.array(np.sort(keys.last))))


class DeduplicateOperator(KeyedColumnsOperator):
    """Looks the keys of a batch up, and emits the records that are the first or last ones now."""

    def __init__(self, node: Node, spec: DeduplicateSpec) -> None:
        super().__init__(node, spec.key, spec.descriptors[0])
        self._spec = spec
        # Codes of the ordering are smaller for what is to be kept.
        self._ordering = None if spec.order_by is None else Ordering((spec.order_by,), (spec.keep_last,))
        self._ttl: ColumnTtl | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        if self._spec.ttl_ms is not None:
            self._ttl = ColumnTtl(self._state.table(), self._spec.ttl_ms, context.user_now_ms)

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        keys = self._keys(batch)
        found = self._find(keys)
        if self._ordering is None:
            kept, records = found < 0, keys.first
        else:
            kept, records = self._better(batch, keys, found)
        if kept.any():
            records = records[kept]
            self._keep(batch, keys.where(kept), records)
            self.emit(batch.take(pa.array(np.sort(records))))
        yield from ()

    # Inside.

    def _better(self, batch: pa.RecordBatch, keys: Keys, found: Any) -> tuple[Any, Any]:
        """Return for which keys the batch has a better record than the state, and the index of each key's best record."""
        assert self._ordering is not None
        (codes,) = self._ordering.codes(batch)
        best = np.full(len(keys), np.iinfo(np.int64).max)
        np.minimum.at(best, keys.of, codes)
        ties = np.flatnonzero(codes == best[keys.of])
        records = np.empty(len(keys), np.int64)
        if not self._spec.keep_last:
            ties = ties[::-1]
        records[keys.of[ties]] = ties  # of an index that repeats, the last value stays
        known = found >= 0
        (held,) = self._ordering.codes_of_rows(self._state.table().vectors, found[known])
        kept = np.ones(len(keys), bool)
        kept[known] = best[known] <= held if self._spec.keep_last else best[known] < held
        return kept, records

    def _find(self, keys: Keys) -> Any:
        """Return the row of each key, or -1. What the ttl has ended is removed."""
        table = self._state.table()
        rows = table.find(keys.columns.columns)
        if self._ttl is not None:
            there = np.flatnonzero(rows >= 0)
            ended = there[self._ttl.ended(rows[there])]
            table.delete(rows[ended])
            rows[ended] = -1
        return rows

    def _keep(self, batch: pa.RecordBatch, keys: Keys, records: Any) -> None:
        table = self._state.table()
        rows = table.rows_of(keys.columns.columns)
        if self._spec.order_by is not None:
            table.change(rows)
            put_column(table.vectors[self._spec.order_by], rows, batch.column(self._spec.order_by).take(pa.array(records)))
        if self._ttl is not None:
            self._ttl.touch(rows)

    def _remove_ended(self, budget: int) -> None:
        if self._ttl is not None:
            self._ttl.sweep(budget)
