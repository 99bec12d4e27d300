"""Windows of a number of records: a result for every so many records of a key, in the order in which they arrive.

State is one table, by key: the accumulators of the window that is open, and how many records it has.

All windows of a batch are accumulated at once, however many a key fills. The first one of each key begins with what the
key's open window has accumulated before. The full ones are emitted, those of a key in their order, and the last one of each
key becomes its state if it isn't full.

Time plays no role. At the end of input a window that isn't full stays in the state: the job may get more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.dataflow.aggregates.base import SumTooLarge, Vectors
from tidegate.dataflow.aggregates.numpy_columns import copy_rows, held_vectors, ranks
from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.base import OperatorContext
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window import COUNT
from tidegate.dataflow.operators.window_aggregates import AtOnceWindowOperator, WindowSettings
from tidegate.dataflow.windows import Global


class CountWindowOperator(AtOnceWindowOperator):
    def __init__(self, node: Node, assigner: Global, settings: WindowSettings) -> None:
        super().__init__(node, assigner, settings)
        assert assigner.count is not None
        self._size = assigner.count

    def open(self, context: OperatorContext) -> None:
        super().open(context)

    def _add_all(self, batch: pa.RecordBatch) -> None:
        table, aggregation = self._state.table(), self._aggregation
        keys = self._keys(batch)
        rows_of_records = table.rows_of(keys)
        before = table.vectors[COUNT].values[rows_of_records]
        # Which of the key's windows a record is in. 0 is the one that is open.
        number_of_records = (before + ranks(rows_of_records)) // self._size
        _, first, of, counts = np.unique(
            rows_of_records * (int(number_of_records.max()) + 1) + number_of_records,
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )  # the windows: key by key, those of each key in order
        rows, is_open = rows_of_records[first], number_of_records[first] == 0
        counts += np.where(is_open, before[first], 0)
        held = held_vectors(aggregation.accumulators, len(first))
        copy_rows(held, np.flatnonzero(is_open), table.vectors, rows[is_open])
        with self._blaming(table):
            try:
                aggregation.add(held, of, aggregation.inputs(batch))
            except SumTooLarge as error:
                raise SumTooLarge(int(rows[error.row]), error.text) from None
        is_full, is_last = counts == self._size, np.diff(rows, append=-1) != 0
        self._emit_full(keys, first, held, np.flatnonzero(is_full))
        stays = np.flatnonzero(is_last & ~is_full)
        table.change(rows[stays])
        copy_rows({name: table.vectors[name] for name in held}, rows[stays], held, stays)
        table.vectors[COUNT].values[rows[stays]] = counts[stays]
        table.delete(rows[is_last & is_full])

    def _emit_full(self, keys: list[pa.Array], first: Any, held: Vectors, full: Any) -> None:
        if len(full):
            at = pa.array(first[full])
            columns = [column.take(at) for column in keys] if self._settings.key else []
            results = self._aggregation.results(held, full)
            self._give(pa.RecordBatch.from_arrays([*columns, *results], schema=self.node.schema))

    def _fire(self, at_ms: int) -> Steps:
        yield from ()

    def _expire(self) -> None:
        """Nothing is late."""
