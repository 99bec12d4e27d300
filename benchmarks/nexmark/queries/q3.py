"""q3: who sells in Oregon, Idaho or California in category 10, and in which auctions?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT p.name, p.city, p.state, a.id
FROM auction a JOIN person p ON a.seller = p.id
WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')
"""
BY_RECORD = True


class Sellers(tg.CoProcess):
    """Joins a person with the auctions, whichever comes first. Both are kept: more auctions may follow at any time."""

    person = tg.value("struct<name: string, city: string, state: string>")
    waiting = tg.list("long")

    def process_left(self, auction: Any, ctx: tg.Context) -> Iterator[Any]:
        """Join an auction, or keep it until its seller is known."""
        person = self.person.get()
        if person is None:
            self.waiting.add(auction.id)
        else:
            yield *person.values(), auction.id

    def process_right(self, person: Any, ctx: tg.Context) -> Iterator[Any]:
        """Keep a person, and join the auctions that came before."""
        self.person.set({"name": person.name, "city": person.city, "state": person.state})
        for auction in self.waiting.get():
            yield person.name, person.city, person.state, auction
        self.waiting.clear()


def program(nexmark: Nexmark) -> tg.Stream:
    """Filter both sides, and join them by seller."""
    auctions = nexmark.auction("id", "seller", "category").filter("category = 10")
    persons = nexmark.person("id", "name", "city", "state").filter("state IN ('OR', 'ID', 'CA')")
    return (
        auctions.key_by("seller")
        .connect(persons.key_by("id"))
        .process("sellers", Sellers(), returns="name string, city string, state string, id long")
    )
