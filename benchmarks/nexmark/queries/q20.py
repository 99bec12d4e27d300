"""q20: every bid for an auction of category 10, with the auction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tidegate as tg
from benchmarks.nexmark.events import BID
from benchmarks.nexmark.streams import Nexmark

OF_AUCTION = (
    "item_name, description, initial_bid, reserve, a.date_time AS begun, expires, seller, category, a.extra AS about"
)
SQL = f"""
SELECT auction, bidder, price, channel, url, b.date_time, b.extra, {OF_AUCTION}
FROM bid b JOIN auction a ON b.auction = a.id WHERE a.category = 10
"""
BY_RECORD = True
_AUCTION = (
    "item_name string, description string, initial_bid long, reserve long, begun timestamp, expires timestamp, "
    "seller long, category long, about string"
)

COLUMNS = [column.split()[0] for column in _AUCTION.split(", ")]


class WithAuction(tg.CoProcess):
    """Joins an auction and its bids, whichever comes first. Of an auction of another category only that is kept."""

    auction = tg.value(f"struct<{_AUCTION}>")
    is_other = tg.value("boolean", default=False)
    early = tg.list(f"struct<{BID}>")

    def process_left(self, auction: Any, ctx: tg.Context) -> Iterator[Any]:
        """Take an auction, and join the bids that came before."""
        if auction.category == 10:
            found = auction[1:]
            self.auction.set(dict(zip(COLUMNS, found, strict=True)))
            for bid in self.early.get():
                yield *bid.values(), *found
        else:
            self.is_other.set(True)
        self.early.clear()

    def process_right(self, bid: Any, ctx: tg.Context) -> Iterator[Any]:
        """Join a bid, or keep it until its auction is known."""
        auction = self.auction.get()
        if auction is not None:
            yield *bid, *auction.values()
        elif not self.is_other.get():
            self.early.add(bid._asdict())


def program(nexmark: Nexmark) -> tg.Stream:
    """Join by auction."""
    return (
        nexmark.auction()
        .key_by("id")
        .connect(nexmark.bid().key_by("auction"))
        .process("with auction", WithAuction(), returns=f"{BID}, {_AUCTION}")
    )
