"""q9: the winning bid of each auction, with everything that is known of both."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.events import AUCTION
from benchmarks.nexmark.queries.winning import WinningBid
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
BY_RECORD = True
BID = "price long, date_time timestamp, bidder long, extra string"
RESULT = f"{AUCTION}, price long, bid_time timestamp, bidder long, bid_extra string"


class FullWinningBid(WinningBid):
    """Keeps all columns."""

    auction = tg.value(f"struct<{AUCTION}>")
    best = tg.value(f"struct<{BID}>")
    early = tg.list(f"struct<{BID}>")


def program(nexmark: Nexmark) -> tg.Stream:
    """Find the winning bids."""
    auctions = nexmark.auction(timed=True).key_by("id")
    bids = nexmark.bid("auction", "price", "date_time", "bidder", "extra", timed=True).key_by("auction")
    return auctions.connect(bids).process("winners", FullWinningBid(), returns=RESULT)
