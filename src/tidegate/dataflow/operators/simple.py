"""The stateless operators: map, flat_map, filter, map_batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.operators.returned import taker
from tidegate.dataflow.operators.user_code import RAISED, blame, fit
from tidegate.errors import SchemaError
from tidegate.state.sections import StateInfo
from tidegate.types import ddl_of, rows_of


class _FunctionOperator(Operator):
    def __init__(self, node: Node, function: Callable[[Any], Any]) -> None:
        super().__init__(node)
        self._function = function


class MapOperator(_FunctionOperator):
    """One record in, one row out."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        record = None
        function = self._function
        out: list[Any] = []
        append = out.append
        try:
            for record in rows_of(batch):
                append(function(record))
        except RAISED as error:
            blame(self.name, error, record)
        if out:
            self.emit(fit(self.name, out, self.node.schema))


class FlatMapOperator(_FunctionOperator):
    """One record in, any number of rows out."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        record = None
        function = self._function
        out: list[Any] = []
        take = taker(function, out)
        try:
            for record in rows_of(batch):
                rows = function(record)
                if rows is not None:
                    take(rows)
        except RAISED as error:
            blame(self.name, error, record)
        if out:
            self.emit(fit(self.name, out, self.node.schema))


class FilterOperator(_FunctionOperator):
    """Keeps the records for which the function is true."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        record = None
        function = self._function
        keep: list[bool] = []
        append = keep.append
        try:
            for record in rows_of(batch):
                append(bool(function(record)))
        except RAISED as error:
            blame(self.name, error, record)
        kept = batch.filter(pa.array(keep, pa.bool_()))
        if kept.num_rows:
            self.emit(kept)


class MapBatchesOperator(_FunctionOperator):
    """One Arrow batch in, any number out: vectorised."""

    def on_batch(self, batch: pa.RecordBatch, port: int) -> None:
        try:
            given = self._function(batch)
            batches = () if given is None else tuple(given) if _is_several(given) else (given,)
        except RAISED as error:
            blame(self.name, error, at=f"a batch of {batch.num_rows} records")
        for out in batches:
            if not isinstance(out, pa.RecordBatch) or not out.schema.equals(self.node.schema):
                got = ddl_of(out.schema) if isinstance(out, pa.RecordBatch) else f"a {type(out).__name__}"
                raise SchemaError(
                    f"operator {self.name!r} is declared with returns={ddl_of(self.node.schema)!r}, and "
                    f"its function gave {got!r}. Give record batches of the declared schema "
                    f"(RecordBatch.cast may help), or change returns=."
                )
            if out.num_rows:
                self.emit(out)


def _is_several(given: Any) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, pa.RecordBatch | pa.Table | Mapping | str)


@dataclass(frozen=True, slots=True)
class _FunctionSpec:
    """What the specs of these operators have in common: a function, and no state."""

    function: Callable[[Any], Any]
    stateful: bool = False
    operator: ClassVar[type[_FunctionOperator]]

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
