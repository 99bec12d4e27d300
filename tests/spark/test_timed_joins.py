"""Joins by event time between DataFrames: in a batch they are Spark SQL's, in a query each row is emitted once."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import tidegate as tg

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def records(spark: SparkSession, seed: int, names: tuple[str, str]) -> DataFrame:
    """Some seconds in microseconds, in no order; some records have no time, and some no key. No two records of a key have
    one time, since Spark would take any of them for the latest version."""
    rng = Random(seed)
    times: dict[tuple[str | None, int | None], int] = {}
    for number in range(150):
        time_us = rng.choice((rng.randint(-2_000_000, 4_000_000), rng.randint(-20, 40) * 100_000))
        times[rng.choice((None, "a", "b", "c", "d")), time_us] = number
    rows = [(key, None if number % 20 == 0 else time_us, number) for (key, time_us), number in times.items()]
    time, n = names
    return spark.createDataFrame(rows, "key string, us long, n long").selectExpr(
        "key", f"timestamp_micros(us) {time}", f"n {n}"
    )


def test_joins_in_a_batch_are_those_of_spark_sql(spark: SparkSession) -> None:
    left, right = records(spark, 1, ("ts", "n")).repartition(3), records(spark, 2, ("since", "m"))

    def joined(left: Any, right: Any) -> Any:
        keyed = right.key_by("key")
        pairs = left.key_by("key").join("near", keyed, how="full", between=("-100 ms", "300 ms"), times=("ts", "since"))
        latest = left.key_by("key").join("latest", keyed, as_of=("ts", "since"))
        return pairs.select("n", "m", "'near' AS kind").union(latest.select("n", "m", "'latest' AS kind"))

    left.createOrReplaceTempView("lefts")
    right.createOrReplaceTempView("rights")
    expected = spark.sql(
        """
        SELECT n, m, 'near' AS kind FROM lefts FULL JOIN rights ON lefts.key = rights.key
            AND since BETWEEN ts - INTERVAL '0.1' SECOND AND ts + INTERVAL '0.3' SECOND
        UNION ALL
        SELECT n, max_by(m, since), 'latest' AS kind
        FROM lefts JOIN rights ON lefts.key = rights.key AND since <= ts GROUP BY n
        """
    )
    found = tg.transform({"left": left, "right": right}, joined, slots=2)
    assert sorted(map(tuple, found.collect()), key=str) == sorted(map(tuple, expected.collect()), key=str)


def test_a_query_emits_each_pair_and_each_record_alone_once_over_its_restarts(spark: SparkSession, tmp_path: Path) -> None:
    def pipeline(stream: Any) -> Any:
        timed = stream.with_watermark("ts", "10 s")
        opened = timed.filter("what = 'open'").select("key", "ts", "n").key_by("key")
        closed = timed.filter("what = 'close'").select("key", "ts AS closed", "n AS m").key_by("key")
        return opened.join("closed", closed, how="left", between=(0, "1 minute"), times=("ts", "closed")).select("n", "m")

    def run(*rows: tuple[str, str, int, int]) -> list[tuple[Any, ...]]:
        frame = spark.createDataFrame(rows, "what string, key string, s long, n long")
        frame = frame.selectExpr("what", "key", "timestamp_seconds(s) ts", "n")
        frame.coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))
        stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "in"))
        result = tg.transform(
            stream, pipeline, name="closed", slots=2, snapshots=tg.Snapshots(to=str(tmp_path / "snapshots"))
        )
        query = (
            result.writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        query.awaitTermination()
        written = spark.read.schema(result.schema).parquet(str(tmp_path / "out"))
        return sorted(map(tuple, written.collect()), key=str)

    assert run(("open", "a", 5, 1), ("open", "b", 6, 2), ("open", "a", 20, 3)) == []
    assert run(("close", "a", 30, 10)) == [(1, 10), (3, 10)]
    assert run(("open", "c", 100, 4)) == [(1, 10), (2, None), (3, 10)], "b's minute is over"
    assert run(("close", "b", 50, 11), ("close", "c", 101, 12)) == [(1, 10), (2, None), (3, 10), (4, 12)], (
        "b's close is late"
    )
