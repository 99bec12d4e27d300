"""q6: what is the average selling price of each seller's last ten auctions?

In the original the window has eleven auctions, in the order of the winning bids' times. Here it has the ten that it means,
in the order in which the auctions end.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import tidegate as tg
from benchmarks.nexmark.queries.winning import AUCTION, COLUMNS, WINNERS, WinningBid
from benchmarks.nexmark.streams import Nexmark

SQL = f"""
SELECT seller, id, AVG(price) OVER last_ten AS price FROM ({WINNERS})
WINDOW last_ten AS (PARTITION BY seller ORDER BY expires, id ROWS BETWEEN 9 PRECEDING AND CURRENT ROW)
"""
BY_RECORD = True


class LastTen(tg.KeyedProcess):
    """The average of the last ten auctions. Auctions come from several subtasks, so event time puts them in order."""

    coming = tg.list("struct<expires: timestamp, id: long, price: long>")
    last = tg.list("long")

    def process(self, winner: Any, ctx: tg.Context) -> None:
        """Keep an auction until all that end before it are here."""
        self.coming.add({"expires": winner.expires, "id": winner.id, "price": winner.price})
        ctx.timers.event_time(winner.expires + timedelta(milliseconds=1))

    def on_timer(self, at: int, ctx: tg.Context) -> Iterator[Any]:
        """Add the auctions that have ended by now, in order."""
        coming = sorted(self.coming.get(), key=lambda each: (each["expires"], each["id"]))
        ended = [each for each in coming if each["expires"].timestamp() * 1000 < at]
        last = list(self.last.get())
        for each in ended:
            last = [*last[-9:], each["price"]]
            yield ctx.key, each["id"], sum(last) / len(last)
        self.last.replace(last)
        self.coming.replace(coming[len(ended) :])


def program(nexmark: Nexmark) -> tg.Stream:
    """Find the winning bids, and average the last ten of a seller."""
    auctions = nexmark.auction(*AUCTION, timed=True).key_by("id")
    bids = nexmark.bid("auction", "price", "date_time", timed=True).key_by("auction")
    winners = auctions.connect(bids).process("winners", WinningBid(), returns=COLUMNS)
    return winners.key_by("seller").process("last ten", LastTen(), returns="seller long, id long, price double")
