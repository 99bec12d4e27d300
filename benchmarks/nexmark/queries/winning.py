"""The winning bid of each auction, which q6 and q9 begin with: the highest, of equal ones the earliest.

A bid is valid from the auction's beginning to its end. It may arrive before its auction does. Bids are joined with auctions
within the longest time that an auction may take, and those after the auction's own end are dropped. An auction's bids are
all in one window by the time of its end, and the winning one is known when that window is complete.
"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

LONGEST = "1 minute"  # no auction takes longer
WINNERS = """
SELECT * FROM (
    SELECT a.id, a.seller, a.category, a.expires, b.price,
           ROW_NUMBER() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time) AS rank
    FROM auction a JOIN bid b ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires
) WHERE rank = 1
"""


def winners(nexmark: Nexmark, auction: tuple[str, ...], *bid: str) -> tg.Stream:
    """Return the auctions that were won: their number, beginning and end and these columns; and of the winning bids the
    price, the time, and these columns, which are expressions."""
    auctions = nexmark.auction("id", "date_time", "expires", *auction, timed=True)
    bids = nexmark.bid("auction", "price", "date_time", *(each.split()[0] for each in bid), timed=True)
    bids = bids.select("auction AS id", "price", "date_time AS bid_time", *bid)
    return (
        auctions.key_by("id")
        .join("bids of auctions", bids.key_by("id"), between=("0 s", LONGEST), times=("date_time", "bid_time"))
        .filter("bid_time <= expires")
        .key_by("id")
        .window(tg.tumbling("expires", "1 s"))
        .top("winners", 1, by=["price", "bid_time"], descending=[True, False])
    )
