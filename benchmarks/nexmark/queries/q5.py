"""q5: which auctions have the most bids in the last ten seconds? Every two seconds."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.queries.highest import Highest, HighestInBatch
from benchmarks.nexmark.streams import Nexmark

SQL = """
WITH counts AS (
    SELECT auction, count(*) AS num, window(date_time, '10 seconds', '2 seconds') AS w FROM bid
    GROUP BY auction, window(date_time, '10 seconds', '2 seconds')
)
SELECT num, auction FROM (SELECT *, RANK() OVER (PARTITION BY w ORDER BY num DESC) AS rank FROM counts) WHERE rank = 1
"""


class MostBids(Highest):
    """The auctions with the most bids of a window."""

    records = tg.list("struct<num: long, auction: long>")


def program(nexmark: Nexmark) -> tg.Stream:
    """Count by auction and window, and keep the highest counts of each window."""
    bids = nexmark.bid("auction", "date_time", timed=True)
    counts = bids.key_by("auction").window(tg.sliding("date_time", "10 s", "2 s")).aggregate("counts", num=tg.count())
    few = counts.select("num", "auction", "window_end").map_batches(
        HighestInBatch("num", "window_end"), returns="num long, auction long, window_end timestamp NOT NULL"
    )
    return few.key_by("window_end").process("most bids", MostBids(), returns="num long, auction long")
