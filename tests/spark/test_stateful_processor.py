# ruff: noqa: N803  (Spark's names)
"""`tg.transform_with_state`: Spark's stateful processors on Tidegate, on a real Spark, `local[4]`.

That the results are Spark's own is tested in test_processors_on_both_engines.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import tidegate as tg
from tests.faults.accounts import POISON, Driver
from tidegate.errors import JobError, SchemaError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "key string, amount long, at timestamp"
SUMS = "key string, total long, rows long"
HEAP, ROCKSDB = pytest.param(tg.Heap(), id="heap"), pytest.param(tg.RocksDB(memory="64 MB"), id="rocksdb")
LONG_ROCKSDB = pytest.param(tg.RocksDB(memory="64 MB"), id="rocksdb", marks=pytest.mark.long)


class Sums(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "sum long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        amounts = [row.amount for row in rows]
        before = self.total.get()
        total = sum(amounts) + (before[0] if before is not None else 0)
        self.total.update((total,))
        yield Row(key=key[0], total=total, rows=len(amounts))

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.total.update((initialState.start,))


class OldSums(Sums):
    def init(self, handle: Any) -> None:
        super().init(handle)
        self.old = handle.getListState("old", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.old.appendValue((1,))
        return super().handleInputRows(key, rows, timerValues)


class NewSums(Sums):
    def init(self, handle: Any) -> None:
        super().init(handle)
        handle.deleteIfExists("old")


class PandasSums(Sums):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        frames = list(rows)
        assert all(list(frame.index) == list(range(len(frame))) for frame in frames)
        for row in super().handleInputRows(key, (row for frame in frames for row in frame.itertuples()), timerValues):
            yield pd.DataFrame({"rows": [row.rows], "key": [row.key], "total": [row.total]})

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.total.update((initialState["start"].iloc[0],))


class Everything(StatefulProcessor):
    """All kinds of state and their methods, told by rows of text."""

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "amount long, at timestamp, tags array<string>")
        self.all = handle.getListState("all", "amount long")
        self.by_amount = handle.getMapState("by amount", "amount long", "times long, key string")
        self.by_both = handle.getMapState("by both", "amount long, key string", "times long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        told: list[Any] = [self.last.exists(), self.last.get(), self.all.exists(), self.by_amount.exists()]
        assert (timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs()) == (-1, -1)
        for row in rows:
            self.last.update([row.amount, None, ["x", key[0]]])
            self.all.appendValue((row.amount,))
            times = self.by_amount.getValue((row.amount,))
            self.by_amount.updateValue((row.amount,), (1 if times is None else times[0] + 1, key[0]))
            self.by_both.updateValue((row.amount, key[0]), (1,))
        self.all.appendList([(100,), (200,)])
        told += [
            list(self.all.get()),
            sorted(self.by_amount.iterator()),
            sorted(self.by_both.keys()),
            self.by_amount.containsKey((1,)),
            self.by_both.containsKey((1, "b")),
            sorted(self.by_amount.values()),
        ]
        self.by_amount.removeKey((1,))
        self.all.put(list(self.all.get())[:1])
        told += [sorted(self.by_amount.keys()), list(self.all.get())]
        yield Row(key=key[0], told=json.dumps(told))


class Timed(StatefulProcessor):
    """Tells of rows and of timers. A row sets a timer at its amount."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.seen = handle.getValueState("seen", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.handle.registerTimer(row.amount)
            yield Row(
                key=key[0],
                what="row",
                at=row.amount,
                watermark=timerValues.getCurrentWatermarkInMs(),
                timers=list(self.handle.listTimers()),
            )

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        timers = list(self.handle.listTimers())
        yield Row(
            key=key[0],
            what="timer",
            at=expiredTimerInfo.getExpiryTimeInMs(),
            watermark=timerValues.getCurrentWatermarkInMs(),
            timers=timers,
        )


TIMED = "key string, what string, at long, watermark long, timers array<long>"


