"""What operators on columnar keyed state have in common: they open it, restore it, and hand it to snapshots.

Subclasses find what their spec declares in `_state`. Records are handled in bounded steps (stepwise.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import KeyedBackend, OperatorContext
from tidegate.dataflow.operators.process import key_type
from tidegate.dataflow.operators.stepwise import StepwiseOperator
from tidegate.state.batch_keys import Keys, keys_of
from tidegate.state.column_table import ColumnState
from tidegate.state.descriptors import Columns
from tidegate.state.sections import FrozenState

NO_KEY = pa.scalar(0, pa.int8())
"""The key of all records of a stream without key."""


class KeyedColumnsOperator(StepwiseOperator):
    """One columnar state by key. Without key columns, there is one key for all records."""

    def __init__(self, node: Node, key: tuple[str, ...], descriptor: Columns) -> None:
        super().__init__(node)
        self._key = key
        self._descriptor = descriptor
        self._backend: KeyedBackend | None = None

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        backend = self._backend = context.make_backend(columns_key_type(self.node, self._key))
        self._state: ColumnState = backend.column_state(self._descriptor)
        for state, batches in context.restored.items():
            self._load(state, batches, known=context.goes_on)

    def maintain(self, budget: int) -> None:
        if not self.has_work():  # work under way knows the numbers of rows, which this may change
            assert self._backend is not None
            self._remove_ended(budget)
            self._backend.maintain(budget)

    def freeze(self, epoch: int) -> FrozenState | None:
        assert self._backend is not None
        return self._backend.freeze()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    # Inside.

    def _load(self, state: str, batches: Iterable[pa.RecordBatch], *, known: bool) -> None:
        assert self._backend is not None
        for rows in batches:
            self._backend.load(state, rows, known=known)

    def _remove_ended(self, budget: int) -> None:
        """Remove some of what a ttl has ended."""

    def _key_columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        if not self._key:
            return [pa.repeat(NO_KEY, batch.num_rows)]
        columns = [batch.column(name) for name in self._key]
        return [each.dictionary_decode() if pa.types.is_dictionary(each.type) else each for each in columns]

    def _keys(self, batch: pa.RecordBatch) -> Keys:
        return keys_of(self._key or ("",), self._key_columns(batch))


def columns_key_type(node: Node, key: Sequence[str]) -> pa.DataType:
    """Return the type of the key in the state."""
    return key_type(node.input_schemas[0], tuple(key)) if key else NO_KEY.type
