"""q6: what is the average selling price of each seller's last ten auctions?

In the original the window has eleven auctions, in the order of the winning bids' times. Here it has the ten that it means,
in the order in which the auctions end.
"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.queries.winning import WINNERS, winners
from benchmarks.nexmark.streams import Nexmark

SQL = f"""
SELECT seller, id, AVG(price) OVER last_ten AS price FROM ({WINNERS})
WINDOW last_ten AS (PARTITION BY seller ORDER BY expires, id ROWS BETWEEN 9 PRECEDING AND CURRENT ROW)
"""


def program(nexmark: Nexmark) -> tg.Stream:
    """Find the winning bids, and average the last ten of a seller, whose windows come in the order of their ends."""
    return (
        winners(nexmark, ("seller",))
        .key_by("seller")
        .over("last ten", ["window_end", "expires", "id"], 10, average=tg.mean("price"))
        .select("seller", "id", "average AS price")
    )
