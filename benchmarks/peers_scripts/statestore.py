"""Reads the state of a streaming sum over many keys with Spark's own `statestore` source; prints one JSON object.

The state is made by Spark's SQL aggregate, in RocksDB, in as many partitions as there are cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time


def main(keys: int, runs: int) -> None:
    from peer_session import peer_session  # beside this script

    spark = peer_session("statestore", changelog=False)
    folder = tempfile.mkdtemp()
    spark.range(keys).selectExpr("id AS key", "id % 64 AS amount").write.parquet(f"{folder}/in")
    records = spark.readStream.schema("key long, amount long").parquet(f"{folder}/in")
    (
        records.groupBy("key")
        .sum("amount")
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", f"{folder}/state")
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        spark.read.format("statestore").load(f"{folder}/state").write.format("noop").mode("overwrite").save()
        times.append(time.perf_counter() - started)
    count = spark.read.format("statestore").load(f"{folder}/state").count()
    print(json.dumps({"read_s": round(min(times[1:]), 3), "keys": count}))
    spark.stop()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
