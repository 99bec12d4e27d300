"""Aggregates over the last records of each key, in the order of event time: SQL's OVER with ROWS … PRECEDING.

Records wait until the watermark has reached their time, in stretches of time (timed_records.py), and then go in the order of
their times: emitted with their results, and deleted, in one step, so that a snapshot may come between any two. The last
records of each key are kept, one less than are aggregated, with only those columns that the aggregates read.

The due records of a step are put behind the last ones of their keys. Then each takes the places of those before it, and all
of these are added, each once for every record that it counts for. So any aggregate will do, and a record costs as much as it
has records before it.

Not here: lateness, and what arrives (joining.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tidegate.channels.elements import MIN_WATERMARK_MS
from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import SumTooLarge
from tidegate.dataflow.aggregates.numpy_columns import held_vectors
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.aggregate import inputs_of
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.operators.joining import MAX_ROWS as STEP_ROWS
from tidegate.dataflow.operators.joining import STRETCH_ROWS, Arrived, TimedOperator, TimedSide, valid_values
from tidegate.dataflow.operators.ordering import Ordering
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.timed_records import TimedRecords
from tidegate.dataflow.operators.user_code import blame
from tidegate.errors import JobError
from tidegate.state.batch_keys import places_in_groups
from tidegate.state.descriptors import Records
from tidegate.state.event_time import WATERMARK
from tidegate.state.key_index import KeyIndex
from tidegate.state.key_store import Array, IntArray
from tidegate.state.record_table import RecordTable
from tidegate.state.sections import StateInfo
from tidegate.types import to_list

MAX_ROWS = 1000
"""How many records an aggregate may be over."""


@dataclass(frozen=True, slots=True, eq=False)
class OverSpec:
    """Aggregates over `rows` records: the record itself and those before it by `time`, and then by `ordering`. `columns` are
    those of the records, without dictionaries."""

    aggregation: Aggregation
    key: tuple[str, ...]
    time: str
    ordering: Ordering
    rows: int
    columns: tuple[pa.Field, ...]
    late: str | None
    kind: ClassVar[str] = "over"
    stateful: ClassVar[bool] = True
    in_columns: ClassVar[bool] = True
    needs_event_time: ClassVar[bool] = True

    def create(self, node: Node) -> Operator:
        return OverOperator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        of_key = key_type(node.input_schemas[0], self.key)
        return (*(each.info(of_key) for each in self.descriptors), WATERMARK)

    @property
    def kept(self) -> tuple[pa.Field, ...]:
        """The columns that are kept beside the key while a record waits."""
        return tuple(field for field in self.columns if field.name not in self.key or field.name == self.time)

    @property
    def read(self) -> tuple[pa.Field, ...]:
        """The columns beside the key that the aggregates read."""
        return tuple(field for field in self.columns if field.name in self.aggregation.columns - {*self.key})

    @property
    def descriptors(self) -> tuple[Records, Records]:
        return Records("waiting", self.kept, windowed=True), Records("last", self.read)

    @property
    def text(self) -> str:
        """What `explain` shows."""
        return f"{self.rows} by {', '.join((self.time, *self.ordering.columns))}: {self.aggregation.text}"


class OverOperator(TimedOperator):
    """Emits every record with the aggregates, when its time has come."""

    def __init__(self, node: Node, spec: OverSpec) -> None:
        super().__init__(node, (TimedSide(spec.key, spec.time, spec.kept),), (spec.late,))
        self._spec = spec

    def _open_state(self) -> Sequence[TimedRecords]:
        waiting, last = self._spec.descriptors
        self._waiting = TimedRecords(waiting, self._backend, time=self._spec.time, kept_ms=0)
        self._last = self._backend.record_state(last).table()
        return (self._waiting,)

    def _held_back_ms(self) -> int:
        return 0

    def _take(self, arrived: Arrived, can_match: Array, port: int) -> Steps:
        arrived = arrived.at(valid_values(arrived.columns[self._spec.time]))
        for _ in self._waiting.append(arrived.keys, self._kept(arrived, port), arrived.times_us):
            if self._is_spent(STRETCH_ROWS):
                yield

    def _settle(self) -> Steps:
        at_ms = self._time.at_ms
        if at_ms == MIN_WATERMARK_MS:
            return
        for stretch in self._waiting.stretches():
            if stretch.start_ms > at_ms:
                break
            yield from self._give_due(stretch.table, at_ms)
            if stretch.stop_ms - 1 <= at_ms:
                self._waiting.drop(stretch)

    # Inside.

    def _give_due(self, table: RecordTable, at_ms: int) -> Steps:
        """Emit the records of a stretch whose time has come."""
        rows = table.rows()
        times_us = self._waiting.times_us(table, rows)
        due = times_us < (at_ms + 1) * 1000 if at_ms < times_us.max(initial=0) // 1000 else np.ones(len(rows), bool)
        rows, times_us = rows[due], times_us[due]
        batch = self._records(table, rows, self._spec.ordering.columns)
        order = np.lexsort((table.positions(rows), *reversed(self._spec.ordering.codes(batch)), times_us))
        rows, times_us = rows[order], times_us[order]
        step = max(1, STEP_ROWS // self._spec.rows)
        table.keeps_rows = True  # a snapshot may come between two steps
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            self._give(self._records(table, some, [field.name for field in self._spec.columns]))
            table.delete(some)
            self._time.on_fired(int(times_us[start + len(some) - 1]) // 1000)
            if self._is_spent(len(some) * self._spec.rows):
                yield
        table.keeps_rows = False

    def _give(self, due: pa.RecordBatch) -> None:
        """Emit records in order, with their aggregates, and keep the last ones of their keys."""
        index = KeyIndex(self._key_type)
        keys = [due.column(name) for name in self._spec.key]
        groups, _ = index.rows_of(keys)
        probes, held = self._held(index)
        # The records of each key lie beside one another: those that were kept, and then those that are due.
        of = np.concatenate([probes, groups])
        order = np.argsort(of, kind="stable")
        of, is_due = of[order], order >= len(probes)
        places = places_in_groups(of)
        back = np.empty(len(groups), np.int64)  # where each due record is
        back[order[is_due] - len(probes)] = np.flatnonzero(is_due)
        counts = np.minimum(places[back] + 1, self._spec.rows)
        self._emit(due, self._inputs(due, held, order), back, counts)
        # What is kept of each key are its last records.
        from_end = np.bincount(of)[of] - 1 - places
        kept = from_end < self._spec.rows - 1
        self._last.delete(held[order[~kept & ~is_due]])
        new = np.sort(order[kept & is_due] - len(probes))
        if len(new):
            some = pa.array(new)
            columns = [due.column(field.name).take(some) for field in self._spec.read]
            self._last.append([each.take(some) for each in keys], columns)

    def _held(self, index: KeyIndex) -> tuple[IntArray, IntArray]:
        """Return what is kept of these keys: by record the number of its key, and its row."""
        pairs = list(self._last.matches(index.keys(np.arange(index.top))))
        nothing = np.empty(0, np.int64)
        probes, rows = ([nothing, *(pair[which] for pair in pairs)] for which in range(2))
        return np.concatenate(probes), np.concatenate(rows)

    def _inputs(self, due: pa.RecordBatch, held: IntArray, order: IntArray) -> list[pa.Array]:
        """Return the inputs of the aggregates for the records that are kept and due, in this order."""
        needed = [field.name for field in self._spec.columns if field.name in self._spec.aggregation.columns]
        before = self._records(self._last, held, needed)
        # The aggregates know the schema of the input, of which they read only these columns.
        columns = [
            pa.concat_arrays([before.column(field.name), due.column(field.name)]).take(pa.array(order))
            if field.name in needed
            else pa.nulls(len(order), field.type)
            for field in self._spec.columns
        ]
        schema = pa.schema([field.with_nullable(True) for field in self._spec.columns])
        return inputs_of(self.name, self._spec.aggregation, pa.RecordBatch.from_arrays(columns, schema=schema))

    def _emit(self, due: pa.RecordBatch, inputs: Sequence[pa.Array], back: IntArray, counts: IntArray) -> None:
        aggregation, rows = self._spec.aggregation, np.repeat(np.arange(len(back)), counts)
        first = np.cumsum(counts) - counts
        places = pa.array(np.repeat(back - counts + 1 - first, counts) + np.arange(len(rows)))
        vectors = held_vectors(aggregation.accumulators, len(back))
        try:
            aggregation.add(vectors, rows, [each.take(places) for each in inputs])
        except SumTooLarge as error:
            key = [to_list(due.column(name).slice(error.row, 1))[0] for name in self._spec.key]
            blame(self.name, JobError(error.text), at=f"key {key[0] if len(key) == 1 else tuple(key)!r}")
        results = aggregation.results(vectors, np.arange(len(back)))
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(due.columns, self.node.input_schemas[0], strict=True)
        ]
        self._out.append(pa.RecordBatch.from_arrays([*columns, *results], schema=self.node.schema))

    def _records(self, table: RecordTable, rows: IntArray, names: Sequence[str]) -> pa.RecordBatch:
        """Return columns of stored records."""
        column = self._stored(0, table, rows)
        return pa.RecordBatch.from_arrays([column(name) for name in names], names=list(names))
