"""q12: how many bids does each bidder make in each ten seconds of processing time?

Which window a bid is in depends on the clock, so the windows can't be Spark's. But each bid is in one of them: the sum of a
bidder's windows is compared with the number of their bids.
"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = "SELECT bidder, COUNT(*) FROM bid GROUP BY bidder"
TOTALS = ("bidder", "bid_count")


def program(nexmark: Nexmark) -> tg.Stream:
    """Count by bidder and window."""
    windows = nexmark.bid("bidder").key_by("bidder").window(tg.tumbling(None, "10 s", time="processing"))
    counts = windows.aggregate("bids of bidders", bid_count=tg.count())
    return counts.select("bidder", "bid_count", "window_start AS starttime", "window_end AS endtime")
