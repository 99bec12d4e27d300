"""q16: how many bids, bidders and auctions has each channel each day, by ranks of prices, and when was the last bid?"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.queries.statistics import DAY, DISTINCT_COUNTS, distinct_counts
from benchmarks.nexmark.streams import Nexmark

MINUTE = "date_format(date_time, 'HH:mm')"
SQL = f"SELECT channel, {DAY} AS day, max({MINUTE}) AS minute, {DISTINCT_COUNTS} FROM bid GROUP BY channel, {DAY}"
KEY = ("channel", "day")


def program(nexmark: Nexmark) -> tg.Stream:
    """Aggregate by channel and day."""
    bids = nexmark.bid("auction", "bidder", "price", "channel", "date_time").with_columns(day=DAY)
    return bids.key_by("channel", "day").aggregate("statistics", minute=tg.max(MINUTE), **distinct_counts())
