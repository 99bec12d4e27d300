"""`tg.transform` between Delta tables, read and written by Delta's own connector: on the newest Spark that it has a version
for, which is one before ours. That one is put into a folder of the build and comes before ours on the path of a process.

A killed slot, a query that is started again, other slots, and a batch: each row is in the table once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import tidegate as tg
from tests.servers.jars import JarsMissing, Program, jars_of
from tests.servers.spark_process import SparkProcess
from tests.spark.test_batches_without_data import SAID, SENSORS, dead_sensors
from tests.spark.test_transform import Count, DiesOnce, check_counts, counted
from tests.spark.test_transform_connectors import rows_in, run
from tidegate.spark.alarm_stream import NAME

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SPARK, DELTA = "4.2.1", Program(("io.delta:delta-spark_4.2_2.13:4.4.0",))
FOLDER = Path(__file__).parents[2] / "build" / f"spark-{SPARK}"
SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkProcess]:
    if not (FOLDER / "pyspark").exists():
        got = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", FOLDER, f"pyspark=={SPARK}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if got.returncode:
            pytest.skip(f"Spark {SPARK} couldn't be had: {got.stderr}")
    try:
        jars = jars_of(DELTA)
    except JarsMissing as missing:
        pytest.skip(str(missing))
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    with SparkProcess(
        tmp_path_factory.mktemp("spark"),
        jars=jars,
        settings=SETTINGS,
        environment={"PYTHONPATH": path, "SPARK_HOME": str(FOLDER / "pyspark")},
    ) as process:
        assert process.call(version) == SPARK
        yield process


# --- what runs in the process of the session ---------------------------------------------------------------------------


def version(spark: SparkSession) -> str:
    return spark.version


def add(spark: SparkSession, *, table: str, first: int, stop: int) -> None:
    """Two files."""
    spark.range(first, stop, 1, 2).selectExpr("id", "id % 7 as key").write.format("delta").mode("append").save(table)


def run_query(spark: SparkSession, *, folder: str, slots: int, dies_at: int | None) -> int:
    """Over all that is there, a file in a micro-batch. Gives the number of the last one."""
    function = Count() if dies_at is None else DiesOnce(f"{folder}/died", dies_at)

    def pipeline(events: Any) -> Any:
        return events.key_by("key").process("count", function, returns="id long, key long, n long")

    events = spark.readStream.format("delta").option("maxFilesPerTrigger", 1).load(f"{folder}/in")
    counts = tg.transform(events, pipeline, name="counts", slots=slots, snapshots=tg.Snapshots(to=f"{folder}/snapshots"))
    return run(counts, folder, "delta", {"path": f"{folder}/out"})


def run_batch(spark: SparkSession, *, folder: str) -> None:
    events = spark.read.format("delta").load(f"{folder}/in")
    tg.transform(events, counted, slots=2).write.format("delta").save(f"{folder}/batch")


def run_timers(spark: SparkSession, *, folder: str) -> list[str]:
    """A query whose timers fire when no data comes any more. Gives the names of the sources in its progress."""
    frame = dead_sensors(spark, Path(folder), patience_ms=1000)
    query = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", f"{folder}/query")
        .trigger(availableNow=True)
        .start(f"{folder}/out")
    )
    assert query.awaitTermination(120)
    return [source["description"] for progress in query.recentProgress for source in progress["sources"]]


# --- tests -------------------------------------------------------------------------------------------------------------


def check(process: SparkProcess, table: Path, ids: range) -> None:
    check_counts([SimpleNamespace(**row) for row in process.call(rows_in, format="delta", path=str(table))], ids)


def test_delta_is_source_and_sink_over_a_killed_slot_a_new_start_and_other_slots(
    tmp_path: Path, process: SparkProcess
) -> None:
    process.call(add, table=str(tmp_path / "in"), first=0, stop=1000)
    assert process.call(run_query, folder=str(tmp_path), slots=2, dies_at=700) == 1
    assert (tmp_path / "died").exists()
    check(process, tmp_path / "out", range(1000))
    process.call(add, table=str(tmp_path / "in"), first=1000, stop=1500)
    assert process.call(run_query, folder=str(tmp_path), slots=3, dies_at=None) == 3
    check(process, tmp_path / "out", range(1500))


def test_delta_is_source_and_sink_of_a_batch(tmp_path: Path, process: SparkProcess) -> None:
    process.call(add, table=str(tmp_path / "in"), first=0, stop=500)
    process.call(run_batch, folder=str(tmp_path))
    check(process, tmp_path / "batch", range(500))


def test_a_query_with_timers_is_woken_by_the_driver_on_this_spark_too(tmp_path: Path, process: SparkProcess) -> None:
    SENSORS.write(tmp_path / "in", range(1))
    sources = process.call(run_timers, folder=str(tmp_path))
    assert any(source.startswith(NAME) for source in sources), sources
    found = process.call(rows_in, format="parquet", path=str(tmp_path / "out"))
    assert sorted(tuple(row.values()) for row in found) == SAID