class TimedWithMoments(Timed):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        return map(with_moment, super().handleInputRows(key, rows, timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        return map(with_moment, super().handleExpiredTimer(key, timerValues, expiredTimerInfo))


def with_moment(row: Row) -> Row:
    return Row(moment=datetime.fromtimestamp(row.at / 1000, UTC), **row.asDict())


class Forgets(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.short = handle.getValueState("short", "n long", ttlDurationMs=1)
        self.long = handle.getValueState("long", "n long", ttlDurationMs=3_600_000)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        assert timerValues.getCurrentProcessingTimeInMs() > 1_600_000_000_000
        yield Row(key=key[0], short=self.short.exists(), long=self.long.exists())
        self.short.update((1,))
        self.long.update((1,))


class Bad(Sums):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        yield Row(key=key[0], total="many", rows=1)


class Desk:
    """A folder with input files, each of which makes a micro-batch."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder = folder
        self.spark = spark
        self.files = 0
        (folder / "in").mkdir()

    def add(self, *rows: tuple[str, int] | tuple[str, int, int]) -> None:
        """Of key, amount and second."""
        lines = [
            json.dumps(
                {"key": key, "amount": amount, "at": f"1970-01-01T00:{rest[0] // 60:02}:{rest[0] % 60:02}Z"}
                if rest
                else {"key": key, "amount": amount}
            )
            for key, amount, *rest in rows
        ]
        path = self.folder / f"{self.files}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (1e9 + self.files, 1e9 + self.files))
        path.rename(self.folder / "in" / f"{self.files:05}.json")
        self.files += 1

    def stream(self) -> DataFrame:
        return self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self.folder / "in"))

    def transform(
        self,
        processor: StatefulProcessor,
        output: str,
        *more: Any,
        data: DataFrame | None = None,
        in_pandas: bool = False,
        slots: int = 2,
        **rest: Any,
    ) -> DataFrame:
        function = tg.transform_with_state_in_pandas if in_pandas else tg.transform_with_state
        return function(
            (self.stream() if data is None else data).groupBy("key"),
            processor,
            output,
            *more,
            name="sums",
            slots=slots,
            snapshots=tg.Snapshots(to=str(self.folder / "snapshots")),
            **rest,
        )

    def run(self, frame: DataFrame) -> None:
        query = (
            frame.writeStream.format("parquet")
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(self.folder / "out"))
        )
        try:
            assert query.awaitTermination(240)
        finally:
            query.stop()

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(tuple(row) for row in self.spark.read.parquet(str(self.folder / "out")).collect())


@pytest.fixture
def desk(tmp_path: Path, spark: SparkSession) -> Desk:
    return Desk(tmp_path, spark)


# -------------------------------------------------------------------------------------------------------------- queries


@pytest.mark.parametrize("in_pandas", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("backend", [HEAP, LONG_ROCKSDB])
def test_a_query_goes_on_after_a_restart_with_other_slots(desk: Desk, in_pandas: bool, backend: Any) -> None:
    desk.add(("a", 1), ("b", 10), ("a", 2))
    desk.add(("a", 4), ("c", 7))
    desk.run(desk.transform(PandasSums() if in_pandas else OldSums(), SUMS, in_pandas=in_pandas, slots=2, backend=backend))
    desk.add(("b", 5), ("b", 6), ("a", 1))
    desk.run(desk.transform(PandasSums() if in_pandas else NewSums(), SUMS, in_pandas=in_pandas, slots=3, backend=backend))
    assert desk.rows() == [("a", 3, 2), ("a", 7, 1), ("a", 8, 1), ("b", 10, 1), ("b", 21, 2), ("c", 7, 1)]
    state = tg.read_state(desk.spark, str(desk.folder / "snapshots" / "sums"), operator="sums", state="total")
    assert sorted((row.key, row.value.sum) for row in state.collect()) == [("a", 8), ("b", 21), ("c", 7)]


@pytest.mark.long  # as on Spark's engine: test_processors_on_both_engines.py, likewise below
def test_an_initial_state_is_there_in_the_first_micro_batch(desk: Desk) -> None:
    initial = desk.spark.createDataFrame([("a", 100), ("z", 50)], "name string, start long").groupBy("name")
    desk.add(("a", 1))
    desk.run(desk.transform(Sums(), SUMS, "Append", "None", initial))
    desk.add(("z", 1), ("a", 1))
    desk.run(desk.transform(Sums(), SUMS, "Append", "None", initial))
    assert desk.rows() == [("a", 101, 1), ("a", 102, 1), ("z", 51, 1)]


@pytest.mark.long
@pytest.mark.parametrize("backend", [HEAP, ROCKSDB])
def test_timers_of_event_time_and_late_rows(desk: Desk, backend: Any) -> None:
    for amount, second in ((9000, 10), (20_000, 20), (1, 8), (12_000, 25)):
        desk.add(("a", amount, second))
    frame = desk.transform(
        Timed(), TIMED, "Append", "EventTime", data=desk.stream().withWatermark("at", "1 second"), backend=backend
    )
    desk.run(frame)
    # Watermarks are 0, 9, 19, 19 and then 24 seconds. The third row is late by 9, the last one's timer due at once.
    assert desk.rows() == [
        ("a", "row", 9000, 0, [9000]),
        ("a", "row", 12_000, 19_000, [12_000, 20_000]),
        ("a", "row", 20_000, 9000, [9000, 20_000]),
        ("a", "timer", 9000, 9000, [9000, 20_000]),
        ("a", "timer", 12_000, 19_000, [12_000, 20_000]),
        ("a", "timer", 20_000, 24_000, [20_000]),
    ]


def test_timers_fire_in_micro_batches_without_data_where_what_follows_makes_spark_run_them(desk: Desk) -> None:
    for second in (10, 20):
        desk.add(("a", 1000 * second, second))
    frame = desk.transform(
        TimedWithMoments(),
        TIMED + ", moment timestamp",
        "Append",
        "EventTime",
        data=desk.stream().withWatermark("at", "0 seconds"),
        event_time_column="moment",
    )
    desk.run(frame.dropDuplicatesWithinWatermark(["key", "what", "at"]).drop("moment"))
    assert desk.rows() == [
        ("a", "row", 10_000, 0, [10_000]),
        ("a", "row", 20_000, 10_000, [10_000, 20_000]),
        ("a", "timer", 10_000, 10_000, [10_000, 20_000]),
        ("a", "timer", 20_000, 20_000, [20_000]),
    ]


@pytest.mark.long
@pytest.mark.parametrize("backend", [HEAP, ROCKSDB])
def test_state_with_a_ttl_is_forgotten(desk: Desk, backend: Any) -> None:
    """Whether it was in the slots since, or comes from a snapshot."""
    for slots in (2, 1):
        desk.add(("a", 1))
        desk.add(("a", 1))
        desk.run(
            desk.transform(
                Forgets(),
                "key string, short boolean, long boolean",
                "Update",
                "ProcessingTime",
                slots=slots,
                backend=backend,
            )
        )
    assert desk.rows() == [("a", False, False), *3 * [("a", False, True)]]


# ---------------------------------------------------------------------------------------------------------------- batch


@pytest.mark.parametrize("in_pandas", [False, True])
def test_a_batch_with_an_initial_state(spark: SparkSession, in_pandas: bool) -> None:
    data = spark.range(0, 1000).selectExpr("concat('k', id % 7) as key", "id as amount")
    initial = spark.createDataFrame([("k0", 10**6), ("k9", 5)], "key string, start long").groupBy("key")
    function = tg.transform_with_state_in_pandas if in_pandas else tg.transform_with_state
    found = function(
        data.groupBy("key"),
        statefulProcessor=PandasSums() if in_pandas else Sums(),
        outputStructType=SUMS,
        outputMode="Append",
        timeMode="None",
        initialState=initial,
        slots=2,
    ).collect()
    expected = [
        (f"k{each}", sum(range(each, 1000, 7)) + (10**6 if each == 0 else 0), len(range(each, 1000, 7))) for each in range(7)
    ]
    assert sorted(map(tuple, found)) == expected


@pytest.mark.parametrize("backend", [HEAP, LONG_ROCKSDB])
def test_all_kinds_of_state_in_a_batch(spark: SparkSession, backend: Any) -> None:
    data = spark.createDataFrame([("a", 1), ("a", 2), ("a", 1)], "key string, amount long").coalesce(1)
    (row,) = tg.transform_with_state(
        data.groupBy("key"), Everything(), "key string, told string", slots=1, backend=backend
    ).collect()
    assert json.loads(row.told) == [
        False,
        None,
        False,
        False,
        [[1], [2], [1], [100], [200]],
        [[[1], [2, "a"]], [[2], [1, "a"]]],
        [[1, "a"], [2, "a"]],
        True,
        False,
        [[1, "a"], [2, "a"]],
        [[2]],
        [[1]],
    ]


@pytest.mark.parametrize("backend", [HEAP, LONG_ROCKSDB])
def test_timers_of_processing_time_in_a_batch(spark: SparkSession, backend: Any) -> None:
    data = spark.createDataFrame([("a", 5), ("a", 4), ("b", 2**60)], "key string, amount long").coalesce(1)
    found = tg.transform_with_state(
        data.groupBy("key"), Timed(), TIMED, "Append", "ProcessingTime", slots=2, backend=backend
    ).collect()
    assert sorted(map(tuple, found)) == [
        ("a", "row", 4, -1, [4, 5]),
        ("a", "row", 5, -1, [5]),
        ("a", "timer", 4, -1, [4, 5]),
        ("a", "timer", 5, -1, [5]),
        ("b", "row", 2**60, -1, [2**60]),
    ]


# --------------------------------------------------------------------------------------------------------------- errors


def test_a_row_that_does_not_fit_is_named_with_what_to_change(spark: SparkSession) -> None:
    data = spark.createDataFrame([("a", 1)], "key string, amount long")
    with pytest.raises(
        Exception,
        match=r"operator 'bad' is declared with the output .*total.*Row\(key='a', total='many', "
        r"rows=1\) doesn't fit.*Change what the processor yields",
    ):
        tg.transform_with_state(data.groupBy("key"), Bad(), SUMS, name="bad", slots=1).collect()


@pytest.mark.parametrize("backend", [pytest.param("heap", marks=pytest.mark.long), "rocksdb"])
def test_an_error_in_a_processor_ends_the_query_which_goes_on_when_it_is_mended(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str], backend: str
) -> None:
    """With an initial state, all kinds of state, timers and late rows; in the middle of a batch; at other slots then. In the
    batch before, a process is killed, which nobody notices."""
    plan = {"files": 4, "strikes": {"rows 75": "process", "poison 140": "nobody"}, "slots": [2, 3], "backend": backend}
    driver = Driver(spark.newSession(), tmp_path, plan)
    driver.run()
    told = capfd.readouterr().out
    assert re.findall(r"start \d with (\d) slots", told) == ["2", "3"]
    assert re.search(
        rf"(?s)the query failed.*in operator 'accounts', at the records of key \('k0',\), the first of them "
        rf"Row\(.*{POISON}",
        told,
    )
    driver.check()


@pytest.mark.long
def test_a_snapshot_that_a_slot_cant_write_isnt_a_batch_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    """Else timers would fire too early, and rows would be late that aren't, in some slots or in all."""
    plan = {"files": 7, "strikes": {"rows 190": "write", "rows 310": "write"}, "slots": [2], "backend": "heap"}
    driver = Driver(spark.newSession(), tmp_path, plan)
    driver.run()
    driver.check()


def test_what_is_asked_for_wrongly_is_said_at_once(spark: SparkSession) -> None:
    data = spark.createDataFrame([("a", 1)], "key string, amount long")
    by_key = data.groupBy("key")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("instance of a subclass", lambda: tg.transform_with_state(by_key, Sums, SUMS)),  # type: ignore[arg-type]
        ("'Append' or 'Update'", lambda: tg.transform_with_state(by_key, Sums(), SUMS, "Complete")),
        ("'None', 'ProcessingTime' or 'EventTime'", lambda: tg.transform_with_state(by_key, Sums(), SUMS, "Append", "Now")),
        ("df.groupBy", lambda: tg.transform_with_state(data, Sums(), SUMS)),  # type: ignore[arg-type]
        ("withColumn", lambda: tg.transform_with_state(data.groupBy(data.amount + 1), Sums(), SUMS)),
        ("grouped by no column", lambda: tg.transform_with_state(data.groupBy(), Sums(), SUMS)),
        ("timeMode='ProcessingTime'", lambda: tg.transform_with_state(by_key, Forgets(), SUMS)),
        ("same types", lambda: tg.transform_with_state(by_key, Sums(), SUMS, "Append", "None", data.groupBy("amount"))),
        ("no argument 'x'|'x'", lambda: tg.transform_with_state(by_key, Sums(), SUMS, x=1)),
    ]
    for match, call in calls:
        with pytest.raises((JobError, TypeError), match=match):
            call()
    with pytest.raises(SchemaError, match="outputStructType"):
        tg.transform_with_state(by_key, Sums(), "no such thing")


def test_timers_need_a_time_mode(spark: SparkSession) -> None:
    data = spark.createDataFrame([("a", 1)], "key string, amount long")
    with pytest.raises(Exception, match="give timeMode='ProcessingTime', or 'EventTime' and a watermark"):
        tg.transform_with_state(data.groupBy("key"), Timed(), TIMED, slots=1).collect()


def test_event_time_needs_a_watermark(desk: Desk) -> None:
    with pytest.raises(JobError, match="withWatermark"):
        desk.transform(Timed(), TIMED, "Append", "EventTime")
