"""Window operators: aggregates of the records that each key has in each window.

This module has what all kinds of windows share: event time, lateness, and the order of what arrives while windows fire.
The kinds are in paned_windows.py (tumbling, sliding, cumulating), session_windows.py and count_windows.py.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MAX_WATERMARK_MS
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import SumTooLarge
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.aggregate import blame_sum
from tidegate.dataflow.operators.base import OperatorContext
from tidegate.dataflow.operators.event_time import OperatorTime
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.stepwise import Steps, StepwiseOperator
from tidegate.dataflow.operators.user_code import RAISED, blame
from tidegate.dataflow.windows import Assigner, Global, Sessions, Times
from tidegate.errors import JobError, TidegateError
from tidegate.state.column_table import ColumnState, ColumnTable
from tidegate.state.descriptors import Columns
from tidegate.state.event_time import WATERMARK
from tidegate.state.operator_state import FrozenTogether
from tidegate.state.sections import FrozenState
from tidegate.state.vectors import VectorField

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


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """What all kinds of windows have. Without `key` there is one window for all records of a time. `late` is the tag of the
    side output for late records, or None."""

    key: tuple[str, ...]
    aggregation: Aggregation
    lateness_ms: int = 0
    late: str | None = None
    early_ms: int | None = None  # after which time a change is shown before its window is complete
    purges: bool = False  # whether what was shown is dropped, so that the next result begins from nothing
    renamed: Mapping[str, str] = field(default_factory=dict)  # results, by their names now


class WindowOperator(StepwiseOperator):
    """Aggregates by key and window."""

    def __init__(self, node: Node, assigner: Assigner, settings: WindowSettings) -> None:
        super().__init__(node)
        self._descriptor = window_state(assigner, settings)
        self._settings = settings
        self._aggregation = settings.aggregation
        self._lateness_ms = settings.lateness_ms
        self._key_type = window_key_type(node.input_schemas[0], settings.key)
        self._is_whole = True  # whether the state agrees with the operator's time, so that it can be frozen
        self._out: list[pa.RecordBatch] = []
        self._spent_rows = 0  # in this step

    # What a kind of windows implements.

    @abstractmethod
    def _add(self, batch: pa.RecordBatch) -> None:
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
        self._on_first = context.on_timer_without_event_time
        self._time = OperatorTime(context, keyed=True)
        self._backend = context.make_backend(self._key_type)
        self._state: ColumnState = self._backend.column_state(self._descriptor)
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
        if self._on_first is not None:
            on_first, self._on_first = self._on_first, None
            on_first()
        self._add(batch)
        self._flush()
        yield from ()

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

    def _keys(self, batch: pa.RecordBatch) -> list[pa.Array]:
        if not self._settings.key:
            return [pa.repeat(_NO_KEY, batch.num_rows)]
        columns = [batch.column(name) for name in self._settings.key]
        return [each.dictionary_decode() if pa.types.is_dictionary(each.type) else each for each in columns]

    def _times_of_keys(self, keys: Sequence[pa.Array]) -> Any:
        """Return the operator's time for each of these keys, or one number if it is the same for all."""
        return self._time.at_ms if self._time.is_one else self._time.of_keys(keys)

    def _new_table(self) -> ColumnTable:
        """Return a table for accumulators that are no state."""
        return ColumnTable(self._key_type, fields_of(self._aggregation))

    def _accumulate(self, table: ColumnTable, rows: Any, records: pa.RecordBatch) -> None:
        table.change(rows)
        with self._blaming(table):
            self._aggregation.add(table.vectors, rows, self._aggregation.inputs(records))

    def _merge_rows(self, table: ColumnTable, rows: Any, other: ColumnTable, other_rows: Any) -> None:
        """Merge rows of another table, which have accumulated later."""
        table.change(rows)
        with self._blaming(table):
            self._aggregation.merge(table.vectors, rows, other.vectors, other_rows)

    def _emit_late(self, batch: pa.RecordBatch, is_late: Any) -> pa.RecordBatch:
        """Emit the late records, or count them if there is no output for them, and return the others."""
        if self._settings.late is None:
            self.late_dropped += int(np.count_nonzero(is_late))
        else:
            self.emit_side(self._settings.late, batch.filter(pa.array(is_late)))
        return batch.filter(pa.array(~is_late))

    def _results(self, table: ColumnTable, rows: Any, bounds: Sequence[pa.Array]) -> pa.RecordBatch:
        """Return the results at these rows."""
        with self._blaming(table):
            results = self._aggregation.results(table.vectors, rows)
        keys = table.keys(rows) if self._settings.key else []
        return pa.RecordBatch.from_arrays([*keys, *bounds, *results], schema=self.node.schema)

    def _give(self, results: pa.RecordBatch) -> None:
        """Emit results when the step ends, together with others."""
        self._out.append(results)

    def _is_spent(self, rows: int) -> bool:
        """Whether this step has done enough, after so many further rows."""
        self._spent_rows += rows
        return self._spent_rows >= MAX_ROWS or self._budget.is_spent

    # Inside.

    @contextmanager
    def _blaming(self, table: ColumnTable) -> Iterator[None]:
        """Say in errors of aggregates where they happened."""
        try:
            yield
        except TidegateError:
            raise
        except SumTooLarge as error:
            blame_sum(self.name, error, table)
        except RAISED as error:
            blame(self.name, error, at="aggregates of a window")

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
            self.emit(out[0] if len(out) == 1 else pa.concat_batches(out))


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


def window_state(assigner: Assigner, settings: WindowSettings) -> Columns:
    """Return the state of aggregates by key and window."""
    counts = isinstance(assigner, Global) and assigner.count is not None
    own = (START, END) if isinstance(assigner, Sessions) else (COUNT,) if counts else ()
    fields = [*(VectorField(name, pa.int64(), 0) for name in own), *fields_of(settings.aggregation)]
    renamed = settings.aggregation.renamed(settings.renamed)
    return Columns("windows", fields, windowed=not isinstance(assigner, Global), renamed=renamed)


def fields_of(aggregation: Aggregation) -> list[VectorField]:
    return [VectorField(each.name, each.type, each.default) for each in aggregation.accumulators]
