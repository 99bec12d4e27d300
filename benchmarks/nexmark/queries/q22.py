"""q22: every bid, with the folders of its address."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

FOLDERS = [f"split_part(url, '/', {place}) AS dir{place - 3}" for place in (4, 5, 6)]
SQL = f"SELECT auction, bidder, price, channel, {', '.join(FOLDERS)} FROM bid"


def program(nexmark: Nexmark) -> tg.Stream:
    """Compute three columns."""
    bids = nexmark.bid("auction", "bidder", "price", "channel", "url")
    return bids.select("auction", "bidder", "price", "channel", *FOLDERS)
