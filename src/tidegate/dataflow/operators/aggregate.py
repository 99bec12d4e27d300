"""Keyed aggregates without windows, on whole batches: one row of columnar state for each key.

`AggregateOperator` emits, for every batch, the new result of each key that is in it: upserts by key. `RunningOperator` emits
every record with the aggregates up to and including it.

Running aggregates of a batch are a scan. Each record begins as an accumulator of its own, merged behind what its key has
accumulated before the batch. Then each takes in the accumulators 1, 2, 4, … places before it in its key, so that after
log2(n) merges of whole columns, n being the most records that a key has in the batch, each has all before it.

A ttl counts from the last record of a key, by the slot's clock. When it has run out, the key begins again at its next
record; what is left of it is removed in small steps between batches.

Not here: windows, and what an aggregate computes (dataflow/aggregates).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import IntArray, SumTooLarge, Vectors
from tidegate.dataflow.aggregates.numpy_columns import Groups, copy_rows, grouped, held_vectors
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.user_code import RAISED, blame
from tidegate.errors import ExpressionError, JobError, TidegateError
from tidegate.state.column_table import ColumnTable
from tidegate.state.descriptors import Columns
from tidegate.state.sections import FrozenState, StateInfo
from tidegate.state.vectors import VectorField
from tidegate.types import rows_of, to_list

STATE = "aggregates"
TOUCHED = "__touched_ms"
NEVER = 0  # of a key from before there was a ttl: its time begins when the key is seen


@dataclass(frozen=True, slots=True, eq=False)
class _AggregatingSpec:
    aggregation: Aggregation
    key: tuple[str, ...]
    ttl_ms: int | None
    renamed: Mapping[str, str] = field(default_factory=dict)  # results, by their names now
    stateful: bool = True
    in_columns: ClassVar[bool] = True
    operator: ClassVar[type[_AggregatingOperator]]

    def create(self, node: Node) -> Operator:
        return self.operator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return tuple(each.info(key_type(node.input_schemas[0], self.key)) for each in self.descriptors)

    @property
    def descriptors(self) -> tuple[Columns, ...]:
        fields = [VectorField(each.name, each.type, each.default) for each in self.aggregation.accumulators]
        if self.ttl_ms is not None:
            fields.append(VectorField(TOUCHED, pa.int64(), NEVER))
        return (Columns(STATE, fields, renamed=self.aggregation.renamed(self.renamed)),)

    @property
    def text(self) -> str:
        return self.aggregation.text


class _AggregatingOperator(Operator):
    """What both have in common: the table, and its ttl."""

    def __init__(self, node: Node, spec: _AggregatingSpec) -> None:
        super().__init__(node)
        self._aggregation = spec.aggregation
        self._key = spec.key
        self._descriptor = spec.descriptors[0]
        self._ttl_ms = spec.ttl_ms
        self._swept = 0
        self._backend: KeyedBackend | None = None

    def open(self, context: OperatorContext) -> None:
        self._backend = backend = context.make_backend(key_type(self.node.input_schemas[0], self._key))
        self._table = backend.column_state(self._descriptor).table()
        self._now_ms = context.user_now_ms
        for state, batches in context.restored.items():
            for rows in batches:
                backend.load(state, rows, known=context.goes_on)

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        keys = [_plain(batch.column(name)) for name in self._key]
        inputs = inputs_of(self.name, self._aggregation, batch)
        try:
            rows = self._rows_of(keys)
            self._take(batch, rows, inputs)
        except TidegateError:
            raise
        except SumTooLarge as error:
            blame_sum(self.name, error, self._table)
        except RAISED as error:
            blame(self.name, error, at=f"a batch of {batch.num_rows} records")

    def maintain(self, budget: int) -> None:
        assert self._backend is not None
        if self._ttl_ms is not None:
            self._sweep(budget)
        self._backend.maintain(budget)

    def freeze(self, epoch: int) -> FrozenState | None:
        assert self._backend is not None
        return self._backend.freeze()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    # Inside.

    def _take(self, batch: pa.RecordBatch, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        raise AssertionError("the operators below say what they emit")

    def _rows_of(self, keys: Sequence[pa.Array]) -> IntArray:
        """Return the row of each record, without what the ttl has ended."""
        table = self._table
        rows = table.rows_of(keys)
        if self._ttl_ms is None:
            return rows
        now_ms = self._now_ms()
        touched = table.vectors[TOUCHED].values[rows]
        ended = (touched != NEVER) & (touched <= now_ms - self._ttl_ms)
        if ended.any():
            table.delete(rows[ended])
            rows = table.rows_of(keys)
        table.change(rows)
        table.vectors[TOUCHED].values[rows] = now_ms
        return rows

    def _sweep(self, budget: int) -> None:
        """Remove keys that ended, among the next `budget` rows."""
        assert self._ttl_ms is not None
        table = self._table
        if self._swept >= table.top:
            self._swept = 0
        some = np.arange(self._swept, min(self._swept + budget, table.top))
        self._swept += budget
        some = some[table.stamps[some] >= 0]
        now_ms, touched = self._now_ms(), table.vectors[TOUCHED].values
        unknown = some[touched[some] == NEVER]
        table.change(unknown)
        touched[unknown] = now_ms
        ended = some[touched[some] <= now_ms - self._ttl_ms]
        if len(ended):
            table.delete(ended)


class AggregateOperator(_AggregatingOperator):
    """Emits the new result of each key that a batch has, once for each batch."""

    def _take(self, batch: pa.RecordBatch, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        table = self._table
        table.change(rows)
        self._aggregation.add(table.vectors, rows, inputs)
        groups = grouped(rows)
        first = pa.array(groups.first)
        keys = [batch.column(name).take(first) for name in self._key]
        results = self._aggregation.results(table.vectors, groups.rows)
        self.emit(pa.RecordBatch.from_arrays([*keys, *results], schema=self.node.schema))


class RunningOperator(_AggregatingOperator):
    """Emits every record with the aggregates of its key so far."""

    def _take(self, batch: pa.RecordBatch, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        groups = grouped(rows)
        order = groups.order()
        sorted_inputs = [each.take(pa.array(order)) for each in inputs]
        try:
            results = self._scanned(groups, order, sorted_inputs)
        except SumTooLarge:  # of a part of the records, perhaps, and not of all up to one
            results = self._one_by_one(rows[order], groups.of[order], sorted_inputs)
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        in_order = [each.take(pa.array(back)) for each in results]
        self.emit(pa.RecordBatch.from_arrays([*batch.columns, *in_order], schema=self.node.schema))

    def _scanned(self, groups: Groups, order: IntArray, inputs: Sequence[pa.Array]) -> list[pa.Array]:
        aggregation, table = self._aggregation, self._table
        places = _places(groups.of[order])
        numbers = np.arange(len(order))
        so_far = held_vectors(aggregation.accumulators, len(order))
        aggregation.add(so_far, numbers, inputs)
        self._merge_behind(table.vectors, groups.rows, so_far, np.flatnonzero(places == 0))
        apart, most = 1, int(places.max())
        while apart <= most:
            later = np.flatnonzero(places >= apart)
            self._merge_behind(so_far, later - apart, so_far, later)
            apart *= 2
        table.change(groups.rows)
        last = np.append(np.flatnonzero(places == 0)[1:], len(order)) - 1
        copy_rows({name: table.vectors[name] for name in so_far}, groups.rows, so_far, last)
        return aggregation.results(so_far, numbers)

    def _merge_behind(self, earlier: Vectors, earlier_rows: IntArray, later: Vectors, later_rows: IntArray) -> None:
        """Make of each later one what it and the earlier one have accumulated."""
        both = held_vectors(self._aggregation.accumulators, len(later_rows))
        all_of_both = np.arange(len(later_rows))
        copy_rows(both, all_of_both, earlier, earlier_rows)
        self._aggregation.merge(both, all_of_both, later, later_rows)
        copy_rows(later, later_rows, both, all_of_both)

    def _one_by_one(self, rows: IntArray, groups: IntArray, inputs: Sequence[pa.Array]) -> list[pa.Array]:
        """Add first the first record of each key, then the second… so that a sum that is too large is that of a key."""
        places = _places(groups)
        found: list[list[pa.Array]] = []
        taken: list[IntArray] = []
        table = self._table
        table.change(rows)
        for place in range(int(places.max()) + 1):
            here = np.flatnonzero(places == place)
            self._aggregation.add(table.vectors, rows[here], [each.take(pa.array(here)) for each in inputs])
            found.append(self._aggregation.results(table.vectors, rows[here]))
            taken.append(here)
        back = pa.array(np.argsort(np.concatenate(taken)))
        return [pa.concat_arrays(list(parts)).take(back) for parts in zip(*found, strict=True)]


def inputs_of(operator: str, aggregation: Aggregation, batch: pa.RecordBatch) -> list[pa.Array]:
    """Evaluate what is aggregated. An error names the operator and the record."""
    try:
        return aggregation.inputs(batch)
    except ExpressionError as error:
        (record,) = rows_of(batch.slice(aggregation.first_failing(batch), 1))
        blame(operator, error, record)


class AggregateSpec(_AggregatingSpec):
    """The results by key, as upserts."""

    __slots__ = ()
    kind: ClassVar[str] = "aggregate"
    operator = AggregateOperator


class RunningSpec(_AggregatingSpec):
    """Every record with the results so far."""

    __slots__ = ()
    kind: ClassVar[str] = "running aggregate"
    operator = RunningOperator


def blame_sum(operator: str, error: SumTooLarge, table: ColumnTable) -> NoReturn:
    """Raise `UserFunctionError` for a sum that doesn't fit. No restart cures it."""
    key = [to_list(column)[0] for column in table.keys(np.array([error.row]))]
    blame(operator, JobError(error.text), at=f"key {key[0] if len(key) == 1 else tuple(key)!r}")


def _places(groups: IntArray) -> IntArray:
    """Return for each record of a batch in the order of its groups which one of its group it is, from 0."""
    numbers = np.arange(len(groups))
    starts = np.zeros(len(groups), np.int64)
    begins = np.flatnonzero(np.diff(groups)) + 1
    starts[begins] = begins
    return numbers - np.maximum.accumulate(starts)


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
