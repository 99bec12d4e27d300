"""A window without an end for each key, whose results triggers show (dataflow/triggers.py).

State is one table, by key: the accumulators of the aggregates and of the triggers. The result of a key is shown when a
trigger by records fires, after the batch that made it fire, or some time after a change, by the clock. If the window purges,
the key is deleted in the call that shows it. Otherwise its row stays.

Which keys have changed since they were shown is not in the state; after a restore all keys count as changed. At the end
of input they are shown, since the clock won't.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.operators.base import AT_ONCE_MS, OperatorContext
from tidegate.dataflow.operators.paned_windows import slices
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window_aggregates import AggregatingWindowOperator
from tidegate.state.column_table import ColumnTable


class GlobalWindowOperator(AggregatingWindowOperator):
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._on_first = None
        self._now_ms = context.user_now_ms
        self._table = self._state.table()
        self._changed = ColumnTable(self._key_type, [])  # keys
        self._due_ms: int | None = None  # when to show them
        if self._settings.early_ms is not None:
            for rows in slices(self._table.rows()):
                self._note_changed(self._table.keys(rows))

    def on_time(self, now_ms: int) -> None:
        self._do(self._steps(self._show()))

    def deadline_ms(self) -> int | None:
        """In a micro-batch the clock stands still: the results are due from the beginning or not in this batch."""
        if self._due_ms is None or not self._by_epoch:
            return self._due_ms
        return AT_ONCE_MS if self._due_ms <= self._now_ms() else None

    # Inside.

    def _add_all(self, batch: pa.RecordBatch) -> None:
        table = self._table
        changed = table.rows_of(self._keys(batch))
        self._accumulate(table, changed, batch)
        rows = np.unique(changed)
        with self._blaming(table):
            fires = self._aggregation.fires(table.vectors, rows)
        if self._settings.early_ms is not None and not fires.all():
            self._note_changed(table.keys(rows[~fires]))
        self._give_rows(rows[fires])

    def _note_changed(self, keys: list[pa.Array]) -> None:
        assert self._settings.early_ms is not None
        if self._due_ms is None:
            self._due_ms = self._now_ms() + self._settings.early_ms
        self._changed.rows_of(keys)

    def _show(self) -> Steps:
        changed, self._changed, self._due_ms = self._changed, ColumnTable(self._key_type, []), None
        for rows in slices(changed.rows()):
            found = self._table.find(changed.keys(rows))
            rows_of_keys = found[found >= 0]  # others were shown and purged meanwhile
            self._table.change(rows_of_keys)
            self._give_rows(rows_of_keys)
            if self._is_spent(len(rows)):
                yield

    def _give_rows(self, rows: Any) -> None:
        """Show the results of keys whose rows may be written."""
        if not len(rows):
            return
        self._give(self._results(self._table, rows, []))
        if self._settings.purges:
            self._table.delete(rows)
        elif self._aggregation.has_triggers:
            self._aggregation.begin_triggers(self._table.vectors, rows)

    def _fire(self, at_ms: int) -> Steps:
        if at_ms == MAX_WATERMARK_MS and self._due_ms is not None:
            yield from self._show()

    def _expire(self) -> None:
        """Nothing is late."""
