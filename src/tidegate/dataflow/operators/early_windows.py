"""Windows that show their results before they are complete, when a trigger fires (dataflow/triggers.py).

Triggers by records are asked after each batch, for the rows that it has changed. They have accumulators in the state, beside
those of the aggregates. They are for windows of one pane: in others, each window would need accumulators of its own.

By the clock, the results of the keys that have changed are shown some time after the first change. Which keys these are is
not in the state. After a restore all of them count as changed: what was shown before the failure may not have been
committed. So a result may be shown twice, and the result at the end of the window is emitted in any case.

If windows purge, a row is deleted in the call that shows it. So every record is in one result, whenever a snapshot is taken.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import AT_ONCE_MS, OperatorContext
from tidegate.dataflow.operators.paned_windows import PanedWindowOperator, slices
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window_aggregates import WindowSettings
from tidegate.dataflow.windows import Paned
from tidegate.state.column_table import ColumnTable


class EarlyWindowOperator(PanedWindowOperator):
    def __init__(self, node: Node, assigner: Paned, settings: WindowSettings) -> None:
        super().__init__(node, assigner, settings)
        assert assigner.is_one_pane or not (settings.aggregation.has_triggers or settings.purges)
        assert not (settings.purges and settings.lateness_ms)
        self._early_ms = settings.early_ms
        self._changed: dict[int, ColumnTable] = {}  # the keys, by pane
        self._due_ms: int | None = None  # when to show them

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._now_ms = context.user_now_ms
        for pane in self._state.windows() if self._early_ms is not None else ():
            table = self._state.window(pane)
            for rows in slices(table.rows()):
                self._note_changed(pane, table.keys(rows))

    def on_time(self, now_ms: int) -> None:
        changed, self._changed, self._due_ms = self._changed, {}, None
        self._do(self._steps(self._show(changed)))

    def deadline_ms(self) -> int | None:
        """In a micro-batch the clock stands still: the results are due from the beginning or not in this batch."""
        if self._due_ms is None or not self._by_epoch:
            return self._due_ms
        return AT_ONCE_MS if self._due_ms <= self._now_ms() else None

    # Inside.

    def _on_added(self, pane: int, table: ColumnTable, changed: Any) -> None:
        rows = np.unique(changed)
        if self._aggregation.has_triggers:
            rows = self._fire_by_records(pane, table, rows)
        if self._early_ms is not None and len(rows):
            self._note_changed(pane, table.keys(rows))

    def _fire_by_records(self, pane: int, table: ColumnTable, rows: Any) -> Any:
        """Show the windows whose triggers fire, and return the rows that weren't shown."""
        with self._blaming(table):
            fires = self._aggregation.fires(table.vectors, rows)
        end_ms = self._assigner.last_end(pane)
        if self._lateness_ms:  # a window that has fired already fires again in any case
            fires &= self._times_of_keys(table.keys(rows)) < end_ms - 1
        shown = rows[fires]
        if len(shown):
            self._give_rows(end_ms, table, shown)
            self._begin_again(table, shown)
        return rows[~fires]

    def _begin_again(self, table: ColumnTable, rows: Any) -> None:
        if self._settings.purges:
            table.delete(rows)
        elif self._aggregation.has_triggers:
            self._aggregation.begin_triggers(table.vectors, rows)

    def _note_changed(self, pane: int, keys: list[pa.Array]) -> None:
        assert self._early_ms is not None
        if self._due_ms is None:
            self._due_ms = self._now_ms() + self._early_ms
        if pane not in self._changed:
            self._changed[pane] = ColumnTable(self._key_type, [])
        self._changed[pane].rows_of(keys)

    def _show(self, changed: dict[int, ColumnTable]) -> Steps:
        """Emit the results so far of the windows that have not fired."""
        panes: dict[int, list[ColumnTable]] = defaultdict(list)
        for pane, table in changed.items():
            for end_ms in self._assigner.ends(pane, after_ms=self._time.at_ms + 1):
                panes[end_ms].append(table)
        for end_ms, tables in sorted(panes.items(), key=lambda each: each[0]):
            of_window = tables[0]
            if len(tables) > 1:
                of_window = ColumnTable(self._key_type, [])
                for table in tables:
                    of_window.rows_of(table.keys(table.rows()))
            for rows in slices(of_window.rows()):
                keys = self._open_for(end_ms, of_window.keys(rows))
                if len(keys[0]):
                    self._show_keys(end_ms, keys)
                if self._is_spent(len(rows)):
                    yield

    def _show_keys(self, end_ms: int, keys: list[pa.Array]) -> None:
        if not self._assigner.is_one_pane:
            self._fire_again(end_ms, [keys])
            return
        table = self._state.window(self._assigner.window(end_ms).start_ms)
        found = table.find(keys)
        rows = found[found >= 0]  # others were shown and purged meanwhile
        if len(rows):
            table.change(rows)
            self._give_rows(end_ms, table, rows)
            self._begin_again(table, rows)

    def _open_for(self, end_ms: int, keys: list[pa.Array]) -> list[pa.Array]:
        """Return the keys for which a window has not fired. After a restore at another parallelism some may be ahead."""
        if self._time.is_one:
            return keys
        is_open = pa.array(self._time.of_keys(keys) < end_ms - 1)
        return [column.filter(is_open) for column in keys]
