"""Keyed aggregates of changes: records of the input may take earlier ones back.

For every batch, the former result of each key in it is deleted and the new one inserted, unless both are equal. A key whose
records have all been taken back is deleted, and its state with it. So the output is changes too, with one row for each key.

A key whose ttl has ended is forgotten with all of its records. Deletions of them have no effect as long as the key has no
new record; later ones take back what they can't be told from.

Not here: how an aggregate takes a record back (dataflow/aggregates/retracting.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import IntArray
from tidegate.dataflow.aggregates.numpy_columns import grouped
from tidegate.dataflow.changelog import Changelog
from tidegate.dataflow.operators.aggregate import AggregatingOperator, AggregatingSpec
from tidegate.dataflow.operators.changelog import emit_changes, same_rows
from tidegate.dataflow.operators.keyed_table import plain, touched_fields
from tidegate.dataflow.row_kinds import ROW_KIND, signs_of, takes_back_earlier
from tidegate.state.descriptors import Columns
from tidegate.state.vectors import VectorField

# Another state than that of aggregates of appended records, which doesn't know how many records a key has: a program whose
# input becomes changes begins with an empty one.
STATE = "aggregates of changes"
RECORDS = "__records"


class AggregateOfChangesOperator(AggregatingOperator):
    """Emits how the result of each key that a batch has changes, once for each batch."""

    def _take(self, batch: pa.RecordBatch, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        table, aggregation = self._table, self._aggregation
        counts = table.vectors[RECORDS].values
        signs = signs_of(batch.column(ROW_KIND))
        groups = grouped(rows)
        was_there = counts[groups.rows] > 0
        old = aggregation.results(table.vectors, groups.rows)
        table.change(groups.rows)
        known = ~(takes_back_earlier(rows, signs) & (counts[rows] == 0))
        if not known.all():
            rows, signs, inputs = rows[known], signs[known], [each.filter(pa.array(known)) for each in inputs]
        np.add.at(counts, rows, signs)
        aggregation.change(table.vectors, rows, inputs, signs)
        is_there = counts[groups.rows] > 0
        new = aggregation.results(table.vectors, groups.rows)
        changed = ~(was_there & is_there & same_rows(old, new))
        first = pa.array(groups.first)
        keys = [plain(batch.column(name)).take(first) for name in self._key]
        deleted, inserted = np.flatnonzero(was_there & changed), np.flatnonzero(is_there & changed)
        emit_changes(self, [*keys, *old], deleted, [*keys, *new], inserted)
        gone = groups.rows[~is_there]
        if len(gone):
            table.delete(gone)


class AggregateOfChangesSpec(AggregatingSpec):
    """The results by key, as changes."""

    __slots__ = ()
    kind: ClassVar[str] = "aggregate"
    operator = AggregateOfChangesOperator
    changelogs: ClassVar[frozenset[Changelog]] = frozenset({Changelog.RETRACT})

    @property
    def descriptors(self) -> tuple[Columns, ...]:
        fields = [VectorField(each.name, each.type, each.default) for each in self.aggregation.accumulators]
        fields.append(VectorField(RECORDS, pa.int64(), 0))
        return (Columns(STATE, [*fields, *touched_fields(self.ttl_ms)], renamed=self.aggregation.renamed(self.renamed)),)
