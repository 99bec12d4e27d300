"""q14: bids of certain prices, with the time of day, and how often there is a c in the text."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

TIME_OF_DAY = """
CASE WHEN hour(date_time) >= 8 AND hour(date_time) <= 18 THEN 'dayTime'
     WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'nightTime'
     ELSE 'otherTime' END AS bid_time_type
"""
C_COUNTS = "length(extra) - length(replace(extra, 'c', '')) AS c_counts"
SQL = f"""
SELECT auction, bidder, 0.908 * price AS price, {TIME_OF_DAY}, date_time, extra, {C_COUNTS}
FROM bid WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000
"""


def program(nexmark: Nexmark) -> tg.Stream:
    """Filter, and compute three columns."""
    bids = nexmark.bid("auction", "bidder", "price", "date_time", "extra")
    found = bids.filter("0.908 * price > 1000000 AND 0.908 * price < 50000000")
    return found.select("auction", "bidder", "0.908 * price AS price", TIME_OF_DAY, "date_time", "extra", C_COUNTS)
