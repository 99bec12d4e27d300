"""Window operators: what is computed of the records that each key has in each window.

This module has what all kinds of windows share: event time, lateness, and the order of what arrives while windows fire.
Aggregates of windows are in window_aggregates.py, and the kinds of windows in paned_windows.py (tumbling, sliding,
cumulating), session_windows.py, count_windows.py and global_windows.py. What works on the records themselves, functions of
whole windows and joins, is in record_windows.py.

Theory of operation
-------------------
Event time moves window by window. A watermark w is taken as a series of watermarks: one for each window that is complete
by then, in ascending order of their ends, and w itself at the end. For a window that ends at e, its results are emitted and
then the operator's time becomes e - 1. So the state agrees with the operator's time at any moment: windows up to that time
were emitted, later ones were not. A snapshot between two windows needs nothing else, and the watermark itself comes again
after a restore. It goes downstream last, after all results that it made complete.

Windows fire in bounded steps (stepwise.py), and a snapshot may come between two steps. Emitted rows that no later window
needs are deleted in the step that emits them, and the window counts as emitted from then on: what is left of it fires first
after a restore, and what was emitted is not emitted again. If the rows stay, because later windows need them or late
records may change them, a snapshot waits for the rest of the window that is under way.

A record is late if all of its windows have fired and the allowed lateness is over. It changes nothing, and goes to the side
output for late records if there is one. A record within the lateness is added to its windows, and those of them that have
fired already fire again for its key in the same call. Time is kept as in ProcessOperator, by key-group (event_time.py): a
window that was emitted doesn't open again after a restore, also at another parallelism.

The end of time fires every window, but time is kept at the last window that fired (docs/adr/018), and the state that the
allowed lateness needs stays, so that input which is added later continues from there.

Not here: which window a time is in (dataflow/windows.py), and what is computed of its records.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, OperatorContext
from tidegate.dataflow.operators.event_time import OperatorTime
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.stepwise import Steps, StepwiseOperator
from tidegate.dataflow.windows import Times
from tidegate.errors import JobError
from tidegate.state.event_time import WATERMARK
from tidegate.state.operator_state import FrozenTogether
from tidegate.state.sections import FrozenState
from tidegate.types.limits import joined

START, END = "window_start", "window_end"
"""Columns of the output, and of the state of sessions."""
COUNT = "window_count"
"""How many records a window has, in the state of windows of a number of records."""

MAX_ROWS = 65_536
"""A step ends when it has emitted or merged so many rows. It takes at most as many at a time."""
MAX_WINDOWS = 256
"""Windows that fire in one step."""

_NO_KEY = pa.scalar(0, pa.int8())
"""The key of all records of a stream without key."""

FARTHEST_MS = 2**61
"""Times beyond this, and their windows, don't fit into 64 bits when they are added."""


