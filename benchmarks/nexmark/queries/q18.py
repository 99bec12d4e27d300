"""q18: the last bid of each bidder for each auction."""

from __future__ import annotations

from typing import Any

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT bidder, auction, price, channel, url, date_time, extra FROM (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY date_time DESC) AS rank FROM bid
) WHERE rank = 1
"""
KEY = ("bidder", "auction")
OTHERS = ("price", "channel", "url", "date_time", "extra")


def program(nexmark: Nexmark) -> tg.Stream:
    """Keep the columns of the latest bid."""
    latest: dict[str, Any] = {name: tg.max_by(name, by="date_time") for name in OTHERS}
    return nexmark.bid().key_by("bidder", "auction").aggregate("last bids", **latest)
