"""q0: every bid, unchanged. What the engine costs without any work."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = "SELECT auction, bidder, price, date_time, extra FROM bid"


def program(nexmark: Nexmark) -> tg.Stream:
    """Read the bids."""
    return nexmark.bid("auction", "bidder", "price", "date_time", "extra")
