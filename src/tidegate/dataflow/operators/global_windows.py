"""A window without an end for each key, whose results triggers show (showing.py).

Of aggregates, state is one table, by key: their accumulators, and those of the triggers. Functions of whole windows have the
records by key, and the accumulators of triggers in a state of their own, in which a key has a row only if it has records.

The result of a key is shown when a trigger by records fires, after the batch that made it fire, or some time after a change,
by the clock. If the window purges, the key is deleted in the call that shows it. Otherwise its state stays. At the end of
input, what has changed is shown, since the clock won't.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, OperatorContext
from tidegate.dataflow.operators.budget import Pace
from tidegate.dataflow.operators.function_windows import FunctionWindowSpec
from tidegate.dataflow.operators.paned_windows import slices
from tidegate.dataflow.operators.record_windows import all_matches, plain_columns, taken
from tidegate.dataflow.operators.showing import RecordTriggers, Unshown
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window import MAX_ROWS, WindowOperator
from tidegate.dataflow.operators.window_aggregates import AtOnceWindowOperator
from tidegate.dataflow.operators.window_results import Bounds, Group
from tidegate.state.column_table import ColumnTable


class OneWindowOperator(WindowOperator):
    """Shows what has changed by the clock, after `_early_ms`."""

    _early_ms: int | None

    @abstractmethod
    def _all_keys(self) -> Iterator[list[pa.Array]]:
        """Yield the keys of the restored state."""

    @abstractmethod
    def _show_keys(self, keys: list[pa.Array]) -> Steps:
        """Emit the results of these keys. Some may have nothing to show."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._unshown = Unshown(self._early_ms, self._key_type, context)
        for keys in self._all_keys() if self._unshown.goes_by_clock else ():
            self._unshown.note(keys)

    def on_time(self, now_ms: int) -> None:
        self._do(self._steps(self._show()))

    def deadline_ms(self) -> int | None:
        return self._unshown.deadline_ms()

    def _show(self) -> Steps:
        for changed in self._unshown.taken().values():
            for rows in slices(changed.rows()):
                yield from self._show_keys(changed.keys(rows))
                if self._is_spent(len(rows)):
                    yield

    def _fire(self, at_ms: int) -> Steps:
        if at_ms == MAX_WATERMARK_MS:
            yield from self._show()

    def _expire(self) -> None:
        """Nothing is late."""


class GlobalWindowOperator(OneWindowOperator, AtOnceWindowOperator):
    """Aggregates."""

    @property
    def _early_ms(self) -> int | None:  # type: ignore[override]
        return self._settings.early_ms

    def _open_state(self, backend: KeyedBackend) -> None:
        super()._open_state(backend)
        self._table = self._state.table()

    def _all_keys(self) -> Iterator[list[pa.Array]]:
        return (self._table.keys(rows) for rows in slices(self._table.rows()))

    def _add_all(self, batch: pa.RecordBatch) -> None:
        table = self._table
        changed = table.rows_of(self._keys(batch))
        self._accumulate(table, changed, batch)
        rows = np.unique(changed)
        with self._blaming(table):
            fires = self._aggregation.fires(table.vectors, rows)
        if self._unshown.goes_by_clock:
            self._unshown.note(table.keys(rows[~fires]))
        self._give_rows(rows[fires])

    def _show_keys(self, keys: list[pa.Array]) -> Steps:
        yield from ()
        found = self._table.find(keys)
        rows = found[found >= 0]  # others were shown and purged meanwhile
        self._table.change(rows)
        self._give_rows(rows)

    def _give_rows(self, rows: Any) -> None:
        """Show the results of keys whose rows may be written."""
        if not len(rows):
            return
        self._give(self._results(self._table, rows, []))
        if self._settings.purges:
            self._table.delete(rows)
        elif self._aggregation.has_triggers:
            self._aggregation.begin_triggers(self._table.vectors, rows)


class GlobalFunctionOperator(OneWindowOperator):
    """Functions of whole windows, called with all records of a key so far."""

    def __init__(self, node: Node, spec: FunctionWindowSpec) -> None:
        super().__init__(node, keys=(spec.key,))
        assert spec.showing is not None
        self._spec = spec
        self._showing = spec.showing
        self._early_ms = spec.showing.after_ms
        triggers = spec.showing.triggers
        self._triggers = None if triggers is None else RecordTriggers(self.name, triggers)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._pace = Pace(context.budget)

    def _open_state(self, backend: KeyedBackend) -> None:
        self._records = backend.record_state(self._spec.records).table()
        for each in self._showing.descriptors(windowed=False):
            self._accumulators: ColumnTable = backend.column_state(each).table()

    def _all_keys(self) -> Iterator[list[pa.Array]]:
        return (self._records.key_columns(rows) for rows in slices(self._records.rows()))

    def _add(self, batch: pa.RecordBatch, port: int) -> Steps:
        keys = self._keys(batch)
        self._records.append(keys, plain_columns(batch))
        if self._triggers is None:
            self._unshown.note(keys)
            return
        keys, fires = self._triggers.add(self._accumulators, keys, batch)
        self._unshown.note([column.filter(pa.array(~fires)) for column in keys])
        yield from self._show_keys([column.filter(pa.array(fires)) for column in keys])

    def _show_keys(self, keys: list[pa.Array]) -> Steps:
        counts = self._records.counts(keys)
        keys, counts = [column.filter(pa.array(counts > 0)) for column in keys], counts[counts > 0]
        start = 0
        while start < len(counts):
            fitting = int(np.searchsorted(np.cumsum(counts[start:]), MAX_ROWS, side="right"))
            stop = start + max(1, min(self._pace.portion, fitting))
            self._call([column.slice(start, stop - start) for column in keys])
            start = stop
            is_over = self._pace.is_over()
            if (self._is_spent(0) or is_over) and start < len(counts):
                yield

    def _call(self, keys: list[pa.Array]) -> None:
        """Call the function for some keys, each of which has records."""
        probes, found = all_matches(self._records, keys)
        count = len(keys[0])
        group = Group(taken(self._records, found, self._spec.schema), np.bincount(probes, minlength=count))
        of_keys = keys if self._key_columns[0] else []
        bounds = Bounds(pa.nulls(count), pa.nulls(count))
        for batch in self._spec.results.of(self.name, self.node.schema, of_keys, bounds, [group]):
            self._give(batch)
        if self._showing.purges:
            self._records.delete(found)
        if self._triggers is not None:
            (self._triggers.delete if self._showing.purges else self._triggers.begin_again)(self._accumulators, keys)
