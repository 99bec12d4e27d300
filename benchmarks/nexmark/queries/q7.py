"""q7: what are the highest bids of each ten seconds?

In the original, a bid at the very end of a window counts for that window, too. Here windows are half-open.
"""

from __future__ import annotations

import pyarrow as pa

import tidegate as tg
from benchmarks.nexmark.queries.highest import Highest, HighestInBatch
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT price, auction, bidder, date_time, extra FROM (
    SELECT *, RANK() OVER (PARTITION BY window(date_time, '10 seconds') ORDER BY price DESC) AS rank FROM bid
) WHERE rank = 1
"""
COLUMNS = ("price", "auction", "bidder", "date_time", "extra")
RESULT = "price long, auction long, bidder long, date_time timestamp, extra string"
SIZE_US = 10_000_000
_highest = HighestInBatch("price", "window_end")


def highest_in_batch(bids: pa.RecordBatch) -> pa.RecordBatch:
    """Add the window's end, and keep the highest bids of each window."""
    times = bids.column("date_time").view(pa.int64()).to_numpy()
    ends = pa.array((times // SIZE_US + 1) * SIZE_US).view(pa.timestamp("us", tz="UTC"))
    return _highest(bids.append_column("window_end", ends))


class HighestBids(Highest):
    """The highest bids of a window."""

    records = tg.list("struct<price: long, auction: long, bidder: long, date_time: timestamp, extra: string>")


def program(nexmark: Nexmark) -> tg.Stream:
    """Keep the highest of each batch, and of them the highest of each window."""
    few = nexmark.bid(*COLUMNS, timed=True).map_batches(highest_in_batch, returns=f"{RESULT}, window_end timestamp")
    return few.key_by("window_end").process("highest bids", HighestBids(), returns=RESULT)
