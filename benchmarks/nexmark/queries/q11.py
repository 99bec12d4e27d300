"""q11: how many bids does a bidder make in each session? A session ends with ten seconds without a bid."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT bidder, w.start AS window_start, w.end AS window_end, bid_count FROM (
    SELECT bidder, session_window(date_time, '10 seconds') AS w, count(*) AS bid_count FROM bid
    GROUP BY bidder, session_window(date_time, '10 seconds')
)
"""


def program(nexmark: Nexmark) -> tg.Stream:
    """Count by session."""
    bids = nexmark.bid("bidder", "date_time", timed=True)
    return bids.key_by("bidder").window(tg.sessions("date_time", "10 s")).aggregate("sessions", bid_count=tg.count())
