"""The winning bid of each auction, which q4, q6 and q9 begin with: the highest, of equal ones the earliest.

A bid is valid from the auction's beginning to its end. It may come before its auction does: then it waits, until event time
shows that the auction has begun later than the bid. The result comes when event time has passed the auction's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import tidegate as tg

AUCTION = ("id", "date_time", "expires", "seller", "category")
COLUMNS = "id long, date_time timestamp, expires timestamp, seller long, category long, price long, bid_time timestamp"
WINNERS = """
SELECT * FROM (
    SELECT a.id, a.seller, a.category, a.expires, b.price,
           ROW_NUMBER() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time) AS rank
    FROM auction a JOIN bid b ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires
) WHERE rank = 1
"""

# Timers have milliseconds, times have microseconds: the millisecond is over when the next one begins.
_NEXT = timedelta(milliseconds=1)


class WinningBid(tg.CoProcess):
    """Joins auctions keyed by their number and bids keyed by their auction. A bid's columns are its auction, price and time,
    and more if a subclass declares its states with more."""

    auction: tg.ValueState[Any] = tg.value(
        "struct<id: long, date_time: timestamp, expires: timestamp, seller: long, category: long>"
    )
    best: tg.ValueState[Any] = tg.value("struct<price: long, date_time: timestamp>")
    early: tg.ListState[Any] = tg.list("struct<price: long, date_time: timestamp>")

    def process_left(self, auction: Any, ctx: tg.Context) -> None:
        """Begin an auction."""
        self.auction.set(auction._asdict())
        for bid in self.early.get():
            self._offer(self.auction.get(), bid)
        self.early.clear()
        ctx.timers.event_time(auction.expires + _NEXT)

    def process_right(self, bid: Any, ctx: tg.Context) -> None:
        """Take a bid, without the column that is the key."""
        auction = self.auction.get()
        if auction is None:
            self.early.add(_without_key(bid))
            ctx.timers.event_time(bid.date_time + _NEXT)
        else:
            self._offer(auction, _without_key(bid))

    def on_timer(self, at: int, ctx: tg.Context) -> Iterator[Any]:
        """End an auction, or drop bids whose auction has not begun in time."""
        auction, best = self.auction.get(), self.best.get()
        if auction is None:
            self.early.replace([bid for bid in self.early.get() if _passes(bid["date_time"]) > at])
        elif _passes(auction["expires"]) <= at:
            if best is not None:
                yield *auction.values(), *best.values()
            self.auction.clear()
            self.best.clear()

    def _offer(self, auction: Any, bid: Any) -> None:
        if auction["date_time"] <= bid["date_time"] <= auction["expires"]:
            best = self.best.get()
            if best is None or (-bid["price"], bid["date_time"]) < (-best["price"], best["date_time"]):
                self.best.set(bid)


def _without_key(bid: Any) -> dict[str, Any]:
    columns: dict[str, Any] = bid._asdict()
    del columns["auction"]
    return columns


def _passes(moment: Any) -> int:
    """Return the first millisecond after a moment."""
    return int(moment.timestamp() * 1000) + 1
