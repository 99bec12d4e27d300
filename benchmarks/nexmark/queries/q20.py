"""q20: every bid for an auction of category 10, with the auction."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT auction, bidder, price, channel, url, b.date_time, b.extra, item_name, description, initial_bid, reserve,
    a.date_time AS begun, expires, seller, category, a.extra AS about
FROM bid b JOIN auction a ON b.auction = a.id WHERE a.category = 10
"""
KEEPS_BIDS = True


def program(nexmark: Nexmark) -> tg.Stream:
    """Join by auction. The names of the auction's columns must not be those of the bid's."""
    auctions = (
        nexmark.auction()
        .filter("category = 10")
        .with_columns(auction="id", begun="date_time", about="extra")
        .select(
            "auction",
            "item_name",
            "description",
            "initial_bid",
            "reserve",
            "begun",
            "expires",
            "seller",
            "category",
            "about",
        )
    )
    return nexmark.bid().key_by("auction").join("with auction", auctions.key_by("auction"))
