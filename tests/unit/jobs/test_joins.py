"""Joins in whole jobs: through a crash, at another number of slots, and as tables."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import committed
from tests.unit.jobs.conftest import Bench
from tests.unit.jobs.test_aggregates import BACKENDS
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.state_tables import state_table
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Kill, ScriptedSource

CUSTOMERS, PAYING = 10, 13


def run(bench: Bench, backend: str, orders: tg.Source, payments: int, *, slots: int, ttl: str | None = None) -> tg.Handle:
    """Join orders with the number of payments of their customer."""
    job = ProcessJob(
        "job",
        slots=slots,
        backend=BACKENDS[backend],
        restart=tg.FixedDelay(attempts=20, delay=0),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="50 ms"),
    )
    paying = tg.sources.generator(make_row=lambda i: (i % PAYING,), schema="customer long", rows=payments, splits=2)
    counts = job.source("payments", paying).key_by("customer").aggregate("paid", paid=tg.count())
    changes = counts.as_changelog("changes").key_by("customer")
    joined = job.source("orders", orders).key_by("customer").join("join", changes, how="full", ttl=ttl)
    joined.as_append().to("out", tg.sinks.parquet(bench.out))
    handle = bench.start(job)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    return handle


def left_of(folder: Path) -> Counter[Any]:
    """Return the rows that are left when all changes are applied."""
    found: Counter[Any] = Counter()
    for kind, *row in committed(folder):
        found[tuple(row)] += 1 if kind == "+I" else -1
    assert min(found.values()) >= 0
    return +found


def expected(orders: int, payments: int) -> Counter[Any]:
    paid = {customer: len(range(customer, payments, PAYING)) for customer in range(PAYING)}
    rows = [(n % CUSTOMERS, n, paid[n % CUSTOMERS]) for n in range(orders)]
    return Counter([*rows, *((customer, None, paid[customer]) for customer in range(CUSTOMERS, PAYING))])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_join_goes_on_after_a_crash_and_at_another_number_of_slots(bench: Bench, backend: str) -> None:
    rows = [(n % CUSTOMERS, n) for n in range(200)]
    script = [*rows[:80], AwaitSnapshot(times=2), *rows[80:100], Kill(), *rows[100:]]
    schema = "customer long, n long"
    source = ScriptedSource(script, schema=schema, memory=bench.folder / "marks")
    handle = run(bench, backend, source, 100, slots=2)
    assert len(handle.attempts) == 2
    assert left_of(bench.out) == expected(200, 100)
    table = state_table(find_snapshot(str(bench.snapshots / "job")), "left with matches", None)
    held = [row for part in table.parts(None) for batch in table.read(part) for row in batch.to_pylist()]
    assert sorted((row["key"], row["value"]["n"]) for row in held) == sorted(rows)
    rows += [(n % CUSTOMERS, n) for n in range(200, 300)]
    longer = ScriptedSource([*script, *rows[200:]], schema=schema, memory=bench.folder / "marks")
    run(bench, backend, longer, 150, slots=3, ttl="1 day")
    assert left_of(bench.out) == expected(300, 150)