class WindowOperator(StepwiseOperator):
    """Windows by key. `keys` and `late`, the side outputs of late records, are by port."""

    def __init__(
        self, node: Node, *, keys: Sequence[tuple[str, ...]], lateness_ms: int = 0, late: Sequence[str | None] = (None,)
    ) -> None:
        super().__init__(node)
        self._key_columns = tuple(keys)
        self._late = tuple(late)
        self._lateness_ms = lateness_ms
        self._key_type = window_key_type(node.input_schemas[0], keys[0])
        self._is_whole = True  # whether the state agrees with the operator's time, so that it can be frozen
        self._out: list[pa.RecordBatch] = []
        self._spent_rows = 0  # in this step

    # What a kind of windows implements.

    @abstractmethod
    def _open_state(self, backend: KeyedBackend) -> None:
        """Make the state, which is empty."""

    @abstractmethod
    def _add(self, batch: pa.RecordBatch, port: int) -> Steps:
        """Add records to their windows, fire those again that had fired, and emit late records."""

    @abstractmethod
    def _fire(self, at_ms: int) -> Steps:
        """Fire the windows that are complete at this watermark, in order, and advance time with each of them."""

    @abstractmethod
    def _expire(self) -> None:
        """Drop the state that only records need that are late now."""

    # What the subtask calls.

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._by_epoch = context.batch_now_ms is not None
        self._time = OperatorTime(context, keyed=True)
        self._backend = context.make_backend(self._key_type)
        self._open_state(self._backend)
        for state, batches in context.restored.items():
            if state == WATERMARK.name:
                self._time.load(batches)
            else:
                for rows in batches:
                    self._backend.load(state, rows, known=context.goes_on)

    def resume(self) -> None:
        """Windows that are complete by the restored time were in the state that was restored."""
        self._do(self._steps(self._fire(self._time.at_ms)))

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        yield from self._steps(self._add(batch, port))

    def take_watermark(self, at_ms: int) -> Steps:
        yield from self._steps(self._fire(at_ms))
        reached_ms = self._time.advance(at_ms)
        if at_ms != MAX_WATERMARK_MS:
            self._expire()
        self.forward_watermark(reached_ms)

    def holds_records(self) -> bool:
        """A window that is under way, and whose rows stay, is like records: a snapshot waits for it."""
        return super().holds_records() or not self._is_whole

    def before_snapshot(self) -> None:
        if self._by_epoch:  # all windows that the epoch's watermark has completed belong to the epoch
            self._finish()

    def freeze(self, epoch: int) -> FrozenState:
        return FrozenTogether(self._backend.freeze(), self._time.freeze())

    def maintain(self, budget: int) -> None:
        if not self.has_work():  # work under way knows the numbers of rows, which this may change
            self._backend.maintain(budget)

    def close(self) -> None:
        self._backend.close()

    # What the kinds of windows use.

    def _keys(self, batch: pa.RecordBatch, port: int = 0) -> list[pa.Array]:
        if not self._key_columns[port]:
            return [pa.repeat(_NO_KEY, batch.num_rows)]
        columns = [batch.column(name) for name in self._key_columns[port]]
        return [each.dictionary_decode() if pa.types.is_dictionary(each.type) else each for each in columns]

    def _times_of_keys(self, keys: Sequence[pa.Array]) -> Any:
        """Return the operator's time for each of these keys, or one number if it is the same for all."""
        return self._time.at_ms if self._time.is_one else self._time.of_keys(keys)

    def _emit_late(self, batch: pa.RecordBatch, is_late: Any, port: int = 0) -> pa.RecordBatch:
        """Emit the late records, or count them if there is no output for them, and return the others."""
        late = self._late[port]
        if late is None:
            self.late_dropped += int(np.count_nonzero(is_late))
        else:
            self.emit_side(late, batch.filter(pa.array(is_late)))
        return batch.filter(pa.array(~is_late))

    def _give(self, results: pa.RecordBatch) -> None:
        """Emit results when the step ends, together with others."""
        self._out.append(results)

    def _is_spent(self, rows: int) -> bool:
        """Whether this step has done enough, after so many further rows."""
        self._spent_rows += rows
        return self._spent_rows >= MAX_ROWS or self._budget.is_spent

    # Inside.

    def _steps(self, firing: Steps) -> Steps:
        """Emit what each step gave before it pauses."""
        self._spent_rows = 0
        for _ in firing:
            self._flush()
            yield
            self._spent_rows = 0
        self._flush()

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            for batch in joined(out):
                self.emit(batch)


def with_times(batch: pa.RecordBatch, column: str) -> pa.RecordBatch:
    """Return the records that have a time. Those without one are in no window, as in Spark."""
    times = batch.column(column)
    return batch.filter(times.is_valid()) if times.null_count else batch


def times_ms_of(operator: str, column: pa.Array) -> Times:
    """Return the event times of a column without nulls in milliseconds, rounded down."""
    kind = column.type
    if pa.types.is_date(kind):
        column, kind = column.cast(pa.timestamp("ms")), pa.timestamp("ms")
    if pa.types.is_timestamp(kind):
        ticks = np.asarray(column.cast(pa.int64()))
        if kind.unit == "s":
            return ticks * 1000
        per_ms = {"ms": 1, "us": 1000, "ns": 1_000_000}[kind.unit]
        return ticks if per_ms == 1 else ticks // per_ms
    times = np.asarray(column)
    if len(times) and not -FARTHEST_MS < times.min() <= times.max() < FARTHEST_MS:
        raise JobError(
            f"operator {operator!r}: a record has the time {times[np.abs(times).argmax()]} ms, and windows can have times "
            f"up to ±2**61 ms. Filter such records out before window(…)"
        )
    return times


def time_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of `window_start` and `window_end` for this type of a time column."""
    return pa.timestamp("us", tz="UTC") if pa.types.is_date(kind) else kind


def times_from(times_ms: Times, kind: pa.DataType) -> pa.Array:
    """Return times as a column of the type of `window_start` and `window_end`."""
    if pa.types.is_timestamp(kind):
        return pa.array(times_ms, pa.timestamp("ms", tz=kind.tz)).cast(kind)
    return pa.array(times_ms, kind)


def times_of(at_ms: int, kind: pa.DataType, count: int) -> pa.Array:
    """Return a column with one time in all of its rows."""
    if pa.types.is_timestamp(kind):
        at = pa.scalar(at_ms, pa.timestamp("ms", tz=kind.tz)).cast(kind)
    else:
        at = pa.scalar(at_ms, kind)
    return pa.repeat(at, count)


def window_key_type(schema: pa.Schema, key: tuple[str, ...]) -> pa.DataType:
    """Return the type of the key in the state: of no columns there is one key."""
    return key_type(schema, key) if key else _NO_KEY.type
