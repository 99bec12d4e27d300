"""The highest of each window, with all that are equal to it: what q5 and q7 end with.

Each batch is first reduced to its own highest records, in columns. The few that are left are compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

import tidegate as tg


@dataclass(frozen=True)
class HighestInBatch:
    """Keeps the records of a batch that are the highest of their window in it. `window` is a time column."""

    value: str
    window: str

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        values = batch.column(self.value).to_numpy()
        windows = batch.column(self.window).view(pa.int64()).to_numpy()
        found, places = np.unique(windows, return_inverse=True)
        highest = np.full(len(found), np.iinfo(np.int64).min)
        np.maximum.at(highest, places, values)
        return batch.filter(pa.array(values == highest[places]))


class Highest(tg.KeyedProcess):
    """Key by the window's end. A subclass declares `records`, whose first column is compared, the key's column being left
    away."""

    records: tg.ListState[Any]

    def process(self, record: Any, ctx: tg.Context) -> None:
        """Keep a record if none before was higher."""
        columns = record[:-1]
        kept = self.records.get()
        highest = next(iter(kept[0].values())) if kept else None
        found = dict(zip(record._fields, columns, strict=False))
        if highest is None or columns[0] > highest:
            self.records.replace([found])
            ctx.timers.event_time(record[-1])
        elif columns[0] == highest:
            self.records.add(found)

    def on_timer(self, at: int, ctx: tg.Context) -> Iterator[Any]:
        """End the window."""
        for record in self.records.get():
            yield tuple(record.values())
        self.records.clear()
