"""Functions of whole windows that have no fixed places: sessions, and windows of a number of records.

`SessionFunctionOperator` keeps sessions as aggregates of sessions do (session_windows.py), with their bounds and the number
of their records, and beside them the records by key. The records of a session are those of its key whose times are in it,
since no two sessions of a key overlap. They are deleted in the call that emits what the function made of them.

`CountFunctionOperator` has the records by key and nothing else. Whenever a key has enough, its earliest ones are handed over
and deleted. What is left has no window yet, and stays in the state at the end of input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.budget import Pace
from tidegate.dataflow.operators.record_windows import plain_columns
from tidegate.dataflow.operators.session_windows import Rows, SessionWindowOperator
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window import START, WindowOperator, times_from, times_ms_of, window_key_type
from tidegate.dataflow.operators.window_aggregates import WindowSettings, window_state
from tidegate.dataflow.operators.window_results import Bounds, Group, WindowResults
from tidegate.dataflow.windows import Global, Sessions, Times
from tidegate.state.column_table import ColumnTable
from tidegate.state.descriptors import Descriptor, Records
from tidegate.state.event_time import WATERMARK
from tidegate.state.key_store import IntArray
from tidegate.state.record_table import RecordTable
from tidegate.state.sections import StateInfo


@dataclass(frozen=True, slots=True)
class FunctionWindowSpec:
    """A function of whole sessions, or of whole windows of a number of records. `schema` is that of the records, without
    dictionaries, and `bound_type` the type of the windows' bounds."""

    assigner: Sessions | Global
    settings: WindowSettings
    results: WindowResults
    schema: pa.Schema
    bound_type: pa.DataType
    kind: ClassVar[str] = "window function"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True

    def create(self, node: Node) -> Operator:
        if isinstance(self.assigner, Sessions):
            return SessionFunctionOperator(node, self.assigner, self)
        return CountFunctionOperator(node, self.assigner, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        of_key = window_key_type(node.input_schemas[0], self.settings.key)
        return (*(each.info(of_key) for each in self.descriptors), WATERMARK)

    @property
    def records(self) -> Records:
        return Records("records", list(self.schema))

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        own = (window_state(self.assigner, self.settings),) if isinstance(self.assigner, Sessions) else ()
        return (*own, self.records)

    @property
    def needs_event_time(self) -> bool:
        return isinstance(self.assigner, Sessions)

    @property
    def text(self) -> str:
        return f"{self.assigner.text}: {self.results.text}"


class SessionFunctionOperator(SessionWindowOperator):
    def __init__(self, node: Node, assigner: Sessions, spec: FunctionWindowSpec) -> None:
        super().__init__(node, assigner, spec.settings)
        assert not self._keeps, "a session that was emitted is over"
        self._spec = spec

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._pace = Pace(context.budget)

    def _open_state(self, backend: KeyedBackend) -> None:
        super()._open_state(backend)
        self._records = backend.record_state(self._spec.records).table()

    def _keep(self, batch: pa.RecordBatch) -> None:
        self._records.append(self._keys(batch), plain_columns(batch))

    def _most_sessions(self) -> int:
        return self._pace.portion

    def _is_spent(self, rows: int) -> bool:
        return super()._is_spent(rows) or self._pace.is_over()

    def _give_sessions(self, levels: Rows, rows: Rows, ends: Times) -> None:
        """Call the function for sessions, which are in order: for those of one level at a time."""
        for run in np.split(np.arange(len(levels)), np.flatnonzero(np.diff(levels)) + 1):
            table = self._state.window(int(levels[run[0]]))
            self._call(table.keys(rows[run]), table.vectors[START].values[rows[run]], ends[run])

    def _call(self, keys: list[pa.Array], starts: Times, ends: Times) -> None:
        probes, found = all_matches(self._records, keys)
        times_ms = times_ms_of(self.name, self._records.column(self._column, found))
        inside = (times_ms >= starts[probes]) & (times_ms < ends[probes])
        probes, found = probes[inside], found[inside]
        group = Group(taken(self._records, found, self._spec.schema), np.bincount(probes, minlength=len(starts)))
        bounds = Bounds(times_from(starts, self._spec.bound_type), times_from(ends, self._spec.bound_type))
        of_keys = keys if self._settings.key else []
        for batch in self._spec.results.of(self.name, self.node.schema, of_keys, bounds, [group]):
            self._give(batch)
        self._records.delete(found)


class CountFunctionOperator(WindowOperator):
    def __init__(self, node: Node, assigner: Global, spec: FunctionWindowSpec) -> None:
        super().__init__(node, keys=(spec.settings.key,))
        assert assigner.count is not None
        self._size = assigner.count
        self._spec = spec

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._on_first = None
        self._pace = Pace(context.budget)

    def _open_state(self, backend: KeyedBackend) -> None:
        self._records = backend.record_state(self._spec.records).table()

    def _add(self, batch: pa.RecordBatch, port: int) -> Steps:
        keys = self._keys(batch)
        self._records.append(keys, plain_columns(batch))
        known = ColumnTable(self._key_type, [])
        known.rows_of(keys)
        distinct = known.keys(known.rows())
        full = self._records.counts(distinct) // self._size  # windows, by key
        due = np.flatnonzero(full)
        while len(due):
            # Some keys with all of their windows, or one key with some of them.
            count = int(np.searchsorted(np.cumsum(full[due]), self._pace.portion, side="right"))
            some = due[: max(1, count)]
            windows = full[some] if count else np.array([self._pace.portion])
            self._call([column.take(pa.array(some)) for column in distinct], windows)
            full[some] -= windows
            due = due[full[due] > 0]
            is_over = self._pace.is_over()
            if (self._is_spent(0) or is_over) and len(due):
                yield

    def _call(self, keys: list[pa.Array], windows: IntArray) -> None:
        """Call the function for the earliest windows of each key."""
        probes, found = all_matches(self._records, keys)
        counts = np.bincount(probes, minlength=len(windows))
        places = np.arange(len(probes)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = found[places < (windows * self._size)[probes]]
        total = int(windows.sum())
        group = Group(taken(self._records, rows, self._spec.schema), np.full(total, self._size))
        of_windows = pa.array(np.repeat(np.arange(len(windows)), windows))
        of_keys = [column.take(of_windows) for column in keys] if self._key_columns[0] else []
        bounds = Bounds(pa.nulls(total), pa.nulls(total))
        for batch in self._spec.results.of(self.name, self.node.schema, of_keys, bounds, [group]):
            self._give(batch)
        self._records.delete(rows)

    def _fire(self, at_ms: int) -> Steps:
        yield from ()

    def _expire(self) -> None:
        """Nothing is late."""


def all_matches(table: RecordTable, keys: list[pa.Array]) -> tuple[IntArray, IntArray]:
    """Return the indices of keys and the rows of their records, in the order of the keys and of arrival."""
    pairs = [(np.empty(0, np.int64), np.empty(0, np.int64)), *table.matches(keys)]
    of_keys, rows = zip(*pairs, strict=True)
    return np.concatenate(of_keys), np.concatenate(rows)


def taken(table: RecordTable, rows: IntArray, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([table.column(name, rows) for name in schema.names], schema=schema)
