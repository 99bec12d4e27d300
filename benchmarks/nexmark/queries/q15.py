"""q15: how many bids, bidders and auctions are there each day, by ranks of prices?"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.queries.statistics import DAY, DISTINCT_COUNTS, distinct_counts
from benchmarks.nexmark.streams import Nexmark

SQL = f"SELECT {DAY} AS day, {DISTINCT_COUNTS} FROM bid GROUP BY {DAY}"
KEY = ("day",)


def program(nexmark: Nexmark) -> tg.Stream:
    """Aggregate by day."""
    bids = nexmark.bid("auction", "bidder", "price", "date_time").with_columns(day=DAY)
    return bids.key_by("day").aggregate("statistics", **distinct_counts())
