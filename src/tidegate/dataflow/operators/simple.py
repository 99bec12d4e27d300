"""The stateless operators: map, flat_map, filter, map_batches.

Those that call a function for each record process a batch in several steps if the function is slow (stepwise.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator, OperatorContext
from tidegate.dataflow.operators.budget import MOST_ROWS, Pace
from tidegate.dataflow.operators.given_batches import batches_of, checked_batch
from tidegate.dataflow.operators.returned import taker
from tidegate.dataflow.operators.stepwise import Steps, StepwiseOperator
from tidegate.dataflow.operators.user_code import RAISED, blame, fit
from tidegate.state.sections import StateInfo
from tidegate.types import rows_of


class _RecordOperator(StepwiseOperator):
    """Calls a function with each record."""

    def __init__(self, node: Node, function: Callable[[Any], Any]) -> None:
        super().__init__(node)
        self._function = function

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._pace = Pace(context.budget)

    def take_batch(self, batch: pa.RecordBatch, port: int) -> Steps:
        pace, count, records = self._pace, batch.num_rows, iter(rows_of(batch))
        start = done = 0  # the first record of this step, and that of the next portion
        out: list[Any] = []
        call = self._call(out)
        while done < count:
            portion = min(pace.portion, count - done)
            call(islice(records, portion))
            done += portion
            if done < count and (pace.is_over() or len(out) >= MOST_ROWS):
                self._emit_of(batch.slice(start, done - start), out)
                out.clear()
                self._budget.end()
                yield
                start = done
        self._emit_of(batch.slice(start), out)

    def _call(self, out: list[Any]) -> Callable[[Iterable[Any]], None]:
        """Return a callable that calls the function with each of some records, and appends the results to `out`."""
        raise AssertionError("a kind of operator calls its function in its own way")

    def _emit_of(self, batch: pa.RecordBatch, out: list[Any]) -> None:
        """Emit the results of a batch."""
        if out:
            for batch in fit(self.name, out, self.node.schema):
                self.emit(batch)


class MapOperator(_RecordOperator):
    """One record in, one row out."""

    def _call(self, out: list[Any]) -> Callable[[Iterable[Any]], None]:
        function, append = self._function, out.append

        def call(records: Iterable[Any]) -> None:
            record = None
            try:
                for record in records:
                    append(function(record))
            except RAISED as error:
                blame(self.name, error, record)

        return call


class FlatMapOperator(_RecordOperator):
    """One record in, any number of rows out."""

    def _call(self, out: list[Any]) -> Callable[[Iterable[Any]], None]:
        function, take = self._function, taker(self._function, out)

        def call(records: Iterable[Any]) -> None:
            record = None
            try:
                for record in records:
                    rows = function(record)
                    if rows is not None:
                        take(rows)
            except RAISED as error:
                blame(self.name, error, record)

        return call


class FilterOperator(_RecordOperator):
    """Keeps the records for which the function is true."""

    def _call(self, out: list[Any]) -> Callable[[Iterable[Any]], None]:
        function, append = self._function, out.append

        def call(records: Iterable[Any]) -> None:
            record = None
            try:
                for record in records:
                    append(bool(function(record)))
            except RAISED as error:
                blame(self.name, error, record)

        return call

    def _emit_of(self, batch: pa.RecordBatch, out: list[Any]) -> None:
        kept = batch.filter(pa.array(out, pa.bool_()))
        if kept.num_rows:
            self.emit(kept)


class MapBatchesOperator(Operator):
    """One Arrow batch in, any number out: vectorised."""

    def __init__(self, node: Node, function: Callable[[Any], Any]) -> None:
        super().__init__(node)
        self._function = function

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        try:
            batches = tuple(batches_of(self._function(batch)))
        except RAISED as error:
            blame(self.name, error, at=f"a batch of {batch.num_rows} records")
        for each in batches:
            out = checked_batch(self.name, each, self.node.schema)
            if out.num_rows:
                self.emit(out)


@dataclass(frozen=True, slots=True)
class _FunctionSpec:
    """A function and no state: what the specs of these operators have in common."""

    function: Callable[[Any], Any]
    stateful: bool = False
    operator: ClassVar[type[_RecordOperator] | type[MapBatchesOperator]]

    def create(self, node: Node) -> Operator:
        return self.operator(node, self.function)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class MapSpec(_FunctionSpec):
    kind: ClassVar[str] = "map"
    operator = MapOperator


@dataclass(frozen=True, slots=True)
class FlatMapSpec(_FunctionSpec):
    kind: ClassVar[str] = "flat_map"
    operator = FlatMapOperator


@dataclass(frozen=True, slots=True)
class FilterSpec(_FunctionSpec):
    kind: ClassVar[str] = "filter"
    operator = FilterOperator


@dataclass(frozen=True, slots=True)
class MapBatchesSpec(_FunctionSpec):
    kind: ClassVar[str] = "map_batches"
    in_columns: ClassVar[bool] = True
    operator = MapBatchesOperator
