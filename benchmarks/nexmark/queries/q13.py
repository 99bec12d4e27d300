"""q13: every bid, with a value from a bounded table."""

from __future__ import annotations

import pyarrow as pa

import tidegate as tg
from benchmarks.nexmark.events import SIDE_INPUT
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT b.auction, b.bidder, b.price, b.date_time, s.value
FROM bid b JOIN side_input s ON b.auction % 10000 = s.key
"""


def program(nexmark: Nexmark) -> tg.Stream:
    """Look the value up in a table that every subtask has."""
    bids = nexmark.bid("auction", "bidder", "price", "date_time").with_columns(side_key="auction % 10000")
    table = pa.table({"key": range(len(SIDE_INPUT)), "value": SIDE_INPUT})
    joined = bids.lookup_join("side input", table, on={"side_key": "key"})
    return joined.select("auction", "bidder", "price", "date_time", "value")
