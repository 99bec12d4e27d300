"""`tg.transform` in streaming queries: Spark's rate source, every kind of trigger, loops, several queries and a job in one
session."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg
from tests.collatz import NUMBER, check_collatz, first, rounds
from tests.jobs import build_ledger, check_ledger, committed, until
from tests.spark.test_transform import check_counts, counted
from tests.spark.test_transform_streaming import ROWS, Desk, batches, noted_runs
from tidegate.runtime.gathering import Run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT_ONCE = {"processingTime": "0 seconds"}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    return noted_runs(monkeypatch)


@pytest.fixture
def desk(tmp_path: Path, spark: SparkSession) -> Desk:
    return Desk(tmp_path, spark)


# --- triggers ----------------------------------------------------------------------------------------------------------


def test_a_query_may_have_another_trigger_each_time(desk: Desk, runs: list[Run]) -> None:
    """Available-now is what most tests have."""
    desk.add(3)
    desk.run(trigger={"once": True})
    assert [number for number, _ in batches(runs)] == [0], "once: all there is, in one batch, whatever the source's limits"
    query = desk.start(desk.transform(), trigger={"processingTime": "100 milliseconds"})
    try:
        for _ in range(2):
            desk.add(1)
            query.processAllAvailable()
    finally:
        query.stop()
    assert batches(runs) == [(0, False), (1, False), (2, True)]
    desk.check()


def value_and_key(row: Any) -> tuple[int, int]:
    return row.value, row.value % 7


def test_the_rate_source_goes_on_where_a_query_was_stopped(desk: Desk, runs: list[Run]) -> None:
    """It is stopped while a batch runs, as a rule; Spark runs that one again."""
    stream = desk.spark.readStream.format("rate").option("rowsPerSecond", 500).option("numPartitions", 3).load()

    def pipeline(rows: Any) -> Any:
        return counted(rows.map(value_and_key, "id long, key long", name="key"))

    for done in (2, 4):
        query = desk.start(desk.transform(pipeline, data=stream), trigger=AT_ONCE)
        try:
            until(
                lambda query=query, done=done: (
                    query.exception() or (query.lastProgress is not None and query.lastProgress.batchId >= done)
                ),
                f"batch {done}",
            )
        finally:
            query.stop()
        assert query.exception() is None
    rows = desk.rows()
    assert len(rows) >= 1000
    check_counts(rows, range(len(rows)))


# --- loops -------------------------------------------------------------------------------------------------------------


def as_number(row: Any) -> tuple[int, int, int]:
    return row.id, first(row.id), 0


def loop(stream: Any) -> Any:
    return stream.map(as_number, NUMBER, name="number").iterate("collatz", rounds)


def test_a_loop_in_a_batch_gives_what_a_sequential_computation_does(spark: SparkSession) -> None:
    numbers = spark.range(0, 500, 1, 3)
    check_collatz([tuple(row) for row in tg.transform(numbers, loop, slots=3).collect()], 500)


def test_records_leave_a_loop_in_the_micro_batch_that_they_came_in(desk: Desk, runs: list[Run]) -> None:
    desk.add(2)
    desk.run(desk.transform(loop))
    check_collatz([tuple(row) for row in desk.rows()], 2 * ROWS)
    desk.add(1)
    desk.run(desk.transform(loop, slots=3))
    check_collatz([tuple(row) for row in desk.rows()], 3 * ROWS)
    assert [number for number, _ in batches(runs)] == [0, 1, 2]


# --- together ----------------------------------------------------------------------------------------------------------


def test_two_queries_and_a_job_share_a_session(tmp_path: Path, spark: SparkSession, runs: list[Run]) -> None:
    """There are four task slots: the job keeps two of them, the queries take turns with the other two."""
    gate = tmp_path / "gate"
    job = tg.Job("ledger", spark, slots=2, snapshots=tg.Snapshots(to=str(tmp_path / "snapshots"), every="200 ms"))
    build_ledger(job, tg.sinks.parquet(tmp_path / "out"), rows=2000, rate=100, gate=gate)
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
    desks = [Desk(tmp_path / name, spark) for name in ("left", "right")]
    queries = []
    handle = job.start()
    try:
        with ThreadPoolExecutor() as pool:  # at the same time: each has Python processes of its own all the same
            frames = list(pool.map(Desk.transform, desks))
        queries = [each.start(frame, trigger=AT_ONCE) for each, frame in zip(desks, frames, strict=True)]
        for _ in range(3):
            for each in desks:
                each.add()
            for query in queries:
                query.processAllAvailable()
        gate.touch()
        assert handle.wait("2 minutes") is tg.Status.FINISHED
    finally:
        for query in queries:
            query.stop()
        if not handle.status.terminal:
            handle.cancel()
    for each in desks:
        each.check()
    check_ledger(committed(tmp_path / "out"), 2000)
    for name in {run.offers[0].transform for run in runs}:
        assert batches([run for run in runs if run.offers[0].transform == name]) == [(0, False), (1, True), (2, True)]
    assert len({run.offers[0].transform for run in runs}) == 2 and handle.failures == []
