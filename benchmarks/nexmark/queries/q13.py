"""q13: every bid, with a value from a bounded table."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

import tidegate as tg
from benchmarks.nexmark.events import SIDE_INPUT
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT b.auction, b.bidder, b.price, b.date_time, s.value
FROM bid b JOIN side_input s ON b.auction % 10000 = s.key
"""
RESULT = "auction long, bidder long, price long, date_time timestamp, value string"


@dataclass
class LookUp:
    """Adds the column `value`. Row k of the table is that of key k; a bid without a row is dropped."""

    table: pa.Array

    def __call__(self, bids: pa.RecordBatch) -> pa.RecordBatch:
        key = pa.array(bids.column("auction").to_numpy() % 10_000)
        found = bids.append_column("value", self.table.take(key))
        return found.filter(pc.is_valid(found.column("value"))) if self.table.null_count else found


def program(nexmark: Nexmark) -> tg.Stream:
    """Look the value up in a table that every subtask has."""
    bids = nexmark.bid("auction", "bidder", "price", "date_time")
    return bids.map_batches(LookUp(SIDE_INPUT), returns=RESULT)
