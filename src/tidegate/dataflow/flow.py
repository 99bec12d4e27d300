"""What all kinds of streams have in common: records of one schema on their way to the next operator.

A flow is a handle to the outputs of a node, or of several if streams were united. It is immutable and may be used any
number of times; each use is one more consumer of the same records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import pyarrow as pa

from tidegate.dataflow.functions import Function
from tidegate.dataflow.graph import Edge, Partitioning
from tidegate.errors import GraphError

if TYPE_CHECKING:
    from tidegate.dataflow.pipeline import Pipeline

# Spark DDL text such as "auction long, price double", a pyarrow.Schema or a pyspark StructType.
SchemaLike: TypeAlias = Any
# Former names of an operator, under which snapshots may hold its state.
Names: TypeAlias = "str | Sequence[str]"
F = TypeVar("F", bound="Flow")


@dataclass(frozen=True, slots=True)
class Takes:
    """The kind of function that `process` takes on a stream. `here` describes the stream in errors."""

    expected: type[Function]
    here: str
    keyed: bool


class Flow:
    """Outputs of nodes, and how the next node gets their records."""

    __slots__ = ("_edges", "_pipeline", "_schema")

    def __init__(self, pipeline: Pipeline, edges: tuple[Edge, ...], schema: pa.Schema) -> None:
        self._pipeline = pipeline
        self._edges = edges
        self._schema = schema

    @property
    def schema(self) -> pa.Schema:
        """The records' columns and their Arrow types."""
        return self._schema

    def _input(self) -> Self:
        """This flow as an input of a node. Raises `GraphError` if it has no columns."""
        if not self._schema.names:
            operator = self._pipeline._nodes[self._edges[0].source].name
            raise GraphError(
                f"operator {operator!r} has no output that could be used: declare one with "
                f"process({operator!r}, …, returns='column type, …')"
            )
        return self

    def _origin(self) -> str:
        return " and ".join(dict.fromkeys(map(self._output_name, self._edges)))

    def _output_name(self, edge: Edge) -> str:
        name = repr(self._pipeline._nodes[edge.source].name)
        return name if edge.tag is None else f"side output {edge.tag!r} of {name}"

    def _repartitioned(
        self, partitioning: Partitioning, key: tuple[str, ...] = (), *, refuses_nulls: bool = False
    ) -> tuple[Edge, ...]:
        return tuple(replace(edge, partitioning=partitioning, key=key, refuses_nulls=refuses_nulls) for edge in self._edges)

    def _called(self) -> str:
        """Return how errors name it."""
        return repr(self)


def called(given: object) -> str:
    return given._called() if isinstance(given, Flow) else repr(given)


def columns_text(key: tuple[str, ...]) -> str:
    return ", ".join(key)


def check_same_pipeline(where: str, one: Flow, other: Flow) -> None:
    if one._pipeline is not other._pipeline:
        raise GraphError(f"{where}: the two streams are of different jobs; build both from the sources of one")


def connectable(where: str, left: Flow, right: F) -> F:
    if not isinstance(right, Flow):
        raise GraphError(f"{where}: connect takes a stream, not {called(right)}")
    check_same_pipeline(where, left, right)
    left._input()
    return right._input()
