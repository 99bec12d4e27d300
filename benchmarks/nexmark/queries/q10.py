"""q10: every bid into files, with the day and the minute that would name its folder.

Tidegate's Parquet sink has no columns in folder names, so the files are not in folders by day and minute.
"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

DAY, MINUTE = "date_format(date_time, 'yyyy-MM-dd') AS dt", "date_format(date_time, 'HH:mm') AS hm"
SQL = f"SELECT auction, bidder, price, date_time, extra, {DAY}, {MINUTE} FROM bid"


def program(nexmark: Nexmark) -> tg.Stream:
    """Compute two columns."""
    bids = nexmark.bid("auction", "bidder", "price", "date_time", "extra")
    return bids.select("auction", "bidder", "price", "date_time", "extra", DAY, MINUTE)
