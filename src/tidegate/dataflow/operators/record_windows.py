"""Windows of records: functions of whole windows, and joins and co-groups of two inputs by key and window.

State is the records themselves, by key and pane, one state for each input (state/record_table.py). A record is stored once,
in one pane, however many windows it is in. When a window fires, the keys of its panes are collected, and the records of some
keys at a time are handed over (window_results.py), in the order in which they arrived.

Tumbling windows without lateness have one pane each. The records of a key are deleted in the call that emits the last of
its results, and the window counts as emitted from then on: so a snapshot may come between two keys. All other panes stay
until their last window has fired and the allowed lateness is over; a snapshot waits for the window that is under way.

A record within the lateness lets the windows that have fired fire again for its key, with all of their records.

Invariants: those of paned_windows.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.budget import Pace
from tidegate.dataflow.operators.paned_windows import PanesOperator, slices, split
from tidegate.dataflow.operators.showing import Showing
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window import MAX_ROWS, times_of, window_key_type
from tidegate.dataflow.operators.window_results import Bounds, Group, WindowResults
from tidegate.dataflow.windows import Paned
from tidegate.state.column_table import ColumnState, ColumnTable
from tidegate.state.descriptors import Descriptor, Records
from tidegate.state.event_time import WATERMARK
from tidegate.state.key_store import IntArray
from tidegate.state.record_table import RecordState, RecordTable
from tidegate.state.sections import StateInfo


@dataclass(frozen=True, slots=True)
class RecordWindowSpec:
    """What is made of the records of each key and window. Assigners, keys, tags of late records and the names of states are
    by input. The assigners differ in their time columns only; `bound_type` is the type of the windows' bounds."""

    assigners: tuple[Paned, ...]
    keys: tuple[tuple[str, ...], ...]
    results: WindowResults
    schemas: tuple[pa.Schema, ...]  # of the records, without dictionaries
    bound_type: pa.DataType
    late: tuple[str | None, ...]
    lateness_ms: int = 0
    showing: Showing | None = None  # of one input
    kind: str = "window function"
    stateful: bool = True
    in_columns: ClassVar[bool] = True

    @property
    def needs_event_time(self) -> bool:
        """Results of a trigger need none."""
        return self.showing is None

    @property
    def window_columns(self) -> tuple[str | None, ...]:
        return tuple(each.column for each in self.assigners)

    def create(self, node: Node) -> Operator:
        from tidegate.dataflow.operators.early_windows import EarlyRecordWindowOperator  # which imports this module

        return RecordWindowOperator(node, self) if self.showing is None else EarlyRecordWindowOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        of_key = window_key_type(node.input_schemas[0], self.keys[0])
        return (*(each.info(of_key) for each in self.descriptors), WATERMARK)

    @property
    def records(self) -> tuple[Records, ...]:
        return records_of_inputs(self.schemas, windowed=True)

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        return (*self.records, *(() if self.showing is None else self.showing.descriptors(windowed=True)))

    @property
    def text(self) -> str:
        return f"{self.assigners[0].text}{'' if self.showing is None else self.showing.text}: {self.results.text}"


class PanesOfInputs:
    """The panes of several states of records, and of a state `beside` them that goes with them."""

    def __init__(self, states: Sequence[RecordState]) -> None:
        self._states = states
        self.beside: ColumnState | None = None

    def windows(self) -> Sequence[int]:
        if len(self._states) == 1:
            return self._states[0].windows()
        return sorted({pane for state in self._states for pane in state.windows()})

    def drop(self, at: int) -> None:
        for state in self._states:
            if state.has_window(at):
                state.drop(at)
        if self.beside is not None and self.beside.has_window(at):
            self.beside.drop(at)


