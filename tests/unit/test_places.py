"""Which places streaming transforms get, one after the other (spark/processes.py), without Spark."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tidegate.spark import processes
from tidegate.spark.processes import PROCESSES_END_AFTER_S


@dataclass
class Tenant:
    query: str | None = None
    is_settled: bool = False
    has_moved_out: bool = False

    @property
    def has_begun(self) -> bool:
        return self.query is not None

    def move_out(self) -> bool:
        self.has_moved_out = True
        return True


@dataclass
class Session:
    """What the places ask of a session: which queries run."""

    running: set[str] = field(default_factory=set)

    @property
    def _jsparkSession(self) -> Session:
        return self

    def streams(self) -> Session:
        return self

    def get(self, query: str) -> str | None:
        return query if query in self.running else None


class House:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.session = Session()
        monkeypatch.setattr(processes, "_places", [])
        monkeypatch.setattr("tidegate.spark.processes.time.monotonic", lambda: self.now_s)

    def build(self, tenant: Tenant, *, slots: int = 2) -> int:
        return processes._place_for(processes._Let(tenant, slots, cast("Any", self.session)))

    def run(self, *, batches: int, slots: int = 2, ends: bool = True) -> tuple[int, Tenant]:
        tenant = Tenant()
        place = self.build(tenant, slots=slots)
        tenant.query, tenant.is_settled = os.urandom(4).hex(), batches > 1
        if not ends:
            self.session.running.add(tenant.query)
        return place, tenant


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(monkeypatch)


def test_a_settled_place_is_free_at_once_for_as_many_slots(house: House) -> None:
    first, tenant = house.run(batches=3)
    other, _ = house.run(batches=3, slots=3)
    assert other != first and not tenant.has_moved_out
    assert house.run(batches=3)[0] == first and tenant.has_moved_out


def test_a_program_that_starts_queries_forever_has_few_places(house: House) -> None:
    """Each of one batch, a minute after the other, and now and then with other slots."""
    places = set()
    for number in range(100):
        places.add(house.run(batches=1, slots=2 + number % 2)[0])
        house.now_s += 60
    assert places == {0, 1, 2}


def test_the_place_of_a_query_that_runs_or_was_not_started_is_its_own(house: House) -> None:
    house.build(Tenant())
    running, tenant = house.run(batches=3, ends=False)
    house.now_s += 10 * PROCESSES_END_AFTER_S
    assert house.run(batches=3)[0] not in {0, running} and not tenant.has_moved_out


def test_a_query_that_was_started_again_is_not_over(house: House) -> None:
    first, tenant = house.run(batches=1)
    house.run(batches=1)
    assert tenant.query is not None
    house.session.running.add(tenant.query)
    house.now_s += PROCESSES_END_AFTER_S
    house.build(Tenant())
    house.session.running.clear()
    assert house.build(Tenant()) != first, "it had something to do until now"
    house.now_s += PROCESSES_END_AFTER_S
    assert house.build(Tenant()) == first
