"""The stateless operators: map, flat_map, filter, map_batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import Operator
from tidegate.dataflow.operators.returned import taker
from tidegate.dataflow.operators.user_code import RAISED, blame, fit
from tidegate.errors import SchemaError
from tidegate.state.sections import StateInfo
from tidegate.types import ddl_of, rows_of


@dataclass(frozen=True, slots=True)
class MapSpec:
    """One record in, one row out."""

    function: Callable[[Any], Any]
    kind: str = "map"
    stateful: bool = False

    def create(self, node: Node) -> Operator:
        return MapOperator(node, self.function)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class FlatMapSpec:
    """One record in, any number of rows out."""

    function: Callable[[Any], Iterable[Any] | None]
    kind: str = "flat_map"
    stateful: bool = False

    def create(self, node: Node) -> Operator:
        return FlatMapOperator(node, self.function)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class FilterSpec:
    """Keeps the records for which the function is true."""

    function: Callable[[Any], bool]
    kind: str = "filter"
    stateful: bool = False

    def create(self, node: Node) -> Operator:
        return FilterOperator(node, self.function)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class MapBatchesSpec:
    """One Arrow batch in, any number out: vectorised."""

    function: Callable[[pa.RecordBatch], Any]
    kind: str = "map_batches"
    stateful: bool = False

    def create(self, node: Node) -> Operator:
        return MapBatchesOperator(node, self.function)

    def states(self, node: Node) -> tuple[StateInfo, ...]:
        return ()


class MapOperator(Operator):
    def __init__(self, node: Node, function: Callable[[Any], Any]) -> None:
        super().__init__(node)
        self._function = function

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


class FlatMapOperator(Operator):
    def __init__(self, node: Node, function: Callable[[Any], Iterable[Any] | None]) -> None:
        super().__init__(node)
        self._function = function

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


class FilterOperator(Operator):
    def __init__(self, node: Node, function: Callable[[Any], bool]) -> None:
        super().__init__(node)
        self._function = function

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


class MapBatchesOperator(Operator):
    def __init__(self, node: Node, function: Callable[[pa.RecordBatch], Any]) -> None:
        super().__init__(node)
        self._function = function

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
