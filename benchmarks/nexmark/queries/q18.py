"""q18: the last bid of each bidder for each auction."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT auction, bidder, price, channel, url, date_time, extra FROM (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY date_time DESC) AS rank FROM bid
) WHERE rank = 1
"""
KEY = ("bidder", "auction")


def program(nexmark: Nexmark) -> tg.Stream:
    """Keep the latest bid."""
    return nexmark.bid().key_by("bidder", "auction").deduplicate("last bids", keep="last", order_by="date_time")
