"""Windows between DataFrames: in a batch they are Spark SQL's, in a query each is emitted once, their state is a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MINUTE_US = 60_000_000
WINDOWS: dict[str, tuple[Callable[[], Any], str]] = {
    "tumbling": (lambda: tg.tumbling("ts", "10 s"), "window(ts, '10 seconds')"),
    "tumbling with an offset": (
        lambda: tg.tumbling("ts", "10 s", offset="3 s"),
        "window(ts, '10 seconds', '10 seconds', '3 seconds')",
    ),
    "sliding": (lambda: tg.sliding("ts", "30 s", "10 s"), "window(ts, '30 seconds', '10 seconds')"),
    "sessions": (lambda: tg.sessions("ts", "7 s"), "session_window(ts, '7 seconds')"),
}


def events(spark: SparkSession, seed: int, *, unit_us: int) -> DataFrame:
    """Five minutes around 1970, in no order; some records have no time, and some no key."""
    rng = Random(seed)

    def time_us() -> int | None:
        time_us = rng.choice((rng.randint(-MINUTE_US, 4 * MINUTE_US), rng.randint(-60, 240) * 10**6))
        return None if rng.random() < 0.05 else time_us - time_us % unit_us

    rows = [(rng.choice((None, "a", "b", "c")), time_us(), rng.randint(0, 100)) for _ in range(400)]
    return spark.createDataFrame(rows, "key string, us long, n long").selectExpr("key", "timestamp_micros(us) ts", "n")


def bounds(frame: DataFrame) -> list[tuple[Any, ...]]:
    rows = frame.selectExpr("key", "unix_micros(window_start)", "unix_micros(window_end)", "n", "total").collect()
    return sorted(map(tuple, rows), key=repr)


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_in_a_batch_are_those_of_spark_sql(spark: SparkSession, kind: str) -> None:
    make, window = WINDOWS[kind]
    # Sessions have bounds in milliseconds, and those of Spark in microseconds.
    frame = events(spark, seed=len(kind), unit_us=1000 if kind == "sessions" else 1).repartition(3)

    def windows(stream: Any) -> Any:
        return stream.key_by("key").window(make()).aggregate("windows", n=tg.count(), total=tg.sum("n"))

    frame.createOrReplaceTempView("events")
    expected = spark.sql(
        f"SELECT key, w.start AS window_start, w.end AS window_end, n, total FROM "
        f"(SELECT key, {window} AS w, count(*) AS n, sum(n) AS total FROM events GROUP BY key, {window})"
    )
    assert bounds(tg.transform(frame, windows, slots=2)) == bounds(expected)


@pytest.mark.parametrize("how", ["inner", "full", "anti"])
def test_a_join_of_windows_in_a_batch_is_that_of_spark_sql(spark: SparkSession, how: str) -> None:
    left, right = (events(spark, seed, unit_us=1).where("ts IS NOT NULL") for seed in (1, 2))
    right = right.selectExpr("key", "ts AS other_ts", "n AS other")

    def joined(left: Any, right: Any) -> Any:
        windows = left.key_by("key").window(tg.tumbling("ts", "10 s"))
        return windows.join("joined", right.key_by("key").window(tg.tumbling("other_ts", "10 s")), how=how)

    left.selectExpr("*", "window(ts, '10 seconds') AS w").createOrReplaceTempView("lefts")
    right.selectExpr("*", "window(other_ts, '10 seconds') AS w").createOrReplaceTempView("rights")
    columns = "key, ts, n, w.start, w.end" if how == "anti" else "key, ts, n, other_ts, other, w.start, w.end"
    expected = spark.sql(f"SELECT {columns} FROM lefts {how} JOIN rights USING (key, w)")
    got = tg.transform({"left": left, "right": right}, joined, slots=2)
    assert sorted(map(tuple, got.collect()), key=repr) == sorted(map(tuple, expected.collect()), key=repr)


def minutes(stream: Any) -> Any:
    return (
        stream.with_watermark("ts", "10 s")
        .key_by("key")
        .window(tg.tumbling("ts", "1 min"))
        .aggregate("minutes", n=tg.count(), total=tg.sum("n"))
    )


def at(spark: SparkSession, *seconds: int) -> DataFrame:
    return spark.createDataFrame([("a", second * 10**6, 1) for second in seconds], "key string, us long, n long").selectExpr(
        "key", "timestamp_micros(us) ts", "n"
    )


def minutes_of_all(stream: Any) -> Any:
    """Without a key, so that one chain reads, makes time and fires."""
    windows = stream.with_watermark("ts", "10 s").window(tg.tumbling("ts", "1 min"))
    return windows.aggregate("minutes", key=tg.first("key"), n=tg.count(), total=tg.sum("n"))


def minutes_by_function(stream: Any) -> Any:
    """With all records of a window."""

    def minute(window: tg.KeyedWindow, records: Any) -> Any:
        yield window.key, window.start, window.end, len(records), sum(record.n for record in records)

    windows = stream.with_watermark("ts", "10 s").key_by("key").window(tg.tumbling("ts", "1 min"))
    returns = "key string, window_start timestamp, window_end timestamp, n long, total long"
    return windows.apply("minutes", minute, returns=returns, rows=True)


@pytest.mark.parametrize(("pipeline", "slots"), [(minutes, 2), (minutes_of_all, 1), (minutes_by_function, 2)])
def test_a_query_emits_each_window_once_over_its_restarts(
    spark: SparkSession, tmp_path: Path, pipeline: Callable[[Any], Any], slots: int
) -> None:
    def run(*seconds: int) -> list[tuple[Any, ...]]:
        at(spark, *seconds).coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))
        stream = spark.readStream.schema("key string, ts timestamp, n long").parquet(str(tmp_path / "in"))
        result = tg.transform(
            stream, pipeline, name="minutes", slots=slots, snapshots=tg.Snapshots(to=str(tmp_path / "snapshots"))
        )
        query = (
            result.writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        query.awaitTermination()
        written = spark.read.schema(result.schema).parquet(str(tmp_path / "out"))
        return [(start // MINUTE_US, n, total) for _, start, _, n, total in bounds(written)]

    assert run(5, 20) == []
    assert run(75, 10) == [(0, 3, 3)], "records of one micro-batch aren't late against one another"
    assert run(15, 80, 150) == [(0, 3, 3), (1, 2, 2)], "what comes for a window that was emitted is late"


def test_windows_without_a_watermark_are_refused_when_a_query_is_built(spark: SparkSession, tmp_path: Path) -> None:
    def pipeline(stream: Any) -> Any:
        return stream.key_by("value").window(tg.tumbling("timestamp", "1 min")).aggregate("minutes", n=tg.count())

    rate = spark.readStream.format("rate").load()
    with pytest.raises(tg.GraphError, match=r"'minutes' has windows of event time, and event time doesn't move"):
        tg.transform(rate, pipeline, name="no time", snapshots=tg.Snapshots(to=str(tmp_path / "snapshots")))


def test_the_state_of_windows_is_a_table(spark: SparkSession, tmp_path: Path) -> None:
    to = str(tmp_path / "savepoint")
    emitted = tg.transform(at(spark, 5, 20, 75, 75, 100), minutes, name="minutes", slots=2, savepoint_to=to)
    assert [(start // MINUTE_US, n) for _, start, _, n, _ in bounds(emitted)] == [(0, 2)]
    state = tg.read_state(spark, to, "windows", key="key").collect()
    assert [(row.key, row.window, row.value.n_count, row.value.total_sum) for row in state] == [("a", 60_000, 3, 3)]
