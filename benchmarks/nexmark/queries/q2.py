"""q2: the prices bid for every 123rd auction."""

from __future__ import annotations

import tidegate as tg
from benchmarks.nexmark.streams import Nexmark

SQL = "SELECT auction, price FROM bid WHERE auction % 123 = 0"


def program(nexmark: Nexmark) -> tg.Stream:
    """Filter."""
    return nexmark.bid("auction", "price").filter("auction % 123 = 0")
