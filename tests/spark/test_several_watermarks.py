"""Several watermarks in the input of a processor, with delays of their own: Spark follows each and takes the slowest or the
fastest. What the processor is told, which rows are late and which timers fire is the same on both engines, batch by batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg
from tests.faults.queries import strike_once, struck
from tests.spark.processors import ROCKSDB_STATE_STORE, HighWater
from tests.spark.test_processors_on_both_engines import Case, Engines, timed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POLICY = "spark.sql.streaming.multipleWatermarkPolicy"
LONG = pytest.mark.long


class TwoStreams(Case):
    """Ids up to "m" are of one stream, the others of a second one, whose clock may be far behind or ahead."""

    def frame(self, session: SparkSession, folder: Path) -> DataFrame:
        stream = super().frame(session, folder)
        return (
            stream.where("id < 'm'")
            .withWatermark("at", "10 seconds")
            .union(stream.where("id >= 'm'").withWatermark("at", "1 second"))
        )


CASE = TwoStreams(
    HighWater,
    "id string, at_ms long, watermark_ms long",
    "id string, at timestamp",
    timed(
        [("a", 20), ("z", 5)],
        [("b", 4), ("y", 3)],
        [("c", 60), ("y", 30)],
        [("d", 25), ("y", 28), ("z", 31)],
        [("a", 8)],
        [("z", 90), ("x", 40)],
        [("b", 51), ("x", 89)],
        [("c", 45), ("x", 50)],
        [("y", 95), ("a", 99)],
        [("a", 50), ("z", 94)],
    ),
    {},
    time_mode="EventTime",
)


class KilledOnce(HighWater):
    """Its process is killed at the batch that has a row of 89 seconds, which isn't late by either policy."""

    def __init__(self, folder: Path, *, pandas: bool = False) -> None:
        super().__init__(pandas=pandas)
        self.folder = str(folder)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:  # noqa: N803
        given = list(rows)
        if any((row.at.minute, row.at.second) == (1, 29) for row in given):
            strike_once(self.folder, "89 seconds", "process")
        return super().handleInputRows(key, iter(given), timerValues)


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    session = spark.newSession()
    for name, value in {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB_STATE_STORE,
    }.items():
        session.conf.set(name, value)
    return session


@pytest.mark.parametrize(
    ("policy", "backend"),
    [
        pytest.param("min", tg.heap(), id="min"),
        pytest.param("max", tg.heap(), id="max", marks=LONG),
        pytest.param("min", tg.rocksdb(memory="64 MB"), id="min-rocksdb", marks=LONG),
    ],
)
def test_what_several_watermarks_come_to_is_sparks(session: SparkSession, tmp_path: Path, policy: str, backend: Any) -> None:
    """With a process that is killed, and a query that is started again at another number of slots."""
    session.conf.set(POLICY, policy)
    both = Engines(CASE, pandas=False, session=session, folder=tmp_path)
    for number, slots in ((5, 2), (len(CASE.batches), 1)):
        CASE.write(tmp_path / "in", range(number - 5, number))
        frame = CASE.frame(session, tmp_path / "in").groupBy("id")
        killed: Any = partial(KilledOnce, tmp_path)
        ours = Engines(replace(CASE, processor=killed), pandas=False, session=session, folder=tmp_path)
        ours.outputs = both.outputs
        ours.query(
            "tidegate",
            ours.tidegate(frame, slots=slots, backend=backend, snapshots=tg.Snapshots(to=str(tmp_path / "state"))),
        )
        both.on_spark(frame)
    assert struck(tmp_path) == {"89 seconds"}
    both.check()
    told = [int(row.rstrip(")").rpartition(", ")[2]) for rows in both.outputs["spark"].values() for row in rows]
    assert max(told) == {"min": 89_000, "max": 94_000}[policy], "the case doesn't show the policy"


@pytest.mark.long
@pytest.mark.parametrize("policy", ["min", "max"])
def test_batches_without_data_move_several_watermarks_too(session: SparkSession, tmp_path: Path, policy: str) -> None:
    """By rows alone: which batches have no data differs, and Spark needs a batch less if the slowest hasn't moved."""
    session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    session.conf.set(POLICY, policy)
    both = Engines(CASE, pandas=False, session=session, folder=tmp_path)
    CASE.write(tmp_path / "in", range(len(CASE.batches)))
    both.run()
    ours, theirs = (
        [row for number in sorted(found) for row in found[number]]
        for found in (both.outputs["tidegate"], both.outputs["spark"])
    )
    assert ours == theirs != []
