"""The keyed sum as a streaming aggregate of Spark SQL; prints one JSON object.

One shuffle partition per core, no output, large micro-batches (each commits its state, like a snapshot does). The state
store is the faster one of Spark's two, which the caller finds by trying both. The first micro-batches are not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

from pyspark.sql import functions as F

WARM_UP_BATCHES = 3


def main(rows_per_batch: int, batches: int, keys: int, kind: str, store: str) -> None:
    from peer_session import peer_session  # beside this script

    spark = peer_session("Spark SQL aggregate")
    if store == "memory":
        spark.conf.unset("spark.sql.streaming.stateStore.providerClass")
    key = F.pmod(F.xxhash64("value"), F.lit(keys))
    source = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", rows_per_batch)
        .option("numPartitions", 2)
        .load()
        .select(
            (F.concat(F.lit("user-"), F.lpad(key.cast("string"), 7, "0")) if kind == "text" else key).alias("key"),
            (F.col("value") % 64).alias("amount"),
        )
    )
    query = (
        source.groupBy("key")
        .agg(F.sum("amount").alias("total"))
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
                "batch_s": round(seconds / batches, 2),
                "keys": keys,
                "store": store,
            }
        )
    )
    spark.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6])
