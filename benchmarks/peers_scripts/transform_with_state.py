"""The keyed running sum on PySpark's transformWithState (rows); prints one JSON object.

RocksDB with changelog checkpointing, one shuffle partition per core, no output: what a careful user would set. The
first micro-batches, which start processes and create the state of all keys, are not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

WARM_UP_BATCHES = 2


class KeyedSum(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total = self.total.get()[0] if self.total.exists() else 0
        for row in rows:
            total += row.amount
            yield Row(key=key[0], total=total)
        self.total.update((total,))

    def close(self) -> None:
        pass


def main(rows_per_batch: int, batches: int, keys: int) -> None:
    from peer_session import peer_session  # beside this script

    spark = peer_session("transformWithState")
    source = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", rows_per_batch)
        .load()
        .select(F.pmod(F.xxhash64("value"), F.lit(keys)).alias("key"), (F.col("value") % 64).alias("amount"))
    )
    query = (
        source.groupBy("key")
        .transformWithState(
            statefulProcessor=KeyedSum(), outputStructType="key long, total long", outputMode="Update", timeMode="None"
        )
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", tempfile.mkdtemp())
        .start()
    )
    while len(query.recentProgress) < WARM_UP_BATCHES + batches:
        if query.exception() is not None:
            raise query.exception()
        time.sleep(0.2)
    counted = query.recentProgress[WARM_UP_BATCHES : WARM_UP_BATCHES + batches]
    query.stop()
    rows = sum(progress.numInputRows for progress in counted)
    seconds = sum(progress.durationMs["triggerExecution"] for progress in counted) / 1000
    print(
        json.dumps(
            {
                "records": rows,
                "seconds": round(seconds, 2),
                "records_per_s": round(rows / seconds, 1),
                "rows_per_batch": rows_per_batch,
                "keys": keys,
            }
        )
    )
    spark.stop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
