"""q4: what is the average price of the winning bids in each category?"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.queries.winning import AUCTION, COLUMNS, WINNERS, WinningBid
from benchmarks.nexmark.streams import Nexmark

SQL = f"""
SELECT category, AVG(price) AS final FROM ({WINNERS}) GROUP BY category
"""
KEY = ("category",)
BY_RECORD = True


def program(nexmark: Nexmark) -> tg.Stream:
    """Find the winning bids, and average them."""
    auctions = nexmark.auction(*AUCTION, timed=True).key_by("id")
    bids = nexmark.bid("auction", "price", "date_time", timed=True).key_by("auction")
    winners = auctions.connect(bids).process("winners", WinningBid(), returns=COLUMNS)
    return winners.key_by("category").aggregate("average", final=tg.mean("price"))
