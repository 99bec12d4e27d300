"""Look-ups in whole jobs: a killed slot changes nothing, and the broadcast table is read at another number of slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

import tidegate as tg
from tests.jobs import committed
from tests.unit.jobs.conftest import Bench
from tidegate.snapshots.finding import find_snapshot
from tidegate.snapshots.state_tables import state_table
from tidegate.testing.processes import ProcessJob
from tidegate.testing.scripted import AwaitSnapshot, Kill, ScriptedSource

ROWS = [(i, i % 10) for i in range(200)]
RATES = [(key, float(key)) for key in range(0, 10, 2)]


def squares(keys: pa.RecordBatch) -> pa.RecordBatch:
    """Know the squares of all keys but 7."""
    known = [key for key in keys["key"].to_pylist() if key != 7]
    return pa.RecordBatch.from_pydict({"key": known, "square": [key * key for key in known]})


def test_a_killed_slot_changes_no_look_up(bench: Bench) -> None:
    script = [*ROWS[:100], AwaitSnapshot(times=2), *ROWS[100:120], Kill(), *ROWS[120:]]
    source = ScriptedSource(script, schema="id long, key long", memory=bench.folder / "marks")

    def build(numbers: tg.Stream) -> tg.Stream:
        table = pa.table({"digit": range(10), "name": [f"number {key}" for key in range(10)]})
        named = numbers.lookup_join("names", table, on={"key": "digit"})
        return named.lookup("squares", squares, "square long", on="key", cache=4)

    handle = run(bench, source, build)
    assert len(handle.attempts) == 2
    wanted = [(i, key, f"number {key}", None if key == 7 else key * key) for i, key in ROWS]
    assert sorted(committed(bench.out)) == sorted(wanted)


def test_the_broadcast_table_is_state_that_every_slot_gets(bench: Bench) -> None:
    """The rows of the table come in the first job alone."""

    def build(numbers: tg.Stream, rates: list[Any]) -> tg.Stream:
        table = numbers._pipeline.source("rates", tg.sources.rows(rates, "key long, rate double"))
        return numbers.lookup_join("rate", table.broadcast(), on="key", how="left")

    first = tg.sources.rows([], "id long, key long")
    run(bench, first, lambda numbers: build(numbers, RATES))
    table = state_table(find_snapshot(str(bench.snapshots / "job")), "table", "rate")
    found = [row for part in table.parts(None) for batch in table.read(part) for row in batch.to_pylist()]
    assert sorted((row["map_key"], row["value"]["rate"]) for row in found) == RATES
    second = tg.sources.rows(ROWS, "id long, key long")
    run(bench, second, lambda numbers: build(numbers, RATES), slots=3)
    rates = dict(RATES)
    assert sorted(committed(bench.out)) == sorted((i, key, rates.get(key)) for i, key in ROWS)


def run(bench: Bench, source: tg.Source, build: Callable[[tg.Stream], tg.Stream], *, slots: int = 2) -> tg.Handle:
    job = ProcessJob(
        "job",
        slots=slots,
        restart=tg.FixedDelay(attempts=20, delay=0),
        snapshots=tg.Snapshots(to=str(bench.snapshots), every="50 ms"),
    )
    build(job.source("in", source)).to("out", tg.sinks.parquet(bench.out))
    handle = bench.start(job)
    assert handle.wait("1 minute") is tg.Status.FINISHED
    return handle
