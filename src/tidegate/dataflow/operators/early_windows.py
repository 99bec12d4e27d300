"""Windows of fixed places that show their results before they are complete (showing.py).

Triggers by records are asked after each batch, for the keys that it has changed. They are for windows of one pane: in
others, each window would need accumulators of its own.

If windows purge, the state of a key is deleted in the call that shows it. So every record is in one result, whenever a
snapshot is taken.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, OperatorContext
from tidegate.dataflow.operators.paned_windows import PanedWindowOperator, PanesOperator, slices
from tidegate.dataflow.operators.record_windows import RecordWindowOperator, RecordWindowSpec
from tidegate.dataflow.operators.showing import RecordTriggers, Unshown
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window_aggregates import WindowSettings
from tidegate.dataflow.windows import Paned
from tidegate.state.column_table import ColumnTable


class EarlyPanes(PanesOperator):
    """Shows what has changed by the clock, after `_early_ms`."""

    _early_ms: int | None

    @abstractmethod
    def _keys_in(self, pane: int) -> Iterator[list[pa.Array]]:
        """Yield the keys of a pane of the restored state."""

    @abstractmethod
    def _show_keys(self, end_ms: int, keys: list[pa.Array]) -> Steps:
        """Emit the results so far of a window that has not fired for these keys. Some may have nothing to show."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._unshown = Unshown(self._early_ms, self._key_type, context)
        for pane in self._panes.windows() if self._unshown.goes_by_clock else ():
            for keys in self._keys_in(pane):
                self._unshown.note(keys, pane)

    def on_time(self, now_ms: int) -> None:
        self._do(self._steps(self._show(self._unshown.taken())))

    def deadline_ms(self) -> int | None:
        return self._unshown.deadline_ms()

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
                    yield from self._show_keys(end_ms, keys)
                if self._is_spent(len(rows)):
                    yield

    def _open_for(self, end_ms: int, keys: list[pa.Array]) -> list[pa.Array]:
        """Return the keys for which a window has not fired. After a restore at another parallelism some may be ahead."""
        if self._time.is_one:
            return keys
        is_open = pa.array(self._time.of_keys(keys) < end_ms - 1)
        return [column.filter(is_open) for column in keys]


class EarlyWindowOperator(EarlyPanes, PanedWindowOperator):
    """Aggregates. Triggers by records have their accumulators beside those of the aggregates."""

    def __init__(self, node: Node, assigner: Paned, settings: WindowSettings) -> None:
        super().__init__(node, assigner, settings)
        assert assigner.is_one_pane or not (settings.aggregation.has_triggers or settings.purges)
        assert not (settings.purges and settings.lateness_ms)
        self._early_ms = settings.early_ms

    def _keys_in(self, pane: int) -> Iterator[list[pa.Array]]:
        table = self._state.window(pane)
        return (table.keys(rows) for rows in slices(table.rows()))

    def _on_added(self, pane: int, table: ColumnTable, changed: Any) -> None:
        rows = np.unique(changed)
        if self._aggregation.has_triggers:
            rows = self._fire_by_records(pane, table, rows)
        if len(rows):
            self._unshown.note(table.keys(rows), pane)

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

    def _show_keys(self, end_ms: int, keys: list[pa.Array]) -> Steps:
        yield from ()
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


class EarlyRecordWindowOperator(EarlyPanes, RecordWindowOperator):
    """Functions of whole windows, called with the records so far. Triggers by records have a state of their own, which has
    a row for a key only if there are records of it."""

    def __init__(self, node: Node, spec: RecordWindowSpec) -> None:
        super().__init__(node, spec)
        assert spec.showing is not None and len(spec.schemas) == 1
        self._showing = spec.showing
        self._early_ms = spec.showing.after_ms

    def _open_state(self, backend: KeyedBackend) -> None:
        super()._open_state(backend)
        triggers = self._showing.triggers
        self._triggers = None if triggers is None else RecordTriggers(self.name, triggers)
        for each in self._showing.descriptors(windowed=True):
            self._accumulators = backend.column_state(each)
            self._panes.beside = self._accumulators

    def _keys_in(self, pane: int) -> Iterator[list[pa.Array]]:
        table = self._states[0].window(pane)
        return (table.key_columns(rows) for rows in slices(table.rows()))

    def _on_added(self, pane: int, keys: list[pa.Array], records: pa.RecordBatch) -> Steps:
        if self._triggers is None:
            self._unshown.note(keys, pane)
            return
        records = records.select(records.schema.names[:-1])
        keys, fires = self._triggers.add(self._accumulators.window(pane), keys, records)
        end_ms = self._assigner.last_end(pane)
        if self._lateness_ms:  # a window that has fired already fires again in any case
            fires &= self._times_of_keys(keys) < end_ms - 1
        self._unshown.note([column.filter(pa.array(~fires)) for column in keys], pane)
        if fires.any():
            yield from self._give_keys(end_ms, [column.filter(pa.array(fires)) for column in keys])

    def _show_keys(self, end_ms: int, keys: list[pa.Array]) -> Steps:
        there = np.zeros(len(keys[0]), bool)
        for table in self._tables(self._panes_of(end_ms)):
            there |= table.counts(keys) > 0
        yield from self._give_keys(end_ms, [column.filter(pa.array(there)) for column in keys])

    def _give_keys(self, end_ms: int, keys: list[pa.Array]) -> Steps:
        of_window = ColumnTable(self._key_type, [])
        of_window.rows_of(keys)
        yield from self._give_window(end_ms, of_window, is_complete=False)

    def _on_shown(self, end_ms: int, keys: list[pa.Array]) -> None:
        panes = self._panes_of(end_ms)
        if self._showing.purges:
            self._forget(panes, keys)
        elif self._triggers is not None:
            self._triggers.begin_again(self._accumulators.window(panes[0]), keys)

    def _forget(self, panes: Sequence[int], keys: list[pa.Array]) -> None:
        super()._forget(panes, keys)
        if self._triggers is not None:
            for pane in panes:
                self._triggers.delete(self._accumulators.window(pane), keys)
