"""q1: every bid, with its price in euros."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = "SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bid"


def program(nexmark: Nexmark) -> tg.Stream:
    """Compute one column."""
    bids = nexmark.bid("auction", "bidder", "price", "date_time", "extra")
    return bids.select("auction", "bidder", "0.908 * price AS price", "date_time", "extra")
