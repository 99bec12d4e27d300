"""q8: who has entered the system and begun an auction in the same ten seconds?"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT p.id, p.name, p.starttime FROM
    (SELECT DISTINCT id, name, window(date_time, '10 seconds').start AS starttime FROM person) p JOIN
    (SELECT DISTINCT seller, window(date_time, '10 seconds').start AS starttime FROM auction) a
    ON p.id = a.seller AND p.starttime = a.starttime
"""


def program(nexmark: Nexmark) -> tg.Stream:
    """Keep the persons who have an auction in their window: a semi-join."""
    windows = tg.tumbling("date_time", "10 s")
    persons = nexmark.person("id", "name", "date_time", timed=True).key_by("id").window(windows)
    auctions = nexmark.auction("seller", "date_time", timed=True).key_by("seller").window(windows)
    sellers = persons.join("new sellers", auctions, how="semi")
    return sellers.select("id", "name", "window_start AS starttime")
