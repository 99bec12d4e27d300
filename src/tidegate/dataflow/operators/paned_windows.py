"""Windows of fixed places: tumbling, sliding, cumulating (dataflow/windows.py).

`PanesOperator` fires them, whatever is in their panes. `PanedWindowOperator` computes aggregates: its state is one table of
accumulators for each pane, by key. A record is added to one pane. When a window fires, its panes are merged, in a table of
its own that is no state.

Tumbling windows without lateness have one pane each, which nothing needs once its window has fired: its rows are emitted
and dropped. All other panes stay until their last window has fired and the allowed lateness is over.

Invariants:
- Without lateness, a pane in the state is in a window that has not fired.
- With panes that stay, whether a window has fired for a key is known from the operator's time alone.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import groupby, takewhile
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import AT_ONCE_MS, KeyedBackend, OperatorContext
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window import (
    MAX_ROWS,
    MAX_WINDOWS,
    WindowOperator,
    times_ms_of,
    times_of,
    with_times,
)
from tidegate.dataflow.operators.window_aggregates import AtOnceWindowOperator, WindowSettings
from tidegate.dataflow.windows import Paned, Times
from tidegate.state.column_table import ColumnTable

# What a window or a pane costs apart from its rows, as a number of rows.
_OVERHEAD_ROWS = MAX_ROWS // MAX_WINDOWS


class Panes(Protocol):
    """State by pane."""

    def windows(self) -> Sequence[int]:
        """Return the panes that have state, in order."""

    def drop(self, at: int) -> None:
        """Forget a pane."""


class PanesOperator(WindowOperator):
    """Windows that are made of panes."""

    _assigner: Paned
    _panes: Panes
    _keeps: bool  # whether panes stay when a window has fired

    @abstractmethod
    def _fire_window(self, end_ms: int) -> Steps:
        """Fire the window that ends there for all keys for which it hasn't fired. If its panes don't stay, drop them."""

    def _in_time(self, batch: pa.RecordBatch, column: str, port: int = 0) -> tuple[pa.RecordBatch, Times]:
        """Return the records that are in a window and not late, and their times. Emit the late ones."""
        batch = with_times(batch, column)
        times_ms = times_ms_of(self.name, batch.column(column))
        if self._assigner.has_gaps:
            inside = self._assigner.in_windows(times_ms)
            batch, times_ms = batch.filter(pa.array(inside)), times_ms[inside]
        if not batch.num_rows:
            return batch, times_ms
        deadlines_ms = self._assigner.last_ends(times_ms) + (self._lateness_ms - 1)
        late = deadlines_ms <= self._times_of_keys(self._keys(batch, port))
        if late.any():
            batch, times_ms = self._emit_late(batch, late, port), times_ms[~late]
        return batch, times_ms

    def _fired(self, pane: int, keys: list[pa.Array]) -> Iterator[tuple[int, list[pa.Array]]]:
        """Yield the ends of a pane's windows that have fired and are not over, with the keys for which that is so."""
        reached_ms = self._times_of_keys(keys)
        for end_ms in self._assigner.ends(pane, after_ms=int(np.min(reached_ms)) + 1 - self._lateness_ms):
            if end_ms - 1 > np.max(reached_ms):
                return
            if self._time.is_one:
                yield end_ms, keys
            else:
                has_fired = (reached_ms >= end_ms - 1) & (reached_ms < end_ms - 1 + self._lateness_ms)
                yield end_ms, [column.filter(pa.array(has_fired)) for column in keys]

    def _fire(self, at_ms: int) -> Steps:
        for end_ms in self._due(at_ms):
            self._is_whole = not self._keeps
            yield from self._fire_window(end_ms)
            self._time.advance(end_ms - 1)
            self._expire()
            self._is_whole = True
            if self._is_spent(_OVERHEAD_ROWS):
                yield

    def _due(self, at_ms: int) -> Iterator[int]:
        """Yield the ends of the windows that have records, are complete and have not fired, in order. While they fire no
        record is added. A pane may be in very many windows, so they are not all in memory."""
        after_ms = self._time.at_ms + 1 if self._keeps else MIN_WATERMARK_MS
        ends = [self._assigner.ends(pane, after_ms=after_ms) for pane in self._panes.windows()]
        return (end_ms for end_ms, _ in groupby(takewhile(lambda end_ms: end_ms - 1 <= at_ms, merge(*ends))))

    def _expire(self) -> None:
        for pane in list(self._panes.windows()) if self._keeps else ():
            if self._assigner.last_end(pane) - 1 + self._lateness_ms > self._time.at_ms:
                break
            self._panes.drop(pane)

    def _panes_of(self, end_ms: int) -> Sequence[int]:
        """Return the panes of a window that have records, in order."""
        window = self._assigner.window(end_ms)
        if not self._keeps:
            return [window.start_ms]
        panes = self._panes.windows()
        return panes[bisect_left(panes, window.start_ms) : bisect_left(panes, window.end_ms)]


