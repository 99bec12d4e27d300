"""q3: who sells in Oregon, Idaho or California in category 10, and in which auctions?"""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = """
SELECT p.name, p.city, p.state, a.id
FROM auction a JOIN person p ON a.seller = p.id
WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')
"""


def program(nexmark: Nexmark) -> tg.Stream:
    """Filter both sides, and join them by seller."""
    auctions = nexmark.auction("id", "seller", "category").filter("category = 10").select("id AS auction", "seller")
    persons = nexmark.person("id", "name", "city", "state").filter("state IN ('OR', 'ID', 'CA')")
    return auctions.key_by("seller").join("sellers", persons.key_by("id")).select("name", "city", "state", "auction AS id")
