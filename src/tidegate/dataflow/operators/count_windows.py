"""Windows of a number of records: a result for every so many records of a key, in the order in which they arrive.

State is one table, by key: the accumulators of the window that is open, and how many records it has. A batch is processed in
rounds: a round adds to each key the records that its open window still takes, and emits and deletes the windows that are
full. So there are as many rounds as a key fills windows in the batch, and usually one.

Time plays no role. At the end of input a window that isn't full stays in the state: the job may get more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.dataflow.graph import Node
from tidegate.dataflow.operators.stepwise import Steps
from tidegate.dataflow.operators.window import COUNT, WindowOperator, WindowSettings
from tidegate.dataflow.windows import Global


class CountWindowOperator(WindowOperator):
    def __init__(self, node: Node, assigner: Global, settings: WindowSettings) -> None:
        super().__init__(node, assigner, settings)
        self._size = assigner.count

    def _add(self, batch: pa.RecordBatch) -> None:
        table = self._state.table()
        rows = table.rows_of(self._keys(batch))
        window = (table.vectors[COUNT].values[rows] + ranks(rows)) // self._size  # 0 is the one that is open
        for number in range(int(window.max()) + 1):
            here = window == number
            records = batch.filter(pa.array(here))
            rows = table.rows_of(self._keys(records))
            self._accumulate(table, rows, records)
            counts = table.vectors[COUNT].values
            np.add.at(counts, rows, 1)
            full = np.unique(rows[counts[rows] == self._size])
            if len(full):
                self._give(self._results(table, full, []))
                table.delete(full)

    def _fire(self, at_ms: int) -> Steps:
        yield from ()

    def _expire(self) -> None:
        """Nothing is late."""


def ranks(rows: Any) -> Any:
    """Return for each element how many of the same value are before it."""
    order = np.argsort(rows, kind="stable")
    inside = rows[order]
    firsts = np.flatnonzero(np.diff(inside, prepend=-1))
    sizes = np.diff(np.append(firsts, len(inside)))
    found = np.empty(len(rows), np.int64)
    found[order] = np.arange(len(rows)) - np.repeat(firsts, sizes)
    return found