class PanedWindowOperator(AtOnceWindowOperator, PanesOperator):
    def __init__(self, node: Node, assigner: Paned, settings: WindowSettings) -> None:
        super().__init__(node, assigner, settings)
        self._assigner = assigner
        self._keeps = not assigner.is_one_pane or settings.lateness_ms > 0

    def _open_state(self, backend: KeyedBackend) -> None:
        super()._open_state(backend)
        self._panes = self._state

    # Records.

    def _add_all(self, batch: pa.RecordBatch) -> None:
        assert self._assigner.column is not None
        batch, times_ms = self._in_time(batch, self._assigner.column)
        batch = self._numbered(batch)
        again: dict[int, list[list[pa.Array]]] = defaultdict(list)
        for pane, rows in split(batch, self._assigner.panes_of(times_ms)):
            keys = self._keys(rows)
            table = self._state.window(pane)
            changed = table.rows_of(keys)
            self._accumulate(table, changed, rows)
            self._on_added(pane, table, changed)
            if self._lateness_ms:
                for end_ms, of_window in self._fired(pane, keys):
                    again[end_ms].append(of_window)
        for end_ms in sorted(again):
            self._fire_again(end_ms, again[end_ms])

    def _on_added(self, pane: int, table: ColumnTable, changed: Any) -> None:
        """Records were added to a pane, at these rows of its table, which may repeat."""

    def _fire_again(self, end_ms: int, keys: list[list[pa.Array]]) -> None:
        merged = self._new_table()
        for columns in keys:
            merged.rows_of(columns)
        rows = merged.rows()
        of_window = merged.keys(rows)
        for pane in self._panes_of(end_ms):
            table = self._state.window(pane)
            found = table.find(of_window)
            known = found >= 0
            self._merge_rows(merged, rows[known], table, found[known])
        self._give_rows(end_ms, merged, rows)

    def _fire_window(self, end_ms: int) -> Steps:
        panes = self._panes_of(end_ms)
        if not self._keeps or (len(panes) == 1 and self._time.is_one):
            table = self._state.window(panes[0])
        else:
            table = self._new_table()
            for pane in panes:
                yield from self._merge(table, pane, end_ms)
        table.keeps_rows = True  # a snapshot may come between two steps
        given: list[Any] = []
        for rows in slices(table.rows()):
            self._give_rows(end_ms, table, rows)
            given.append(rows)
            if self._is_spent(len(rows)):
                if not self._keeps:
                    table.delete(np.concatenate(given))
                    given.clear()
                    # Closed for the keys that were emitted, and so for all: after a restore, records that were in flight
                    # must not open it again. What is left of it fires first then (`resume`).
                    self._time.advance(end_ms - 1)
                yield
        table.keeps_rows = False
        if not self._keeps:
            self._state.drop(panes[0])

    def _merge(self, merged: ColumnTable, pane: int, end_ms: int) -> Steps:
        """Merge a pane, but for the keys for which the window has fired already."""
        table = self._state.window(pane)
        for rows in slices(table.rows()):
            keys = table.keys(rows)
            if not self._time.is_one:
                to_fire = self._time.of_keys(keys) < end_ms - 1
                rows, keys = rows[to_fire], [column.filter(pa.array(to_fire)) for column in keys]
            self._merge_rows(merged, merged.rows_of(keys), table, rows)
            if self._is_spent(len(rows) + _OVERHEAD_ROWS):
                yield

    def _give_rows(self, end_ms: int, table: ColumnTable, rows: Any) -> None:
        if not len(rows):
            return
        kind = self.node.schema.field("window_end").type
        bounds = [times_of(at_ms, kind, len(rows)) for at_ms in self._assigner.window(end_ms)]
        self._give(self._results(table, rows, bounds))


class ProcessingTimeWindowOperator(PanedWindowOperator):
    """Windows of the time at which records arrive. They fire by the clock, and all of them at the end of input."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._now_ms = context.user_now_ms
        assert not self._keeps, "nothing is late"

    def take_watermark(self, at_ms: int) -> Steps:
        if at_ms == MAX_WATERMARK_MS:
            yield from self._steps(self._fire(at_ms))
        self.forward_watermark(at_ms)

    def on_time(self, now_ms: int) -> None:
        self._do(self._steps(self._fire(self._now_ms() - 1)))

    def deadline_ms(self) -> int | None:
        """In a micro-batch, where the clock stands still, a window is complete from the beginning or not in this batch."""
        pane = None if self.has_work() else min(self._state.windows(), default=None)
        end_ms = None if pane is None else self._assigner.last_end(pane)
        if end_ms is None or not self._by_epoch:
            return end_ms
        return AT_ONCE_MS if end_ms <= self._now_ms() else None

    def _add_all(self, batch: pa.RecordBatch) -> None:
        pane = int(self._assigner.panes_of(np.array([self._now_ms()], np.int64))[0])
        table = self._state.window(pane)
        self._accumulate(table, table.rows_of(self._keys(batch)), batch)


def split(batch: pa.RecordBatch, panes: Times) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the records of each pane, in ascending order of panes. Within a pane they keep their order."""
    if not len(panes):
        return
    if panes[0] == panes[-1] and (panes == panes[0]).all():
        yield int(panes[0]), batch
        return
    found, numbers = np.unique(panes, return_inverse=True)
    # numpy sorts 16-bit numbers by radix, in one pass over them.
    order = np.argsort(numbers.astype(np.uint16) if len(found) < 1 << 16 else numbers, kind="stable")
    stops = np.cumsum(np.bincount(numbers))
    rows, start = batch.take(pa.array(order)), 0
    for pane, stop in zip(found.tolist(), stops.tolist(), strict=True):
        yield pane, rows.slice(start, stop - start)
        start = stop


def slices(rows: Any) -> Iterator[Any]:
    """Yield the rows that one step may take."""
    for start in range(0, len(rows), MAX_ROWS):
        yield rows[start : start + MAX_ROWS]
