"""A running sum as a `StatefulProcessor` on Spark's transformWithState, over files; prints one JSON object.

RocksDB with changelog checkpointing, one shuffle partition per core, rows rather than pandas (which is several times slower
with so many keys), no output: what a careful user would set. `benchmarks/drop_in.py` runs the very same class and the same
stream on Tidegate. The first micro-batches, which start processes and create the state of all keys, are not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

FILES_PER_BATCH = 2
OUTPUT = "key long, total long, n long"


class RunningSum(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.sum = handle.getValueState("sum", "total long, n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total, n = self.sum.get() or (0, 0)
        for row in rows:
            total += row.amount
            n += 1
        self.sum.update((total, n))
        yield Row(key=key[0], total=total, n=n)


def records(spark: SparkSession, folder: str) -> DataFrame:
    """A micro-batch is `FILES_PER_BATCH` files."""
    return (spark.readStream.schema("key long, amount long").option("maxFilesPerTrigger", FILES_PER_BATCH)
            .parquet(folder))


def measure(result: DataFrame, folder: str, *, warm_up_batches: int) -> dict[str, Any]:
    """Runs the query over all files; what the batches behind the first ones took."""
    query = (result.writeStream.format("noop").outputMode("update").option("checkpointLocation", folder)
             .trigger(availableNow=True).start())
    query.awaitTermination()
    counted = [progress for progress in query.recentProgress if progress["numInputRows"]][warm_up_batches:]
    rows = sum(progress["numInputRows"] for progress in counted)
    seconds = sum(progress["durationMs"]["triggerExecution"] for progress in counted) / 1000
    return {"records": rows, "batches": len(counted), "seconds": round(seconds, 2),
            "records_per_s": round(rows / seconds, 1)}


def main(folder: str, warm_up_batches: str) -> None:
    from peer_session import peer_session  # beside this script

    spark = peer_session("transformWithState")
    result = records(spark, folder).groupBy("key").transformWithState(RunningSum(), OUTPUT, "Update", "None")
    print(json.dumps(measure(result, tempfile.mkdtemp(), warm_up_batches=int(warm_up_batches))))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
