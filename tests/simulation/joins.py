"""The job with joins: records of one source, joined with changes that are made of another one, and aggregated again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import tidegate as tg
from tests.simulation.expected import expect_rows
from tests.simulation.rows import rows_source
from tidegate.dataflow.pipeline import Pipeline
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf


class Joins(SimulatedJob):
    """Orders, joined with the number of payments of their customer as it changes, and counted by this number."""

    name = "joins"

    def __init__(self, rng: Random) -> None:
        customers = rng.randint(1, 12)
        self._orders: list[Row] = [(number, rng.choice([*range(customers), None])) for number in range(rng.randint(20, 60))]
        self._payments: list[Row] = [(rng.randrange(customers + 2),) for _ in range(rng.randint(20, 60))]
        self._how = rng.choice(["inner", "left", "full", "anti"])
        self._sources = (
            rows_source(self._orders, "n long, customer long", rng.randint(1, 3)),
            rows_source(self._payments, "customer long", rng.randint(1, 3)),
        )

    def build(self, pipeline: Pipeline, site: Site) -> None:
        def trip(row: Any) -> bool:
            site.trip.at(row)
            return True

        orders = pipeline.source("orders", site.source(self._sources[0]), parallelism=site.parallelism("orders")).filter(
            trip
        )
        payments = pipeline.source("payments", site.source(self._sources[1]), parallelism=site.parallelism("payments"))
        paid = (
            payments.key_by("customer")
            .aggregate("paid", paid=tg.count(), parallelism=site.parallelism("paid"))
            .as_changelog("changes", parallelism=site.parallelism("changes"))
        )
        how: Any = self._how
        joined = orders.key_by("customer").join(
            "join", paid.key_by("customer"), how=how, parallelism=site.parallelism("join")
        )
        joined.as_append().to("joined", site.sink(), parallelism=site.parallelism("join"))
        if how != "anti":
            joined.filter("paid IS NULL OR paid % 2 = 0").key_by("paid").aggregate(
                "by number", orders=tg.count("n"), total=tg.sum("n"), parallelism=site.parallelism("by number")
            ).as_append().to("counted", site.sink(), parallelism=site.parallelism("by number"))

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        if not exact:  # what is inserted twice is deleted once
            return
        paid = Counter(customer for (customer,) in self._payments)
        wanted: list[Row] = []
        for n, customer in self._orders:
            if customer in paid:
                wanted += [] if self._how == "anti" else [(n, customer, paid[customer])]
            elif self._how != "inner":
                wanted.append((n, customer) if self._how == "anti" else (n, customer, None))
        if self._how == "full":
            with_orders = {customer for _, customer in self._orders}
            wanted += [(None, customer, count) for customer, count in paid.items() if customer not in with_orders]
        expect_rows(f"{self._how} join", _left(rows("joined")), wanted)
        if self._how == "anti":
            return
        by_number: dict[Any, list[Any]] = {}
        for n, _, count in wanted:
            if count is None or count % 2 == 0:
                by_number.setdefault(count, []).append(n)
        counts = []
        for count, numbers in by_number.items():
            known = [n for n in numbers if n is not None]
            counts.append((count, len(known), sum(known) if known else None))
        expect_rows("orders by number of payments", _left(rows("counted")), counts)


def _left(changes: list[Row]) -> list[Row]:
    """Return the rows that are left after these changes, in whatever order they are."""
    found: Counter[Row] = Counter()
    for kind, *row in changes:
        found[tuple(row)] += 1 if kind == "+I" else -1
    assert all(count >= 0 for count in found.values()), f"deleted more often than inserted: {found}"
    return list(found.elements())
