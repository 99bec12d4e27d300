# ruff: noqa: N803  (Spark's names)
"""Whatever plan Spark makes of a streaming query, the slots run once in each of its micro-batches, also in those that have
no data for them. The output is that of the same query without the transform, and the state has every record once."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row
from pyspark.sql import functions as f
from pyspark.sql.streaming import StatefulProcessor

import tidegate as tg
from tests.jobs import until
from tests.spark.processors import ROCKSDB_STATE_STORE
from tests.spark.test_transform import check_counts, counted
from tests.spark.test_transform_streaming import ROWS, Desk, batches, noted_runs
from tidegate.dataframes.gathering import Run
from tidegate.spark import unused_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ADAPTIVE = "spark.sql.adaptive.streaming.stateless.enabled"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    return noted_runs(monkeypatch)


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    """Of the same Spark, with settings of its own."""
    session = spark.newSession()
    session.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        ROCKSDB_STATE_STORE,
    )
    session.conf.set("spark.sql.session.timeZone", "UTC")
    return session


@pytest.fixture
def desk(tmp_path: Path, session: SparkSession) -> Desk:
    return Desk(tmp_path, session)


def ran(runs: list[Run]) -> list[int | None]:
    return [number for number, _ in batches(runs)]


def windows(rows: DataFrame) -> DataFrame:
    return (
        rows.withColumn("at", f.timestamp_seconds("id"))
        .withWatermark("at", "0 seconds")
        .groupBy(f.window("at", "10 seconds"))
        .count()
        .select(f.unix_timestamp("window.start").alias("start"), "count")
    )


# --- seen --------------------------------------------------------------------------------------------------------------


def test_a_batch_that_only_an_operator_of_sparks_behind_asked_for(desk: Desk, runs: list[Run]) -> None:
    for number in range(2):
        desk.add(1)
        desk.run(windows(desk.transform()))
        assert ran(runs) == list(range(2 * number + 2)), "each file makes a batch with data and one without"
    last = desk.files * ROWS - 1
    assert {(row.start, row["count"]) for row in desk.rows()} == {(at, 10) for at in range(0, last // 10 * 10, 10)}
    assert desk.snapshots() == [2, 3]


@pytest.mark.parametrize("adaptive", ["true", "false"])
def test_a_batch_that_has_data_for_another_stream_only(desk: Desk, runs: list[Run], adaptive: str) -> None:
    desk.spark.conf.set(ADAPTIVE, adaptive)
    other = Desk(desk.folder / "beside", desk.spark)
    desk.add(1)
    for _ in range(2):
        desk.run(desk.transform().union(other.stream().selectExpr("id", "key", "-1L as n")))
        other.add(1)
    desk.add(1)
    desk.run(desk.transform().union(other.stream().selectExpr("id", "key", "-1L as n")))
    rows = desk.rows()
    check_counts([row for row in rows if row.n > 0], range(2 * ROWS))
    assert sorted(row.id for row in rows if row.n < 0) == list(range(2 * ROWS))
    assert ran(runs) == list(range(3))


# --- foreachBatch ------------------------------------------------------------------------------------------------------


def run_foreach(desk: Desk, write: Callable[[DataFrame, int], None], frame: DataFrame | None = None) -> None:
    query = (
        (desk.transform() if frame is None else frame)
        .writeStream.foreachBatch(write)
        .trigger(availableNow=True)
        .option("checkpointLocation", str(desk.folder / "checkpoint"))
        .start()
    )
    try:
        assert query.awaitTermination(240)
    finally:
        query.stop()


def use(batch: DataFrame) -> None:
    batch.count()


@pytest.mark.long
@pytest.mark.parametrize("adaptive", ["true", "false"])
def test_a_function_of_foreach_batch_may_use_a_batch_more_than_once(desk: Desk, runs: list[Run], adaptive: str) -> None:
    desk.spark.conf.set(ADAPTIVE, adaptive)
    desk.add(3)
    found: dict[int, list[Any]] = {}

    def write(batch: DataFrame, number: int) -> None:
        if number == 1:
            batch.cache()
        assert batch.isEmpty() is False
        found[number] = batch.collect()
        assert sorted(batch.collect()) == sorted(found[number])
        assert batch.limit(3).count() == 3

    run_foreach(desk, write)
    check_counts([row for rows in found.values() for row in rows], range(3 * ROWS))


@pytest.mark.long
def test_that_no_batch_is_used_is_logged_while_the_query_runs(
    desk: Desk, runs: list[Run], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, runs_seen = unused_batches._look, threading.Event()

    def noted(*args: Any) -> set[str]:
        if found := look(*args):
            runs_seen.set()
        return found

    monkeypatch.setattr(unused_batches, "_look", noted)
    monkeypatch.setattr(unused_batches, "LOOK_EVERY_S", 0.1)
    desk.spark.conf.set(ADAPTIVE, "false")
    desk.add(3)

    def told() -> list[str]:
        return [each.getMessage() for each in caplog.records if "without running the transform" in each.getMessage()]

    def wait(batch: DataFrame, number: int) -> None:
        assert runs_seen.wait(20), "someone looks at the queries that run"
        until(lambda: number < 2 or told(), "the warning", patience_s=20)

    run_foreach(desk, wait)
    (warning,) = told()
    assert ran(runs) == [] and desk.snapshots() == []
    assert re.match(r"Job 'counts': Spark has committed micro-batch [01] of the query .*batch.count\(\) does", warning)
    caplog.clear()
    desk.add(3)
    other = Desk(desk.folder / "other", desk.spark)
    other.add(3)

    def use_and_wait(batch: DataFrame, number: int) -> None:
        batch.count()
        time.sleep(0.5)

    run_foreach(other, use_and_wait)
    assert told() == []


@pytest.mark.long
def test_a_batch_that_a_function_does_not_use_is_told_by_its_number(desk: Desk, runs: list[Run]) -> None:
    """Without adaptive execution Spark does nothing for it. With it, all stages but the last have run."""
    desk.add(2)
    desk.spark.conf.set(ADAPTIVE, "true")
    run_foreach(desk, lambda batch, number: None)
    assert ran(runs) == [0, 1]
    desk.spark.conf.set(ADAPTIVE, "false")
    desk.add(3)
    with pytest.raises(
        StreamingQueryException,
        match=(
            r"(?s)has committed micro-batch 3 of the query .* without running the transform 'counts', so their records are "
            r"not in its state, and micro-batch 4 can't run: .*restore_from='.*snapshots/counts'"
        ),
    ):
        run_foreach(desk, lambda batch, number: None if number == 3 else use(batch))
    assert ran(runs) == [0, 1, 2, 4]
    with pytest.raises(
        StreamingQueryException,
        match=(
            r"(?s)resumes from the snapshot of micro-batch 3, and .* has those of the micro-batches \[1, 2\]: .* "
            r"If no folder was moved or deleted, Spark has committed the batches in between without running"
        ),
    ):
        run_foreach(desk, lambda batch, number: use(batch))


# --- refused -----------------------------------------------------------------------------------------------------------


def test_a_query_of_another_session_is_refused_without_another_try(
    desk: Desk, spark: SparkSession, tmp_path: Path, runs: list[Run]
) -> None:
    """A union belongs to the session of its first DataFrame, and its query is started there."""
    desk.add(1)
    other = Desk(tmp_path / "other", spark.newSession())
    other.add(1)
    rows = other.stream().select("id").union(desk.transform().select("id"))
    with pytest.raises(
        StreamingQueryException,
        match=r"JobError: query \S+ .* or it belongs to another session.* Build the transform .* DataFrames of one session",
    ):
        desk.run(rows)
    assert len(runs) == 1


# --- every operator of Spark's -----------------------------------------------------------------------------------------


class Seen(StatefulProcessor):
    """One of Spark's own."""

    def init(self, handle: Any) -> None:
        self.seen = handle.getValueState("seen", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        (n,) = self.seen.get() or (0,)
        for row in sorted(rows, key=lambda row: row.id):
            n += 1
            yield Row(id=row.id, key=key[0])
        self.seen.update((n,))


def timed(rows: DataFrame) -> DataFrame:
    return rows.withColumn("at", f.timestamp_seconds("id")).withWatermark("at", "0 seconds")


def first_and_last(rows: DataFrame) -> DataFrame:
    """One row for each window of ten, when it is over."""
    return timed(rows).groupBy(f.window("at", "10 seconds")).agg(f.max("id").alias("id")).selectExpr("id", "id % 7 as key")


def by_spark(rows: DataFrame) -> DataFrame:
    return timed(rows).groupBy("key").transformWithState(Seen(), "id long, key long", "Append", "EventTime")


def joined(rows: DataFrame, beside: Desk, how: str) -> DataFrame:
    """With a stream in which every second row is missing."""
    left, right = timed(rows), timed(beside.stream().where("id % 2 = 0").toDF("id", "key"))
    right = right.selectExpr("id as id2", "at as at2")
    return left.join(right, f.expr("id = id2 and at2 = at"), how).select("id", "key")


OPERATORS: dict[str, Callable[[DataFrame, Desk], DataFrame]] = {
    "nothing": lambda rows, beside: rows,
    "a window": lambda rows, beside: first_and_last(rows),
    "dropDuplicates": lambda rows, beside: timed(rows).dropDuplicates(["id", "at"]).select("id", "key"),
    "dropDuplicates of keys": lambda rows, beside: rows.select("key").dropDuplicates().selectExpr("key as id", "key"),
    "dropDuplicatesWithinWatermark": lambda rows, beside: (
        timed(rows).dropDuplicatesWithinWatermark(["id"]).select("id", "key")
    ),
    "an inner join of streams": lambda rows, beside: joined(rows, beside, "inner"),
    "a left join of streams": lambda rows, beside: joined(rows, beside, "leftOuter"),
    "transformWithState": lambda rows, beside: by_spark(rows),
    "a union": lambda rows, beside: rows.union(beside.stream().selectExpr("id + 1000000 as id", "key")),
    "a join with an empty table": lambda rows, beside: rows.join(
        rows.sparkSession.createDataFrame([], "key long"), "key"
    ).select("id", "key"),
    "a left join with an empty table": lambda rows, beside: rows.join(
        rows.sparkSession.createDataFrame([], "key long, x long"), "key", "left"
    ).select("id", "key"),
    "a filter": lambda rows, beside: rows.where("id < 0"),
    "an exchange": lambda rows, beside: rows.repartition(3, "key"),
    "coalesce": lambda rows, beside: rows.coalesce(1),
}


@dataclass
class Side:
    """The same query, with the transform or without, in folders of its own."""

    desk: Desk
    query: Callable[[], DataFrame]
    rows: list[tuple[int, int]] = field(default_factory=list)

    def run(self) -> list[tuple[int, int]]:
        self.desk.run(self.query(), checkpoint=f"checkpoint-{id(self)}")
        return sorted((row.id, row.key) for row in self.desk.rows())


@pytest.mark.long
@pytest.mark.parametrize("adaptive", ["true", "false"])
@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_any_operator_of_sparks_before_and_behind(
    tmp_path: Path, spark: SparkSession, session: SparkSession, runs: list[Run], place: str, operator: str, adaptive: str
) -> None:
    session.conf.set(ADAPTIVE, adaptive)
    source, beside = Desk(tmp_path / "source", session), Desk(tmp_path / "beside", session)
    ours, theirs = Desk(tmp_path / "ours", session), Desk(tmp_path / "theirs", session)
    operate = OPERATORS[operator]

    def transform(rows: DataFrame) -> DataFrame:
        transformed: DataFrame = ours.transform(data=rows).select("id", "key")
        return transformed

    def with_transform() -> DataFrame:
        if place == "before":
            return transform(operate(source.stream(), beside))
        return operate(transform(source.stream()), beside)

    sides = [Side(ours, with_transform), Side(theirs, lambda: operate(source.stream(), beside))]
    for number in range(4):
        # Some batches have data for one of the streams only.
        for each in ([source, beside], [source], [beside], [source, beside])[number]:
            each.add(1)
        found = [side.run() for side in sides]
        assert found[0] == found[1], f"after run {number}"
        assert ran(runs) == list(range(len(runs))), "each batch once, none left out"
    state = tg.read_state(spark, str(ours.folder / "snapshots" / "counts"), "count", key="key")
    taken = found[1] if place == "before" else [(number, number % 7) for number in range(source.files * ROWS)]
    assert {row.key: row.value for row in state.collect()} == Counter(key for _, key in taken)


@pytest.mark.long
@pytest.mark.parametrize("adaptive", ["true", "false"])
def test_a_limit_and_a_transform_whose_output_is_used_twice(
    desk: Desk, spark: SparkSession, runs: list[Run], adaptive: str
) -> None:
    desk.spark.conf.set(ADAPTIVE, adaptive)
    for number in range(3):
        desk.add(1)
        result = desk.transform()
        desk.run(result.limit(150).union(result.where("id < 0")))
        assert len(desk.rows()) == min(150, desk.files * ROWS)
        assert ran(runs)[-1] == number
    state = tg.read_state(spark, str(desk.folder / "snapshots" / "counts"), "count", key="key")
    assert {row.key: row.value for row in state.collect()} == Counter(number % 7 for number in range(desk.files * ROWS))


@pytest.mark.long
def test_inputs_that_take_turns(desk: Desk, runs: list[Run]) -> None:
    other = Desk(desk.folder / "beside", desk.spark)
    for turn in range(4):
        (desk, other)[turn % 2].add(1)
        desk.run(
            desk.transform(
                lambda left, right: counted(left.union(right)), data={"left": desk.stream(), "right": other.stream()}
            )
        )
    assert ran(runs) == list(range(4))
    assert sorted(row.id for row in desk.rows()) == sorted(2 * list(range(2 * ROWS)))
    assert Counter(row.key for row in desk.rows()) == {
        key: max(row.n for row in desk.rows() if row.key == key) for key in range(7)
    }
