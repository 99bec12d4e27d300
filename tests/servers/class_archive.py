"""Makes the archive of classes with which Spark's JVMs start quickly: `python -m tests.servers.class_archive`.

A session does a little of all that tests do with Spark, and its JVM writes at its end which classes it had. It takes as long
as a few starts and saves half of every later one. No pytest in here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.servers import quick

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WRITTEN_WITHIN_S = 120


def main() -> None:
    quick.CLASS_ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    unfinished = quick.CLASS_ARCHIVE.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    os.environ["SPARK_SUBMIT_OPTS"] = f"{quick.JAVA_OPTIONS} -XX:ArchiveClassesAtExit={unfinished} -Xlog:disable"
    quick.set_environment()

    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory() as folder:
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.warehouse.dir", f"{folder}/warehouse")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("OFF")
        gateway: Any = spark.sparkContext._gateway
        do_a_little_of_everything(spark, Path(folder))
        spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(WRITTEN_WITHIN_S)
    if unfinished.exists():
        unfinished.replace(quick.CLASS_ARCHIVE)
    else:
        print("This Java writes no archive of classes. Tests take longer without it.")


def do_a_little_of_everything(spark: SparkSession, folder: Path) -> None:
    rows = spark.createDataFrame([(1, "a", 0.5), (2, "b", 1.5)], "n long, text string, share double")
    rows.groupBy("text").count().join(rows, "text").orderBy("n").collect()
    rows.selectExpr("n + 1 as n", "cast(share as decimal(9, 2)) as share", "named_struct('text', text) as s").toPandas()
    rows.write.parquet(str(folder / "rows"))
    rows.write.json(str(folder / "json"))
    spark.read.parquet(str(folder / "rows")).mapInArrow(as_they_are, "n long, text string, share double").collect()
    spark.range(0, 2, 1, 2).mapInArrow(as_they_are, "id long", barrier=True).collect()
    stream = spark.readStream.schema("n long, text string, share double").json(str(folder / "json"))
    for name, frame in {
        "mapped": stream.mapInArrow(as_they_are, stream.schema),
        "counted": stream.groupBy("text").count(),
    }.items():
        query = (
            frame.writeStream.outputMode("update" if name == "counted" else "append")
            .option("checkpointLocation", str(folder / name))
            .trigger(availableNow=True)
            .foreachBatch(collect)
            .start()
        )
        query.awaitTermination()


def as_they_are(batches: Iterator[Any]) -> Iterator[Any]:
    yield from batches


def collect(rows: Any, number: int) -> None:
    rows.collect()


if __name__ == "__main__":
    main()
