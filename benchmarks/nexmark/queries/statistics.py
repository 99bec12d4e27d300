"""What q15, q16 and q17 count: bids, bidders and auctions, in all and by three ranks of prices."""

from __future__ import annotations

from typing import Any

import tidegate as tg

DAY = "date_format(date_time, 'yyyy-MM-dd')"
RANKS = {
    "rank1": "price < 10000",
    "rank2": "price >= 10000 AND price < 1000000",
    "rank3": "price >= 1000000",
}


def counts() -> dict[str, Any]:
    """Return the numbers of bids."""
    return {"total_bids": tg.count()} | {f"{rank}_bids": tg.count(f"if({of}, 1, NULL)") for rank, of in RANKS.items()}


def distinct_counts() -> dict[str, Any]:
    """Return the numbers of bids, bidders and auctions."""
    found = counts()
    for name in ("bidder", "auction"):
        found[f"total_{name}s"] = tg.count_distinct(name)
        found |= {f"{rank}_{name}s": tg.count_distinct(f"if({of}, {name}, NULL)") for rank, of in RANKS.items()}
    return found


def _by_rank(counted: str, name: str) -> str:
    """Return the SQL of one count in all, and by rank."""
    ranks = [f"count({counted}) FILTER (WHERE {of}) AS {rank}_{name}" for rank, of in RANKS.items()]
    return ", ".join([f"count({counted}) AS total_{name}", *ranks])


COUNTS = _by_rank("*", "bids")
DISTINCT_COUNTS = ", ".join([COUNTS, _by_rank("DISTINCT bidder", "bidders"), _by_rank("DISTINCT auction", "auctions")])
