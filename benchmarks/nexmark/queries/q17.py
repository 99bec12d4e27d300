"""q17: how many bids has each auction each day, by ranks of prices, and what are the prices?"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.queries.statistics import COUNTS, DAY, counts
from benchmarks.nexmark.streams import Nexmark

SQL = f"""
SELECT auction, {DAY} AS day, {COUNTS},
       min(price) AS min_price, max(price) AS max_price, avg(price) AS avg_price, sum(price) AS sum_price
FROM bid GROUP BY auction, {DAY}
"""
KEY = ("auction", "day")


def program(nexmark: Nexmark) -> tg.Stream:
    """Aggregate by auction and day."""
    bids = nexmark.bid("auction", "price", "date_time").with_columns(day=DAY)
    return bids.key_by("auction", "day").aggregate(
        "statistics",
        **counts(),
        min_price=tg.min("price"),
        max_price=tg.max("price"),
        avg_price=tg.mean("price"),
        sum_price=tg.sum("price"),
    )
