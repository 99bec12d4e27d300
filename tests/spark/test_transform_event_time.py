"""Event time between DataFrames: no record is late by the order in which Spark gives it, and time goes on where it was."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidegate as tg
from tests.spark.test_transform_streaming import batches, noted_runs
from tidegate.control.settings import Backend

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINUTE_MS, SECOND_MS = 60_000, 1_000
KEYS = 3
LATE = -1
RECORD, OUT = "key long, at long", "key long, at long, n long"
BACKENDS: dict[str, Backend] = {"heap": tg.Heap(), "rocksdb": tg.RocksDB(memory="16 MB")}
LONG_HEAP = [pytest.param("heap", marks=pytest.mark.long), "rocksdb"]


class Minutes(tg.KeyedProcess):
    """Counts the records of each minute, and tells at its end. Those that come behind it are late."""

    counts = tg.map("long", "long")

    def __init__(self, slots: Path | None) -> None:
        self._slots = slots

    def open(self, ctx: Any) -> None:
        if self._slots is not None:
            (self._slots / str(os.getpid())).touch()

    def process(self, record: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        end = (record.at // MINUTE_MS + 1) * MINUTE_MS
        if end <= ctx.watermark_ms:
            yield record.key, end, LATE
            return
        self.counts.put(end, self.counts.get(end, 0) + 1)
        ctx.timers.event_time(end)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[int, int, int | None]]:
        yield ctx.key, at, self.counts.get(at)
        self.counts.remove(at)


def minutes(stream: Any, slots: Path | None = None) -> Any:
    """`slots` is a folder, to which each slot adds a file with its process id as its name."""
    return stream.with_watermark("at", "0 s").key_by("key").process("minutes", Minutes(slots), returns=OUT)


def backwards(*seconds: int) -> list[tuple[int, int]]:
    """A record of each key at each of these seconds, the latest first."""
    return [(key, at * SECOND_MS) for at in sorted(seconds, reverse=True) for key in range(KEYS)]


def rows(minute: int, n: int) -> list[tuple[int, int, int]]:
    return [(key, minute * MINUTE_MS, n) for key in range(KEYS)]


class Query:
    """A streaming query of one file for each batch."""

    def __init__(self, spark: SparkSession, folder: Path, backend: str) -> None:
        self._spark = spark
        self._folder = folder
        self._backend = backend
        for name in ("in", "slots"):
            (folder / name).mkdir()

    def add(self, name: str, records: list[tuple[int, int]]) -> None:
        keys, times = zip(*records, strict=True)
        hidden = self._folder / "in" / f"_{name}"
        pq.write_table(pa.table({"key": pa.array(keys, pa.int64()), "at": pa.array(times, pa.int64())}), hidden)
        hidden.rename(self._folder / "in" / f"{name}.parquet")

    def start(self, *, slots: int = 2, **trigger: Any) -> Any:
        stream = self._spark.readStream.schema(RECORD).option("maxFilesPerTrigger", 1).parquet(str(self._folder / "in"))
        pipeline = functools.partial(minutes, slots=self._folder / "slots")
        frame = tg.transform(
            stream,
            pipeline,
            name="minutes",
            slots=slots,
            backend=BACKENDS[self._backend],
            tuning=tg.Tuning(max_batch_rows=10),
            snapshots=tg.Snapshots(to=str(self._folder / "state")),
        )
        return (
            frame.writeStream.format("parquet")
            .option("checkpointLocation", str(self._folder / "query"))
            .trigger(**(trigger or {"availableNow": True}))
            .start(str(self._folder / "out"))
        )

    def kill_slots(self) -> None:
        """Kill the Python processes in which Spark runs the slots; not the process that forks them."""
        found = [int(each.name) for each in (self._folder / "slots").iterdir()]
        assert found
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    def run(self, **rest: Any) -> None:
        query = self.start(**rest)
        try:
            assert query.awaitTermination(240)
        finally:
            query.stop()

    def check(self, *expected: list[tuple[int, int, int]]) -> None:
        found = sorted(tuple(row) for row in self._spark.read.parquet(str(self._folder / "out")).collect())
        assert found == sorted(row for each in expected for row in each)


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> Query:
    return Query(spark, tmp_path, request.param)


@pytest.mark.parametrize("query", LONG_HEAP, indirect=True)
def test_a_query_that_is_started_again_opens_no_window_that_was_emitted(query: Query) -> None:
    query.add("1", backwards(*range(90)))
    query.run()
    query.check(rows(1, 60))  # nothing late, and the slot without records holds nothing back
    query.add("2", backwards(30, 100, 150))
    query.run(slots=1)
    query.check(rows(1, 60), rows(1, LATE), rows(2, 31))


@pytest.mark.long
@pytest.mark.parametrize("query", BACKENDS, indirect=True)
def test_a_query_whose_slots_were_lost_between_two_batches_opens_no_window_that_was_emitted(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = noted_runs(monkeypatch)
    running = query.start(processingTime="0 seconds")
    try:
        query.add("1", backwards(*range(90)))
        running.processAllAvailable()
        query.kill_slots()
        time.sleep(1)
        query.add("2", backwards(30, 100, 150))
        running.processAllAvailable()
    finally:
        running.stop()
    assert batches(runs) == [(0, False), (1, False)]
    query.check(rows(1, 60), rows(1, LATE), rows(2, 31))


def test_in_a_batch_nothing_is_late_and_its_savepoint_goes_on_with_its_event_time(
    spark: SparkSession, tmp_path: Path
) -> None:
    history = spark.createDataFrame(backwards(*range(90)), RECORD).coalesce(1)
    quick = tg.Tuning(max_batch_rows=10)
    drained = tg.transform(history, minutes, slots=2, tuning=quick).collect()
    assert sorted(map(tuple, drained)) == sorted(rows(1, 60) + rows(2, 30))
    kept = tg.transform(history, minutes, slots=2, tuning=quick, savepoint_to=str(tmp_path / "kept")).collect()
    assert sorted(map(tuple, kept)) == sorted(rows(1, 60))
    more = spark.createDataFrame(backwards(30, 100), RECORD)
    rest = tg.transform(more, minutes, slots=2, restore_from=str(tmp_path / "kept")).collect()
    assert sorted(map(tuple, rest)) == sorted(rows(1, LATE) + rows(2, 31))
