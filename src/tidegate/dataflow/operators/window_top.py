"""The best records of each key in each tumbling window, emitted when the window is complete: appended, and never changed.

State is a table for each window and rank, in windows of columnar state that are numbered by both. Event time and lateness
are as in other windows (window.py): time moves window by window, and the rows of a step are deleted when they are emitted.
So any moment is right for a snapshot. What is left of a window fires first after a restore.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.event_time import OperatorTime
from tidegate.dataflow.operators.keyed_columns import KeyedColumnsOperator, columns_key_type
from tidegate.dataflow.operators.ordering import Ordering
from tidegate.dataflow.operators.paned_windows import split
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.top import RankedTables
from tidegate.dataflow.operators.window import MAX_ROWS, times_ms_of, times_of, with_times
from tidegate.dataflow.windows import Paned
from tidegate.errors import JobError
from tidegate.state.descriptors import Columns
from tidegate.state.event_time import WATERMARK
from tidegate.state.operator_state import FrozenTogether
from tidegate.state.sections import FrozenState, StateInfo
from tidegate.state.vectors import VectorField

STATE = "ranks"
RANKS = 1024
"""How many ranks the number of a window has room for."""
FARTHEST_MS = 2**52
"""Times beyond this don't fit into that number."""


@dataclass(frozen=True, slots=True)
class WindowTopSpec:
    """The first `count` records of each key and window, in an order. `late` is the side output for late records, or None."""

    key: tuple[str, ...]
    assigner: Paned
    ordering: Ordering
    count: int
    late: str | None
    fields: tuple[VectorField, ...]
    kind: ClassVar[str] = "window top"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True
    needs_event_time: ClassVar[bool] = True

    @property
    def window_columns(self) -> tuple[str | None, ...]:
        return (self.assigner.column,)

    @property
    def descriptors(self) -> tuple[Columns, ...]:
        return (Columns(STATE, self.fields, windowed=True),)

    @property
    def text(self) -> str:
        """What `explain` shows."""
        return f"{self.assigner.text}: {self.count} by {self.ordering.text}"

    def create(self, node: Node) -> Operator:
        return WindowTopOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return (*(each.info(columns_key_type(node, self.key)) for each in self.descriptors), WATERMARK)


class WindowTopOperator(KeyedColumnsOperator):
    def __init__(self, node: Node, spec: WindowTopSpec) -> None:
        super().__init__(node, spec.key, spec.descriptors[0])
        self._spec = spec
        assert spec.assigner.column is not None
        self._column = spec.assigner.column

    def open(self, context: OperatorContext) -> None:
        self._by_epoch = context.batch_now_ms is not None
        self._time = OperatorTime(context, keyed=True)
        super().open(context)
        for window in self._state.windows():
            if window % RANKS >= self._spec.count:  # the program kept more before
                self._state.drop(window)

    def resume(self) -> None:
        """Windows that are complete by the restored time were in the state that was restored."""
        self._do(self._fire(self._time.at_ms))

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        batch = with_times(batch, self._column)
        times_ms = times_ms_of(self.name, batch.column(self._column))
        if len(times_ms) and int(np.abs(times_ms).max()) >= FARTHEST_MS:
            raise JobError(
                f"operator {self.name!r}: a record has the time {times_ms[np.abs(times_ms).argmax()]} ms, and top(…) of "
                f"windows takes times up to ±2**52 ms. Filter such records out before window(…)"
            )
        reached_ms = self._time.at_ms if self._time.is_one else self._time.of_keys(self._key_columns(batch))
        late = self._spec.assigner.last_ends(times_ms) - 1 <= reached_ms
        if late.any():
            if self._spec.late is None:
                self.late_dropped += int(np.count_nonzero(late))
            else:
                self.emit_side(self._spec.late, batch.filter(pa.array(late)))
            batch, times_ms = batch.filter(pa.array(~late)), times_ms[~late]
        for pane, rows in split(batch, self._spec.assigner.panes_of(times_ms)):
            for _ in self._tables_of(pane).add(rows, self._keys(rows)):
                if self._budget.is_spent:
                    yield

    def take_watermark(self, at_ms: int) -> Steps:
        yield from self._fire(at_ms)
        self.forward_watermark(self._time.advance(at_ms))

    def before_snapshot(self) -> None:
        if self._by_epoch:  # all windows that the epoch's watermark has completed belong to the epoch
            self._finish()

    def freeze(self, epoch: int) -> FrozenState:
        assert self._backend is not None
        return FrozenTogether(self._backend.freeze(), self._time.freeze())

    # Inside.

    def _load(self, state: str, batches: Iterable[pa.RecordBatch], *, known: bool) -> None:
        if state == WATERMARK.name:
            self._time.load(batches)
        else:
            super()._load(state, batches, known=known)

    def _tables_of(self, pane: int) -> RankedTables:
        state, first = self._state, pane * RANKS
        return RankedTables(
            self._spec.ordering,
            self._spec.fields,
            self._spec.count,
            table_at=lambda rank: state.window(first + rank),
            is_there=lambda rank: state.has_window(first + rank),
        )

    def _fire(self, at_ms: int) -> Steps:
        """Emit the windows that are complete at this watermark, in the order of their ends, and of ranks in each."""
        spent = 0
        for window in list(self._state.windows()):
            pane, rank = divmod(window, RANKS)
            end_ms = self._spec.assigner.last_end(pane)
            if end_ms - 1 > at_ms and at_ms != MAX_WATERMARK_MS:
                return
            table = self._state.window(window)
            while len(rows := table.rows()[:MAX_ROWS]):
                keys, values = table.keys(rows), self._tables_of(pane).values(table, rows)
                self._emit(keys, values, end_ms, rank)
                table.delete(rows)
                # Closed for the keys that were emitted, and so for all: after a restore, records that were in flight must
                # not open it again. What is left of it fires first then (`resume`).
                self._time.advance(end_ms - 1)
                spent += len(rows)
                if spent >= MAX_ROWS or self._budget.is_spent:
                    spent = 0
                    yield
            self._state.drop(window)
            spent += MAX_ROWS // 256  # what a window costs apart from its rows

    def _emit(self, keys: list[pa.Array], values: pa.RecordBatch, end_ms: int, rank: int) -> None:
        count = values.num_rows
        given = {
            **dict(zip(self._key, keys, strict=False)),
            **dict(zip(values.schema.names, values.columns, strict=True)),
        }
        kind = self.node.schema.field("window_end").type
        bounds = [times_of(at, kind, count) for at in self._spec.assigner.window(end_ms)]
        columns = [given[name] for name in self.node.input_schemas[0].names]
        ranks = pa.repeat(pa.scalar(rank + 1, pa.int64()), count)
        self.emit(pa.RecordBatch.from_arrays([*columns, *bounds, ranks], schema=self.node.schema))
