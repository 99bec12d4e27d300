"""Sessions of records: functions of whole sessions, and joins and co-groups of two inputs by key and session.

The inputs make the sessions together: a record of either input extends a session of its key, or joins two of them. Sessions
are kept as aggregates of sessions are (session_windows.py), with their bounds and the number of their records. The records
are kept beside them by key, one state for each input. Those of a session are those of its key whose times are in it, since
no two sessions of a key overlap.

Without lateness, the records are deleted with their session in the call that emits what was made of them. With an allowed
lateness both stay until it is over, and a late record lets its session fire again with all of its records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.declaring import count
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.budget import Pace
from tidegate.dataflow.operators.record_windows import all_matches, plain_columns, records_of_inputs, taken
from tidegate.dataflow.operators.session_windows import Rows, SessionWindowOperator
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window import END, MAX_ROWS, START, times_from, times_ms_of, window_key_type
from tidegate.dataflow.operators.window_aggregates import WindowSettings, window_state
from tidegate.dataflow.operators.window_results import Bounds, Group, WindowResults
from tidegate.dataflow.windows import Sessions, Times
from tidegate.state.column_table import ColumnTable
from tidegate.state.descriptors import Columns, Descriptor, Records
from tidegate.state.event_time import WATERMARK
from tidegate.state.key_store import IntArray
from tidegate.state.sections import StateInfo


@dataclass(frozen=True, slots=True)
class SessionRecordSpec:
    """What is made of the records of each key and session. Assigners, keys, schemas and tags of late records are by input.
    The assigners differ in their time columns only; `bound_type` is the type of the windows' bounds."""

    assigners: tuple[Sessions, ...]
    keys: tuple[tuple[str, ...], ...]
    results: WindowResults
    schemas: tuple[pa.Schema, ...]  # of the records, without dictionaries
    bound_type: pa.DataType
    late: tuple[str | None, ...]
    lateness_ms: int = 0
    kind: str = "window function"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True
    needs_event_time: ClassVar[bool] = True

    @property
    def window_columns(self) -> tuple[str | None, ...]:
        return tuple(each.column for each in self.assigners)

    def create(self, node: Node) -> Operator:
        return SessionRecordOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        of_key = window_key_type(node.input_schemas[0], self.keys[0])
        return (*(each.info(of_key) for each in self.descriptors), WATERMARK)

    @property
    def settings(self) -> WindowSettings:
        """Return the settings of the sessions, of which the number of records is kept."""
        counting = Aggregation("sessions", {"records": count()}, self.schemas[0])
        return WindowSettings(self.keys[0], counting, lateness_ms=self.lateness_ms, late=self.late[0])

    @property
    def records(self) -> tuple[Records, ...]:
        return records_of_inputs(self.schemas, windowed=False)

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        return (self.sessions, *self.records)

    @property
    def sessions(self) -> Columns:
        return window_state(self.assigners[0], self.settings)

    @property
    def text(self) -> str:
        return f"{self.assigners[0].text}: {self.results.text}"


class SessionRecordOperator(SessionWindowOperator):
    def __init__(self, node: Node, spec: SessionRecordSpec) -> None:
        super().__init__(node, spec.assigners[0], spec.settings)
        self._spec = spec
        self._columns = tuple(each.column for each in spec.assigners)
        self._key_columns, self._late = spec.keys, spec.late
        (counted,) = spec.settings.aggregation.accumulators
        self._counted = counted.name

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._pace = Pace(context.budget)

    def _open_state(self, backend: KeyedBackend) -> None:
        super()._open_state(backend)
        self._records = [backend.record_state(each).table() for each in self._spec.records]

    def _keep(self, batch: pa.RecordBatch, port: int) -> None:
        self._records[port].append(self._keys(batch, port), plain_columns(batch))

    def _most_sessions(self, levels: Rows, rows: Rows) -> int:
        """The records of these sessions are to fit into memory."""
        most = min(len(rows), self._pace.portion if self._spec.results.calls_functions else MAX_ROWS)
        counts = np.zeros(most, np.int64)
        for level in np.unique(levels[:most]).tolist():
            here = np.flatnonzero(levels[:most] == level)
            counts[here] = self._state.window(level).vectors[self._counted].values[rows[here]]
        return max(1, int(np.searchsorted(np.cumsum(counts), MAX_ROWS, side="right")))

    def _is_spent(self, rows: int) -> bool:
        is_over = self._spec.results.calls_functions and self._pace.is_over()
        return super()._is_spent(rows) or is_over

    def _give_sessions(self, levels: Rows, rows: Rows, ends: Times) -> Steps:
        """For those of one level at a time, in which no key has two sessions."""
        for run in np.split(np.arange(len(levels)), np.flatnonzero(np.diff(levels)) + 1):
            table = self._state.window(int(levels[run[0]]))
            yield from self._give_records(table.keys(rows[run]), table.vectors[START].values[rows[run]], ends[run])

    def _give_records(self, keys: list[pa.Array], starts: Times, ends: Times) -> Steps:
        groups, inside = [], []
        for port, schema in enumerate(self._spec.schemas):
            probes, found = self._inside(port, keys, starts, ends)
            groups.append(Group(taken(self._records[port], found, schema), np.bincount(probes, minlength=len(starts))))
            inside.append(found)
        bounds = Bounds(times_from(starts, self._spec.bound_type), times_from(ends, self._spec.bound_type))
        of_keys = keys if self._key_columns[0] else []
        for batch in self._spec.results.of(self.name, self.node.schema, of_keys, bounds, groups):
            self._give(batch)
            # After a pause the budget is another one, and the pace of a function would know nothing of this one.
            if super()._is_spent(batch.num_rows) and not self._spec.results.calls_functions:
                yield
        for table, found in zip(self._records, inside, strict=True) if not self._keeps else ():
            table.delete(found)

    def _inside(self, port: int, keys: list[pa.Array], starts: Times, ends: Times) -> tuple[IntArray, IntArray]:
        """Return the indices of sessions and the rows of their records, in the order of the sessions and of arrival."""
        probes, found = all_matches(self._records[port], keys)
        times_ms = times_ms_of(self.name, self._records[port].column(self._columns[port], found))
        inside = (times_ms >= starts[probes]) & (times_ms < ends[probes])
        return probes[inside], found[inside]

    def _forget(self, table: ColumnTable, rows: Rows) -> None:
        for start in range(0, len(rows), MAX_ROWS):
            some = rows[start : start + MAX_ROWS]
            starts, ends = (table.vectors[bound].values[some] for bound in (START, END))
            for port, records in enumerate(self._records):
                records.delete(self._inside(port, table.keys(some), starts, ends)[1])
        super()._forget(table, rows)
