"""q8: who has entered the system and begun an auction in the same ten seconds?"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT p.id, p.name, p.starttime FROM
    (SELECT DISTINCT id, name, window(date_time, '10 seconds').start AS starttime FROM person) p JOIN
    (SELECT DISTINCT seller, window(date_time, '10 seconds').start AS starttime FROM auction) a
    ON p.id = a.seller AND p.starttime = a.starttime
"""
BY_RECORD = True
SIZE_S = 10


class NewSellers(tg.CoProcess):
    """Emits a person with the first auction of the same window. Everything is forgotten when the window ends."""

    person = tg.value("struct<name: string, start: long>")
    auctions = tg.map("long", "boolean")  # by the beginning of their window

    def process_left(self, person: Any, ctx: tg.Context) -> Iterator[Any]:
        """Take a person. The first auction may be here already."""
        start = self._window(person, ctx)
        if start in self.auctions:
            yield _result(ctx.key, person.name, start)
        else:
            self.person.set({"name": person.name, "start": start})

    def process_right(self, auction: Any, ctx: tg.Context) -> Iterator[Any]:
        """Take an auction. Only the first one of a window counts."""
        start, person = self._window(auction, ctx), self.person.get()
        if start not in self.auctions:
            self.auctions.put(start, True)
            if person is not None and person["start"] == start:
                yield _result(ctx.key, **person)

    def on_timer(self, at: int, ctx: tg.Context) -> None:
        """End a window."""
        start, person = at // 1000 - SIZE_S, self.person.get()
        self.auctions.remove(start)
        if person is not None and person["start"] == start:
            self.person.clear()

    def _window(self, record: Any, ctx: tg.Context) -> int:
        start = int(record.date_time.timestamp()) // SIZE_S * SIZE_S
        ctx.timers.event_time((start + SIZE_S) * 1000)
        return start


def _result(key: int, name: str, start: int) -> tuple[int, str, datetime]:
    return key, name, datetime.fromtimestamp(start, UTC)


def program(nexmark: Nexmark) -> tg.Stream:
    """Join by person and window."""
    persons = nexmark.person("id", "name", "date_time", timed=True).key_by("id")
    auctions = nexmark.auction("seller", "date_time", timed=True).key_by("seller")
    return persons.connect(auctions).process(
        "new sellers", NewSellers(), returns="id long, name string, starttime timestamp"
    )
