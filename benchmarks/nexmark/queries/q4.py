"""q4: what is the average price of the winning bids in each category?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tidegate as tg
from benchmarks.nexmark.queries.winning import AUCTION, COLUMNS, WINNERS, WinningBid
from benchmarks.nexmark.streams import Nexmark

SQL = f"""
SELECT category, AVG(price) AS final FROM ({WINNERS}) GROUP BY category
"""
KEY = ("category",)
BY_RECORD = True


class AveragePrice(tg.KeyedProcess):
    """The average of all prices of a category so far."""

    count = tg.value("long", default=0)
    total = tg.value("long", default=0)

    def process(self, winner: Any, ctx: tg.Context) -> Iterator[Any]:
        """Add one winner."""
        self.count.set(self.count.get() + 1)
        self.total.set(self.total.get() + winner.price)
        yield winner.category, self.total.get() / self.count.get()


def program(nexmark: Nexmark) -> tg.Stream:
    """Find the winning bids, and average them."""
    auctions = nexmark.auction(*AUCTION, timed=True).key_by("id")
    bids = nexmark.bid("auction", "price", "date_time", timed=True).key_by("auction")
    winners = auctions.connect(bids).process("winners", WinningBid(), returns=COLUMNS)
    return winners.key_by("category").process("average", AveragePrice(), returns="category long, final double")
