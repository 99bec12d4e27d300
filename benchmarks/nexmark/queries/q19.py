"""q19: the ten highest bids of each auction, of equal ones the earliest."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT auction, bidder, price, channel, url, date_time, extra, rank FROM (
    SELECT *, CAST(ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC, date_time) AS LONG) AS rank FROM bid
) WHERE rank <= 10
"""
KEY = ("auction", "rank")


def program(nexmark: Nexmark) -> tg.Stream:
    """Rank by auction."""
    return nexmark.bid().key_by("auction").top("top ten", 10, by=["price", "date_time"], descending=[True, False])
