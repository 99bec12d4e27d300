"""Keyed aggregates without windows, on whole batches: one row of columnar state for each key.

`AggregateOperator` emits, for every batch, the new result of each key that is in it: upserts by key. `RunningOperator` emits
every record with the aggregates up to and including it.

Running aggregates of a batch are a scan. Each record begins as an accumulator of its own, merged behind what its key has
accumulated before the batch. Then each takes in the accumulators 1, 2, 4, … places before it in its key, so that after
log2(n) merges of whole columns, n being the most records that a key has in the batch, each has all before it.

Not here: the table and its ttl (keyed_table.py), windows, records that take others back (aggregate_changes.py), and what an
aggregate computes (dataflow/aggregates).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.aggregation import Aggregation
from tidegate.dataflow.aggregates.base import IntArray, SumTooLarge, Vectors
from tidegate.dataflow.aggregates.numpy_columns import Groups, copy_rows, distinct_of, grouped, held_vectors, places_in
from tidegate.dataflow.aggregates.partials import PARTIALS_PORT, Partials, merge_partials
from tidegate.dataflow.changelog import APPEND_OR_RETRACT, Changelog
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.operators.keyed_table import KeyedTableOperator, touched_fields
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.user_code import RAISED, blame
from tidegate.errors import ExpressionError, JobError, TidegateError
from tidegate.state.column_table import ColumnTable
from tidegate.state.descriptors import Columns
from tidegate.state.sections import StateInfo
from tidegate.state.vectors import VectorField
from tidegate.types import rows_of, to_list

STATE = "aggregates"


@dataclass(frozen=True, slots=True, eq=False)
class AggregatingSpec:
    aggregation: Aggregation
    key: tuple[str, ...]
    ttl_ms: int | None
    renamed: Mapping[str, str] = field(default_factory=dict)  # results, by their names now
    stateful: bool = True
    in_columns: ClassVar[bool] = True
    kind: ClassVar[str]
    operator: ClassVar[type[AggregatingOperator]]

    def create(self, node: Node) -> Operator:
        return self.operator(node, self)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return tuple(each.info(key_type(node.input_schemas[0], self.key)) for each in self.descriptors)

    @property
    def descriptors(self) -> tuple[Columns, ...]:
        fields = [VectorField(each.name, each.type, each.default) for each in self.aggregation.accumulators]
        fields += touched_fields(self.ttl_ms)
        return (Columns(STATE, fields, renamed=self.aggregation.renamed(self.renamed)),)

    @property
    def text(self) -> str:
        return self.aggregation.text

    def partials(self, node: Node) -> Partials | None:
        """Return the form of the partials that the operator takes beside records, or None if it takes none."""
        return None


class AggregatingOperator(KeyedTableOperator):
    """What all of them have in common: the table, and errors."""

    def __init__(self, node: Node, spec: AggregatingSpec) -> None:
        super().__init__(node, spec.key, spec.descriptors[0], spec.ttl_ms)
        self._aggregation = spec.aggregation

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        inputs = inputs_of(self.name, self._aggregation, batch)
        with self._blaming(batch):
            self._take(batch, self.rows_of(self.keys_of(batch)), inputs)

    @contextmanager
    def _blaming(self, batch: pa.RecordBatch) -> Iterator[None]:
        try:
            yield
        except TidegateError:
            raise
        except SumTooLarge as error:
            blame_sum(self.name, error, self._table)
        except RAISED as error:
            blame(self.name, error, at=f"a batch of {batch.num_rows} records")

    def _take(self, batch: pa.RecordBatch, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        raise AssertionError("the operators below say what they emit")


class AggregateOperator(AggregatingOperator):
    """Emits the new result of each key that a batch has, once for each batch. It takes records, and partials."""

    def __init__(self, node: Node, spec: AggregatingSpec) -> None:
        super().__init__(node, spec)
        self._partials = spec.partials(node)

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        if port != PARTIALS_PORT:
            super().on_batch(batch, port)
            return
        assert self._partials is not None
        with self._blaming(batch):
            rows, table = self.rows_of(self.keys_of(batch)), self._table
            table.change(rows)
            self._emit_results(batch, *merge_partials(self._aggregation, table.vectors, rows, self._partials.vectors(batch)))

    def _take(self, batch: pa.RecordBatch, rows: IntArray, inputs: Sequence[pa.Array]) -> None:
        table = self._table
        table.change(rows)
        self._aggregation.add(table.vectors, rows, inputs)
        self._emit_results(batch, *distinct_of(rows))

    def _emit_results(self, batch: pa.RecordBatch, rows: IntArray, places: IntArray) -> None:
        """Emit the results in distinct rows, whose keys are at these places of the batch."""
        first = pa.array(places)
        keys = [batch.column(name).take(first) for name in self._key]
        results = self._aggregation.results(self._table.vectors, rows)
        self.emit(pa.RecordBatch.from_arrays([*keys, *results], schema=self.node.schema))


class RunningOperator(AggregatingOperator):
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
        places = places_in(groups.of[order])
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
        places = places_in(groups)
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


class AggregateSpec(AggregatingSpec):
    """The results by key, as upserts."""

    __slots__ = ()
    kind: ClassVar[str] = "aggregate"
    operator = AggregateOperator

    def partials(self, node: Node) -> Partials | None:
        return Partials.of(self.aggregation, self.key, node.input_schemas[0])

    changelogs: ClassVar[frozenset[Changelog]] = APPEND_OR_RETRACT  # for changes there is AggregateOfChangesSpec


class RunningSpec(AggregatingSpec):
    """Every record with the results so far."""

    __slots__ = ()
    kind: ClassVar[str] = "running aggregate"
    operator = RunningOperator


def blame_sum(operator: str, error: SumTooLarge, table: ColumnTable) -> NoReturn:
    """Raise `UserFunctionError` for a sum that doesn't fit. No restart cures it."""
    key = [to_list(column)[0] for column in table.keys(np.array([error.row]))]
    blame(operator, JobError(error.text), at=f"key {key[0] if len(key) == 1 else tuple(key)!r}")
