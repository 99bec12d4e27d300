"""Nexmark: every query gives the result that Spark SQL computes in batch on the same events."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg
from benchmarks.nexmark import oracle
from benchmarks.nexmark.events import BID, Bids, Events
from benchmarks.nexmark.suite import QUERIES, build, query
from tests.jobs import completed, until
from tidegate.dataflow.contracts import SourceContext
from tidegate.testing.processes import ProcessJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Some three minutes of event time: eighteen windows of ten seconds.
EVENTS = Events(20_000, rate=100)
KILLS = 2


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("nexmark")
    oracle.write_events(EVENTS, folder)
    with oracle.tables(spark, folder):
        yield spark


# One query for each kind of operator; the rest are in `make long`.
NOW = {"q4", "q5", "q8", "q11", "q12", "q13", "q16", "q18", "q19", "q20"}


@pytest.mark.parametrize("name", [name if name in NOW else pytest.param(name, marks=pytest.mark.long) for name in QUERIES])
def test_a_query_gives_what_spark_sql_gives(name: str, tables: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = ProcessJob(name, slots=2, snapshots=tg.Snapshots(to=str(tmp_path / "snapshots"), every="200 ms"))
    schema = build(job, name, EVENTS, tg.sinks.parquet(out))
    job.run()
    wanted = oracle.expected(tables, query(name).SQL)
    got = oracle.result(name, out, schema)
    assert wanted, "a query without results shows nothing"
    assert got == wanted, oracle.difference(got, wanted)


@pytest.mark.long
@pytest.mark.parametrize("backend", [tg.Heap(), tg.RocksDB()], ids=["heap", "rocksdb"])
@pytest.mark.parametrize("name", QUERIES)
def test_killed_slots_change_no_result_on_either_backend(name: str, backend: Any, tables: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = ProcessJob(
        name,
        slots=2,
        backend=backend,
        restart=tg.FixedDelay(attempts=20, delay=0),
        snapshots=tg.Snapshots(to=str(tmp_path / "snapshots"), every="200 ms"),
    )
    schema = build(job, name, replace(EVENTS, seconds=3), tg.sinks.parquet(out))
    handle = job.start()
    for killed in range(KILLS):
        before = len(completed(handle))
        until(lambda before=before: len(completed(handle)) > before, "another snapshot")
        os.kill(handle.attempts[-1].slots[killed % 2], signal.SIGKILL)
        until(lambda killed=killed: len(handle.attempts) > killed + 1, "another attempt")
    assert handle.wait("2 minutes") is tg.Status.FINISHED
    wanted, got = oracle.expected(tables, query(name).SQL), oracle.result(name, out, schema)
    assert got == wanted, oracle.difference(got, wanted)


def test_an_event_is_the_same_in_whatever_range_it_is_made() -> None:
    columns = tuple(each.split()[0] for each in BID.split(", "))
    make = Bids(EVENTS, columns)
    whole, part = make(1, 0, 1000), make(1, 300, 100)
    for name in columns:
        assert np.array_equal(np.asarray(whole[name])[300:400], np.asarray(part[name]))


def test_another_seed_makes_other_events() -> None:
    ours, others = (Bids(Events(50, seed=seed), ("price",))(0, 0, 20)["price"] for seed in (1, 2))
    assert not np.array_equal(ours, others)


@pytest.mark.parametrize("kind", ["person", "auction", "bid"])
def test_a_column_is_the_same_whatever_other_columns_are_asked_for(kind: str) -> None:
    def first(*columns: str) -> pa.RecordBatch:
        batch = getattr(EVENTS, kind)(*columns).open(SourceContext(0, 1, {}, lambda: 0)).poll(100)
        assert batch is not None
        return batch

    whole = first()
    for name in whole.schema.names:
        assert first(name).column(name).equals(whole.column(name))
