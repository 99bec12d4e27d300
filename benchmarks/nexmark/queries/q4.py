"""q4: what is the average price of the winning bids in each category?"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.queries.winning import WINNERS
from benchmarks.nexmark.streams import Nexmark

SQL = f"""
SELECT category, AVG(price) AS final FROM ({WINNERS}) GROUP BY category
"""
KEEPS_BIDS = True


def program(nexmark: Nexmark) -> tg.Stream:
    """Join bids and auctions, and average the highest bids. A higher bid takes the one before out of the average."""
    auctions = nexmark.auction("id", "category", "date_time", "expires").select(
        "id AS auction", "category", "date_time AS begun", "expires"
    )
    bids = nexmark.bid("auction", "price", "date_time")
    return (
        bids.key_by("auction")
        .join("bids of auctions", auctions.key_by("auction"))
        .filter("date_time BETWEEN begun AND expires")
        .key_by("auction", "category")
        .aggregate("winners", price=tg.max("price"))
        .as_changelog("changes of winners")
        .key_by("category")
        .aggregate("average", final=tg.mean("price"))
    )
