"""Operators on whole batches whose state is one columnar table with a row for each key, and the ttl of its rows.

A ttl counts from the last record of a key, by the slot's clock. When it has run out, the key begins again at its next
record; what is left of it is removed in small steps between batches.

Not here: what an operator does with the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import IntArray
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, Operator, OperatorContext
from tidegate.dataflow.operators.process import key_type
from tidegate.state.descriptors import Columns
from tidegate.state.sections import FrozenState
from tidegate.state.vectors import VectorField

TOUCHED = "__touched_ms"
NEVER = 0  # of a key from before there was a ttl: its time begins when the key is seen


def touched_fields(ttl_ms: int | None) -> tuple[VectorField, ...]:
    """Return the fields that a table needs for its ttl, if it has one."""
    return () if ttl_ms is None else (VectorField(TOUCHED, pa.int64(), NEVER),)


class KeyedTableOperator(Operator):
    """Opens, freezes and maintains the table. Subclasses take batches."""

    def __init__(self, node: Node, key: tuple[str, ...], descriptor: Columns, ttl_ms: int | None) -> None:
        super().__init__(node)
        self._key = key
        self._descriptor = descriptor
        self._ttl_ms = ttl_ms
        self._swept = 0
        self._backend: KeyedBackend | None = None

    def open(self, context: OperatorContext) -> None:
        self._backend = backend = context.make_backend(key_type(self.node.input_schemas[0], self._key))
        self._table = backend.column_state(self._descriptor).table()
        self._now_ms = context.user_now_ms
        for state, batches in context.restored.items():
            for rows in batches:
                backend.load(state, rows, known=context.goes_on)

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

    # What subclasses call.

    def keys_of(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the key columns of a batch."""
        return [plain(batch.column(name)) for name in self._key]

    def rows_of(self, keys: Sequence[pa.Array]) -> IntArray:
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


def plain(column: pa.Array) -> pa.Array:
    """Return a column without the encoding as a dictionary."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
