"""q9: the winning bid of each auction, with everything that is known of both."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.queries.winning import winners
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT id, item_name, description, initial_bid, reserve, date_time, expires, seller, category, extra,
       price, bid_time, bidder, bid_extra
FROM (
    SELECT a.*, b.price, b.date_time AS bid_time, b.bidder, b.extra AS bid_extra,
           ROW_NUMBER() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time) AS rank
    FROM auction a JOIN bid b ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires
) WHERE rank = 1
"""
AUCTION = ("item_name", "description", "initial_bid", "reserve", "seller", "category", "extra")
RESULT = (*AUCTION[:4], "date_time", "expires", *AUCTION[4:], "price", "bid_time", "bidder", "bid_extra")


def program(nexmark: Nexmark) -> tg.Stream:
    """Find the winning bids."""
    return winners(nexmark, AUCTION, "bidder", "extra AS bid_extra").select("id", *RESULT)
