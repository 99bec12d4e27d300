"""q19: the ten highest bids of each auction, of equal ones the earliest."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Any

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT auction, rank, bidder, price, channel, url, date_time, extra FROM (
    SELECT *, CAST(ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC, date_time) AS LONG) AS rank FROM bid
) WHERE rank <= 10
"""
KEY = ("auction", "rank")
BY_RECORD = True
COUNT = 10
_COLUMNS = "bidder long, price long, channel string, url string, date_time timestamp, extra string"


class TopTen(tg.KeyedProcess):
    """Emits each rank whose bid has changed."""

    highest = tg.list(f"struct<{_COLUMNS}>")

    def process(self, bid: Any, ctx: tg.Context) -> Iterator[Any]:
        """Take a bid."""
        highest = list(self.highest.get())
        if len(highest) == COUNT and _order(highest[-1]) < (-bid.price, bid.date_time):
            return
        new = bid._asdict()
        del new["auction"]
        insort(highest, new, key=_order)
        del highest[COUNT:]
        self.highest.replace(highest)
        for place in range(highest.index(new), len(highest)):
            yield ctx.key, place + 1, *highest[place].values()


def _order(bid: dict[str, Any]) -> tuple[int, Any]:
    return -bid["price"], bid["date_time"]


def program(nexmark: Nexmark) -> tg.Stream:
    """Rank by auction."""
    returns = f"auction long, rank long, {_COLUMNS}"
    return nexmark.bid().key_by("auction").process("top ten", TopTen(), returns=returns)
