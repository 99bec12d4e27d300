"""Operators on whole batches whose state is one columnar table with a row for each key, and the ttl of its rows.

A ttl counts from the last record of a key, by the slot's clock. When it has run out, the key begins again at its next
record; what is left of it is removed in small steps between batches.

Not here: what an operator does with the rows of a batch, and how rows end (state/column_ttl.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tidegate.dataflow.aggregates.base import IntArray
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.process import key_type
from tidegate.state.column_ttl import TOUCHED_FIELD, ColumnTtl
from tidegate.state.descriptors import Columns
from tidegate.state.sections import FrozenState
from tidegate.state.vectors import VectorField


def touched_fields(ttl_ms: int | None) -> tuple[VectorField, ...]:
    """Return the fields that a table needs for its ttl, if it has one."""
    return () if ttl_ms is None else (TOUCHED_FIELD,)


class KeyedTableOperator(Operator):
    """Opens, freezes and maintains the table. Subclasses take batches."""

    def __init__(self, node: Node, key: tuple[str, ...], descriptor: Columns, ttl_ms: int | None) -> None:
        super().__init__(node)
        self._key = key
        self._descriptor = descriptor
        self._ttl_ms = ttl_ms
        self._ttl: ColumnTtl | None = None
        self._backend: KeyedBackend | None = None

    def open(self, context: OperatorContext) -> None:
        self._backend = backend = context.make_backend(key_type(self.node.input_schemas[0], self._key))
        self._table = backend.column_state(self._descriptor).table()
        if self._ttl_ms is not None:
            self._ttl = ColumnTtl(self._table, self._ttl_ms, context.user_now_ms)
        for state, batches in context.restored.items():
            for rows in batches:
                backend.load(state, rows, known=context.goes_on)

    def maintain(self, budget: int) -> None:
        assert self._backend is not None
        if self._ttl is not None:
            self._ttl.sweep(budget)
        self._backend.maintain(budget)

    def freeze(self, epoch: int) -> FrozenState | None:
        assert self._backend is not None
        return self._backend.freeze()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    # What subclasses call.

    def keys_of(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the key columns of a batch."""
        return [plain(batch.column(name)) for name in self._key]

    def rows_of(self, keys: Sequence[pa.Array]) -> IntArray:
        """Return the row of each record, without what the ttl has ended."""
        rows = self._table.rows_of(keys)
        if self._ttl is None:
            return rows
        ended = self._ttl.ended(rows)
        if ended.any():
            self._table.delete(rows[ended])
            rows = self._table.rows_of(keys)
        self._ttl.touch(rows)
        return rows


def plain(column: pa.Array) -> pa.Array:
    """Return a column without the encoding as a dictionary."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
