"""A source and a sink that are only described: what is built with them is a graph, and nothing opens them."""

from __future__ import annotations

import pyarrow as pa

from tidegate.dataflow.contracts import Sink, SinkContext, SinkWriter, Source, SourceContext, SourceReader
from tidegate.types import parse_schema


class Records(Source):
    def __init__(self, schema: str | pa.Schema) -> None:
        self._schema = parse_schema(schema) if isinstance(schema, str) else schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def bounded(self) -> bool:
        return True

    def open(self, context: SourceContext) -> SourceReader:
        raise AssertionError("a graph opens nothing")


class Nowhere(Sink):
    def open(self, context: SinkContext) -> SinkWriter:
        raise AssertionError("a graph opens nothing")
