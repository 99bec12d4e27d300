"""Time to live of rows in columnar state: a field with the time of the last write, by the slot's clock.

A row whose time has run out counts as absent when it is looked up, and is removed in small steps between batches. A row that
was written before there was a ttl has no time: its time begins when it is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.state.column_table import ColumnTable
from tidegate.state.key_store import IntArray
from tidegate.state.vectors import VectorField

TOUCHED = "__touched_ms"
NEVER = 0
TOUCHED_FIELD = VectorField(TOUCHED, pa.int64(), NEVER)


class ColumnTtl:
    """The ttl of one table, which has the field `TOUCHED_FIELD`. `remove` deletes rows that ended; by default from this
    table alone."""

    def __init__(
        self,
        table: ColumnTable,
        ttl_ms: int,
        now_ms: Callable[[], int],
        *,
        remove: Callable[[IntArray], None] | None = None,
    ) -> None:
        self._remove = table.delete if remove is None else remove
        self._table = table
        self._ttl_ms = ttl_ms
        self._now_ms = now_ms
        self._swept = 0

    def ended(self, rows: IntArray) -> Any:
        """Return which of these rows, all of which are there, have come to their end."""
        touched = self._table.vectors[TOUCHED].values[rows]
        return (touched != NEVER) & (touched <= self._now_ms() - self._ttl_ms)

    def touch(self, rows: IntArray) -> None:
        """Note that these rows are written now."""
        self._table.change(rows)
        self._table.vectors[TOUCHED].values[rows] = self._now_ms()

    def sweep(self, budget: int) -> None:
        """Remove rows that ended, among the next `budget` ones."""
        table = self._table
        if self._swept >= table.top:
            self._swept = 0
        some = np.arange(self._swept, min(self._swept + budget, table.top))
        self._swept += budget
        some = some[table.stamps[some] >= 0]
        unknown = some[table.vectors[TOUCHED].values[some] == NEVER]
        if len(unknown):
            self.touch(unknown)
        ended = some[self.ended(some)]
        if len(ended):
            self._remove(ended)