class RecordWindowOperator(PanesOperator):
    def __init__(self, node: Node, spec: RecordWindowSpec) -> None:
        super().__init__(node, keys=spec.keys, lateness_ms=spec.lateness_ms, late=spec.late)
        self._spec = spec
        self._assigner = spec.assigners[0]
        self._keeps = not self._assigner.is_one_pane or spec.lateness_ms > 0

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._pace = Pace(context.budget)

    def _open_state(self, backend: KeyedBackend) -> None:
        self._states = [backend.record_state(each) for each in self._spec.records]
        self._panes: PanesOfInputs = PanesOfInputs(self._states)

    # Records.

    def _add(self, batch: pa.RecordBatch, port: int) -> Steps:
        column = self._spec.assigners[port].column
        assert column is not None
        batch, times_ms = self._in_time(batch, column, port)
        again: dict[int, ColumnTable] = {}
        panes, positions = self._assigner.panes_of(times_ms), None
        for pane, records in split(with_numbers(batch), panes):
            keys, table = self._keys(records, port), self._states[port].window(pane)
            # The records of a batch are in the order of their positions also if they are in several panes.
            positions = table.take_positions(batch.num_rows) if positions is None else positions
            *columns, numbers = plain_columns(records)
            table.append(keys, columns, positions[numbers.to_numpy()])
            yield from self._on_added(pane, keys, records)
            for end_ms, of_window in self._fired(pane, keys) if self._lateness_ms else ():
                again.setdefault(end_ms, ColumnTable(self._key_type, [])).rows_of(of_window)
        for end_ms in sorted(again):
            yield from self._give_window(end_ms, again[end_ms])

    def _on_added(self, pane: int, keys: list[pa.Array], records: pa.RecordBatch) -> Steps:
        """Records were added to a pane. These have one more column at the end."""
        yield from ()

    # Windows.

    def _fire_window(self, end_ms: int) -> Steps:
        keys = ColumnTable(self._key_type, [])
        for table in self._tables(self._panes_of(end_ms)):
            for rows in slices(table.rows()):
                columns = table.key_columns(rows)
                if self._keeps and not self._time.is_one:  # otherwise what has fired is gone, key by key
                    to_fire = pa.array(self._time.of_keys(columns) < end_ms - 1)
                    columns = [column.filter(to_fire) for column in columns]
                keys.rows_of(columns)
                if self._is_spent(len(rows)):
                    yield
        yield from self._give_window(end_ms, keys)
        if not self._keeps:
            self._panes.drop(self._assigner.window(end_ms).start_ms)

    def _on_shown(self, end_ms: int, keys: list[pa.Array]) -> None:
        """The results so far of these keys were emitted."""

    def _forget(self, panes: Sequence[int], keys: list[pa.Array]) -> None:
        """Delete the records of these keys."""
        for table in self._tables(panes):
            for _, found in list(table.matches(keys)):
                table.delete(found)

    def _give_window(self, end_ms: int, keys: ColumnTable, *, is_complete: bool = True) -> Steps:
        """Emit the results of these keys, some at a time."""
        panes, rows, was_whole = self._panes_of(end_ms), keys.rows(), self._is_whole
        results, start = self._spec.results, 0
        while start < len(rows):
            columns = keys.keys(rows[start : start + (self._pace.portion if results.calls_functions else MAX_ROWS)])
            count = min(self._fitting(panes, columns), len(columns[0]))
            columns = [column.slice(0, count) for column in columns]
            self._is_whole = False
            groups = [self._group(port, panes, columns) for port in range(len(self._states))]
            of_keys = columns if self._key_columns[0] else []
            bounds = self._bounds(end_ms, count)
            for batch in results.of(self.name, self.node.schema, of_keys, bounds, groups):
                self._give(batch)
                # After a pause the budget is another one, and the pace of a function would know nothing of this one.
                if self._is_spent(batch.num_rows) and not results.calls_functions:
                    yield
            if not is_complete:
                self._on_shown(end_ms, columns)
            elif not self._keeps:
                self._forget(panes, columns)
                # Closed for these keys, and so for all: records in flight must not open it again after a restore.
                self._time.advance(end_ms - 1)
            self._is_whole = was_whole
            start += count
            is_over = results.calls_functions and self._pace.is_over()
            if (self._is_spent(0) or is_over) and start < len(rows):
                yield

    def _fitting(self, panes: Sequence[int], keys: list[pa.Array]) -> int:
        """Return of how many of the first keys the records are to be handed over together."""
        counts = np.zeros(len(keys[0]), np.int64)
        for table in self._tables(panes):
            counts += table.counts(keys)
        return max(1, int(np.searchsorted(np.cumsum(counts), MAX_ROWS, side="right")))

    def _group(self, port: int, panes: Sequence[int], keys: list[pa.Array]) -> Group:
        schema = self._spec.schemas[port]
        probes: list[IntArray] = [np.empty(0, np.int64)]
        positions: list[IntArray] = [np.empty(0, np.int64)]
        batches: list[pa.RecordBatch] = []
        for table in self._tables(panes, [port]):
            for of_keys, rows in table.matches(keys):
                probes.append(of_keys)
                positions.append(table.positions(rows))
                batches.append(
                    pa.RecordBatch.from_arrays([table.column(name, rows) for name in schema.names], schema=schema)
                )
        numbers = np.concatenate(probes)
        records = pa.concat_batches([pa.RecordBatch.from_pylist([], schema), *batches])
        if len(panes) > 1:
            records = records.take(pa.array(np.lexsort((np.concatenate(positions), numbers))))
        return Group(records, np.bincount(numbers, minlength=len(keys[0])))

    def _tables(self, panes: Iterable[int], ports: Iterable[int] | None = None) -> Iterator[RecordTable]:
        """Return the tables of these panes that have records."""
        states = self._states if ports is None else [self._states[port] for port in ports]
        return (state.window(pane) for state in states for pane in panes if state.has_window(pane))

    def _bounds(self, end_ms: int, count: int) -> Bounds:
        return Bounds(*(times_of(at_ms, self._spec.bound_type, count) for at_ms in self._assigner.window(end_ms)))


def with_numbers(records: pa.RecordBatch) -> pa.RecordBatch:
    """Return the records with one more column, the last: which record of the batch it is."""
    numbers = pa.array(np.arange(records.num_rows))
    schema = records.schema.append(pa.field("", numbers.type))
    return pa.RecordBatch.from_arrays([*records.columns, numbers], schema=schema)


def plain_columns(records: pa.RecordBatch) -> list[pa.Array]:
    return [each.dictionary_decode() if pa.types.is_dictionary(each.type) else each for each in records.columns]


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of records as functions of windows and joins get them."""
    return pa.schema(
        [field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema]
    )


def records_of_inputs(schemas: Sequence[pa.Schema], *, windowed: bool) -> tuple[Records, ...]:
    """Return the states of the records of one input, or of two."""
    names = ("records",) if len(schemas) == 1 else ("left", "right")
    return tuple(Records(name, list(schema), windowed=windowed) for name, schema in zip(names, schemas, strict=True))


def all_matches(table: RecordTable, keys: list[pa.Array]) -> tuple[IntArray, IntArray]:
    """Return the indices of keys and the rows of their records, in the order of the keys and of arrival."""
    pairs = [(np.empty(0, np.int64), np.empty(0, np.int64)), *table.matches(keys)]
    of_keys, rows = zip(*pairs, strict=True)
    return np.concatenate(of_keys), np.concatenate(rows)


def taken(table: RecordTable, rows: IntArray, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([table.column(name, rows) for name in schema.names], schema=schema)
