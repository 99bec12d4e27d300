"""Windows that show their results so far: every now and then, by the clock, those of the keys that have changed since.

Which keys have changed is no state. After a restore all of them count as changed: what was shown before the failure may not
have been committed. So a result may be shown twice, and the result at the end of the window is emitted in any case.
"""

from __future__ import annotations

from collections import defaultdict

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import AT_ONCE_MS, OperatorContext
from tidegate.dataflow.operators.paned_windows import PanedWindowOperator, slices
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window import WindowSettings
from tidegate.dataflow.windows import Paned
from tidegate.state.column_table import ColumnTable


class EarlyWindowOperator(PanedWindowOperator):
    def __init__(self, node: Node, assigner: Paned, settings: WindowSettings) -> None:
        super().__init__(node, assigner, settings)
        assert settings.early_ms is not None
        self._early_ms = settings.early_ms
        self._changed: dict[int, ColumnTable] = {}  # the keys, by pane
        self._due_ms: int | None = None  # when to show them

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._now_ms = context.user_now_ms
        for pane in self._state.windows():
            table = self._state.window(pane)
            for rows in slices(table.rows()):
                self._on_added(pane, table.keys(rows))

    def on_time(self, now_ms: int) -> None:
        changed, self._changed, self._due_ms = self._changed, {}, None
        self._do(self._steps(self._show(changed)))

    def deadline_ms(self) -> int | None:
        """In a micro-batch the clock stands still: the results are due from the beginning or not in this batch."""
        if self._due_ms is None or not self._by_epoch:
            return self._due_ms
        return AT_ONCE_MS if self._due_ms <= self._now_ms() else None

    # Inside.

    def _on_added(self, pane: int, keys: list[pa.Array]) -> None:
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
                    self._fire_again(end_ms, [keys])
                if self._is_spent(len(rows)):
                    yield

    def _open_for(self, end_ms: int, keys: list[pa.Array]) -> list[pa.Array]:
        """Return the keys for which a window has not fired. After a restore at another parallelism some may be ahead."""
        if self._time.is_one:
            return keys
        is_open = pa.array(self._time.of_keys(keys) < end_ms - 1)
        return [column.filter(is_open) for column in keys]
