"""Time to live of rows in columnar state: a field with the time of the last write, by the slot's clock.

A row whose time has run out counts as absent when it is looked up, and is removed in small steps between batches. A row that
was written before there was a ttl has no time: its time begins when it is seen.

A sweep looks at rows in memory, round after round. A table that isn't complete may have more rows on the backend's disk.
They are swept too, all of them at most once in a quarter of the ttl. What the disk says may be old, so it only selects
rows: those that may have ended are fetched, and what is in the table then decides. The others are not fetched.

Each step looks at twice as many rows as keys were added since the last one, and some more. So a round over n rows ends
before n / 2 keys are added, and ended rows don't pile up, however fast new keys come.
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
ROUNDS = 4  # over all rows on disk in a ttl, at most
SWEPT_PER_ADDED = 2  # with 1, a round over rows of which none has ended would never overtake the keys that are added


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
        self._added_count = table.added_count  # at the last sweep
        self._place = b""  # of the sweep over the disk
        self._began_ms = now_ms()  # when that began its round

    def ended(self, rows: IntArray) -> Any:
        """Return which of these rows, all of which are there, have come to their end."""
        touched = self._table.vectors[TOUCHED].values[rows]
        return (touched != NEVER) & (touched <= self._now_ms() - self._ttl_ms)

    def touch(self, rows: IntArray) -> None:
        """Note that these rows are written now."""
        self._table.change(rows)
        self._table.vectors[TOUCHED].values[rows] = self._now_ms()

    def sweep(self, budget: int) -> None:
        """Remove rows that ended, among the next ones in memory and on disk: `budget` of each, and as many more as it takes
        to keep up with keys that were added."""
        table = self._table
        count = budget + SWEPT_PER_ADDED * (table.added_count - self._added_count)
        self._added_count = table.added_count
        if self._swept >= table.top:
            self._swept = 0
        some = np.arange(self._swept, min(self._swept + count, table.top))
        self._swept += count
        self._examine(some[table.stamps[some] >= 0])
        self._sweep_disk(count)

    # Inside.

    def _sweep_disk(self, count: int) -> None:
        table, now_ms = self._table, self._now_ms()
        if table.complete or not count:
            return
        if not self._place:
            if 0 <= now_ms - self._began_ms < self._ttl_ms // ROUNDS:
                return
            self._began_ms = now_ms
        up_to = max(now_ms - self._ttl_ms, NEVER)
        rows, self._place = table.fetch_from(self._place, count, field=TOUCHED, up_to=up_to)
        self._examine(rows)

    def _examine(self, rows: IntArray) -> None:
        """Remove those of these rows that ended."""
        unknown = rows[self._table.vectors[TOUCHED].values[rows] == NEVER]
        if len(unknown):
            self.touch(unknown)
        ended = rows[self.ended(rows)]
        if len(ended):
            self._remove(ended)
